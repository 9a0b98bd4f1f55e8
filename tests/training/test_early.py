"""What can be known before jax has devices is told before, all at once, and alike by every way to start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openpi_train.launch.preflight import VARIABLE

ROOT = Path(__file__).resolve().parents[2]
# Ends as a run does, and says then whether jax has devices.
PROGRAM = """
import sys
from jax._src import xla_bridge
from openpi_train import cli
from openpi_train.runtime import exits
has_devices = xla_bridge.backends_are_initialized
exits.say_farewell_by(lambda code, reason: print("devices:", has_devices()))
try:
    sys.exit(cli.run(sys.argv[1:]))
finally:
    print("devices:", has_devices())
"""


def run(folder, *words, **variables):
    """The exit code, what it says of jax's devices, and the lines of stderr, of a command that is to be refused."""
    (folder / "file").touch()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "freed memory" not in done.stderr and "compiled programs" not in done.stderr
    assert [path.name for path in folder.iterdir()] == ["file"], "nothing is written"
    return done.returncode, done.stdout.strip().splitlines()[-1], done.stderr


WRONG = {
    "--checkpoint-base-dir file/runs": "file is a file",
    "--data.datasets.0.source.path nowhere": "nowhere holds no LeRobot dataset",
    "--weight-loader.params-path no_weights": "no_weights: there is no such directory",
    "--grad-accum 0": "--grad-accum 0 must be at least 1",
    "--ema-decay 2": "--ema-decay 2.0 must lie in [0, 1)",
}
WORDS = [word for flags in WRONG for word in flags.split()]
EARLY = "devices: False"


@pytest.mark.parametrize("way", ["train", "dry run", "ahead"])
def test_all_that_is_wrong_is_told_at_once_before_jax_has_devices(tmp_path, way):
    if way == "dry run":
        found = run(tmp_path, "act_aloha_sim", "--exp-name", "x", *WORDS, "--dry-run")
    elif way == "ahead":
        found = run(tmp_path, "act_aloha_sim", "--exp-name", "x", *WORDS, **{VARIABLE: "0"})
    else:
        found = run(tmp_path, "act_aloha_sim", "--exp-name", "x", *WORDS)
    code, devices, told = found
    assert (code, devices) == (2, EARLY), told
    for sentence in WRONG.values():
        assert told.count(sentence) == 1, told


def test_a_run_without_a_name_is_told_so_once(tmp_path):
    code, devices, told = run(tmp_path, "debug")
    assert (code, devices, told.count("--exp-name")) == (2, EARLY, 1)


def test_a_dataset_that_is_not_there_hides_no_other_problem(tmp_path):
    code, devices, told = run(tmp_path, "debug", "--dataset", "nowhere", "--batch-size", "0")
    assert (code, devices) == (2, EARLY)
    assert "nowhere does not exist" in told and "--batch-size 0" in told and "--exp-name NAME" in told
    code, devices, told = run(tmp_path, "debug", "--dataset", "nowhere", "--no-such-flag", "1")
    assert code == 2 and "nowhere does not exist" in told and "no-such-flag" in told
    assert run(tmp_path, "debug", "--dataset", "nowhere", "--exp-name", "x")[:2] == (3, EARLY)  # the data alone


def test_where_the_files_are_elsewhere_only_the_command_line_counts(tmp_path):
    ahead = {VARIABLE: "1", "OPENPI_TRAIN_CHECK_WITHOUT_FILES": "1"}
    told = run(tmp_path, "act_aloha_sim", "--exp-name", "x", *WORDS, **ahead)[2]
    assert "--grad-accum 0" in told and "nowhere" not in told and "no_weights" not in told and "file/runs" not in told
