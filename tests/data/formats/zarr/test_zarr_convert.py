"""RoboTwin's recordings to a store: what its own script makes of them, and what is refused."""

import io
import sys

import h5py
import numpy as np
import pytest
import zarr
from PIL import Image

from openpi_train.data.core.source import BadRecord
from openpi_train.data.formats.zarr.robotwin_recordings import convert
from openpi_train.data.formats.zarr.store import Store
from openpi_train.data.formats.zarr.zarr_layout import read_layout
from openpi_train.tools import data as data_tool

STEPS, SIZE = (6, 4, 9), (12, 16)


def jpeg(rng):
    """A soft picture as RoboTwin stores it, and its pixels as Pillow reads that."""
    corners = rng.integers(0, 256, (3, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(corners).resize(SIZE[::-1]).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def record(folder, number, steps, dims=14, cameras=("head_camera", "left_camera"), seed=0):
    """One episode's file; returns its joints and its pictures as stored."""
    rng = np.random.default_rng((seed, number))
    joints, stored = rng.normal(size=(steps, dims)), {name: [jpeg(rng) for _ in range(steps)] for name in cameras}
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / f"episode{number}.hdf5", "w") as file:
        file["joint_action/vector"] = joints
        for name, pictures in stored.items():
            longest = max(map(len, pictures))
            # Padded with zeros to one length, as RoboTwin writes them.
            file[f"observation/{name}/rgb"] = np.array(pictures, dtype=f"S{longest}")
    return joints, stored


def pixels(data):
    """RGB, after red and blue are put right; channels first."""
    return np.asarray(Image.open(io.BytesIO(data)))[..., ::-1].transpose(2, 0, 1)


@pytest.fixture
def recordings(tmp_path):
    folder = tmp_path / "stack_bowls" / "data"
    return folder.parent, [record(folder, number, steps) for number, steps in enumerate(STEPS)]


def test_rows_are_states_pictures_and_the_next_joints_without_the_last_step(recordings, tmp_path, capsys):
    folder, episodes = recordings
    out = tmp_path / "a.zarr"
    words = ["convert", str(folder), str(out), "--cameras", "head_camera", "left_camera", "--chunk-rows", "4"]
    assert data_tool.main(words, lambda *_: None) == 0
    assert "3 episodes, 16 control steps" in capsys.readouterr().out
    root = zarr.open_group(str(out), mode="r", zarr_format=2)
    np.testing.assert_array_equal(root["meta/episode_ends"][:], np.cumsum(np.array(STEPS) - 1))
    joined = {"state": [joints[:-1] for joints, _ in episodes], "action": [joints[1:] for joints, _ in episodes]}
    for name, values in joined.items():
        np.testing.assert_array_equal(root[f"data/{name}"][:], np.concatenate(values).astype(np.float32), strict=True)
    for name in ("head_camera", "left_camera"):
        expected = np.stack([pixels(data) for _, stored in episodes for data in stored[name][:-1]])
        np.testing.assert_array_equal(root[f"data/{name}"][:], expected, strict=True)
    assert read_layout(Store(out)).tasks == (("stack_bowls", "stack bowls"),)


def test_episodes_lie_in_the_order_of_their_numbers(tmp_path):
    joints = [record(tmp_path / "recorded", number, 2)[0] for number in (1, 2, 10)]
    convert(tmp_path / "recorded", tmp_path / "a.zarr", cameras=("head_camera",), task="t", prompt="p")
    found = zarr.open_group(str(tmp_path / "a.zarr"), mode="r")["data/state"][:]
    np.testing.assert_array_equal(found, np.stack([rows[0] for rows in joints]).astype(np.float32))


def test_recordings_that_cannot_be_one_store_are_refused_by_name(recordings, tmp_path):
    folder, _ = recordings

    def refused(pattern, error=ValueError, path=folder, cameras=("head_camera",)):
        with pytest.raises(error, match=pattern):
            convert(path, tmp_path / "a.zarr", cameras=cameras, task="t", prompt="p")
        assert not (tmp_path / "a.zarr").exists()

    refused(r"no episode<number>\.hdf5", FileNotFoundError, tmp_path)
    refused(r"no pictures of front_camera; it has head_camera, left_camera", cameras=("front_camera",))
    record(folder / "data", 3, 5, dims=16)
    refused(r"episode3\.hdf5 has dims 16, episode0\.hdf5 14")
    record(folder / "data", 3, 1)
    refused(r"episode3\.hdf5 has 1 steps; at least two are needed")
    record(folder / "data", 3, 5)
    with h5py.File(folder / "data/episode3.hdf5", "r+") as file:
        del file["joint_action"]
    refused(r"episode3\.hdf5 has no joint_action/vector with one row per step; it has observation")
    (folder / "data/episode3.hdf5").write_bytes(b"torn")
    refused(r"episode3\.hdf5 cannot be read as HDF5", BadRecord)
    record(folder / "data", 3, 5)
    with h5py.File(folder / "data/episode3.hdf5", "r+") as file:
        file["observation/head_camera/rgb"][2] = b"no picture"
    refused(r"episode3\.hdf5: the picture of head_camera at step 2 cannot be decoded", BadRecord)
    (folder / "data/episode3.hdf5").unlink()
    with pytest.raises(ValueError, match="was begun with other arrays, files: give the same again, or remove it"):
        convert(folder, tmp_path / "a.zarr", cameras=("head_camera",), task="t", prompt="p")


def test_a_missing_extra_is_named(recordings, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ValueError, match=r"HDF5 files need h5py: pip install 'openpi_train\[hdf5\]'"):
        convert(recordings[0], tmp_path / "a.zarr", cameras=("head_camera",), task="t", prompt="p")
