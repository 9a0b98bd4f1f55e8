"""The RLDS source against the records themselves, on the real Bridge sample and on written datasets."""

import concurrent.futures
import io
import logging
import os
import pickle
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image
from rlds_toy import SIZE, toy_episode, toy_features, toy_source, write_toy
from tensorflow_datasets.proto import tf_example_pb2

from openpi_train.data.core.image import blank_cameras
from openpi_train.data.core.source import BadRecord
from openpi_train.data.formats import spans
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.formats.rlds.rlds_writer import write_rlds
from openpi_train.data.formats.rlds.tfrecord import read_records

TRAIN = "bridge_dataset-train.tfrecord-00000-of-00001"


@pytest.fixture(scope="module")
def bridge(bridge_sample, tmp_path_factory):
    return Rlds(path=str(bridge_sample), cache_dir=str(tmp_path_factory.mktemp("cache"))).open()


@pytest.fixture(scope="module")
def protos(bridge_sample):
    """The records as the proto classes parse them: an oracle that shares no code with the index."""
    return [
        tf_example_pb2.Example.FromString(record.payload).features.feature
        for record in read_records(bridge_sample / TRAIN)
    ]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("data"))


def test_bridge_columns_and_prompts_equal_the_records(bridge, protos):
    assert (bridge.num_episodes, bridge.num_steps) == (25, 250)
    assert bridge.episode_ends.tolist() == list(range(10, 251, 10))
    for name, width in {"action": 7, "observation/state": 7, "reward": 1, "discount": 1}.items():
        expected = np.concatenate([np.array(proto[f"steps/{name}"].float_list.value, np.float32) for proto in protos])
        np.testing.assert_array_equal(bridge.columns[name].reshape(-1), expected, strict=True)
        assert bridge.columns[name].shape == ((250, width) if width > 1 else (250,))
    first = np.concatenate([np.array(proto["steps/is_first"].int64_list.value, bool) for proto in protos])
    np.testing.assert_array_equal(bridge.columns["is_first"], first, strict=True)
    texts = [text.decode() for proto in protos for text in proto["steps/language_instruction"].bytes_list.value]
    assert [bridge.prompts[index] for index in bridge.prompt_index] == texts
    assert len(bridge.prompts) == 4
    assert all(isinstance(column, np.memmap) for column in bridge.columns.values())


def test_bridge_frames_equal_the_records_images_as_pillow_decodes_them(bridge, protos):
    steps = np.random.default_rng(0).permutation(250)[:60]
    for camera in bridge.cameras:
        frames = bridge.frames(steps, camera)
        assert frames.dtype == np.uint8 and frames.shape == (60, 64, 64, 3)
        for step, frame in zip(steps.tolist(), frames, strict=True):
            stored = protos[step // 10][f"steps/{camera}"].bytes_list.value[step % 10]
            assert bridge.encoded(step, camera) == stored
            np.testing.assert_array_equal(frame, np.asarray(Image.open(io.BytesIO(stored)).convert("RGB")))


def test_every_image_of_the_real_sample_is_found_although_its_flags_say_there_is_none(bridge, protos):
    assert not any(proto[f"episode_metadata/has_image_{k}"].int64_list.value[0] for proto in protos for k in range(4))
    assert bridge.cameras == tuple(f"observation/image_{k}" for k in range(4))
    assert blank_cameras(bridge) == ("observation/image_3",)


def test_train_and_val_of_bridge_have_the_same_episode_ids_in_another_order(bridge, bridge_sample, tmp_path):
    val = Rlds(path=str(bridge_sample), split="val", cache_dir=str(tmp_path)).open()
    assert sorted(val.episode_ids) == sorted(bridge.episode_ids)
    assert list(val.episode_ids) != list(bridge.episode_ids)
    assert len(set(bridge.episode_ids)) == 25
    assert val.fingerprint != bridge.fingerprint
    both = Rlds(path=str(bridge_sample), split="train+val", cache_dir=str(tmp_path)).open()
    assert list(both.episode_ids) == [*bridge.episode_ids, *val.episode_ids]
    np.testing.assert_array_equal(both.columns["action"][250:], val.columns["action"])
    last_and_first = [bridge.encoded(249, "observation/image_1"), val.encoded(0, "observation/image_1")]
    assert [both.encoded(step, "observation/image_1") for step in (249, 250)] == last_and_first


def test_describe_names_file_record_episode_and_step(bridge, bridge_sample):
    assert bridge.describe(37) == f"{bridge_sample / TRAIN}, record 3, episode 3, step 7 of 10"


def test_unknown_camera_and_step_are_named(bridge):
    with pytest.raises(KeyError, match=r"no camera 'image_0' in .*; it has \['observation/image_0'"):
        bridge.frames(np.array([0]), "image_0")
    for step in (-1, 250):
        with pytest.raises(IndexError, match=r"is not in 0\.\.249"):
            bridge.frames(np.array([step]), "observation/image_0")


def test_no_steps_give_no_frames_of_the_right_size(bridge):
    assert bridge.frames(np.array([], np.int64), "observation/image_0").shape == (0, 64, 64, 3)


def test_pickled_source_is_small_and_reads_the_same(bridge):
    data = pickle.dumps(bridge)
    assert len(data) < 1000
    copy = pickle.loads(data)
    np.testing.assert_array_equal(copy.columns["action"], bridge.columns["action"])
    steps, camera = np.array([3, 77]), "observation/image_2"
    np.testing.assert_array_equal(copy.frames(steps, camera), bridge.frames(steps, camera))


def test_existing_index_opens_without_tensorflow_datasets_or_jax(bridge, bridge_sample):
    cache = bridge.stored.root.parent
    code = f"""
import sys
import time
import numpy as np
from openpi_train.data.formats.rlds import Rlds
source = Rlds(path={str(bridge_sample)!r}, cache_dir={str(cache)!r}).open()
source.frames(np.array([5]), "observation/image_0")
print(sorted({{"tensorflow", "tensorflow_datasets", "jax"}} & set(sys.modules)), source.fingerprint)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"[] {bridge.fingerprint}"


def test_written_dataset_reads_back_with_all_shards_in_order(toy, tmp_path):
    assert len(list(toy.glob("*.tfrecord-*"))) > 3
    source = toy_source(toy, tmp_path).open()
    episodes = [toy_episode(seed, 3 + seed % 5) for seed in range(12)]
    assert source.episode_ends.tolist() == np.cumsum([3 + seed % 5 for seed in range(12)]).tolist()
    assert source.cameras == ("observation/image_0", "observation/wrist")
    for name in ("action", "counter", "is_first", "reward"):
        expected = np.concatenate([episode["steps"][name] for episode in episodes])
        np.testing.assert_array_equal(source.columns[name], expected, strict=True)
    assert "embedding" not in source.columns
    steps = np.arange(source.num_steps)[::-1]
    wrist = np.concatenate([episode["steps"]["observation"]["wrist"] for episode in episodes])
    np.testing.assert_array_equal(source.frames(steps, "observation/wrist"), wrist[::-1])
    texts = [text for episode in episodes for text in episode["steps"]["language_instruction"]]
    assert [source.prompts[index] for index in source.prompt_index] == texts


def test_fingerprint_and_ids_depend_on_content_and_not_on_place_or_shards(toy, tmp_path):
    source = toy_source(toy, tmp_path / "a").open()
    moved = write_toy(tmp_path / "elsewhere", shard_size_mb=100)
    same = toy_source(moved, tmp_path / "b").open()
    assert len(list(moved.glob("*.tfrecord-*"))) == 1
    assert same.fingerprint == source.fingerprint
    other = toy_source(write_toy(tmp_path / "other", seeds=[*range(11), 99]), tmp_path / "c").open()
    assert other.fingerprint != source.fingerprint
    assert list(other.episode_ids[:11]) == list(source.episode_ids[:11])
    assert other.episode_ids[11] != source.episode_ids[11]


def test_an_episode_is_what_was_seen_and_done_and_not_how_it_was_labelled(tmp_path):
    def ids(name, change=lambda steps: None):
        episodes = [toy_episode(seed, 4) for seed in range(2)]
        episodes[1]["steps"]["observation"]["wrist"][:] = 7  # pictures of one colour: as many bytes for any
        change(episodes[1]["steps"])
        features = toy_features()
        folder = write_rlds(tmp_path / name, name="toy", version="1.0.0", features=features, splits={"train": episodes})
        source = toy_source(folder, tmp_path / "cache").open()
        assert len(source.encoded(7, "observation/wrist")) == len(source.encoded(6, "observation/wrist"))
        return list(source.episode_ids)

    def other(name, value):
        return lambda steps: steps.__setitem__(name, value)

    plain = ids("plain")
    assert ids("rewarded", other("reward", np.arange(4, dtype=np.float32))) == plain
    assert ids("told", other("language_instruction", ["pull"] * 4)) == plain
    for number, change in enumerate(
        (
            other("action", np.zeros((4, 2), np.float32)),
            other("counter", np.arange(4)),
            lambda steps: steps["observation"]["wrist"].__setitem__(3, 8),
        )
    ):
        changed = ids(str(number), change)
        assert changed[0] == plain[0] and changed[1] != plain[1]


def test_wide_column_is_kept_when_named_and_leaves_the_ids_alone(toy, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        plain = toy_source(toy, tmp_path).open()
    assert "embedding is not in the index: 300 numbers wide" in caplog.text
    wide = toy_source(toy, tmp_path, wide_columns=("embedding",)).open()
    expected = np.concatenate([toy_episode(seed, 3 + seed % 5)["steps"]["embedding"] for seed in range(12)])
    np.testing.assert_array_equal(wide.columns["embedding"], expected, strict=True)
    assert list(wide.episode_ids) == list(plain.episode_ids)
    with pytest.raises(ValueError, match=r"wide_columns \['embeding'\] are not numeric features"):
        toy_source(toy, tmp_path, wide_columns=("embeding",)).open()


def test_prompt_may_come_from_the_episode_or_be_none(toy, tmp_path):
    source = toy_source(toy, tmp_path, prompt_feature="episode_metadata/task").open()
    assert list(source.prompts) == ["task 0", "task 1"]
    assert source.prompt_index[: source.episode_ends[1]].tolist() == [0] * 3 + [1] * 4
    empty = toy_source(toy, tmp_path, prompt_feature="none").open()
    assert list(empty.prompts) == [""] and not empty.prompt_index.any()
    with pytest.raises(ValueError, match=r"prompt_feature 'lang' is not in .*\['language_instruction', 'episode"):
        toy_source(toy, tmp_path, prompt_feature="lang").open()


def test_newest_of_several_versions_is_read_and_said(tmp_path, caplog):
    write_toy(tmp_path, seeds=range(2), version="1.9.0")
    write_toy(tmp_path, seeds=range(3), version="1.10.0")
    with caplog.at_level(logging.INFO):
        source = toy_source(tmp_path / "toy", tmp_path / "cache").open()
    assert source.num_episodes == 3
    assert "reading 1.10.0 (also there: 1.9.0)" in caplog.text


def test_missing_dataset_split_shard_and_metadata_are_named_with_what_to_do(toy, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no RLDS dataset.*<data_dir>/<name>/<version>"):
        toy_source(tmp_path / "nowhere", tmp_path).open()
    with pytest.raises(ValueError, match=r"split 'test' is not in .*; it has train \(12 episodes\)"):
        toy_source(toy, tmp_path, split="test").open()
    copy = tmp_path / "toy" / "1.0.0"
    shutil.copytree(toy, copy)
    shards = sorted(copy.glob("*.tfrecord-*"))
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=rf"1 of the {len(shards)} shards .* are missing in .*{shards[1].name}"):
        toy_source(copy, tmp_path).open()
    whole = toy_source(toy, tmp_path).open()
    source = toy_source(copy, tmp_path, on_bad_record="skip").open()
    assert 0 < source.num_dropped < whole.num_episodes == source.num_dropped + source.num_episodes
    assert set(source.episode_ids) < set(whole.episode_ids)
    shutil.copy(toy / shards[1].name, shards[1])
    assert toy_source(copy, tmp_path, on_bad_record="skip").open().fingerprint == whole.fingerprint
    (copy / "features.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no features\.json"):
        toy_source(copy, tmp_path).open()
    (copy / "features.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read the metadata of .*Compare dataset_info\.json and feat"):
        toy_source(copy, tmp_path).open()


def test_dataset_without_steps_or_instruction_is_refused_with_its_features(tmp_path):
    import tensorflow_datasets as tfds

    flat = tfds.features.FeaturesDict({"action": tfds.features.Scalar(dtype=np.float32)})
    step = tfds.features.FeaturesDict({"a": tfds.features.Scalar(dtype=np.float32), "note": tfds.features.Text()})
    with_steps = tfds.features.FeaturesDict({"steps": tfds.features.Dataset(step)})
    path = write_rlds(
        tmp_path,
        name="bare",
        version="1.0.0",
        features=with_steps,
        splits={"train": [{"steps": [{"a": 1.0, "note": "hello"}]}]},
    )
    with pytest.raises(ValueError, match=r"no `\*instruction\*` text feature; set prompt_feature .*\['note'\]"):
        toy_source(path, tmp_path).open()
    assert list(toy_source(path, tmp_path, prompt_feature="note").open().prompts) == ["hello"]
    flat.save_config(str(path))
    with pytest.raises(ValueError, match="has no `steps` dataset feature"):
        toy_source(path, tmp_path, prompt_feature="none").open()


def test_record_that_lacks_a_promised_feature_is_a_bad_record(toy, tmp_path):
    copy = tmp_path / "toy" / "1.0.0"
    shutil.copytree(toy, copy)
    import tensorflow_datasets as tfds

    steps = {**toy_features()["steps"].feature, "torque": tfds.features.Scalar(dtype=np.float32)}
    tfds.features.FeaturesDict({"steps": tfds.features.Dataset(steps)}).save_config(str(copy))
    with pytest.raises(BadRecord, match=r"record 0 .*: it lacks steps/torque, which features\.json lists"):
        toy_source(copy, tmp_path).open()


@pytest.mark.parametrize("picture", [b"no picture", b"\xff\xd8\xff\xe0 broken", b"\x89PNG\r\n\x1a\n broken", "cut"])
def test_image_that_does_not_decode_is_a_bad_record_only_when_touched(tmp_path, picture):
    episodes = [toy_episode(seed, 4) for seed in range(2)]
    good = write_rlds(tmp_path, name="good", version="1.0.0", features=toy_features(), splits={"train": episodes})
    if picture == "cut":
        picture = toy_source(good, tmp_path).open().encoded(6, "observation/image_0")[:-40]
    images = list(episodes[1]["steps"]["observation"]["image_0"])
    episodes[1]["steps"]["observation"]["image_0"] = [*images[:2], picture, images[3]]
    path = write_rlds(tmp_path, name="bad", version="1.0.0", features=toy_features(), splits={"train": episodes})
    source = toy_source(path, tmp_path).open()
    source.frames(np.array([0, 5, 7]), "observation/image_0")
    where = r"bad-train\.tfrecord-00000-of-00001, record 1, episode 1, step 2 of 4, observation/image_0: cannot decode"
    with pytest.raises(BadRecord, match=where):
        source.frames(np.array([0, 6]), "observation/image_0")


def test_picture_of_another_size_is_a_bad_record(tmp_path):
    import tensorflow_datasets as tfds

    image = tfds.features.Image(shape=(None, None, 3), encoding_format="png")
    step = {"image": image, "language_instruction": tfds.features.Text()}
    features = tfds.features.FeaturesDict({"steps": tfds.features.Dataset(step)})
    steps = [
        {"image": np.zeros((*SIZE, 3), np.uint8), "language_instruction": ""},
        {"image": np.zeros((8, 8, 3), np.uint8), "language_instruction": ""},
    ]
    path = write_rlds(tmp_path, name="sizes", version="1.0.0", features=features, splits={"train": [{"steps": steps}]})
    source = toy_source(path, tmp_path).open()
    assert source.frames(np.array([1]), "image").shape == (1, 8, 8, 3)
    with pytest.raises(BadRecord, match=r"step 1 of 2, image: cannot decode .* the picture is 8x8, expected 12x16"):
        source.frames(np.array([0, 1]), "image")


def test_threads_that_open_a_shard_at_the_same_time_all_read_it(bridge_sample, tmp_path, monkeypatch):
    """Each of them opens the file; all but one handle are dropped, and none may close under its reader."""
    source = Rlds(path=str(bridge_sample), cache_dir=str(tmp_path)).open()
    camera = source.cameras[0]
    expected = [source.encoded(step, camera) for step in range(8)]
    slow_open = os.open

    def opened_slowly(*arguments, **options):
        time.sleep(0.05)
        return slow_open(*arguments, **options)

    spans.open_file.cache_clear()
    monkeypatch.setattr(spans.os, "open", opened_slowly)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda step: source.encoded(step, camera), range(8))) == expected
