"""The tutorials of docs/tutorials, typed as they stand: every command is run, and what it prints holds the lines shown.

A block with a title (```json title="chat.jsonl") is written to that file. In a block of ```console a line with `$ ` is
typed, in one folder, empty at first, and an empty home; lines below it must be printed, in their order, where `...`
stands for any part of a line. A command that ends in `&` goes on beside those after it. Port 8000 is a free one. Blocks
of ```bash are for other machines, and only parsed (tests/test_docs.py).
"""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
LIMIT_S = 900
# Pages whose runs take long enough that XLA's effort in compiling them pays: they have a user's XLA.
LONG = ("first_run",)
BLOCK = re.compile(r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Command:
    """A line to type and what it must print; or a file to write, of this name and text."""

    words: str
    printed: str
    file: str | None = None


def commands(text: str) -> list[Command]:
    """What a page asks to do, in its order."""
    found = []
    for kind, name, block in BLOCK.findall(text):
        if name:
            found.append(Command("", block, name))
        elif kind == "console":
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                words, printed = re.match(r"((?:[^\n]*\\\n)*[^\n]*)\n?(.*)", part, re.DOTALL).groups()
                found.append(Command(words, printed))
    return found


def missing(shown: str, printed: str) -> str | None:
    """The first of the lines shown that is not among those printed, in their order; `...` is any part of a line."""
    lines = iter(printed.splitlines())
    for line in shown.splitlines():
        pattern = r"\s+".join(re.escape(word).replace(r"\.\.\.", ".*") for word in line.split())
        if not any(re.fullmatch(pattern, other.strip()) for other in lines):
            return line
    return None


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(page, tmp_path):
    home, folder = tmp_path / "home", tmp_path / "folder"
    home.mkdir(), folder.mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    left_out = ("PYTHONPATH", "XLA_FLAGS") if page.stem in LONG else ("PYTHONPATH",)
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    environment = {**kept, "HOME": str(home), "PATH": path, "COLUMNS": "120"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        text = page.read_text().replace("8000", str(probe.getsockname()[1]))
    beside = []
    try:
        for one in commands(text):
            if one.file:
                (folder / one.file).write_text(one.printed)
                continue
            how = {
                "cwd": folder,
                "env": environment,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
                "text": True,
            }
            started = subprocess.Popen(["bash", "-c", one.words.removesuffix("&")], start_new_session=True, **how)
            if one.words.endswith("&"):
                beside.append(started)
                continue
            printed, _ = started.communicate(timeout=LIMIT_S)
            assert started.returncode == 0, f"$ {one.words}\n{printed}"
            lost = missing(one.printed, printed)
            assert lost is None, f"$ {one.words}\nnot printed, or not in this order: {lost}\n{printed}"
    finally:
        for started in beside:
            os.killpg(started.pid, signal.SIGKILL)
            started.communicate()


def test_what_a_page_shows_is_looked_for():
    page = (
        '```json title="a.jsonl"\n{}\n```\nword\n```console\n$ echo 1 \\\n  2\n1 2\n$ cat a\n...\n```\n'
        "```bash\nrm\n```\n"
    )
    assert commands(page) == [
        Command("", "{}\n", "a.jsonl"),
        Command("echo 1 \\\n  2", "1 2\n"),
        Command("cat a", "...\n"),
    ]
    printed = "a\nstep 2/3  | loss 0.5\nb\nthen saved\n"
    assert missing("step 2/3 | loss ...\n...saved\n", printed) is None
    assert missing("step 2/3 | loss ...\nsaved\n", printed) == "saved"
    assert missing("... saved\nstep ...\n", printed) == "step ..."
    assert missing("step 2.3 | loss ...\n", printed) == "step 2.3 | loss ..."
