"""`data collect`: successful demonstrations alone, the same files by any number of processes and after a kill."""

import dataclasses
import hashlib

import numpy as np
import pytest
from walking import Walk

from openpi_train.data.formats.zarr import Zarr
from openpi_train.envs.env import NoEnv
from openpi_train.robots.tabletop import Tabletop
from openpi_train.runtime.exits import DataError
from openpi_train.tools import collect as tool
from openpi_train.tools import data
from openpi_train.tools.collect import collect

ENV = Walk()
POSSIBLE = ("sure", "hard", "harder")
ASKED = {"tasks": POSSIBLE, "episodes_per_task": 6}


def digests(store):
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in store.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("collected") / "walks.zarr"
    return out, collect(ENV, out, **ASKED)


def opened(out, tmp_path):
    return Zarr(path=str(out), cache_dir=str(tmp_path / "index")).open()


@pytest.mark.slow
def test_successes_are_kept_and_failures_told(made, tmp_path):
    out, told = made
    source = opened(out, tmp_path)
    assert [(one.task, one.kept, one.attempts - len(one.failed)) for one in told] == [(name, 6, 6) for name in POSSIBLE]
    sure, _, harder = told
    assert not sure.failed and sure.text() == "sure: 6 demonstrations of 6 attempts"
    assert harder.failed and harder.text().endswith(f"; failed and left out: {', '.join(map(str, harder.failed))}")
    assert source.num_episodes == 18 and source.cameras == ("front",)
    assert list(source.prompts) == [f"walk, {name}" for name in POSSIBLE]
    starts = np.concatenate([[0], source.episode_ends[:-1]])
    assert source.prompt_index[starts].tolist() == np.repeat([0, 1, 2], 6).tolist()
    for start, end in zip(starts, source.episode_ends, strict=True):
        states, actions = source.columns["state"][start:end], source.columns["action"][start:end]
        assert states[:, 0].tolist() == list(range(end - start)) and (actions == 1).all()
        assert states[-1, 0] + 1 == states[0, 1], "ends with the step that brings success"
        pictures = source.frames(np.arange(start, end), "front")
        assert pictures.shape == (end - start, 4, 5, 3) and (pictures[:, 0, 0, 0] == states[:, 0]).all()
    assert not out.with_name("walks.zarr.rounds").exists()


@pytest.mark.slow
def test_two_processes_write_the_files_of_one(made, tmp_path):
    assert collect(ENV, tmp_path / "walks.zarr", workers=2, **ASKED) == made[1]
    assert digests(tmp_path / "walks.zarr") == digests(made[0])


@pytest.mark.slow
def test_a_killed_one_goes_on_where_it_was(made, tmp_path, monkeypatch):
    simulated = []

    def run(one, most=5):
        if len(simulated) == most:
            raise KeyboardInterrupt
        simulated.append((one.task, one.number))
        real(one)

    real = tool.run_round
    monkeypatch.setattr(tool, "run_round", run)
    out = tmp_path / "walks.zarr"
    with pytest.raises(KeyboardInterrupt):
        collect(ENV, out, **ASKED)
    assert not out.exists()
    before = list(simulated)
    monkeypatch.setattr(tool, "run_round", lambda one: run(one, most=1000))
    with pytest.raises(ValueError, match=r"rounds was begun with .*seed 0, not .*seed 1: give the same again"):
        collect(ENV, out, seed=1, **ASKED)
    assert collect(ENV, out, **ASKED) == made[1]
    assert digests(out) == digests(made[0])
    assert len(before) == 5 and len(set(simulated)) == len(simulated), "a round was simulated twice"


def test_more_episodes_begin_with_the_fewer_and_other_seeds_are_others(made, tmp_path):
    first = opened(made[0], tmp_path).columns["state"]
    collect(ENV, tmp_path / "more.zarr", tasks=("sure",), episodes_per_task=9)
    more = opened(tmp_path / "more.zarr", tmp_path).columns["state"]
    assert np.array_equal(more[: len(more[:12])], first[:12]) and len(more) > 18
    collect(ENV, tmp_path / "other.zarr", seed=1, tasks=("sure",), episodes_per_task=9)
    assert not np.array_equal(opened(tmp_path / "other.zarr", tmp_path).columns["state"], more)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"tasks": ["sure", "easy"]},
            ValueError,
            "there is no task easy; Walk has 0 sure, 1 hard, 2 harder, 3 impossible",
        ),
        ({"episodes_per_task": 0}, ValueError, "episodes_per_task 0 and workers 1 must be at least 1"),
        ({"tasks": ["impossible"]}, RuntimeError, "expert failed impossible 16 times of as many: leave the task out"),
    ],
)
def test_what_cannot_be_collected_is_refused(change, error, message, tmp_path):
    with pytest.raises(error, match=message):
        collect(ENV, tmp_path / "x.zarr", **ASKED | change)


def test_an_environment_without_an_expert_and_a_store_that_is_there_are_refused(made, tmp_path):
    with pytest.raises(ValueError, match="NoEnv has no scripted expert"):
        collect(NoEnv(), tmp_path / "x.zarr")
    with pytest.raises(FileExistsError, match=r"walks.zarr is there already: give another --out"):
        collect(ENV, made[0], **ASKED)
    with pytest.raises(DataError, match="no environment 'metaworlds'; did you mean metaworld"):
        data.main(["collect", "metaworlds", "--out", str(tmp_path / "x.zarr")], lambda *_: None)
    with pytest.raises(DataError, match=r"no environment 'mujoco'\. There are"):
        data.main(["collect", "mujoco", "--out", str(tmp_path / "x.zarr")], lambda *_: None)


@pytest.mark.slow
def test_tabletop_is_collected_and_read_by_its_robot(tmp_path, capsys):
    out = tmp_path / "reach.zarr"
    words = ["collect", "tabletop", "--tasks", "reach_red", "--episodes-per-task", "1", "--image-size", "32"]
    assert data.main([*words, "--out", str(out)], lambda *_: None) == 0
    shown = capsys.readouterr().out
    assert "reach_red: 1 demonstrations of " in shown and "tasks reach_red ('move to the red block')" in shown
    robot = dataclasses.replace(Tabletop(), cameras={"base_0_rgb": "image_0"}, state_columns=("state",))
    source = opened(out, tmp_path)
    steps = robot.read(source.columns, source.episode_ends)
    assert steps.state.shape == steps.actions.shape == (source.num_steps, 7) and source.num_episodes == 1
    assert source.cameras == ("image_0", "image_1") and source.frames(np.array([0]), "image_0").std() > 5
    # The fingers come down towards the block.
    assert steps.state[-1, 2] < steps.state[0, 2] and steps.actions.std(axis=0)[:3].max() > 1e-3
