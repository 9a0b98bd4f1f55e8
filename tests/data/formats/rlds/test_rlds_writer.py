"""Writing RLDS: what tensorflow-datasets says of it, streaming, bad episodes and torn writes."""

import errno
import os

import numpy as np
import pytest
import tensorflow_datasets as tfds
from rlds_toy import SIZE, toy_episode, toy_episodes, toy_features, toy_source, write_toy
from tensorflow_datasets.proto import tf_example_pb2

from openpi_train.data.core import image
from openpi_train.data.formats.rlds import rlds_writer
from openpi_train.data.formats.rlds.rlds_writer import write_rlds
from openpi_train.data.formats.rlds.tfrecord import read_records


def write(directory, episodes, features=None):
    features = features or toy_features()
    return write_rlds(directory, name="toy", version="1.0.0", features=features, splits={"train": episodes})


def test_tensorflow_datasets_reads_the_metadata_it_would_have_written(tmp_path):
    path = write_toy(tmp_path, seeds=range(12), val=toy_episodes(range(3)))
    builder = tfds.builder_from_directory(path)
    assert (builder.info.name, str(builder.info.version)) == ("toy", "1.0.0")
    assert repr(builder.info.features) == repr(toy_features())
    assert {name: split.num_examples for name, split in builder.info.splits.items()} == {"train": 12, "val": 3}
    for name, split in builder.info.splits.items():
        assert [os.path.basename(file) for file in split.filenames] == sorted(p.name for p in path.glob(f"toy-{name}*"))
        counts = [len(list(read_records(path / os.path.basename(file)))) for file in split.filenames]
        assert split.shard_lengths == counts
        sizes = sum(len(record.payload) for file in split.filenames for record in read_records(path / file))
        assert int(split.num_bytes) == sizes


def test_step_mappings_and_one_mapping_of_arrays_write_the_same_bytes(tmp_path):
    episode = toy_episode(3, 5)
    steps = [rlds_writer._pick(episode["steps"], index) for index in range(5)]
    a = write(tmp_path / "a", [episode])
    b = write(tmp_path / "b", [{**episode, "steps": iter(steps)}])
    name = "toy-train.tfrecord-00000-of-00001"
    assert (a / name).read_bytes() == (b / name).read_bytes()
    proto = tf_example_pb2.Example.FromString(next(read_records(a / name)).payload).features.feature
    np.testing.assert_array_equal(proto["steps/counter"].int64_list.value, episode["steps"]["counter"])
    assert proto["episode_metadata/task"].bytes_list.value[0] == b"task 1"


def test_encoded_images_are_stored_as_they_are_and_png_is_exact(tmp_path):
    episode = toy_episode(0, 4)
    jpegs = [image.encode(picture, "jpeg", quality=30) for picture in episode["steps"]["observation"]["image_0"]]
    wrist = episode["steps"]["observation"]["wrist"]
    episode["steps"]["observation"] = {**episode["steps"]["observation"], "image_0": jpegs}
    source = toy_source(write(tmp_path, [episode]), tmp_path / "cache").open()
    assert [source.encoded(step, "observation/image_0") for step in range(4)] == jpegs
    np.testing.assert_array_equal(source.frames(np.arange(4), "observation/wrist"), wrist)


def test_jpeg_of_a_smooth_picture_is_close(tmp_path):
    y, x = np.mgrid[0 : SIZE[0], 0 : SIZE[1]]
    picture = np.stack([10 * y, 10 * x, 5 * (x + y)], -1).astype(np.uint8)
    decoded = image.decode(image.encode(picture, "jpeg", quality=95))
    # Quality 95 quantises the finest coefficients by about 10, of which a pixel sees a few.
    assert np.abs(decoded.astype(int) - picture).max() <= 6


def test_gray_palette_and_alpha_pictures_decode_to_rgb():
    import io

    from PIL import Image

    rgb = np.random.default_rng(0).integers(0, 256, (5, 6, 3), np.uint8)
    for mode in ("L", "P", "RGBA"):
        picture = Image.fromarray(rgb).convert(mode)
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG")
        np.testing.assert_array_equal(image.decode(buffer.getvalue()), np.asarray(picture.convert("RGB")))
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(buffer, format="PNG")
    with pytest.raises(ValueError, match="pixel mode 'I;16', not 8 bits"):
        image.decode(buffer.getvalue())


def test_episodes_are_streamed(tmp_path, monkeypatch):
    written, ahead = [0], []
    write_record = rlds_writer.write_record

    def counting(file, payload):
        written[0] += 1
        return write_record(file, payload)

    def episodes():
        for seed in range(6):
            ahead.append(seed - written[0])
            yield toy_episode(seed, 3)

    monkeypatch.setattr(rlds_writer, "write_record", counting)
    write(tmp_path, episodes())
    assert ahead == [0] * 6


def test_existing_version_is_never_overwritten(tmp_path):
    path = write_toy(tmp_path, seeds=range(1))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(FileExistsError, match=r"toy/1\.0\.0 exists already; choose another version"):
        write_toy(tmp_path, seeds=range(2))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_torn_write_leaves_no_dataset(tmp_path):
    def episodes():
        yield toy_episode(0, 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, episodes())
    assert list((tmp_path / "toy").iterdir()) == []


def test_full_disk_says_so_and_leaves_no_dataset(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rlds_writer, "write_record", refuse)
    with pytest.raises(OSError, match=r"cannot write .*toy: the disk is full\. Make room there"):
        write_toy(tmp_path)
    assert list((tmp_path / "toy").iterdir()) == []


def changed(**steps):
    episode = toy_episode(1, 3)
    observation = {**episode["steps"]["observation"], **steps.pop("observation", {})}
    return {**episode, "steps": {**episode["steps"], **steps, "observation": observation}}


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (lambda: changed(action=np.zeros((3, 5), np.float32)), r"does not fit features\.json.*\(5,\)"),
        (lambda: changed(extra=np.zeros(3)), r"steps\[0\]/: missing features \[\], unknown features \['extra'\]"),
        (lambda: {**toy_episode(1, 3), "episode_metadata": {"task": "x"}}, r"missing features \['seed'\]"),
        (lambda: changed(reward=np.zeros(2, np.float32)), "columns of `steps` differ in length"),
        (lambda: changed(observation={"wrist": np.zeros((3, 8, 8, 3), np.uint8)}), r"wrist has shape \(8, 8, 3\)"),
        (lambda: changed(observation={"wrist": np.zeros((3, *SIZE, 3), np.float32)}), "convert it to uint8"),
        (lambda: {"steps": [], "episode_metadata": {}}, "has no steps"),
    ],
)
def test_bad_episode_is_named_with_its_split_and_number(tmp_path, episode, message):
    with pytest.raises(ValueError, match=rf"(?s)split 'train', episode 1.*{message}"):
        write(tmp_path, [toy_episode(0, 3), episode()])
    assert not (tmp_path / "toy" / "1.0.0").exists()


def test_empty_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"toy-val\.tfrecord has no episodes; leave an empty split out"):
        write_toy(tmp_path, val=[])
