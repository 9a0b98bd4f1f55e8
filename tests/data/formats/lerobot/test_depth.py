"""Depth never becomes a camera of colours: by flags, channels, pixel formats; a name is a hint that is told."""

import io
import json
import logging
import shutil
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.formats.lerobot.depth import depth_reason, is_deep_video
from openpi_train.data.formats.lerobot.described import described
from openpi_train.data.formats.parquet import Parquet
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.formats.rlds.rlds_writer import write_rlds
from openpi_train.data.formats.rlds.schema import _classify
from openpi_train.data.formats.zarr import Zarr
from openpi_train.types import OPENPI_SLOTS

FIXTURES = Path(__file__).parent / "fixtures"
FRONT, WRIST = "observation/images/front", "observation/images/wrist"


def feature(*, shape=(48, 64, 3), names=("height", "width", "channels"), **fields):
    return {"dtype": "video", "shape": list(shape), "names": list(names), **fields}


@pytest.mark.parametrize(
    "marked",
    [
        feature(info={"is_depth_map": True}),  # LeRobot 0.6
        feature(info={"video.is_depth_map": True}),  # LeRobot to 0.4
        feature(video_info={"video.is_depth_map": True}),  # LeRobot's format 2.0
        feature(info={"video": {"is_depth_map": "true"}}),
        feature(is_depth_map=True),
        feature(info={"video.is_depth_map": False, "is_depth_map": True}),
        feature(info={"video.pix_fmt": "gray12le", "is_depth_map": False}),
        feature(video_info={"pix_fmt": "yuv420p12le"}),
        # One channel, wherever it stands; 0.4 wrote `false` without looking.
        feature(shape=(48, 64, 1)),
        feature(shape=(1, 48, 64), names=("channels", "height", "width"), info=None),
        feature(shape=(48, 64, 1), info={"video.is_depth_map": False}),
    ],
)
def test_depth_is_known_by_each_of_its_marks(marked):
    assert depth_reason(marked)


def test_pictures_of_colours_and_grey_ones_that_say_so_are_cameras():
    assert not depth_reason(feature(info={"video.pix_fmt": "yuv420p", "video.is_depth_map": False}))
    assert not depth_reason(feature(shape=(3, 48, 64), names=("channels", "height", "width")))
    assert not depth_reason(feature(shape=(48, 64, 1), info={"is_depth_map": False}))
    assert not depth_reason(feature(info={"video.pix_fmt": "yuv420p10le"}))  # HDR


@pytest.mark.parametrize(
    "pixels", ["gray12le", "gray16le", "gray10be", "yuv420p12le", "yuv444p16", "yuv420p12", "p016le"]
)
def test_deep_pixel_formats(pixels):
    assert is_deep_video(pixels)


@pytest.mark.parametrize(
    "pixels", ["", "gray", "yuv420p", "yuvj420p", "yuv420p10le", "p010le", "rgb24", "gbrp", "nv12"]
)
def test_pixel_formats_of_pictures(pixels):
    assert not is_deep_video(pixels)


@pytest.fixture
def changed(tmp_path, caplog):
    """A function that copies a fixture, changes the wrist camera's metadata, and opens it; `root` is the copy."""
    caplog.set_level(logging.INFO)

    def change(name, told=None, opening=True, rename=None):
        root = tmp_path / name
        if not root.exists():
            shutil.copytree(FIXTURES / name, root)
        file = root / "meta" / "info.json"
        info = json.loads(file.read_text())
        info["features"]["observation.images.wrist"] |= told or {}
        file.write_text(json.dumps(info))
        return LeRobot(path=str(root), cache_dir=str(tmp_path / "index")).open() if opening else root

    return change


def test_a_depth_video_fills_no_slot_and_is_told(changed, caplog):
    source = changed("v30_video", {"info": {"is_depth_map": True}})
    assert source.cameras == (FRONT,) and source.about().left_out[WRIST] == "a depth map"
    assert "observation.images.wrist is not in the index: a depth map" in caplog.text
    root = changed("v30_video", opening=False)
    assert described(root, OPENPI_SLOTS).cameras == {"base_0_rgb": FRONT}
    assert described(root).cameras == {"front": FRONT}


def test_a_video_whose_file_is_depth_is_left_out_whatever_the_metadata_say(changed, caplog):
    root = changed("v30_video", opening=False)
    for file in (root / "videos" / "observation.images.wrist").rglob("*.mp4"):
        with av.open(str(file)) as container:
            stream = container.streams.video[0]
            frames, size, rate = (
                sum(1 for _ in container.decode(stream)),
                (stream.height, stream.width),
                stream.base_rate,
            )
        with av.open(str(file), "w") as out:
            stream = out.add_stream("libx265", rate=rate, options={"x265-params": "lossless=1:log-level=none"})
            stream.height, stream.width, stream.pix_fmt = *size, "gray12le"
            for number in range(frames):
                deep = np.full(size, (64 + 80 * number) % 4096, np.uint16)
                out.mux(stream.encode(av.VideoFrame.from_ndarray(deep, format="gray12le")))
            out.mux(stream.encode())
    source = changed("v30_video")
    assert source.cameras == (FRONT,)
    assert (
        "observation.images.wrist is not in the index: a depth map by the pixels of its files, gray12le" in caplog.text
    )
    assert source.about().left_out[WRIST].endswith("gray12le")


def pictures_as(root, make):
    """Replace the wrist's pictures of all data files."""
    for file in (root / "data").rglob("*.parquet"):
        table = pq.read_table(file)
        place = table.column_names.index("observation.images.wrist")
        column = table.column(place)
        made = []
        for number, old in enumerate(column.to_pylist()):
            with Image.open(io.BytesIO(old["bytes"])) as picture:
                data = io.BytesIO()
                make(picture, number).save(data, "PNG")
            made.append(old | {"bytes": data.getvalue()})
        pq.write_table(table.set_column(place, table.field(place), pa.array(made, column.type)), file)


def deep_picture(picture, number):
    return Image.fromarray(np.full((picture.height, picture.width), 1000 + number, np.uint16))


@pytest.mark.parametrize("name", ["v30_image", "v21_image"])
def test_pictures_of_16_bits_are_left_out(changed, caplog, name):
    pictures_as(changed(name, opening=False), deep_picture)
    source = changed(name)
    assert source.cameras == (FRONT,) and "a depth map by the pixels of its files, I;16" in caplog.text


def test_grey_pictures_are_told(changed, caplog):
    pictures_as(changed("v30_image", opening=False), lambda picture, _: picture.convert("L"))
    source = changed("v30_image")
    assert source.cameras == (FRONT, WRIST)
    (finding,) = source.findings
    assert (
        finding.kind == "grey camera" and "observation.images.wrist" in finding.what and finding.line() in caplog.text
    )


def test_a_name_is_a_hint_that_is_told_and_fills_no_slot_by_itself(changed, caplog, tmp_path):
    root = changed("v30_image", opening=False)
    for file in (root / "meta" / "info.json", *(root / "data").rglob("*.parquet")):
        if file.suffix == ".json":
            file.write_text(file.read_text().replace("images.wrist", "images.wrist_depth"))
        else:
            table = pq.read_table(file)
            names = [one.replace("images.wrist", "images.wrist_depth") for one in table.column_names]
            pq.write_table(table.rename_columns(names), file)
    source = LeRobot(path=str(root), cache_dir=str(tmp_path / "index")).open()
    assert [(one.kind, one.where) for one in source.findings] == [("named depth", f"{WRIST}_depth")]
    assert described(root, OPENPI_SLOTS).cameras == {"base_0_rgb": FRONT} and described(root).cameras == {
        "front": FRONT
    }
    assert f"{WRIST}_depth of {root}: depth by the name, left out" in caplog.text


def test_16_bits_in_plain_parquet_are_left_out(tmp_path, caplog):
    caplog.set_level(logging.INFO)

    def png(array):
        data = io.BytesIO()
        Image.fromarray(array).save(data, "PNG")
        return data.getvalue()

    colours, deep, grey = np.zeros((8, 8, 3), np.uint8), np.full((8, 8), 900, np.uint16), np.zeros((8, 8), np.uint8)
    table = {
        "image_1": [png(colours)] * 3, "image_2": [png(deep)] * 3, "image_3": [png(grey)] * 3,
        "state": [[1.0, 2.0]] * 3, "action": [[1.0]] * 3, "prompt": ["go"] * 3,
    }  # fmt: skip
    (tmp_path / "episodes").mkdir()
    pq.write_table(pa.table(table), tmp_path / "episodes" / "a.parquet")
    source = Parquet(path=str(tmp_path / "episodes"), cache_dir=str(tmp_path / "index")).open()
    assert source.cameras == ("image_1", "image_3")
    assert [(one.kind, one.what) for one in source.findings] == [("grey camera", "image_3, by its first picture")]
    assert "image_2 is not in the index: a depth map by its pixels, I;16" in caplog.text


def test_depth_in_rlds_is_left_out_in_each_of_its_forms(tmp_path):
    features = tfds.features
    step = {
        "observation": {
            "image": features.Image(shape=(8, 8, 3), encoding_format="png"),
            "depth_png": features.Image(shape=(8, 8, 1), encoding_format="png"),
            "depth_metres": features.Tensor(shape=(20, 20, 1), dtype=np.float32),
            "depth_mm": features.Tensor(shape=(20, 20), dtype=np.uint16),
        },
        "action": features.Tensor(shape=(2,), dtype=np.float32),
        "language_instruction": features.Text(),
    }
    made = {
        "image": np.zeros((3, 8, 8, 3), np.uint8), "depth_png": np.zeros((3, 8, 8, 1), np.uint8),
        "depth_metres": np.zeros((3, 20, 20, 1), np.float32), "depth_mm": np.zeros((3, 20, 20), np.uint16),
    }  # fmt: skip
    steps = {"observation": made, "action": np.ones((3, 2), np.float32), "language_instruction": ["go"] * 3}
    described_as = features.FeaturesDict({"steps": features.Dataset(step)})
    out = write_rlds(tmp_path, name="toy", version="1.0.0", features=described_as, splits={"train": [{"steps": steps}]})
    source = Rlds(path=str(out), cache_dir=str(tmp_path / "index")).open()
    assert source.cameras == ("observation/image",) and set(source.columns) == {"action"}
    assert {name.rpartition("/")[2] for name in source.about().left_out} == {"depth_png", "depth_metres", "depth_mm"}
    deep = features.Image(shape=(8, 8, 1), dtype=np.uint16, encoding_format="png")
    assert _classify(deep, features) == ("skipped", "an image of 1 channels, uint16; cameras are RGB uint8")


def test_depth_in_zarr_is_no_camera(tmp_path):
    import zarr

    root = zarr.open_group(str(tmp_path / "store"), mode="w")
    for name, array in {
        "data/img": np.ones((6, 24, 24, 3), np.uint8), "data/depth": np.ones((6, 24, 24), np.float32),
        "data/depth_mm": np.ones((6, 24, 24, 1), np.uint16), "data/action": np.ones((6, 2), np.float32),
        "meta/episode_ends": np.array([6]),
    }.items():  # fmt: skip
        root[name] = array
    source = Zarr(path=str(tmp_path / "store"), cache_dir=str(tmp_path / "index")).open()
    assert source.cameras == ("img",) and set(source.columns) == {"action"}
    assert set(source.about().left_out) == {"depth", "depth_mm"}
