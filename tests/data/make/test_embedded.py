"""`data prepare`: a genuine dataset, equal for equal arguments, reused when complete, repaired when not."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.proto import tf_example_pb2

from openpi_train.data.check.examined import ExaminedData
from openpi_train.data.check.fault_kinds import examine
from openpi_train.data.core import image
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.formats.rlds.tfrecord import read_records
from openpi_train.data.make import embedded as tool
from openpi_train.data.make.embedded import prepare
from openpi_train.data.make.written_folder import MANIFEST
from openpi_train.data.tokenizers.tokenizer import load_tokenizer
from openpi_train.envs import tabletop_scene as world
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.robots.tabletop import Tabletop
from openpi_train.runtime.exits import UsageError

ROOT = Path(__file__).resolve().parents[3]
ENV = TabletopEnv(image_size=32)
ARGUMENTS = {"episodes_per_task": 2, "val_episodes_per_task": 1, "image_size": 32}
FEW = {**ARGUMENTS, "tasks": ("reach_red", "pick_yellow")}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("datasets"), **ARGUMENTS)


@pytest.fixture(scope="module")
def sources(made, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("index"))
    return {
        split: Rlds(path=str(made.dataset.parent), split=split, cache_dir=cache).open() for split in ("train", "val")
    }


def examples(prepared, split):
    (path,) = prepared.dataset.glob(f"*-{split}.tfrecord-*")
    return [tf_example_pb2.Example.FromString(record.payload) for record in read_records(path)]


def feature(example, name):
    value = example.features.feature[name]
    kind = value.WhichOneof("kind")
    return list(getattr(value, kind).value)


@pytest.mark.slow
def test_counts_and_instructions_are_as_asked(made, sources):
    assert made.num_episodes == {"train": 2 * len(ENV.tasks), "val": len(ENV.tasks)}
    for split, source in sources.items():
        assert source.num_episodes == made.num_episodes[split]
        assert source.num_steps == made.num_steps[split]
        assert set(source.prompts) == {ENV.instruction(task) for task in range(len(ENV.tasks))}
        lengths = np.diff(source.episode_ends, prepend=0)
        assert lengths.min() > 3
        assert lengths.max() <= ENV.max_steps
    assert not set(sources["train"].episode_ids) & set(sources["val"].episode_ids)


@pytest.mark.slow
def test_the_robot_reads_states_and_bounded_commands(sources):
    robot = Tabletop()
    assert tuple(robot.cameras.values()) == sources["train"].cameras
    steps = robot.read(sources["train"].columns, sources["train"].episode_ends)
    assert np.abs(steps.actions[:, :3]).max() <= world.MAX_MOVE_M
    assert set(np.unique(steps.actions[:, 6])) == {0.0, 1.0}
    assert (steps.actions.std(0) > 1e-3).all()
    assert (steps.state.std(0) > 1e-3).all()


@pytest.mark.slow
def test_nothing_in_it_is_suspicious(sources):
    train, val = sources["train"], sources["val"]
    assert not train.findings and not examine(ExaminedData(name="tabletop", source=train, held_out=val))


@pytest.mark.slow
def test_an_episodes_seed_gives_back_its_first_state_and_pictures(made, sources):
    """Equal but for single edge pixels, which may round differently in batches of other sizes."""
    source = sources["train"]
    starts = np.concatenate([[0], source.episode_ends[:-1]])
    found = examples(made, "train")
    seeds = np.array([feature(one, "episode_metadata/seed")[0] for one in found], np.uint32)
    tasks = [ENV.tasks.index(feature(one, "episode_metadata/task")[0].decode()) for one in found]
    seen = ENV.observe(ENV.reset(jax.vmap(jax.random.key)(seeds), jnp.asarray(tasks)))
    assert np.allclose(seen.state, source.columns["observation/state"][starts], atol=1e-6)
    for name in ENV.cameras:
        frames = source.frames(starts, f"observation/{name}").astype(int)
        expected = np.stack([image.decode(image.encode(one)) for one in np.asarray(seen.images[name])])
        assert np.abs(frames - expected).mean() < 0.05
    assert [source.prompts[index] for index in source.prompt_index[starts]] == [ENV.instruction(t) for t in tasks]


@pytest.mark.slow
def test_flags_mark_the_ends_and_every_episode_is_a_success(made):
    for example in examples(made, "val"):
        length = len(feature(example, "steps/is_first"))
        assert feature(example, "steps/is_first") == [1] + [0] * (length - 1)
        for name in ("is_last", "is_terminal", "reward"):
            assert feature(example, f"steps/{name}") == [0] * (length - 1) + [1]
        assert feature(example, "steps/discount") == [1] * (length - 1) + [0]
        assert feature(example, "episode_metadata/success") == [1]


@pytest.mark.slow
def test_tensorflow_datasets_knows_it(made):
    builder = tfds.builder_from_directory(made.dataset)
    assert {name: split.num_examples for name, split in builder.info.splits.items()} == made.num_episodes
    assert builder.info.features["steps"]["observation"]["image_1"].shape == (32, 32, 3)


@pytest.mark.slow
def test_the_tokenizer_gives_back_every_instruction_and_the_state_prompt(made):
    tokenizer = load_tokenizer(str(made.tokenizer))
    for task in range(len(ENV.tasks)):
        tokens = tokenizer.encode(ENV.instruction(task))
        assert tokenizer.decode(tokens) == ENV.instruction(task)
        assert len(tokens) <= 12
    prompt = "Task: put the red block, State: 0 17 128 255 -1;\nAction: "
    assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
    assert tokenizer.vocab_size <= tool.VOCAB_SIZE


@pytest.mark.slow
def test_the_same_arguments_give_the_same_bytes_and_other_seeds_other_episodes(tmp_path):
    made, again = (prepare(tmp_path / name, **FEW) for name in ("made", "again"))
    names = {path.relative_to(made.dataset.parent) for path in made.dataset.parent.rglob("*") if path.is_file()}
    assert len(names) == 6
    for name in names:
        assert (again.dataset.parent / name).read_bytes() == (made.dataset.parent / name).read_bytes(), name
    other = prepare(tmp_path / "other", seed=1, **FEW)
    assert not any(one in examples(made, "val") for one in examples(other, "val"))


@pytest.mark.slow
def test_a_complete_dataset_is_reused_with_a_message(made, caplog):
    stamps = {path: path.stat().st_mtime_ns for path in made.dataset.iterdir()}
    with caplog.at_level(logging.INFO):
        assert prepare(made.dataset.parent.parent, **ARGUMENTS) == made
    assert "is already complete: reusing it" in caplog.text
    assert stamps == {path: path.stat().st_mtime_ns for path in made.dataset.iterdir()}


@pytest.fixture
def cheap(monkeypatch):
    """The episodes replaced by one small file; returns the arguments of every write."""
    written = []

    def fake_write(draft, env, arguments):
        written.append(arguments)
        (draft / "data").write_text("whole")
        return {"num_episodes": {}, "num_steps": {}}

    monkeypatch.setattr(tool, "_write", fake_write)
    return written


@pytest.mark.parametrize("harm", ["cut", "file missing", "manifest missing", "manifest torn", "other arguments"])
def test_what_is_torn_or_different_is_moved_aside_and_written_anew(tmp_path, cheap, caplog, harm):
    prepare(tmp_path)
    root = tmp_path / "tabletop"
    if harm == "cut":
        (root / "data").write_text("who")
    elif harm == "file missing":
        (root / "data").unlink()
    elif harm == "manifest missing":
        (root / MANIFEST).unlink()
    elif harm == "manifest torn":
        (root / MANIFEST).write_text("{")
    prepare(tmp_path, seed=int(harm == "other arguments"))
    assert len(cheap) == 2
    assert (root / "data").read_text() == "whole"
    assert [path.name.partition("-")[0] for path in sorted(tmp_path.iterdir())] == ["tabletop", "tabletop.aside"]
    assert "is now at" in caplog.text
    prepare(tmp_path, seed=int(harm == "other arguments"))
    assert len(cheap) == 2


@pytest.mark.slow
def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def failing(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(tool, "train_tokenizer", failing)
    with pytest.raises(OSError, match="disk full"):
        prepare(tmp_path, **FEW)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_expert_that_always_fails_is_an_error_that_names_the_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(tool.tabletop_env, "HOLD_STEPS", 10_000)
    with pytest.raises(RuntimeError, match=r"the expert failed 32 times in a row at \['reach_red'"):
        prepare(tmp_path, **FEW)


def test_a_dataset_of_some_tasks_lies_beside_the_others(tmp_path, cheap):
    everything, some = prepare(tmp_path), prepare(tmp_path, name="reach", tasks=["reach_blue", "reach_red"])
    assert some.dataset == everything.dataset.parent.parent / "reach" / "1.0.0"
    assert cheap[1]["tasks"] == ["move to the blue block", "move to the red block"]
    assert [len(arguments["tasks"]) for arguments in cheap] == [len(ENV.tasks), 2]
    with pytest.raises(UsageError, match="no task reach_pink; there are reach_red, reach_blue, pick_yellow"):
        prepare(tmp_path, tasks=["reach_pink"])


def test_a_long_write_is_told_before_the_simulation_is_compiled(tmp_path, monkeypatch, caplog):
    def compile_for_long(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(tool, "demonstrate", compile_for_long)
    with caplog.at_level(logging.INFO), pytest.raises(InterruptedError):
        prepare(tmp_path, **FEW)
    told = [record.getMessage() for record in caplog.records]
    assert (
        told[0] == f"writing {tmp_path / 'tabletop'} ..." and "before the first the simulation is compiled" in told[1]
    )


def test_useless_numbers_are_refused(tmp_path):
    with pytest.raises(UsageError, match="val_episodes_per_task 0 must be positive"):
        prepare(tmp_path, val_episodes_per_task=0)


def test_without_a_directory_it_goes_where_the_experiments_look(tmp_path, cheap, monkeypatch):
    monkeypatch.setenv("OPENPI_TRAIN_HOME", str(tmp_path))
    assert prepare().dataset == tmp_path / "datasets" / "tabletop" / "1.0.0"
    assert (tmp_path / "datasets" / "tabletop" / MANIFEST).is_file()


@pytest.mark.slow
def test_the_first_runs_to_miss_an_embedded_dataset_write_it_once(tmp_path, monkeypatch):
    """Three processes at once: one writes, the others wait, and a later one leaves what is there as it is."""
    program = (
        "import logging\n"
        "from openpi_train.data.make import embedded\n"
        "from openpi_train.data.robot import opened\n"
        "from openpi_train.registry import load\n"
        "logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "embedded.RECIPES['tabletop'] = embedded.Recipe(tasks=('reach_red',), episodes_per_task=1, "
        "val_episodes_per_task=1, image_size=16)\n"
        "opened.write_missing(load('pi0_bridge_traj_tiny').data)\n"
    )
    environment = os.environ | {"OPENPI_TRAIN_HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    started = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    assert sum(" written: " in text for text in said) == 1, said
    dataset = tmp_path / "datasets" / "tabletop"
    assert Rlds(path=str(dataset), cache_dir=str(tmp_path / "index")).open().num_episodes == 1
    assert [path.name for path in dataset.parent.iterdir()] == ["tabletop"]

    (dataset / "prepared.json").write_text("changed by hand")
    monkeypatch.setenv("OPENPI_TRAIN_HOME", str(tmp_path))
    tool.write_missing(dataset)
    assert (dataset / "prepared.json").read_text() == "changed by hand"


def test_other_folders_of_datasets_are_nobodys_to_write(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENPI_TRAIN_HOME", str(tmp_path))
    tool.write_missing(tmp_path / "datasets" / "my_robot")
    assert not (tmp_path / "datasets").exists()
