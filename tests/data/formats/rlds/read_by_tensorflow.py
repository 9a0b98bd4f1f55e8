"""A dataset as our reader reads it and as tensorflow-datasets does, every step of both: a program of its own.

TensorFlow brings libraries that end a process with a segmentation fault where it is imported behind MuJoCo, PyAV and
PyArrow, as in a worker of the suite. Reads a pickle (path, our source, split) and prints the number of equal steps.
"""

import pickle
import sys

import numpy as np
import simplejpeg
import tensorflow as tf
import tensorflow_datasets as tfds


def assert_same_frame(source, step, camera, decoded):
    data = source.encoded(step, camera)
    frame = source.frames(np.array([step]), camera)[0]
    if data[:2] != b"\xff\xd8":
        np.testing.assert_array_equal(frame, decoded, strict=True)
        return
    accurate = tf.io.decode_jpeg(data, channels=3, dct_method="INTEGER_ACCURATE").numpy()
    np.testing.assert_array_equal(frame, accurate, strict=True)
    np.testing.assert_array_equal(simplejpeg.decode_jpeg(data, fastdct=True), decoded, strict=True)


def compare(path, source, split):
    """Compare every camera (stored and decoded), column and instruction in tfds' own order; the number of steps."""
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
    return step


if __name__ == "__main__":
    path, source, split = pickle.load(sys.stdin.buffer)
    print(compare(path, source.open(), split))
