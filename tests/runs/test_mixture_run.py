"""A mixture of two robots' datasets with unreadable records, through the real command line."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import losses, places, train

from openpi_train import cli

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
RUNS = Path(__file__).with_name("mixture_runs.py")
BATCH_SIZE, NUM_STEPS = 8, 4


def test_shares_and_replaced_rows_are_told_and_equal_on_any_number_of_processes(tmp_path):
    name = f"{RUNS}:mixed"
    results = []
    for processes in (1, 2):
        base = tmp_path / str(processes)
        train(base, name, processes=processes, devices=2 // processes)
        run = base / "runs" / "mixed" / "x"
        result = json.loads((run / "results.json").read_text())["training_metrics"]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        shares = [line["data/share/0_torn"] for line in lines if "data/share/0_torn" in line]
        results.append((losses(base, "mixed"), shares, result["proportions"], result["bad_records"]))
    assert results[0] == results[1]

    rows = cli.parse_experiment(name, [*places(tmp_path)]).open_data().train
    dataset, _, _ = rows.mixture.locate(np.arange(BATCH_SIZE * NUM_STEPS))
    skipped = rows.batch(np.arange(BATCH_SIZE * NUM_STEPS))[1]
    _, shares, proportions, bad_records = results[0]
    first = np.cumsum(dataset == 0)[BATCH_SIZE - 1 :: BATCH_SIZE] / np.arange(BATCH_SIZE, 33, BATCH_SIZE)
    np.testing.assert_allclose(shares, first)
    assert proportions == {"0_torn": shares[-1], "1_sound": 1 - shares[-1]}
    assert bad_records == len(skipped) > 0
