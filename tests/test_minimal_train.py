"""`examples/minimal_train.py` as its first lines say: on one process, on two, and again with more steps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs.command import environment

from openpi_train.launch.processes import free_port

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "minimal_train.py"


def losses_of(folder, *, processes=1, steps=200):
    """By step, what process 0 prints."""
    port, started = str(free_port()), []
    for rank in range(processes):
        place = {"RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(
            subprocess.Popen(
                [sys.executable, str(EXAMPLE), str(folder), str(steps)],
                env=environment(**place if processes > 1 else {}, JAX_NUM_CPU_DEVICES=str(2 // processes)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0] * processes, said
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", said[0][0])}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_it_learns_alike_on_one_process_and_on_two_and_goes_on_where_it_was(tmp_path):
    whole = losses_of(tmp_path / "one")
    assert list(whole) == [50, 100, 150, 200] and whole[200] < whole[50] / 4
    first = losses_of(tmp_path / "two", steps=100)
    rest = losses_of(tmp_path / "two", processes=2)
    assert list(rest) == [150, 200]  # from the checkpoint of step 100
    assert {**first, **rest} == whole


def test_it_is_read_by_a_student():
    assert len(EXAMPLE.read_text().splitlines()) <= 220
