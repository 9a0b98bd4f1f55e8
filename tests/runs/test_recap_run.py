"""RECAP from a stored dataset, as three commands: a value function, its advantages, and a policy that is told them."""

import json

import numpy as np
import pyarrow.parquet as parquet
import pytest
from runs.command import losses, openpi_train, train

from openpi_train import load_policy
from openpi_train.data.formats.lerobot import LeRobotWriter

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SHORT = ("--batch-size", "8", "--num-workers", "0", "--log-interval", "1", "--num-train-steps", "2")
SHORT += ("--save-interval", "2", "--lr-schedule.warmup-steps", "1", "--eval.interval", "0")
FIXED = ("--model.mlp.width", "32", "--model.mlp.depth", "1")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Episodes of 10 to 12 steps; every second one succeeds, and a person corrects the first steps of one."""
    home, random = tmp_path_factory.mktemp("stored"), np.random.default_rng(0)
    single = {"shape": (1,), "names": None}
    writer = LeRobotWriter(
        home / "own",
        fps=25,
        features={
            "state": {"dtype": "float32", "shape": (16,), "names": None},
            "action": {"dtype": "float32", "shape": (4,), "names": None},
            "next.success": {"dtype": "bool", **single},
            "is_intervention": {"dtype": "bool", **single},
        },
    )
    for episode in range(12):
        steps = np.arange(10 + episode % 3)
        writer.add_episode(
            {
                "state": random.normal(size=(len(steps), 16)).astype(np.float32),
                "action": random.normal(size=(len(steps), 4)).astype(np.float32),
                "next.success": (steps == steps[-1]) & (episode % 2 == 0),
                "is_intervention": (steps < 3) & (episode == 5),
            },
            {},
            task="go",
        )
    writer.finish()
    return home


@pytest.fixture(scope="module")
def valued(stored):
    train(stored, "fetch_reach_value", "--dataset", stored / "own", *SHORT, *FIXED)
    return stored


def test_a_value_function_trains_alike_on_two_processes_and_goes_on(valued, tmp_path):
    found = losses(valued, "fetch_reach_value")
    # All bins are equally likely at first.
    assert found[1] == pytest.approx(np.log(201), rel=1e-4)
    flags = ("--dataset", valued / "own", *SHORT, *FIXED)
    train(tmp_path, "fetch_reach_value", *flags, processes=2, devices=1)
    assert losses(tmp_path, "fetch_reach_value") == pytest.approx(found, rel=1e-5)
    train(valued, "fetch_reach_value", *flags, "--num-train-steps", "4", "--resume")
    assert sorted(losses(valued, "fetch_reach_value")) == [1, 2, 3, 4]


def test_advantages_of_a_dataset_train_a_policy_that_acts_by_them(valued, tmp_path):
    run = valued / "runs" / "fetch_reach_value" / "x"
    done = openpi_train("data", "advantages", run, "--out", tmp_path, "--lookahead", "4", "--always", "is_intervention")
    assert done.returncode == 0, done.stderr[-3000:]
    file = tmp_path / "own.parquet"
    table = parquet.read_table(file).to_pydict()
    assert table["episode_index"] == np.repeat(np.arange(12), [10, 11, 12] * 4).tolist()
    # The last steps of the first two episodes, which succeed and fail: a failure costs 10 of 11 lengths.
    assert table["return"][9] == 0 and table["return"][20] == pytest.approx(-10 / 11)
    corrected = [n for n, one in enumerate(table["episode_index"]) if one == 5][:3]
    assert all(table["is_better"][step] for step in corrected)
    better = np.delete(table["is_better"], corrected)
    assert abs(better.mean() - 0.4) < 1 / len(better) + 1e-9
    assert "correlation of value and return in held-out episodes" in done.stdout

    pytest.importorskip("gymnasium_robotics", reason="in which it acts")
    acts = ("--eval.closed-loop.interval", "0", "--eval.closed-loop.episodes-per-task", "1")
    acts += ("--eval.closed-loop.episodes-per-device", "1", "--eval.closed-loop.max-steps", "8")
    told = ("--dataset", valued / "own", "--data.datasets.0.advantages", file, "--data.datasets.0.norm-stats", "None")
    train(tmp_path, "fetch_reach_recap", *told, *SHORT, *FIXED, *acts)
    run = tmp_path / "runs" / "fetch_reach_recap" / "x"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "success/all" in line]) == 2
    found = [line for line in lines if "loss" in line]
    assert len(found) == 2 and all(line["better"] + line["worse"] == pytest.approx(1) for line in found)
    own, other = (load_policy(run, guidance=guidance) for guidance in (None, 2.0))
    observation = {"state": np.zeros(16, np.float32), "prompt": "go"}
    chunks = [policy.infer(observation, draw=0)["actions"] for policy in (own, other)]
    assert chunks[0].shape == (8, 4) and not np.array_equal(*chunks)
