"""Runs on zarr stores by the command line alone: one name, the experiment chosen by the store's action dims."""

from pathlib import Path

import pytest
from command import check, losses, openpi_train, train

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
FIXTURES = Path(__file__).resolve().parents[1] / "data" / "formats" / "zarr" / "fixtures"
ARMS = f"{Path(__file__).with_name('zarr_runs.py')}:arms"


def test_a_store_trains_alike_on_one_process_and_two_with_workers(tmp_path):
    home = {"OPENPI_TRAIN_HOME": str(tmp_path / "home")}
    store = FIXTURES / "arms_16.zarr"
    train(tmp_path / "1", ARMS, "--dataset", store, devices=2, **home)
    read = ("--data.datasets.0.source.decoded-copy", "False", "--num-workers", "1")
    train(tmp_path / "2", ARMS, "--dataset", store, *read, processes=2, **home)
    alone = losses(tmp_path / "1", "arms_16")
    assert set(alone) == {1, 2}
    assert losses(tmp_path / "2", "arms_16") == alone


def test_a_store_of_unknown_dims_or_none_at_all_ends_with_the_code_for_data(tmp_path):
    done = openpi_train(ARMS, "--exp-name", "x", "--dataset", FIXTURES / "arms_10.zarr")
    check(done, 3, "arms_10.zarr has [10] per step there", "Known: 14, 16 dims")
    done = openpi_train(ARMS, "--exp-name", "x")
    check(done, 3, "nowhere.zarr holds no zarr store")
