"""A command whose output nobody reads any more ends without an error, as `| head` expects."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openpi_train.runtime.closed_output import CLOSED, quietly

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = "launch local --processes 2 --dry-run -- debug --exp-name x"
SCRIPT = "scripts/run_distributed.py --world-size 2 --dry-run -- debug --exp-name x"


@pytest.mark.parametrize("line", [f"-m openpi_train {LAUNCH}", "-m openpi_train runs --help", SCRIPT])
def test_a_closed_pipe_is_no_error(line):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, *line.split()]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=ROOT, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (CLOSED, b"")


def test_another_broken_pipe_is_one(capsys):
    def lost():
        raise BrokenPipeError("the connection to node2")

    with pytest.raises(BrokenPipeError, match="node2"):
        quietly(lost)
    assert quietly(lambda: 3) == 3
