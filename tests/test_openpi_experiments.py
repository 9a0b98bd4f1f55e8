"""openpi's experiments: their names in our table, and their values, against a record of openpi's own config files.

The record holds names and values of openpi at 15a9616 (`training/config.py`, `misc/*_config.py`).
"""

import json
import re
import types
from pathlib import Path

import pytest

from openpi_train import cli, registry
from openpi_train.checkpoints import checkpoint_formats
from openpi_train.data.core import cache_folders
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.optim import LRSchedule
from openpi_train.policy import restore
from openpi_train.robots.aloha import Aloha
from openpi_train.robots.droid import Droid
from openpi_train.robots.libero import Libero
from openpi_train.runtime.exits import UsageError

RECORD = {
    one["name"]: one
    for one in json.loads((Path(__file__).parent / "interop" / "recorded" / "openpi_configs.json").read_text())
}
PAGE = Path(__file__).resolve().parent.parent / "docs" / "from" / "openpi.md"
TABLE = dict(re.findall(r"^\| `(\w+)` \| (yes|no|other) \|", PAGE.read_text(), re.MULTILINE))
HERE = sorted(name for name, here in TABLE.items() if here == "yes")
# openpi's own defaults, of fields that its configs leave out.
DEFAULTS = {"num_train_steps": 30_000, "batch_size": 32, "ema_decay": 0.99, "save_interval": 1000, "keep_period": 5000}
NORMS = "gs://openpi-assets/checkpoints/"


def test_the_table_has_every_config_of_openpi_and_what_is_here_is_an_experiment():
    assert TABLE.keys() == RECORD.keys()
    assert set(HERE) <= set(registry.entries())
    assert not {name for name, here in TABLE.items() if here == "no"} & set(registry.entries())


@pytest.mark.parametrize("name", HERE)
def test_an_experiment_has_openpis_values(name):
    theirs, ours = RECORD[name], registry.load(name)
    for field, default in DEFAULTS.items():
        assert getattr(ours, field) == theirs.get(field, default), field
    assert ours.lr_schedule == LRSchedule(**theirs.get("lr_schedule", {}))
    assert ours.weight_loader.params_path == theirs.get("weights", "")
    model = dict(theirs["model"])
    assert type(ours.model).__name__ == model.pop("class").replace("FAST", "Fast")
    assert {field: getattr(ours.model, field) for field in model} == model


@pytest.mark.parametrize("name", HERE)
def test_its_data_and_norm_stats_are_where_openpi_has_them(name):
    data, (dataset,) = RECORD[name]["data"], registry.load(name).demonstrations.datasets
    assets, repo_id = data.get("assets", {}), data.get("repo_id", "YOU/YOUR_DATASET")
    assert dataset.asset == assets.get("asset_id", repo_id)
    given = assets.get("assets_dir", "").rstrip("/").removesuffix("/assets").removeprefix(NORMS)
    assert dataset.norm_stats == (cache_folders.openpi_assets(given, assets["asset_id"]) if given else None)
    if "SimpleData" not in data["class"] and "RLDS" not in data["class"] and not repo_id.startswith("your_"):
        assert dataset.source == LeRobot(path=cache_folders.lerobot(repo_id))
    assert dataset.prompt == data.get("default_prompt")
    robot = dataset.robot
    if isinstance(robot, Libero):
        assert robot.extra_delta == data["extra_delta_transform"]
    elif isinstance(robot, Aloha):
        assert (robot.relative, robot.adapt_to_pi) == (data.get("use_delta_joint_actions", True), True)
    else:
        assert isinstance(robot, Droid)
        assert robot.action == data.get("action_space", "joint_velocity").lower()


@pytest.mark.parametrize("name", [name for name in HERE if "fast" in name])
def test_pi0_fast_sees_a_black_picture_where_openpi_gives_it_one(name):
    experiment = registry.load(name)
    slots, cameras = experiment.model.camera_slots, experiment.demonstrations.cameras
    assert experiment.model.black_cameras and len(slots) == 3 and set(cameras) < set(slots)
    assert experiment.model.rows.batch_spec(2, cameras).observation.images.keys() == set(cameras)


def test_repo_id_is_a_name_on_the_hub_or_a_folder_and_norm_stats_of_a_dataset_are_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))

    def dataset(name, repo_id):
        words = ["--exp-name", "x", "--data.repo-id", repo_id, "--batch-size", "64"]
        experiment = cli.parse_experiment(name, words)
        assert experiment.batch_size == 64
        return experiment.demonstrations.datasets[0]

    monkeypatch.setattr(cache_folders, "lerobot", lambda repo_id: f"{tmp_path}/home/{repo_id}")
    found = dataset("pi0_ur5", "me/mine")
    assert (found.source, found.asset, Path(found.norm_stats).name) == (
        LeRobot(path=f"{tmp_path}/home/me/mine"),
        "ur5e",
        "ur5e",
    )
    assert dataset("pi0_ur5", str(tmp_path)).source.path == str(tmp_path)
    with pytest.raises(UsageError, match=r"this is for robots' demonstrations"):
        dataset("arithmetic_sft", "me/mine")


def test_repo_id_goes_with_a_deepspeed_config(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8}))
    words = ["--exp-name", "x", "--deepspeed", str(tmp_path / "ds.json"), "--data.repo-id", str(tmp_path)]
    experiment = cli.parse_experiment("pi0_libero", words)
    assert experiment.batch_size == 8
    assert experiment.demonstrations.datasets[0].source == LeRobot(path=str(tmp_path))


def test_norm_stats_of_a_dataset_get_the_name_of_the_new_one():
    experiment = cli.parse_experiment("pi0_libero", ["--exp-name", "x", "--data.repo_id=me/mine"])
    (dataset,) = experiment.demonstrations.datasets
    assert (dataset.asset, dataset.source) == ("me/mine", LeRobot(path=cache_folders.lerobot("me/mine")))
    assert isinstance(dataset.robot, Libero) and dataset.robot.extra_delta


def test_a_checkpoint_without_a_record_is_of_the_experiment_that_its_folder_names(monkeypatch):
    monkeypatch.setattr(checkpoint_formats, "open_checkpoint", lambda *_: types.SimpleNamespace(experiment=None))
    _, found = restore.open_run("gs://openpi-assets/checkpoints/pi0_aloha_towel")
    assert (found.name, found.demonstrations.datasets[0].prompt) == ("pi0_aloha_towel", "fold the towel")
    with pytest.raises(UsageError, match="does not say whose model it is"):
        restore.open_run("/models/mine")
