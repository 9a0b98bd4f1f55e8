"""The results of a run that learns from its own rollouts, iteration by iteration, from the lines of its log."""

import json

import pytest

from openpi_train.runtime.exits import CheckpointError
from openpi_train.training.iterations import FILE, iterations_of, write_iterations

LINES = [
    {"step": 0, "val/loss": 3.0},
    {"step": 2, "loss": 0.5, "rl/iteration": 1, "rl/rollouts": 16, "rl/reward": 0.25},
    {"step": 4, "loss": 1.5, "rl/iteration": 1, "rl/rollouts": 16, "rl/reward": 0.25},
    {"step": 4, "time/checkpoint_stall_s": 0.1},
    {
        "step": 8,
        "loss": "NaN",
        "rl/iteration": 2,
        "rl/rollouts": 32,
        "rl/success": 0.75,
        "rl/success/reach_red": 1.0,
        "learning_rate": None,
    },
]


def run_in(folder):
    summary = {"step": 8}
    results = {"config": {"name": "x"}, "distributed_info": {"processes": 2}, "summary": summary}
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return folder


def test_an_iteration_has_the_means_of_its_lines_and_nulls_for_what_is_no_number():
    first, second = iterations_of(LINES)
    assert first == {
        "iteration": 1,
        "step": 4,
        "total_episodes": 16,
        "mean_reward": 0.25,
        "mean_loss": 1.0,
        "success_rates": {},
    }
    assert second["mean_loss"] is None and second["learning_rate"] is None and second["success_rate"] == 0.75
    assert second["success_rates"] == {"reach_red": 1.0}


def test_the_file_has_every_iteration_and_a_summary(tmp_path):
    write_iterations(run_in(tmp_path))
    found = json.loads((tmp_path / FILE).read_text())
    assert found["training_metrics"] == iterations_of(LINES)
    assert (found["config"], found["distributed_info"]) == ({"name": "x"}, {"processes": 2})
    assert found["experiment_summary"] == {
        "total_iterations": 2,
        "total_episodes": 48,
        "total_training_steps": 8,
        "final_success_rate": 0.75,
        "final_loss": None,
    }


def test_a_full_disk_is_no_traceback(small_disk, fill_disk):
    run_in(small_disk)
    filler = fill_disk()
    with pytest.raises(CheckpointError, match="No space left"):
        write_iterations(small_disk)
    filler.unlink()
    assert not (small_disk / FILE).exists()
