"""A run that learns from its own completions, on any processes, killed and resumed: the same bits."""

import json
import shutil
import textwrap

import pytest
from runs.command import check, killed_when_logged, openpi_train, places, train

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
# An iteration is 2 epochs of 2 batches. Nearly every weight moves at every step.
RUN = (
    "arithmetic_grpo --num-train-steps 12 --save-interval 4 --keep-last 5 --log-interval 1 --batch-size 16 "
    "--rl.num-groups 8 --rl.group-size 4 --rl.epochs 2 --rl.mixed-only --rl.max-waves 2 "
    "--rl.skip-solved 1 --lr-schedule.peak-lr 1e-2 --lr-schedule.decay-lr 1e-2 --lr-schedule.warmup-steps 0 "
    "--model.sizes.width 16 --model.sizes.mlp-dim 16 --model.sizes.depth 1 --objective.distribution.top-k 8 "
    "--eval.num-prompts 0"
).split()
REWARD = """
    import os, time

    def even(prompt, completion, reference):
        # The more slowly, the higher the process's number.
        time.sleep(float(os.environ.get("SLOWLY_S") or 0.01 * int(os.environ.get("RANK", 0))))
        return sum(character in "02468" for character in completion) / 4

    def broken(prompt, completion, reference):
        return float("nan") if os.environ.get("RANK") == "1" else 1.0
"""
# What depends on the machine.
TIMES = ("time/", "_per_s", "data/", "mfu", "hfu")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    (home / "own_rewards.py").write_text(textwrap.dedent(REWARD))
    return home


def run(home, base, *flags, reward="even", **options):
    reward = ("--rl.rewards.0.name", f"{home}/own_rewards.py:{reward}")
    return train(base, *RUN, *reward, *flags, OPENPI_TRAIN_HOME=str(home), **options)


def lines(base):
    """The lines of the log, without what depends on the machine."""
    text = (base / "runs" / "arithmetic_grpo" / "x" / "metrics.jsonl").read_text().splitlines()
    found = [line for line in map(json.loads, text) if "loss" in line]
    return [{name: value for name, value in line.items() if not any(time in name for time in TIMES)} for line in found]


@pytest.fixture(scope="module")
def one_by_four(home, tmp_path_factory):
    base = tmp_path_factory.mktemp("one_by_four")
    run(home, base, devices=4)
    return base


def test_it_acts_once_per_iteration_and_learns(one_by_four):
    found = lines(one_by_four)
    assert [line["step"] for line in found] == list(range(1, 13))
    assert [line["rl/iteration"] for line in found] == [1] * 4 + [2] * 4 + [3] * 4
    # Devices add shares of their mean, each of which is rounded.
    assert [abs(line["ratio"] - 1) < 1e-6 for line in found] == [True, False, False, False] * 3
    assert found[-1]["rl/reward"] > found[0]["rl/reward"] and found[0]["rl/groups_mixed"] > 0


def test_processes_change_no_bit(home, tmp_path, one_by_four):
    """Several devices of each of two processes: `test_robot_rl_run.py`."""
    run(home, tmp_path, processes=4)
    assert lines(tmp_path) == lines(one_by_four)


def test_a_run_that_lost_its_last_checkpoints_goes_on_bit_for_bit(home, tmp_path, one_by_four):
    """One is lost, and of the other there is as much as of a save that was killed: it has no manifest."""
    shutil.copytree(one_by_four, tmp_path, dirs_exist_ok=True)
    checkpoints = tmp_path / "runs" / "arithmetic_grpo" / "x"
    shutil.rmtree(checkpoints / "12")
    (checkpoints / "8" / "manifest.json").unlink()
    done = run(home, tmp_path, "--resume", devices=4)
    assert "continuing from step 4 of 12" in done.stdout + done.stderr and lines(tmp_path) == lines(one_by_four)


@pytest.mark.parametrize("after", [5, 8])
def test_killed_at_any_moment_it_goes_on_bit_for_bit(home, tmp_path, one_by_four, after):
    """Killed as soon as this step is logged: within the second iteration, or while saving and acting for the third."""
    reward = ("--rl.rewards.0.name", f"{home}/own_rewards.py:even")
    flags = (*RUN, *reward, "--devices-per-process", "4")
    # It acts for seconds, so that there is time for the kill.
    slowly = {"OPENPI_TRAIN_HOME": str(home), "SLOWLY_S": "0.05"}
    killed_when_logged(tmp_path, after, *flags, experiment="arithmetic_grpo", **slowly)
    run(home, tmp_path, "--resume", devices=4)
    assert lines(tmp_path) == lines(one_by_four)


def test_a_reward_that_is_not_finite_on_one_process_ends_all_with_its_name(home, tmp_path):
    flags = (*RUN, "--rl.rewards.0.name", f"{home}/own_rewards.py:broken", *places(tmp_path))
    launch = (
        "launch",
        "local",
        "--processes",
        "2",
        "--devices-per-process",
        "1",
        "--log-dir",
        tmp_path / "output",
        "--",
    )
    done = openpi_train(*launch, *flags, OPENPI_TRAIN_HOME=str(home))
    check(done, 3, "process 1: the reward", "own_rewards.py:broken", "is nan; needed is a finite number")


def test_a_checkpoint_is_evaluated_like_any_other(home, one_by_four):
    run = one_by_four / "runs" / "arithmetic_grpo" / "x"
    done = openpi_train("eval", run, "--num-prompts", "8", OPENPI_TRAIN_HOME=str(home))
    check(done, 0, "perplexity", "exact_match", "mean_length")
