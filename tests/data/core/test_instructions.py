"""Episodes without an instruction: told, left out, or given the text that is there."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds

from openpi_train.data.core.instructions import filled, is_blank, unlabeled, unlabeled_episodes
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.formats.rlds.rlds_writer import write_rlds
from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.opened import _report_blank, open_windows
from openpi_train.data.robot.windows import Windows, WindowShape
from openpi_train.robots.bridge import Bridge
from openpi_train.robots.droid import Droid
from openpi_train.robots.openx import OpenX
from openpi_train.robots.tabletop import Tabletop
from openpi_train.tools.inspect_data import inspect

SHAPE = WindowShape(horizon=2)
# Keeps episodes without an instruction.
ONE_CAMERA = Tabletop(cameras={})
FIXTURE = Path(__file__).parents[1] / "formats" / "lerobot" / "fixtures" / "v30_image"


@pytest.mark.parametrize("text", ["", "  ", "\n", "nan", "None", "NULL", None])
def test_texts_that_say_nothing(text):
    assert is_blank(text) and not is_blank("none of the cups")


def test_blank_steps_take_the_nearest_instruction_of_their_episode():
    prompts, ends = ["", "a", "b", " "], np.array([4, 7, 9])
    index = np.array([1, 0, 2, 3, 0, 3, 1, 0, 0])
    assert filled(prompts, index, ends).tolist() == [1, 1, 2, 2, 1, 1, 1, 0, 0]
    assert unlabeled_episodes(prompts, index, ends).tolist() == [False, False, True]
    finding = unlabeled(prompts, index, ends)
    assert finding is not None and (finding.count, finding.total, finding.where) == (1, 3, "episode 2")
    # Of a dataset without any instruction nothing is said here: formats without texts are used without.
    assert unlabeled([""], np.zeros(9, int), ends) is None and unlabeled(["a"], np.zeros(9, int), ends) is None


def fake(*texts, **fields):
    """Three episodes, whose instructions are these in turn."""
    source = FakeData(num_episodes=3, episode_length=9, prompts=texts).open()
    lengths = np.diff(source.episode_ends, prepend=0)
    source.prompt_index = np.repeat(np.arange(3) % len(texts), lengths).astype(np.int32)
    return Windows(source=source, robot=fields.pop("robot", Bridge()), shape=SHAPE, **fields)


def test_episodes_without_an_instruction_are_left_out_for_some_robots_and_by_a_flag():
    windows = fake("push", " ", "lift")
    second = windows.source.steps_of(1)
    kept = set(windows.starts.tolist())
    assert not kept & set(second) and windows.num_blank == 0 and windows.unlabeled.tolist() == [False, True, False]
    for other in (fake("push", " ", "lift", skip_unlabeled=False), fake("push", " ", "lift", robot=ONE_CAMERA)):
        assert (
            kept < set(other.starts.tolist()) and other.num_blank == len(set(other.starts.tolist()) & set(second)) > 0
        )
    assert fake("push", "nan", "lift", robot=ONE_CAMERA, skip_unlabeled=True).starts.tolist() == windows.starts.tolist()
    assert Droid.skip_unlabeled and OpenX.skip_unlabeled and not Tabletop.skip_unlabeled


def test_an_instruction_of_the_first_step_is_that_of_its_episode():
    windows = fake("push", "")
    index = windows.source.prompt_index
    index[:] = 1
    index[[0, windows.source.steps_of(1).start, windows.source.steps_of(2).start]] = 0
    again = dataclasses.replace(windows)  # reads the index again
    assert set(again.prompt_numbers(np.arange(len(again))).tolist()) == {0}
    assert {again.prompt_at(int(step)) for step in again.starts} == {"push"} and not again.unlabeled.any()
    recorded = dataclasses.replace(again, skip_unlabeled=False)
    assert recorded.prompt_at(int(recorded.starts[-1])) == ""


def test_a_dataset_without_any_instruction_is_an_error_that_says_what_to_do():
    with pytest.raises(
        ValueError, match=r"no episode of the dataset has an instruction .*robot is a Bridge: .*prompt,"
    ):
        fake("", "  ", "None")
    with pytest.raises(ValueError, match=r"skip_unlabeled is on: .* --data\.datasets\.N\.skip-unlabeled False"):
        fake("", robot=ONE_CAMERA, skip_unlabeled=True)
    assert fake("", skip_unlabeled=False).num_blank > 0


def test_with_one_instruction_for_all_no_episode_is_without():
    whole = fake("push", " ", prompt="lift", skip_unlabeled=True)
    assert not whole.unlabeled.any() and whole.num_blank == 0
    assert fake("", prompt="lift").prompt_at(3) == "lift"
    assert len(whole) == len(fake("push", " ", skip_unlabeled=False))


@pytest.fixture
def written(tmp_path):
    """An RLDS dataset in DROID's texts, one episode for each triple; the config that reads it."""

    def write(*texts):
        features, names = tfds.features, [f"language_instruction{end}" for end in ("", "_2", "_3")]
        step = {
            "observation": {
                "image_0": features.Image(shape=(8, 8, 3), encoding_format="png"),
                "state": features.Tensor(shape=(7,), dtype=np.float32),
            },
            "action": features.Tensor(shape=(7,), dtype=np.float32),
            **{name: features.Text() for name in (*names, "language_instruction_note")},
        }
        episodes = []
        for number, triple in enumerate(texts):
            state = np.arange(28, dtype=np.float32).reshape(4, 7) + number
            parts = {
                name: [part] * 4 if isinstance(part, str) else part for name, part in zip(names, triple, strict=True)
            }
            observation = {"image_0": np.zeros((4, 8, 8, 3), np.uint8), "state": state}
            steps = {"observation": observation, "action": state, **parts, "language_instruction_note": ["note"] * 4}
            episodes.append({"steps": steps})
        out = write_rlds(
            tmp_path, name="toy", version="1.0.0", features=features.FeaturesDict({"steps": features.Dataset(step)}),
            splits={"train": episodes},
        )  # fmt: skip
        return Rlds(path=str(out), cache_dir=str(tmp_path / "index"))

    return write


def test_droids_second_and_third_instruction_stand_in_for_a_blank_one(written, caplog):
    caplog.set_level(logging.WARNING)
    config = written(
        ("one", "two", "three"),
        ("", "two", "three"),
        (" ", "nan", "three"),
        ("", "", ""),
        (["a", "", "b", ""], "c", ""),
    )
    source = config.open()
    found = [source.prompts[number] for number in source.prompt_index]
    assert found[::4] == ["one", "two", "three", "", "a"] and found[16:] == ["a", "c", "b", "c"]
    assert "no instruction: 1 of 5 episodes; the first: episode 3" in caplog.text
    left = source.about().left_out
    assert left["language_instruction_2"] == left["language_instruction_3"] == "used where the instruction is blank"
    assert left["language_instruction_note"] == "a text that is not the instruction"
    assert "no instruction 1 of 5 episodes" in " ".join(inspect("toy", source).split())
    # The second opening, without a build, says it too.
    caplog.clear()
    assert [finding.kind for finding in config.open().findings] == ["no instruction"] and "1 of 5" in caplog.text


def test_a_run_says_what_is_left_out_and_what_is_blank(caplog):
    caplog.set_level(logging.INFO)
    source = FakeData(num_episodes=9, episode_length=9, seed=3, prompts=("push", ""))
    for robot, reads, level, said in (
        (Bridge(), True, "INFO", " of 9 episodes have no instruction and are left out"),
        (ONE_CAMERA, True, "WARNING", "training samples have no instruction; the model learns them"),
        (ONE_CAMERA, False, "INFO", "training samples have no instruction"),
    ):
        caplog.clear()
        config = DataConfig(datasets=(Dataset(source=source, robot=robot, asset_id="arm"),))
        _report_blank(config, open_windows(config, SHAPE), reads_text=reads)
        (record,) = caplog.records
        assert record.levelname == level and said in record.message and record.message.startswith("data: arm: ")


def test_a_run_says_that_its_model_does_not_read_several_instructions(caplog):
    caplog.set_level(logging.INFO)
    for texts, reads, lines in ((("push", "lift", ""), False, 1), (("push", "lift"), True, 0), (("push",), False, 0)):
        caplog.clear()
        source = FakeData(num_episodes=9, episode_length=9, seed=3, prompts=texts)
        config = DataConfig(datasets=(Dataset(source=source, robot=Bridge(), asset_id="arm"),))
        _report_blank(config, open_windows(config, SHAPE), reads_text=reads)
        told = [record.message for record in caplog.records if "reads no text" in record.message]
        assert {record.levelname for record in caplog.records if record.message in told} <= {"WARNING"}
        assert len(told) == lines and all("the 2 different instructions as one task" in line for line in told)


def test_skipping_changes_the_rows_identity_only_where_it_changes_rows(open_small):
    def identity(**fields):
        dataset = Dataset(
            source=FakeData(num_episodes=9, seed=3, prompts=fields.pop("prompts")), robot=Bridge(), **fields
        )
        return open_small(DataConfig(datasets=(dataset,))).train.identity["datasets"][0]

    assert "skip_unlabeled" not in identity(prompts=("push", "lift"))
    assert identity(prompts=("push", ""))["skip_unlabeled"] is True
    assert "skip_unlabeled" not in identity(prompts=("push", ""), skip_unlabeled=False)


def test_lerobots_empty_task_is_none(tmp_path):
    shutil.copytree(FIXTURE, tmp_path / "arm")
    file = tmp_path / "arm" / "meta" / "tasks.parquet"
    table = pq.read_table(file)
    names = table.column_names
    text = next(name for name in names if name != "task_index")
    column = table.column(text)
    values = pa.array(["", *column.to_pylist()[1:]], column.type)
    pq.write_table(table.set_column(names.index(text), table.field(text), values), file)
    source = LeRobot(path=str(tmp_path / "arm"), cache_dir=str(tmp_path / "index")).open()
    expected = unlabeled_episodes(source.prompts, source.prompt_index, source.episode_ends)
    assert "" in source.prompts and len(source.findings) == (0 < expected.sum() < len(expected))
    assert json.dumps([finding.as_json() for finding in source.findings])
