"""What a dry run finds out about robots' datasets: what opening them would say, without writing anything."""

import dataclasses
from pathlib import Path

import pytest

from openpi_train.data.formats.zarr import Zarr
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.examination import examine
from openpi_train.data.robot.windows import WindowShape
from openpi_train.models.act import ActConfig
from openpi_train.models.pi0 import Pi0Config
from openpi_train.robots.robotwin import RoboTwin
from openpi_train.runtime.exits import DataError

STORE = Path(__file__).parents[1] / "formats" / "zarr" / "fixtures" / "arms_14.zarr"
SHAPE = WindowShape(history=1, horizon=4)


def data(tmp_path, path=STORE, dims=14, **robot):
    source = Zarr(path=str(path), cache_dir=str(tmp_path / "cache"))
    return DataConfig(datasets=(Dataset(source=source, robot=RoboTwin(dims=dims, **robot), prompt="stack"),))


def test_a_store_of_another_robot_is_refused_before_it_is_indexed(tmp_path):
    with pytest.raises(DataError, match=r"the RoboTwin robot has 10 state dims .* the dataset gives 14"):
        examine(data(tmp_path, dims=10), SHAPE)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match="nowhere"):
        examine(data(tmp_path, path=tmp_path / "nowhere.zarr"), SHAPE)


def test_what_is_not_indexed_is_told_and_what_is_is_read_as_the_run_does(tmp_path):
    (sentence,) = examine(data(tmp_path), SHAPE)
    assert sentence.endswith(f"`data index {STORE}` does so now") and not (tmp_path / "cache").exists()
    data(tmp_path).datasets[0].source.open()
    assert examine(data(tmp_path), SHAPE) == []
    with pytest.raises(DataError, match="the RoboTwin robot has 10 state dims"):
        examine(data(tmp_path, dims=10), SHAPE)
    with pytest.raises(DataError, match="reads the image feature 'front'"):
        examine(data(tmp_path, cameras={"head_camera": "front"}), SHAPE)


def test_a_model_of_other_dims_than_the_robots_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"14 action dims, .* 7 .*--model\.action-dim 14"):
        data(tmp_path).examine(ActConfig(action_dim=7))
    with pytest.raises(DataError, match=r"14 state dims, .* 6 .*--model\.state-dim"):
        data(tmp_path).examine(ActConfig(action_dim=14, state_dim=6))
    with pytest.raises(DataError, match=r"14 state dims, the model takes 8: set --model.action-dim 14 or more"):
        data(tmp_path).examine(Pi0Config(action_dim=8))
    (sentence,) = data(tmp_path).examine(ActConfig(action_dim=14))
    assert "not indexed yet" in sentence


def test_norm_stats_and_tokenizers_that_are_not_there_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    given, pi0 = data(tmp_path), Pi0Config(action_dim=14)
    stats = dataclasses.replace(given.datasets[0], norm_stats=str(tmp_path / "norm_stats.json"))
    with pytest.raises(DataError, match="no norm stats at"):
        dataclasses.replace(given, datasets=(stats,), tokenizer="bytes").examine(pi0)
    with pytest.raises(DataError, match=r"no tokenizer at nowhere\.model"):
        dataclasses.replace(given, tokenizer="nowhere.model").examine(pi0)
    # What the hub holds is fetched by a start, if it may.
    _, note = dataclasses.replace(given, tokenizer="someone/tokens").examine(pi0)
    assert note == "tokenizer someone/tokens: it is not on this machine; a start fetches it from the hub"
    with pytest.raises(DataError, match="offline and not cached"):
        dataclasses.replace(given, tokenizer="someone/tokens", offline=True).examine(pi0)


def test_all_that_is_missing_is_told_at_once(tmp_path):
    (one,) = data(tmp_path, path=tmp_path / "first.zarr").datasets
    (other,) = data(tmp_path, path=tmp_path / "second.zarr").datasets
    given = DataConfig(
        datasets=(one, dataclasses.replace(other, norm_stats=str(tmp_path / "norm_stats.json"))),
        tokenizer="nowhere.model",
    )
    with pytest.raises(DataError, match=r"(?s)first\.zarr.*second\.zarr.*no norm stats at.*no tokenizer at nowhere"):
        given.examine(Pi0Config(action_dim=14))
