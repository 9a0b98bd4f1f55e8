"""Our reader against tensorflow-datasets with TensorFlow, bit for bit (needs the extra `rlds-check`).

TensorFlow decodes JPEG by libjpeg's fast integer DCT unless told otherwise; we by its accurate one, as pillow, OpenCV
and tfds' own numpy path do. So frames are compared with TensorFlow's accurate decode, and tfds' default frames with
our bytes decoded the fast way: both must be equal.
"""

import numpy as np
import pytest
import simplejpeg
from rlds_toy import toy_episodes, toy_source, write_toy

from openpi_train.data.rlds import Rlds

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def assert_same_frame(source, step, camera, decoded):
    import tensorflow as tf

    data = source.encoded(step, camera)
    frame = source.frames(np.array([step]), camera)[0]
    if data[:2] != b"\xff\xd8":
        np.testing.assert_array_equal(frame, decoded, strict=True)
        return
    accurate = tf.io.decode_jpeg(data, channels=3, dct_method="INTEGER_ACCURATE").numpy()
    np.testing.assert_array_equal(frame, accurate, strict=True)
    np.testing.assert_array_equal(simplejpeg.decode_jpeg(data, fastdct=True), decoded, strict=True)


def compare(path, source, split):
    """Every camera (stored and decoded), column and instruction of every step, in tfds' own order."""
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(path)
    # One file after the other: by default tfds interleaves sixteen.
    config = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    raw = {name.removeprefix("observation/"): tfds.decode.SkipDecoding() for name in source.cameras}
    decoded = builder.as_dataset(split=split, read_config=config)
    stored = builder.as_dataset(split=split, read_config=config, decoders={"steps": {"observation": raw}})
    step = 0
    for episode, stored_episode in zip(decoded, stored, strict=True):
        both = zip(tfds.as_numpy(episode["steps"]), tfds.as_numpy(stored_episode["steps"]), strict=True)
        for theirs, undecoded in both:
            flat = {**{f"observation/{name}": value for name, value in theirs["observation"].items()}, **theirs}
            for camera in source.cameras:
                assert source.encoded(step, camera) == undecoded["observation"][camera.removeprefix("observation/")]
                assert_same_frame(source, step, camera, flat[camera])
            for name, column in source.columns.items():
                np.testing.assert_array_equal(column[step], flat[name])
                assert column.dtype == np.asarray(flat[name]).dtype
            assert source.prompts[source.prompt_index[step]] == theirs["language_instruction"].decode()
            step += 1
    assert step == source.num_steps


@pytest.mark.parametrize("split", ["train", "val"])
def test_real_bridge_reads_as_tfds_reads_it(bridge_sample, tmp_path, split):
    pytest.importorskip("tensorflow", reason="install .[rlds-check]")
    source = Rlds(path=str(bridge_sample), split=split, cache_dir=str(tmp_path), wide_columns=("language_embedding",))
    compare(bridge_sample, source.open(), split)


def test_dataset_that_we_wrote_reads_as_tfds_reads_it(tmp_path):
    pytest.importorskip("tensorflow", reason="install .[rlds-check]")
    path = write_toy(tmp_path, val=toy_episodes(range(2)))
    for split in ("train", "val"):
        compare(path, toy_source(path, tmp_path / "cache", split=split).open(), split)
