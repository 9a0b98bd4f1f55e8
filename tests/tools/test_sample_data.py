"""`data sample`: what other packages read in it, the same actions on every machine, and all of it or nothing."""

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple

import av
import numpy as np
import pyarrow.parquet
import pytest
import zarr

from openpi_train.data.formats import detection
from openpi_train.envs.tabletop_scene import DEFAULT_TASKS
from openpi_train.runtime.exits import DataError, UsageError
from openpi_train.tools import sample_data
from openpi_train.tools.sample_data import sample

TASKS, EPISODES, SIZE = ("reach_red", "pick_yellow"), 2, 32
PROMPTS = {"reach_red": "move to the red block", "pick_yellow": "pick up the yellow block"}
ASKED = {
    "form": "lerobot",
    "env_name": "tabletop",
    "tasks": TASKS,
    "episodes_per_task": EPISODES,
    "image_size": SIZE,
    "seed": 0,
    "overwrite": False,
}
# Of the actions, float32 [steps, 7], by XLA for processors with fused multiplications (AVX2) and without (SSE4.2).
# Simulated in 32 bits, the two are different bytes.
ACTIONS = "a76cfa1daed5a6a79d574128193790c94ea57c0f795d6ad2ad0c4e640e5c3575"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a sample in each format."""
    folder = tmp_path_factory.mktemp("samples")
    return {
        form: folder / form for form in ("lerobot", "rlds", "zarr") if sample(folder / form, **ASKED | {"form": form})
    }


def opened(path, tmp_path):
    return dataclasses.replace(detection.source_at(str(path)), cache_dir=str(tmp_path / "index")).open()


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.slow
def test_our_readers_find_the_same_in_every_format(made, tmp_path):
    sources = {form: opened(path, tmp_path) for form, path in made.items()}
    first = sources["zarr"]
    assert first.num_episodes == len(TASKS) * EPISODES and digest(first.columns["action"]) == ACTIONS
    for source in sources.values():
        assert source.cameras == ("observation/image_0", "observation/image_1")
        assert {source.prompts[number] for number in source.prompt_index} == set(PROMPTS.values())
        assert source.about().control_hz == 5.0 and source.about().robot_type == "tabletop"
        assert np.array_equal(source.episode_ends, first.episode_ends)
        for name in ("action", "observation/state"):
            assert source.columns[name].dtype == np.float32 and np.array_equal(
                source.columns[name], first.columns[name]
            )
            assert source.about().dim_names[name][-1] == "gripper_fraction"
        # Lossy, but the pictures of the same step.
        for camera in source.cameras:
            theirs, ours = (one.frames(np.arange(3), camera).astype(int) for one in (source, first))
            assert theirs.shape == (3, SIZE, SIZE, 3) and np.abs(theirs - ours).mean() < 8


@pytest.mark.slow
def test_the_lerobot_one_by_pyarrow_and_pyav(made):
    root = made["lerobot"]
    info = json.loads((root / "meta/info.json").read_text())
    table = pyarrow.parquet.read_table(root / info["data_path"].format(chunk_index=0, file_index=0))
    assert (info["codebase_version"], info["fps"], info["total_episodes"]) == ("v3.0", 5, len(TASKS) * EPISODES)
    assert digest(np.stack(table["action"].to_numpy()).astype(np.float32)) == ACTIONS
    assert np.allclose(table["timestamp"].to_numpy(), table["frame_index"].to_numpy() / 5)
    tasks = pyarrow.parquet.read_table(root / "meta/tasks.parquet").to_pydict()
    named = dict(zip(tasks["task_index"], tasks["__index_level_0__"], strict=True))
    by_episode = dict(zip(table["episode_index"].to_pylist(), table["task_index"].to_pylist(), strict=True))
    wanted = [PROMPTS[task] for task in TASKS for _ in range(EPISODES)]
    assert [named[by_episode[number]] for number in range(len(wanted))] == wanted
    for camera in ("observation.image_0", "observation.image_1"):
        video = root / info["video_path"].format(video_key=camera, chunk_index=0, file_index=0)
        with av.open(str(video)) as file:
            frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
        assert len(frames) == table.num_rows == info["total_frames"]
        assert frames[0].shape == (SIZE, SIZE, 3) and frames[0].std() > 20


@pytest.mark.slow
def test_the_zarr_one_by_zarr(made):
    store = zarr.open_group(str(made["zarr"]), mode="r")
    data, ends = store["data"], store["meta/episode_ends"][:]
    assert digest(data["action"][:]) == ACTIONS
    assert (
        data["observation.image_0"].shape == (ends[-1], SIZE, SIZE, 3) and data["observation.image_0"].dtype == np.uint8
    )
    assert [task["prompt"] for task in store.attrs["tasks"]] == [PROMPTS[task] for task in TASKS]
    height = data["observation.state"][:][:, 2]
    # A demonstration of `pick` ends with the gripper, and the block that it holds, higher than it was at its lowest.
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        task = TASKS[int(data["task_id"][start])]
        lowest = height[start:end].min()
        assert (height[end - 1] > lowest + 0.03) == (task == "pick_yellow")


def run(folder, line, *more, **variables):
    """A command as it is printed, in a process of its own."""
    assert line.startswith("python -m openpi_train ")
    words = [sys.executable, *line.split()[1:], *more]
    environment = {**os.environ, "OPENPI_TRAIN_HOME": str(folder / "home"), **variables}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, f"{words}\n{done.stdout[-1000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
def test_a_processor_without_fused_multiplications_gives_the_same_actions(tmp_path):
    words = ("--format", "zarr", "--tasks", *TASKS, "--episodes-per-task", str(EPISODES), "--image-size", str(SIZE))
    run(tmp_path, "python -m openpi_train data sample old", *words, XLA_FLAGS="--xla_cpu_max_isa=SSE4_2")
    assert digest(zarr.open_group(str(tmp_path / "old"), mode="r")["data/action"][:]) == ACTIONS


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_commands_that_it_names_run(tmp_path):
    words = ("--tasks", "reach_red", "--episodes-per-task", "8", "--image-size", str(SIZE))
    told = run(tmp_path, "python -m openpi_train data sample demos", *words)
    inspect, check, train = [line.strip() for line in told.splitlines() if line.startswith("  python")]
    run(tmp_path, inspect)
    assert (tmp_path / "look" / "demos.png").is_file()
    assert "nothing found" in run(tmp_path, check)
    short = ("--num-train-steps", "2", "--batch-size", "4", "--eval.closed-loop.episodes-per-task", "1")
    run(tmp_path, train, *short)
    evaluate = "python -m openpi_train eval checkpoints/tabletop_act/first --episodes 0 --held-out 100"
    held_out = re.search(r"open loop, (\d+) held-out episodes?,", run(tmp_path, evaluate))
    assert held_out and f"training holds {held_out[1]} of the 8 episodes out" in told


def test_what_is_there_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(UsageError, match=r"mine exists; give another directory, or --overwrite"):
        sample(tmp_path / "mine", **ASKED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ("reach_rd",)}, "there is no task reach_rd; did you mean reach_red"),
        ({"env_name": "table"}, "there is no sample of 'table'; there are tabletop, metaworld"),
    ],
)
def test_unknown_tasks_and_simulators_are_refused_before_anything_is_written(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sample(tmp_path / "demos", **ASKED | change)
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_told_before_it_starts(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10))
    with pytest.raises(DataError, match=r"not enough disk space in .*: \d+\.\d MB are needed, 0\.0 MB are free"):
        sample(tmp_path / "demos", **ASKED)


@pytest.mark.parametrize("stage", ["collect", "Zarr"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_nothing_is_left_of_an_interrupted_one(stage, error, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(sample_data, "collect", lambda *args, **kwargs: [])
    monkeypatch.setattr(sample_data, stage, fail)
    told = {KeyboardInterrupt: None, OSError: "demos could not be written: the disk is full; free some space"}
    with pytest.raises((KeyboardInterrupt, DataError), match=told[type(error)]):
        sample(tmp_path / "demos", **ASKED)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_overwriting_moves_what_was_there_aside(tmp_path):
    (tmp_path / "demos").mkdir()
    (tmp_path / "demos" / "mine.txt").write_text("mine")
    sample(tmp_path / "demos", **ASKED | {"overwrite": True, "tasks": TASKS[:1], "episodes_per_task": 1})
    (aside,) = tmp_path.glob("demos.replaced-*")
    assert (aside / "mine.txt").read_text() == "mine" and (tmp_path / "demos" / "meta" / "info.json").is_file()


@pytest.mark.slow
@pytest.mark.sim
def test_metaworld_by_pyarrow(tmp_path):
    pytest.importorskip("metaworld")
    asked = ASKED | {"env_name": "metaworld", "tasks": ("drawer-close",), "episodes_per_task": 1}
    sample(tmp_path / "drawers", **asked)
    table = pyarrow.parquet.read_table(tmp_path / "drawers/data/chunk-000/file-000.parquet")
    actions = np.stack(table["action"].to_numpy())
    assert actions.shape[1] == 4 and len(table["observation.state"][0]) == 39 and actions.std() > 0
    assert json.loads((tmp_path / "drawers/meta/info.json").read_text())["fps"] == 80


def test_the_default_tasks_are_the_environments():
    assert set(sample_data.DEFAULT_TASKS["tabletop"]) < {task.name for task in DEFAULT_TASKS}
