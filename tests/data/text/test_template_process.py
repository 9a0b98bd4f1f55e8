"""Chat templates that take time or memory without bound: an error that says so, and the next one works."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import chats
import pytest

from openpi_train.data.text import template_process
from openpi_train.data.text.template_process import TemplateProcess
from openpi_train.runtime.exits import DataError

REPO = Path(__file__).resolve().parents[3]
MESSAGES = [{"role": "user", "content": "hello"}]
FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def limited(monkeypatch):
    shared = TemplateProcess(most_s=0.5, most_bytes=256 << 20)
    monkeypatch.setattr(template_process, "SHARED", shared)
    yield shared
    shared.close()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (FOREVER, "takes longer than 0.5 s"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "longer than"),
        ("{{ (messages|length + 9) ** (10 ** 9) }}", "takes "),  # in C: no thread of Python's could end it
        ("{{ 'a' * (messages|length * 10 ** 10) }}", r"takes more than 0\.25 GiB of memory"),
        ("{{ 'a' * 10 ** 10 }}", r"takes more than 0\.25 GiB of memory"),  # jinja computes it when it compiles
        ("{{ messages[0].content.center(10 ** 10) }}", r"takes more than 0\.25 GiB of memory"),
        ("{{ '%0999999999d' % 1 }}", "takes more than"),
        ("{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "takes "),
        (
            "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x] * 9 %}{% endfor %}{{ n.x }}",
            "takes ",
        ),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory")
def test_a_template_without_bound_is_an_error_and_the_next_one_works(source, message, limited):
    with pytest.raises(DataError, match=message) as caught:
        chats.chat(source).render(MESSAGES)
    assert "the chat template tiny" in str(caught.value)
    assert chats.chat("{{ messages[0].content }}").render(MESSAGES) == "hello"


def test_a_process_that_was_killed_is_started_again(limited):
    template = chats.chat("{{ messages[0].content }}")
    template.render(MESSAGES)
    assert limited._process is not None
    os.kill(limited._process.pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"has ended its process \(-9\), as where no memory is left"):
        template.render(MESSAGES)
    assert template.render(MESSAGES) == "hello"


def test_a_conversation_that_is_nested_too_deeply_is_told(limited):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        chats.chat("{{ tools|length }}").render(MESSAGES, {"tools": deep})


def test_any_text_arrives_as_it_is(limited):
    for text in ("\ud800", "\x00", "日本語 😀", "x" * 3_000_000):
        assert chats.chat("{{ messages[0].content }}").render([{"role": "user", "content": text}]) == text


def test_it_ends_with_the_process_that_asks(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(REPO / "tests")!r})
import chats
from openpi_train.data.text import template_process
chats.chat("x").render([])
print(template_process.SHARED._process.pid, flush=True)
import time; time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        run.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists()
