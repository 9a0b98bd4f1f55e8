"""Without a network what has to be fetched is told at once, in a line: what it is, and how to get it there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
NAME = "google/paligemma-3b-pt-224"


def ended(folder, *words):
    """Code and stderr of a command in an empty home, where nobody listens at the hub's address."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(folder / "cache"), "HF_ENDPOINT": "http://127.0.0.1:9", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import sys; from openpi_train import cli; sys.exit(cli.run(sys.argv[1:]))"]
    done = subprocess.run(
        [*command, *words],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "Traceback" not in done.stderr and "Retry" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("flags", "code", "what"),
    [
        (("--data.tokenizer", NAME), 3, f"`hf download {NAME} tokenizer.model` (it is gated"),
        (("--weight-loader.params-path", "hub:some/body"), 4, "`hf download some/body`, and copy the cache (HF_HOME)"),
    ],
)
def test_a_start_says_what_is_missing_before_it_begins(tmp_path, flags, code, what):
    found, told = ended(tmp_path, "debug", "--exp-name", "x", *flags)
    assert found == code and what in told and "docs/install.md" in told
    assert len(told.strip().splitlines()) == 1 and not (tmp_path / "checkpoints").exists()


def test_a_file_is_asked_for_once(tmp_path):
    program = f"""
from openpi_train.data.tokenizers.tokenizer import load_tokenizer
try:
    load_tokenizer("{NAME}")
except FileNotFoundError as error:
    print(error)
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": str(REPO)}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "Retry" not in done.stderr and f"`hf download {NAME} tokenizer.model` (it is gated" in done.stdout
    assert "--data.tokenizer" in done.stdout and len(done.stdout.strip().splitlines()) == 1
