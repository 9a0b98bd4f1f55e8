"""Reinforcement learning in a project of the PyTorch post-training tool, by the tool's own commands."""

import json
import math
import subprocess
import sys

import pytest
from posttraining_project import write_project
from runs.command import ROOT, check, environment

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
RUN = ("--config", "config_rlhf_example.yaml")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return write_project(tmp_path_factory.mktemp("project"))


def script(project, name, *words):
    """A script, started in the project's folder as the tool's are."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *words],
        cwd=project,
        env=environment(OPENPI_TRAIN_HOME=str(project / "home")),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def lines(project, algorithm, having="loss"):
    text = (project / "outputs" / algorithm / "rl" / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if having in line]


def test_a_reward_model_is_trained_then_ppo_by_it_which_goes_on(project):
    few = ("--num-train-steps", "4", "--save-interval", "4", "--eval.interval", "0")
    check(script(project, "main.py", "--config", "config.yaml", "--algorithm", "reward", *few), 0)
    words = (*RUN, "--mode", "train", "--algorithm", "ppo")
    done = script(project, "main.py", *words)
    check(done, 0, "outputs/rm/one_device", ": a reward model with ")
    found = lines(project, "ppo")
    # Two iterations of two passes: the policy that learns is at first the one that acted.
    assert [line["rl/iteration"] for line in found] == [1, 1, 2, 2]
    assert [abs(line["ratio"] - 1) < 1e-6 for line in found] == [True, False, True, False]
    assert all(math.isfinite(line[name]) for line in found for name in ("rl/reward", "value_loss", "grad_norm"))
    assert found[0]["rl/reward_std"] > 0 and found[0]["rl/length_max"] <= 12
    assert [line["step"] for line in lines(project, "ppo", "val/exact_match")] == [0, 4]
    latest = "./outputs/rl/checkpoints/latest"
    done = script(project, "main.py", *words, "--resume_from_checkpoint", latest, "--num-train-steps", "6")
    check(done, 0, "continuing from step 4 of 6")
    assert [line["rl/iteration"] for line in lines(project, "ppo")] == [1, 1, 2, 2, 3, 3]


def test_two_processes_train_by_grpo(project):
    words = ("--nproc_per_node", "2", "--devices_per_process", "1", *RUN, "--algorithm", "grpo")
    done = script(project, "run_distributed.py", *words, "--extra_args", "--num-epochs 1")
    # 48 prompts, two of each device at a time.
    check(done, 0, "8 rows x 2 devices x 1 micro-batches", "1 epochs of 48 contexts, 4 at a time: 12 steps")
    found = lines(project, "grpo")
    assert [line["rl/iteration"] for line in found] == list(range(1, 13))
    vowels, numbers = (f"rl/reward/{name}" for name in ("0_vowels", "1_number_match"))
    assert all(line["rl/reward"] == pytest.approx(line[vowels] + 2 * line[numbers]) for line in found)
    assert found[0]["kl"] == 0 and found[-1]["kl"] > 0
    # Vowels are easily learnt.
    assert found[-1][vowels] > found[0][vowels]


def test_what_a_run_needs_is_told_before_it_starts(project):
    # The run of the config's name may be there by now, which a start would refuse.
    words = ("--algorithm", "grpo", "--experiment_name", "new", "--dry-run", "--devices-per-process", "1")
    check(script(project, "main.py", *RUN, *words), 0, "8 rows x 1 devices", "frozen parameters", "fits")
