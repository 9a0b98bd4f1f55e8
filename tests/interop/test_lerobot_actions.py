"""What LeRobot's own processors computed in our folders is what we compute, for robots with all kinds of actions.

`recorded/lerobot_relative.json` holds its numbers (lerobot 0.6.1), and a digest of the files from which they came.
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import exchanged
import lerobot_exports
import numpy as np
import pytest
from openpi_train_configs.openpi_arms import pi0_aloha_pen_uncap
from openpi_train_configs.pi0_bridge import pi0_bridge_traj

from openpi_train.checkpoints import lerobot_policy
from openpi_train.checkpoints.checkpoint_formats import open_checkpoint
from openpi_train.fields import as_json
from openpi_train.interop.robot_actions import action_dims, check_action_dims, openpis_transforms
from openpi_train.models.diffusion_policy import diffusion_policy_checkpoint
from openpi_train.policy.loading import load_policy
from openpi_train.policy.restore import open_run
from openpi_train.robots.aloha import Aloha
from openpi_train.robots.bridge import Bridge
from openpi_train.robots.droid import Droid
from openpi_train.robots.libero import Libero
from openpi_train.robots.ur5 import UR5
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.tools import convert_checkpoint
from openpi_train.tools.requests import ConvertRequest

RECORDED = json.loads((Path(__file__).parent / "recorded" / "lerobot_relative.json").read_text())["cases"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of a case by name, written at the first call."""
    place = tmp_path_factory.mktemp("lerobot")

    def folder(name: str) -> Path:
        if not (place / name).exists():
            lerobot_exports.write(place / name, name)
        return place / name

    return folder


@pytest.fixture
def partly(folders, tmp_path):
    """A copy of the folder of a policy whose actions are partly relative."""
    return Path(shutil.copytree(folders("pi0-partly-bridge"), tmp_path / "policy"))


@pytest.mark.parametrize("name", lerobot_exports.CASES)
def test_lerobots_processors_give_our_actions_in_the_folder_that_we_write(name, folders):
    # Other files than LeRobot has read: run record_lerobot_relative.py again.
    assert lerobot_exports.digest(folders(name)) == RECORDED[name]["digest"]
    for key, value in lerobot_exports.computed(name).items():
        # Scales are 0.5 and more; ours have openpi's 1e-6 added where LeRobot's have not, and theirs are float32.
        np.testing.assert_allclose(value, RECORDED[name][key], rtol=1e-5, atol=1e-5, err_msg=key)
    has_field = name.startswith("pi0")
    assert RECORDED[name]["config"] is (("absolute" not in name) if has_field else None)


POSE = (True,) * 6 + (False,)
# What LeRobot's folders must say of relative dims, by the names of the cases.
MASKS = {
    "absolute": None,
    "all": (True,) * 3,
    "parts-of-names": (False, True, True),
    "partly-bridge": POSE,
    "partly-two-arms": POSE * 2,
    "partly-aloha": POSE * 2,
    "partly-ur5": POSE,
    "partly-droid": (True,) * 7 + (False,),
}


@pytest.mark.parametrize("name", lerobot_exports.CASES)
def test_a_folder_says_which_dims_are_relative(name, folders):
    make, robot = lerobot_exports.CASES[name]
    with lerobot_exports.narrow():
        stored = open_checkpoint(folders(name), make(robot))
    kind = name.partition("-")[2]
    expected = MASKS["absolute" if kind.startswith("absolute") else kind]
    assert stored.action_dims.relative == (expected or (False,) * len(robot.action_names))
    check_action_dims(stored, robot)


def test_a_robot_that_would_move_otherwise_than_the_policy_was_trained_is_refused(partly):
    stored = open_checkpoint(partly, lerobot_exports.pi0(Bridge()))
    for robot in (Bridge(), Droid(action="joint_position"), Aloha(relative=False)):
        with pytest.raises(UsageError, match=r"would move otherwise than it was trained|other units than the robot"):
            check_action_dims(stored, robot)
    # The same dims by other names are the same numbers.
    check_action_dims(stored, UR5())


def test_dims_are_found_by_what_the_robot_computes():
    assert action_dims(Libero()).relative == (False,) * 7
    assert action_dims(Libero(extra_delta=True)).relative == (True,) * 6 + (False,)
    assert action_dims(UR5()).in_words().startswith("relative to the state in joint_1_rad, joint_2_rad")
    assert action_dims(Bridge(trajectory=True, num_arms=2)).relative == ((True,) * 6 + (False,)) * 2


class Shifted(lerobot_exports.Masked):
    """An arm whose state has a number before those of its joints."""

    def _offset(self, state, width):
        return super()._offset(np.roll(state, -1, axis=-1), width)


def test_actions_relative_to_another_place_of_the_state_are_refused():
    """LeRobot's step and openpi's DeltaActions take the state's number at the action's own place."""
    robot = Shifted(names=("x_m", "y_m", "grip"), mask=(True, True, False))
    with pytest.raises(UsageError, match=r"other units than the robot in x_m, y_m, .* at the same place"):
        action_dims(robot)
    assert openpis_transforms(robot) == "transforms of its own that do what Shifted does"


@pytest.mark.parametrize("relative", [True, False])
def test_alohas_units_of_pi0_have_no_place_in_another_trainers_policy(relative, tmp_path):
    stored = exchanged.as_stored(exchanged.made_up(), robots={"robot": Aloha(relative=relative)})
    with pytest.raises(UsageError, match=r"Aloha robot's model has other units .* left_shoulder_rad.*no-adapt-to-pi"):
        lerobot_policy.prepare(stored, exchanged.TINY.model)
    assert not list(tmp_path.iterdir())


def test_the_robot_is_that_of_the_experiment_which_the_checkpoint_records(tmp_path):
    for experiment, said in ((pi0_bridge_traj, None), (pi0_aloha_pen_uncap, "the Aloha robot's model has other units")):
        stored = exchanged.as_stored(exchanged.made_up(), experiment=as_json(experiment))
        if said:
            with pytest.raises(UsageError, match=said):
                lerobot_policy.prepare(stored, exchanged.TINY.model)
            continue
        lerobot_policy.write(tmp_path / "out", stored, exchanged.TINY.model)
        config = json.loads((tmp_path / "out/config.json").read_text())
        assert config["use_relative_actions"] and config["relative_exclude_joints"] == ["gripper_fraction"]


def test_robots_whose_actions_differ_are_not_one_policy():
    stored = exchanged.as_stored(exchanged.made_up(), robots={"a": UR5(), "b": Libero()})
    with pytest.raises(UsageError, match=r"the actions of the robots .* differ.*a: relative to the state in joint_1"):
        lerobot_policy.prepare(stored, exchanged.TINY.model)
    # Those of the norm stats count.
    lerobot_policy.prepare(dataclasses.replace(stored, norm_stats={"b": exchanged.STATS}), exchanged.TINY.model)


def test_a_state_with_fewer_dims_than_relative_actions_is_refused():
    """LeRobot takes the state's dim at each action's place."""
    arm = lerobot_exports.Masked(names=("x_m", "y_m", "grip"), mask=(True, True, False))
    stats = lerobot_exports.norm_stats(arm)
    for name, width in (("state", 2), ("actions", 2)):
        short = {**stats["norm_stats"], name: {key: value[:width] for key, value in stats["norm_stats"][name].items()}}
        stored = exchanged.as_stored(exchanged.made_up(), robots={"robot": arm})
        stored = dataclasses.replace(stored, norm_stats={"robot": {"norm_stats": short}})
        with pytest.raises(UsageError, match="needs a state of at least as many dims"):
            lerobot_policy.prepare(stored, exchanged.TINY.model)


def test_relative_actions_have_no_place_in_diffusion_policys_checkpoints():
    robot = UR5()
    model = dataclasses.replace(lerobot_exports.diffusion(robot), pooling="average", relu_features=False)
    stored = exchanged.as_stored(exchanged.made_up(dataclasses.replace(exchanged.TINY, model=model)))
    stored = dataclasses.replace(
        stored,
        norm_stats={"robot": lerobot_exports.norm_stats(robot)},
        robots={"robot": robot},
        trained_with={"objective.sampler": "ddpm"},
    )
    with lerobot_exports.narrow(), pytest.raises(UsageError, match=r"relative to the state in .*convert --to lerobot"):
        diffusion_policy_checkpoint.prepare(stored, model)
    with lerobot_exports.narrow():
        diffusion_policy_checkpoint.prepare(dataclasses.replace(stored, robots={"robot": Libero()}), model)


def edited(folder: Path, file: str, change) -> None:
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))


def step(content: dict, name: str) -> dict:
    return next(one for one in content["steps"] if one.get("registry_name") == name)


BEFORE, AFTER, CONFIG = "policy_preprocessor.json", "policy_postprocessor.json", "config.json"
RELATIVE, ABSOLUTE = "relative_actions_processor", "absolute_actions_processor"


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (BEFORE, lambda one: one["steps"].append({"registry_name": "delta_clip"}), "has the step 'delta_clip'"),
        (AFTER, lambda one: one["steps"].append({"class": "my.Flip", "config": {}}), "has the step 'my.Flip'"),
        (AFTER, lambda one: step(one, ABSOLUTE)["config"].update(enabled=False), f"its {ABSOLUTE} not enabled"),
        (AFTER, lambda one: one["steps"].remove(step(one, ABSOLUTE)), f"its {ABSOLUTE} not enabled"),
        (CONFIG, lambda one: one.update(use_relative_actions=False), "its config says use_relative_actions False"),
        (BEFORE, lambda one: one["steps"].reverse(), f"its {RELATIVE} comes after its normalizer_processor"),
        (
            BEFORE,
            lambda one: step(one, "normalizer_processor")["config"].update(normalize_observation_keys=[]),
            "leaves observation.state as it is",
        ),
    ],
)
def test_steps_that_are_not_done_here_are_named(file, change, said, partly):
    edited(partly, file, change)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        open_checkpoint(partly, lerobot_exports.pi0(Bridge()))


def test_a_relative_policy_without_its_steps_is_incomplete(partly):
    (partly / BEFORE).unlink()
    with pytest.raises(CheckpointError, match=r"says use_relative_actions, and policy_preprocessor.json is missing"):
        open_checkpoint(partly, lerobot_exports.pi0(Bridge()))


@pytest.mark.parametrize(
    ("settings", "relative"),
    [
        # As LeRobot reads them: without names nothing is excluded, parts of names count, letters' case does not.
        ({"action_names": None}, (True,) * 7),
        ({"exclude_joints": []}, (True,) * 7),
        ({"exclude_joints": ["GRIPPER"]}, (True,) * 6 + (False,)),
        ({"exclude_joints": ["_m"]}, (False,) * 3 + (True,) * 4),
        ({"action_names": ["gripper"], "exclude_joints": ["gripper"]}, (False,) + (True,) * 6),
    ],
)
def test_dims_are_excluded_as_lerobot_excludes_them(settings, relative, partly):
    edited(partly, BEFORE, lambda one: step(one, RELATIVE)["config"].update(settings))
    stored = open_checkpoint(partly, lerobot_exports.pi0(Bridge()))
    assert stored.action_dims.relative == relative


def test_the_verb_converts_there_and_back_and_refuses_the_experiment_of_another_robot(tmp_path, capsys):
    dataset = exchanged.TINY.data.datasets[0]
    data = dataclasses.replace(
        exchanged.TINY.data, datasets=(dataclasses.replace(dataset, robot=Bridge(trajectory=True)),)
    )
    experiment = dataclasses.replace(exchanged.TINY, data=data)
    source = exchanged.write(tmp_path / "openpi", exchanged.made_up())

    def convert(source, target, name, experiment):
        request = ConvertRequest(source=str(source), target=target, target_format=name, outputs=False)
        return convert_checkpoint.main(request, experiment, lambda _: experiment)

    assert convert(source, tmp_path / "lerobot", "lerobot", experiment) == 0
    assert json.loads((tmp_path / "lerobot/config.json").read_text())["use_relative_actions"]
    assert convert(tmp_path / "lerobot", tmp_path / "ours", "ours", experiment) == 0
    capsys.readouterr()
    assert convert(tmp_path / "lerobot", tmp_path / "back", "openpi", experiment) == 0
    assert "DeltaActions and AbsoluteActions of make_bool_mask(6, -1)" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"relative to the state in x_m, .*Bridge, are all absolute"):
        convert(tmp_path / "lerobot", tmp_path / "other", "ours", exchanged.TINY)
    assert not (tmp_path / "other").exists()


def test_a_policy_is_not_loaded_for_a_robot_that_would_move_otherwise(tmp_path):
    stored = exchanged.as_stored(exchanged.made_up(), robots={"robot": Bridge(trajectory=True)})
    lerobot_policy.write(tmp_path / "policy", stored, exchanged.TINY.model)
    with pytest.raises(UsageError, match=r"policy are relative to the state in x_m, .*Bridge, are all absolute"):
        load_policy(tmp_path / "policy", experiment=exchanged.TINY)


def test_a_policy_is_written_with_the_normalisation_it_was_trained_with(tmp_path):
    data = dataclasses.replace(exchanged.TINY.data, normalization="quantile")
    experiment = dataclasses.replace(exchanged.TINY, data=data)
    stored = exchanged.as_stored(exchanged.made_up(), experiment=as_json(experiment))
    lerobot_policy.write(tmp_path / "pi0", stored, experiment.model)
    normalizer = step(json.loads((tmp_path / "pi0" / BEFORE).read_text()), "normalizer_processor")
    assert normalizer["config"]["norm_map"] == {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    open_run(tmp_path / "pi0", experiment)
    with pytest.raises(UsageError, match=r"data.normalization is quantile: give --data.normalization quantile"):
        open_run(tmp_path / "pi0", exchanged.TINY)
    for make in (lerobot_exports.act, lerobot_exports.smolvla):
        model = make(Bridge())
        params = exchanged.made_up(dataclasses.replace(experiment, model=model))
        with pytest.raises(UsageError, match=r"trained with --data.normalization quantile"):
            lerobot_policy.prepare(exchanged.as_stored(params, experiment=as_json(experiment)), model)
