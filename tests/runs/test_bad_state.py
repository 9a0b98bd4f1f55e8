"""Bad input that meets a run on its way: checkpoints and weights that are damaged or of another run, NaN in the data,
a full disk. As in `test_bad_input.py`: the exit code, a message that helps, and no traceback.
"""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from bad_files import SOURCE, small_disk
from command import check, losses, openpi_train, places, words
from small_runs import SMALL

from openpi_train import cli
from openpi_train.runtime.exits import CHECKPOINT, DONE, NUMBERS, PEER_LOST, USAGE

pytestmark = pytest.mark.slow

SEEING, POISONED = (f"{Path(__file__).with_name('tiny_policies.py')}:{name}" for name in ("seeing", "poisoned"))
RUN = (SEEING, "--num-train-steps", "4", "--save-interval", "2", "--keep-last", "2", "--data.validation-fraction", "0")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with checkpoints 2 and 4 and nothing held out, and what it printed."""
    base = tmp_path_factory.mktemp("finished")
    done = openpi_train(*RUN, *places(base))
    assert done.returncode == DONE, done.stderr
    return base, done


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True, symlinks=True)
    return tmp_path


def run_of(base: Path) -> Path:
    return base / "runs" / "seeing" / "x"


def test_nothing_held_out_is_warned_of_with_the_flag(finished):
    check(finished[1], DONE, "no episode is held out", "--data.validation-fraction")
    assert "next: python -m openpi_train serve" in finished[1].stderr
    assert "next: python -m openpi_train eval" not in finished[1].stderr


def test_an_existing_run_is_left_alone(finished):
    before = sorted(run_of(finished[0]).rglob("*"))
    says = "holds a run already: --resume continues it, --overwrite moves it aside, another --exp-name leaves it alone"
    check(openpi_train(*RUN, *places(finished[0])), USAGE, says)
    assert sorted(run_of(finished[0]).rglob("*")) == before


def test_resume_with_another_model_names_the_fields(copy):
    done = openpi_train(*RUN, *places(copy), "--resume", "--model.mlp.depth", "2", "--ema-decay", "None")
    text = check(done, USAGE, "model.mlp.depth: the run has 1, given 2", "Give the run's own values")
    assert "ema_decay: the run has 0.99, given None" in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            (f"{SOURCE}.seed", "3"),
            ("resuming with data.datasets.0.source.seed 3 (was 0)", "data.datasets.0.source: then"),
        ),
    ],
    ids=["dataset"],
)
def test_resume_on_other_data_names_what_differs(copy, flags, says):
    done = openpi_train(*RUN, *places(copy), "--resume", *flags)
    check(done, CHECKPOINT, *says, "restore these settings, or start a new run from the checkpoint's weights")


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(copy, finished):
    largest = max((run_of(copy) / "4").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    done = openpi_train(*RUN, *places(copy), "--resume")
    check(done, DONE, "checkpoint 4 cannot be used", "is corrupt", "falling back to checkpoint 2")
    assert losses(copy, "seeing") == losses(finished[0], "seeing")
    assert not list(run_of(copy).glob("4.damaged-*")), "a new checkpoint 4 is whole, so the damaged one is gone"


def test_when_all_checkpoints_are_damaged_each_is_named(copy):
    os.truncate(run_of(copy) / "2" / "meta.json", 10)
    os.truncate(run_of(copy) / "4" / "manifest.json", 10)
    done = openpi_train(*RUN, *places(copy), "--resume")
    says = (
        "2: meta.json is truncated",
        "4: manifest.json cannot be read",
        "Put a copy back, or start anew with --overwrite",
    )
    check(done, CHECKPOINT, "all 2 checkpoints in", *says)


def test_torn_files_that_can_be_made_anew_are_only_warned_of(copy, finished):
    """Killed while writing: half a line of metrics, half the norm stats, half of two records."""
    with open(run_of(copy) / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 4, "lo')
    os.truncate(copy / "assets" / "seeing" / "fake" / "norm_stats.details.json", 10)
    (run_of(copy) / "best.json").write_text('{"step"')
    os.truncate(run_of(copy) / "environment.json", 10)
    longer = [word if word != "4" else "6" for word in RUN]
    check(
        openpi_train(*longer, *places(copy), "--resume"),
        DONE,
        "best.json cannot be read",
        "environment.json cannot be read",
        "computing them again",
    )
    before, after = losses(finished[0], "seeing"), losses(copy, "seeing")
    assert {step: after[step] for step in before} == before
    assert len(after) == 6


def test_damaged_start_weights_are_refused(finished, tmp_path):
    weights = shutil.copytree(run_of(finished[0]) / "4" / "params", tmp_path / "params")
    for path in (weights / "d").iterdir():
        os.truncate(path, path.stat().st_size // 2)
    done = openpi_train(*RUN, *places(tmp_path), "--weight-loader.params-path", weights)
    # Not `check`: tensorstore's thread, cut off while it reads, prints a traceback of its own beside our message.
    assert done.returncode == CHECKPOINT
    assert re.search(rf"{weights} .*fetch it again", words(done)), done.stderr


def test_start_weights_of_another_model_name_the_parameters(finished, tmp_path):
    flags = ("--weight-loader.params-path", run_of(finished[0]) / "4", "--model.mlp.width", "64")
    done = openpi_train(*RUN, *places(tmp_path), *flags)
    check(
        done, CHECKPOINT, "does not fit the model", "of another shape", "the model wants", "model's variants and sizes"
    )


def poison(base: Path) -> str:
    """A control step that a row of the third batch starts at, and that no row before has in its chunk."""
    experiment = cli.parse_experiment(POISONED, [*RUN[1:], *places(base)])
    rows = experiment.open_data().train
    starts = rows.windows[0].starts[rows.mixture.locate(np.arange(3 * 8))[2]]
    before = starts[: 2 * 8, None] + np.arange(experiment.model.action_horizon)
    return str(next(start for start in starts[2 * 8 :] if start not in before))


def test_a_nan_stops_the_run_with_the_batchs_rows_or_is_skipped(finished, tmp_path):
    stats = finished[0] / "assets" / "seeing" / "fake"
    nan = (f"{SOURCE}.nan-steps", poison(tmp_path), "--data.datasets.0.norm-stats", stats)
    arguments = (POISONED, *RUN[1:], *places(tmp_path), *nan)
    text = check(
        openpi_train(*arguments), NUMBERS, "loss nan", "step 3: ", "The update was not applied", "--on-nan skip"
    )
    assert len(re.findall(r"fake data \(seed 0\), record \d+, episode \d+, step \d+", text)) == 8
    check(openpi_train(*arguments, "--overwrite", "--on-nan", "skip"), DONE, "step 4/4")
    lines = (tmp_path / "runs" / "poisoned" / "x" / "metrics.jsonl").read_text().splitlines()
    assert max(line.get("skipped_steps", 0) for line in map(json.loads, lines)) >= 1


@pytest.mark.parametrize(("fault", "code"), [("one save fails", DONE), ("save fails", PEER_LOST)])
def test_a_save_that_fails_is_warned_of_and_several_end_the_run_for_a_restart(tmp_path, fault, code):
    run = (SMALL, "--num-train-steps", "10", "--save-interval", "2", "--data.process", "", "--data.fault", fault)
    told = "W saving checkpoint 2 failed: OSError: [Errno 5] Input/output error. The run goes on without it"
    text = check(openpi_train(*run, *places(tmp_path)), code, told)
    assert ("saving checkpoint 6 failed" in text) == (code != DONE)
    assert ("saving checkpoint 8 in" in text) == (code == DONE), "it ended at the third"
    saved = [path.parent.name for path in (tmp_path / "runs" / "small" / "x").glob("*/manifest.json")]
    assert ("10" in saved) == (code == DONE) and "2" not in saved


def test_a_full_disk_is_told_before_each_save_and_ends_the_run_at_the_last(tmp_path):
    (tmp_path / "runs").mkdir()
    done = openpi_train(*RUN, *places(tmp_path), prefix=small_disk(tmp_path / "runs", "1m"))
    told = "not enough disk space for checkpoint 4", "it needs 1.3 MB", "--checkpoint-base-dir"
    check(done, CHECKPOINT, "W not enough disk space for checkpoint 2", "The run goes on without it", *told)
