"""Garbage is looked for rarely while a program starts, then as usual, and not among what the start made."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_start_is_not_held_up_and_what_it_made_stays_out_of_later_looks():
    program = """
import gc
usual = gc.get_threshold()
from openpi_train.runtime import garbage
garbage.look_rarely()
assert gc.get_threshold()[0] >= 10 * usual[0]
made = [[number] for number in range(10_000)]
circle = []
circle.append(circle)
del circle
assert gc.get_freeze_count() == 0
garbage.look_as_usual()
assert gc.get_threshold() == usual
assert gc.get_freeze_count() >= len(made)
assert gc.collect() == 0 and len(gc.get_objects()) < len(made)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
