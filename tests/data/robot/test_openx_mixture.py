"""Datasets in Open X-Embodiment's and DROID's layouts, written as RLDS, read, and mixed by weight."""

import dataclasses

import numpy as np
import tensorflow_datasets as tfds

from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.formats.rlds.rlds_writer import write_rlds
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.robots.openx import OpenX

# The steps' features, as the releases nest them: numbers by width, instructions, cameras.
FEATURES = {
    "fractal20220817_data": {
        "observation": {
            "image": "camera",
            "natural_language_instruction": "text",
            "natural_language_embedding": 512,
            "base_pose_tool_reached": 7,
            "gripper_closed": 1,
        },
        "action": {"world_vector": 3, "rotation_delta": 3, "gripper_closedness_action": 1, "terminate_episode": 3},
        "reward": 0,
    },
    "bridge_dataset": {
        "observation": {"image_0": "camera", "state": 7},
        "action": 7,
        "language_instruction": "text",
    },
    "droid": {
        "observation": {
            "exterior_image_1_left": "camera",
            "exterior_image_2_left": "camera",
            "wrist_image_left": "camera",
            "cartesian_position": 6,
            "gripper_position": 1,
            "joint_position": 7,
        },
        "action": 7,
        "action_dict": {"cartesian_velocity": 6, "gripper_position": 1, "joint_velocity": 7},
        "language_instruction": "text",
        "language_instruction_2": "text",
        "language_instruction_3": "text",
    },
}
STEPS, EPISODES, SIZE = 9, 4, (12, 16)


def feature(kind):
    if isinstance(kind, dict):
        return {name: feature(child) for name, child in kind.items()}
    if kind == "camera":
        return tfds.features.Image(shape=(*SIZE, 3), dtype=np.uint8, encoding_format="jpeg")
    return (
        tfds.features.Text()
        if kind == "text"
        else tfds.features.Tensor(shape=(kind,) if kind else (), dtype=np.float32)
    )


def values(kind, random, text):
    if isinstance(kind, dict):
        return {name: values(child, random, f"{text} {name}") for name, child in kind.items()}
    if kind == "camera":
        return random.integers(0, 256, (STEPS, *SIZE, 3), np.uint8)
    if kind == "text":
        return [text] * STEPS
    return random.uniform(-1, 1, (STEPS, kind) if kind else STEPS).astype(np.float32)


def write(folder, name):
    """A tiny dataset in a release's layout; returns its source and its episodes."""
    steps = FEATURES[name]
    episodes = [{"steps": values(steps, np.random.default_rng(number), name)} for number in range(EPISODES)]
    features = tfds.features.FeaturesDict({"steps": tfds.features.Dataset(feature(steps))})
    path = write_rlds(folder, name=name, version="0.1.0", features=features, splits={"train": episodes})
    return Rlds(path=str(path), cache_dir=str(folder / "cache")), episodes


def test_layouts_of_three_releases_are_read_and_mixed_by_weight(tmp_path, open_small):
    written = {name: write(tmp_path, name) for name in FEATURES}
    weights = {"fractal20220817_data": 2.0, "bridge_dataset": 1.0, "droid": 1.0}
    datasets = [
        Dataset(source=source, robot=OpenX(layout=name), weight=weights[name]) for name, (source, _) in written.items()
    ]
    config = DataConfig(datasets=tuple(datasets), validation_fraction=0, may_differ=("state", "rate"))
    assert not config.check() and len(dataclasses.replace(config, may_differ=("state",)).check()) == 2
    opened = open_small(config)
    assert opened.proportions == {"0_fractal20220817_data": 0.5, "1_bridge_dataset": 0.25, "2_droid": 0.25}
    assert opened.cameras == ("base_0_rgb", "left_wrist_0_rgb")
    shares = np.bincount(opened.train.mixture.locate(np.arange(256))[0]) / 256
    np.testing.assert_array_equal(shares, [0.5, 0.25, 0.25])
    batch, skipped = opened.train.batch(np.arange(16))
    assert not skipped and np.isfinite(batch["actions"]).all()

    windows = dict(zip(FEATURES, opened.train.windows, strict=True))
    instructions = {name: set(window.prompts) for name, window in windows.items()}
    assert instructions == {
        "fractal20220817_data": {"fractal20220817_data observation natural_language_instruction"},
        "bridge_dataset": {"bridge_dataset language_instruction"},
        "droid": {"droid language_instruction"},
    }
    robot, (_, episodes) = windows["droid"].robot, written["droid"]
    state, actions, _ = windows["droid"].chunks(np.arange(STEPS))
    observed, commanded = episodes[0]["steps"]["observation"], episodes[0]["steps"]["action_dict"]
    assert robot.state_names[-1] == "gripper_fraction" and robot.control_hz == 15
    np.testing.assert_allclose(state[:, :6], observed["cartesian_position"])
    np.testing.assert_allclose(state[:, 6:], 1 - observed["gripper_position"])
    np.testing.assert_allclose(actions[:, 0, :6], commanded["cartesian_velocity"])
    np.testing.assert_allclose(actions[:, 0, 6:], 1 - np.clip(commanded["gripper_position"], 0, 1))
