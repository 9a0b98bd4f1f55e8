"""Demonstrations are collected, a policy of states learns from them, and it succeeds where nobody has shown it how."""

import json

import pytest
from command import check, openpi_train, train

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'openpi_train[sim]'")

pytestmark = [pytest.mark.sim, pytest.mark.slow]
SHORT = "--num-train-steps 200 --batch-size 64 --lr-schedule.warmup-steps 20 --log-interval 100".split()
SHORT += "--eval.interval 0 --eval.closed-loop.interval 0 --eval.closed-loop.max-steps 200".split()
SHORT += "--eval.closed-loop.env.task-list drawer-close --eval.closed-loop.episodes-per-task 6".split()
SHORT += "--eval.closed-loop.num-videos 0 --data.validation-fraction 0".split()


def test_five_demonstrations_of_one_task_teach_it(tmp_path):
    store = tmp_path / "drawer.zarr"
    words = ("data", "collect", "metaworld", "--tasks", "drawer-close", "--episodes-per-task", "5", "--out", store)
    check(
        openpi_train(*words),
        0,
        "drawer-close: 5 demonstrations of 5 attempts",
        "tasks drawer-close ('close the drawer')",
    )
    train(tmp_path, "metaworld_mt5_flow", "--dataset", store, *SHORT)
    lines = (tmp_path / "runs" / "metaworld_mt5_flow" / "x" / "metrics.jsonl").read_text().splitlines()
    success = {line["step"]: line["success/drawer-close"] for line in map(json.loads, lines) if "success/all" in line}
    # Random weights push it shut once in six times, the trained ones closed all six.
    assert success[200] >= success[0] + 0.5
