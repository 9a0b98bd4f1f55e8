"""Runs on zarr stores by the command line alone: one name, the experiment chosen by the store's action dims."""

from pathlib import Path

import pytest
from command import check, losses, openpi_train, train

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
FIXTURES = Path(__file__).resolve().parents[1] / "data" / "zarr" / "fixtures"
EXPERIMENTS = """
import dataclasses
from openpi_train.choice import ByActionDim
from openpi_train.data.config import Dataset
from openpi_train.data.zarr import Zarr
from openpi_train.robots.robotwin import RoboTwin
from openpi_train_configs.debug import debug


def on(dims):
    dataset = Dataset(source=Zarr(path="nowhere.zarr"), robot=RoboTwin(dims=dims), prompt="stack the bowls")
    data = dataclasses.replace(debug.data, datasets=(dataset,), normalization="min_max", validation_fraction=0.3)
    return dataclasses.replace(debug, data=data, num_train_steps=2)


arms_14, arms_16 = on(14), on(16)
arms = ByActionDim(experiments={14: arms_14, 16: arms_16})
'''Two arms.'''
"""


@pytest.fixture
def arms(tmp_path):
    (tmp_path / "zarr_experiments.py").write_text(EXPERIMENTS)
    return f"{tmp_path}/zarr_experiments.py:arms"


def test_a_store_trains_alike_on_one_process_and_two_with_workers(tmp_path, arms):
    home = {"OPENPI_TRAIN_HOME": str(tmp_path / "home")}
    store = FIXTURES / "arms_16.zarr"
    train(tmp_path / "1", arms, "--dataset", store, devices=2, **home)
    read = ("--data.datasets.0.source.decoded-copy", "False", "--num-workers", "1")
    train(tmp_path / "2", arms, "--dataset", store, *read, processes=2, **home)
    alone = losses(tmp_path / "1", "arms_16")
    assert set(alone) == {1, 2}
    assert losses(tmp_path / "2", "arms_16") == alone


def test_a_store_of_unknown_dims_or_none_at_all_ends_with_the_code_for_data(tmp_path, arms):
    done = openpi_train(arms, "--exp-name", "x", "--dataset", FIXTURES / "arms_10.zarr")
    check(done, 3, "arms_10.zarr has [10] per step there", "Known: 14, 16 dims")
    done = openpi_train(arms, "--exp-name", "x")
    check(done, 3, "nowhere.zarr holds no zarr store")
