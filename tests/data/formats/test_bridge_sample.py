"""The whole data side on the real BridgeData V2 sample."""

import numpy as np
import pytest

from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.robots.bridge import Bridge


@pytest.fixture
def opened(open_small, bridge_sample, tmp_path):
    def open_split(split, trajectory=False):
        cameras = {"base_0_rgb": "observation/image_0", "left_wrist_0_rgb": "observation/image_1"}
        source = Rlds(path=str(bridge_sample), split=split, cache_dir=str(tmp_path / "index"))
        dataset = Dataset(source=source, robot=Bridge(cameras=cameras, trajectory=trajectory))
        return open_small(DataConfig(datasets=(dataset,), validation_fraction=0.2))

    return open_split


def test_no_episode_is_on_both_sides_although_the_two_shards_hold_the_same_ones(opened):
    data = opened("train+val")
    source = data.train.windows[0].source
    assert source.num_episodes == 50
    assert len(set(source.episode_ids)) == 25
    sides = []
    for rows in (data.train, data.validation):
        episodes = np.searchsorted(source.episode_ends, rows.windows[0].starts, side="right")
        sides.append({source.episode_ids[episode] for episode in episodes})
    assert sides[1]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 25
    # Both splits of the same content are cut alike.
    alone = opened("val").validation.windows[0]
    alone_ids = {alone.source.episode_ids[e] for e in np.searchsorted(alone.source.episode_ends, alone.starts, "right")}
    assert alone_ids == sides[1]


def test_null_first_actions_start_no_window(opened):
    data = opened("train")
    total = len(data.train.windows[0]) + len(data.validation.windows[0])
    assert total == 25 * 9
    assert not np.any(data.train.windows[0].starts % 10 == 0)


@pytest.mark.parametrize("trajectory", [False, True])
def test_batches_hold_real_pictures_and_bounded_actions(opened, trajectory):
    data = opened("train", trajectory)
    columns, skipped = data.train.batch(np.arange(64))
    assert not skipped
    for slot in ("base_0_rgb", "left_wrist_0_rgb"):
        assert columns[f"image_mask/{slot}"].all()
        assert np.all(columns[f"image/{slot}"].std(axis=(1, 2, 3)) > 5)
    real = columns["actions"][columns["action_mask"]][:, :7]
    assert np.all(np.abs(real) < 15)
    # The rows are a sample of what the statistics are over: near zero mean and unit variance.
    assert np.all(np.abs(real.mean(axis=0)) < 0.5)
    assert {window.prompt_at(int(step)) for window in data.train.windows for step in window.starts} <= {
        "put carrot on plate",
        "put cup from counter or drying rack into sink",
        "turn lever vertical to front",
        "flip pot upright which is in sink",
    }
