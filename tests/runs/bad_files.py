"""What the tests of bad input feed to the program: damaged datasets, wrong statistics, small disks."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

SOURCE = "--data.datasets.0.source"

EXPERIMENTS = '''
import dataclasses
from openpi_train_configs.debug import debug
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.make.fake import FakeData
from openpi_train.data.formats.rlds import Rlds
from openpi_train.robots.bridge import Bridge

def on(source):
    data = DataConfig(datasets=(Dataset(source=source, robot=Bridge(), asset_id="fake"),), tokenizer="bytes")
    return dataclasses.replace(debug, data=data)

arm = on(Rlds(path={arm!r}, cache_dir={cache!r}))
"""A dataset that was written for this test."""
noise = on(FakeData(image_height=32, image_width=32))
"""Noise."""
number = 3
'''


def write_arm(directory: Path, name: str, with_state: bool = True) -> Path:
    """A small RLDS dataset of a 7-dim arm, 8 episodes of 6 steps in one shard."""
    import tensorflow_datasets as tfds

    from openpi_train.data.formats.rlds.rlds_writer import write_rlds

    image = tfds.features.Image(shape=(16, 16, 3), dtype=np.uint8, encoding_format="png")
    pose = tfds.features.Tensor(shape=(7,), dtype=np.float32)
    observation = {"image_0": image, **({"state": pose} if with_state else {})}
    step = {"observation": observation, "action": pose, "language_instruction": tfds.features.Text()}
    features = tfds.features.FeaturesDict({"steps": tfds.features.Dataset(step)})

    def episode(seed: int):
        random = np.random.default_rng(seed)
        values = {name: random.normal(size=(6, 7)).astype(np.float32) for name in ("state", "action")}
        observation = {"image_0": random.integers(0, 256, (6, 16, 16, 3), np.uint8)}
        observation |= {"state": values["state"]} if with_state else {}
        return {"steps": {"observation": observation, "action": values["action"], "language_instruction": ["lift"] * 6}}

    splits = {"train": map(episode, range(8))}
    return write_rlds(directory, name=name, version="1.0.0", features=features, splits=splits)


def shard_of(dataset: Path) -> Path:
    return next(dataset.glob("*-train.tfrecord-*"))


def write_experiments(file: Path) -> Path:
    """The experiment file, whose `arm` reads the dataset beside it; returns it."""
    base = file.parent
    file.write_text(EXPERIMENTS.replace("{arm!r}", repr(f"{base}/arm")).replace("{cache!r}", repr(f"{base}/index")))
    return file


def write_all(base: Path) -> Path:
    """Fill a folder with good and bad files of every kind; returns it."""
    good = write_arm(base, "arm")
    write_arm(base, "stateless", with_state=False)
    for name in ("torn", "flipped"):
        shutil.copytree(good, base / name / "1.0.0")
    torn, flipped = shard_of(base / "torn" / "1.0.0"), shard_of(base / "flipped" / "1.0.0")
    os.truncate(torn, torn.stat().st_size * 5 // 8 + 50)
    content = bytearray(flipped.read_bytes())
    content[len(content) * 5 // 16] ^= 0xFF
    flipped.write_bytes(content)
    (base / "damaged").mkdir()
    (base / "damaged" / "model.safetensors").touch()

    write_experiments(base / "bad_input_experiments.py")
    (base / "unfinished.py").write_text("try7 = (\n")
    narrow = {key: [0.0, 1.0] for key in ("mean", "std", "q01", "q99")}
    (base / "narrow.json").write_text(json.dumps({"norm_stats": {"state": narrow, "actions": narrow}}))
    unknown = {key: [float("nan")] * 7 for key in ("mean", "std", "q01", "q99")}
    (base / "nan.json").write_text(json.dumps({"norm_stats": {"state": unknown, "actions": unknown}}))
    return base


def small_disk(place: Path, size: str) -> tuple[str, ...]:
    """A command prefix that runs with `place` as a file system of that size; skips where that is not permitted."""
    prefix = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs {place} && exec "$@"', "sh")
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("a private mount needs root")
    return prefix
