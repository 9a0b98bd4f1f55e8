"""A dry run prints what the run needs, and refuses what a start would refuse."""

import dataclasses
import importlib.util
import logging
import math
import re
import sys

import pytest
import small_runs

from openpi_train import cli
from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.data.text import arithmetic
from openpi_train.envs.gym_env import GymEnv
from openpi_train.envs.in_processes import ProcessEnv
from openpi_train.optim import LRSchedule
from openpi_train.planning.memory import DoesNotFit
from openpi_train.runtime.exits import DATA, CheckpointError, DataError, ErrorCollector, UsageError
from openpi_train.runtime.world import WorldFlags, find_world
from openpi_train.training import metrics, settling
from openpi_train.training.dry_run import check_ahead, dry_run
from openpi_train.training.rundir import open_run
from openpi_train.training.settling import Settling, open_if_ready, settle
from openpi_train.training.start_check import check_files


class DamagedPoints(small_runs.PausingPointData):
    def examine(self, model):
        raise ValueError("the points are damaged")


@pytest.fixture
def given(tmp_path):
    return dataclasses.replace(small_runs.small, name="small", exp_name="x", checkpoint_base_dir=str(tmp_path))


def rehearse(experiment):
    return dry_run(experiment, WorldFlags(), None)


def test_what_fits_is_told_with_what_was_not_looked_at(given, tmp_path, capsys):
    assert rehearse(given) == 0
    *_, fits, note = capsys.readouterr().out.splitlines()
    assert fits == "fits" and note == "not checked: the data were not looked at; a start opens them"
    assert list(tmp_path.iterdir()) == []


def test_memory_that_rounds_to_nothing_is_left_out(given, monkeypatch, capsys):
    def sizes():
        assert rehearse(given) == 0
        return dict(re.findall(r"^(\w+) +([\d.]+) GiB per device$", capsys.readouterr().out, re.MULTILINE))

    assert sizes().keys() == {"total", "available"}  # the model has a few parameters
    monkeypatch.setattr(sys.modules[dry_run.__module__], "GIB", 1)
    known = Settling.here(given, find_world(WorldFlags(), {})).prepared.memory.as_json()
    assert sizes().keys() == {name for name, size in known.items() if size} | {"available"} > {"total", "available"}


def test_an_estimate_above_what_there_is_is_not_said_to_fit(given, monkeypatch, capsys):
    given = dataclasses.replace(given, batch_size=64 * given.batch_size)  # activations, which are what is estimated
    memory = Settling.here(given, find_world(WorldFlags(), {})).prepared.memory
    assert memory.least < memory.total
    monkeypatch.setattr(settling, "memory_bytes", lambda *_: (memory.least + memory.total) // 2)
    assert rehearse(given) == 0
    found = capsys.readouterr().out.splitlines()
    assert "fits" not in found and any(line.startswith("may not fit: ") for line in found)


@pytest.mark.parametrize("address", ["gs://bucket/some/params", "hub:me/policy"])
def test_start_weights_that_are_elsewhere_are_told_with_the_place_of_a_copy(
    given, address, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path / "openpi"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    given = dataclasses.replace(given, weight_loader=CheckpointWeightLoader(params_path=address))
    assert rehearse(given) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("start weights: ")]
    assert line.startswith(f"start weights: {address} is not ") and "--weight-loader.params-path" in line
    if address.startswith("gs:"):
        assert f"{tmp_path}/openpi/bucket/some/params" in line


def test_openpis_cached_copy_of_start_weights_is_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path))
    loader = CheckpointWeightLoader(params_path="gs://bucket/some/params")
    assert len(loader.remote()) == 1
    (tmp_path / "bucket/some/params").mkdir(parents=True)
    assert loader.remote() == []


@pytest.mark.parametrize("name", ["arithmetic_sft", "arithmetic_grpo"])
def test_texts_that_are_not_there_are_told_with_the_code_for_data(name, tmp_path, capsys):
    """Texts to learn, and prompts whose answers a reward judges."""
    words = f"{name} --exp-name x --data.datasets.0.path /nope/none.jsonl --dry-run".split()
    assert cli.run([*words, "--checkpoint-base-dir", str(tmp_path)]) == DATA
    found = capsys.readouterr()
    assert "there is no file or folder /nope/none.jsonl: check the path" in found.err
    assert "fits" not in found.out


def test_a_simulator_that_is_not_installed_is_told_before_the_run_would_act_in_it(tmp_path, monkeypatch):
    given = cli.parse_experiment("metaworld_rloo", ["--exp-name", "x", "--checkpoint-base-dir", str(tmp_path)])
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "metaworld" else find(name))
    for one in (given, dataclasses.replace(given, rl=None)):  # to learn from rollouts, and to be evaluated
        together = ErrorCollector()
        check_files(one, one, together)
        assert "pip install 'openpi_train[sim]'" in str(together.errors[0])


@pytest.mark.parametrize("source", ["no/where.py:make", "Nothing-v1", "maniskill:PickCube-v1"])
def test_an_environment_of_gymnasium_needs_its_file_or_its_package(source, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=f"gym:{source}: .*(there is no file|pip install)"):
        ProcessEnv(env=GymEnv(source=source)).require()


def rates_told(caplog):
    """What the log says of the learning rate by step, which is then forgotten."""
    found = [line.removeprefix("learning rate: ") for line in caplog.messages if line.startswith("learning rate: ")]
    caplog.clear()
    return [line for line in found if not line.startswith("peak ")]


def test_a_dry_run_plans_with_the_rows_of_a_start_as_soon_as_the_data_are_ready(tmp_path, capsys, caplog):
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}+1=", "completion": "{n + 1}"}}\n' for n in range(64)))
    words = ["--exp-name", "x", "--checkpoint-base-dir", str(tmp_path), "--data.datasets.0.path", str(file)]
    words += ["--data.datasets.0.validation", "None", "--num-epochs", "3", "--data.cache-dir", str(tmp_path)]
    words += ["--data.max-length", "64"]
    given = cli.parse_experiment("arithmetic_sft", words)
    arithmetic.write_missing(given.data.tokenizer)
    world = find_world(WorldFlags(), {})
    assert open_if_ready(given) is None
    caplog.set_level(logging.INFO)
    longest = Settling.here(given, world, open_if_ready).prepared
    (told,) = rates_told(caplog)
    assert told.startswith("from 9.67742e-05 to 0.003 in 30 steps, then by a cosine to 0.0001 at step 800")
    follows = dataclasses.replace(given, lr_schedule=LRSchedule(warmup_ratio=0.1, decay_steps=None))
    assert rehearse(follows) == 0
    (told,) = rates_told(caplog)
    assert told.startswith("at most 2.5e-05; its steps follow from --num-epochs 3 and the number of samples")
    start = settle(given, world)
    (told,) = rates_told(caplog)
    steps = math.ceil(3 * start.data.num_samples / given.batch_size)
    assert "at step 800" in told and start.experiment.num_train_steps == steps
    found = Settling.here(given, world, open_if_ready)
    assert found.prepared.memory == start.prepared.memory != longest.memory
    assert found.experiment.num_train_steps == start.experiment.num_train_steps
    caplog.clear()
    assert rehearse(follows) == 0
    (told,) = rates_told(caplog)
    assert told.startswith(f"from 1.25e-05 to 2.5e-05 in 1 steps, then by a cosine to 2.5e-06 at step {steps}")
    capsys.readouterr()
    assert rehearse(given) == 0
    told = capsys.readouterr().out
    assert "those of the data" in told and "not checked" not in told


def test_a_run_that_is_there_start_weights_that_are_not_and_damaged_data_are_refused(given, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        rehearse(dataclasses.replace(given, weight_loader=CheckpointWeightLoader(params_path=f"{tmp_path}/nowhere")))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="not a safetensors file, or its first bytes are lost"):
        rehearse(dataclasses.replace(given, weight_loader=CheckpointWeightLoader(params_path=f"{tmp_path}/weights")))
    with pytest.raises(UsageError, match="adapter-path needs the weights that the adapter is added to"):
        rehearse(dataclasses.replace(given, weight_loader=CheckpointWeightLoader(adapter_path="somewhere")))
    with pytest.raises(DataError, match="the points are damaged"):
        rehearse(dataclasses.replace(given, data=DamagedPoints()))
    with pytest.raises(UsageError, match="there is no complete checkpoint"):
        rehearse(dataclasses.replace(given, resume_from="latest"))
    (tmp_path / "small" / "x").mkdir(parents=True)
    (tmp_path / "small" / "x" / "experiment.json").write_text("{}")
    (tmp_path / "small" / "x" / "1").mkdir()
    with pytest.raises(UsageError, match="--resume continues it, --overwrite moves it aside"):
        rehearse(given)


@pytest.fixture
def many_faults(given, tmp_path, monkeypatch):
    """Its batch does not divide by 8, it is too large for any device, and its files and a package are missing."""
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    weights = CheckpointWeightLoader(params_path=f"{tmp_path}/nowhere")
    return dataclasses.replace(
        given, wandb_enabled=True, tensorboard=False, weight_loader=weights, data=DamagedPoints()
    )


def test_a_launch_is_told_all_that_is_wrong_at_once(many_faults):
    with pytest.raises(UsageError, match=r"(?s)not a multiple of the 8 devices.*wandb.*nowhere.*points are damaged"):
        check_ahead(dataclasses.replace(many_faults, batch_size=12), 8)


def test_what_does_not_fit_hides_nothing_else(many_faults, monkeypatch):
    monkeypatch.setattr(Settling, "require_room", does_not_fit)
    with pytest.raises(UsageError, match=r"(?s)wandb.*nowhere.*points are damaged$"):  # before it is planned
        rehearse(many_faults)


def does_not_fit(*_):
    raise DoesNotFit("it does not fit\nWhat to do: less")


def test_a_fault_of_the_data_alone_is_not_told_as_one_of_memory(given, monkeypatch):
    monkeypatch.setattr(Settling, "require_room", does_not_fit)
    with pytest.raises(DataError, match=r"^the points are damaged$"):
        rehearse(dataclasses.replace(given, data=DamagedPoints()))


def test_a_launch_that_goes_on_with_a_run_says_so(given, capsys):
    assert check_ahead(given, 1) == 0 and "it goes on" not in capsys.readouterr().out
    open_run(given)
    again = dataclasses.replace(given, resume=True)
    assert check_ahead(again, 1) == 0
    assert f"it goes on with the run in {given.run_dir}" in capsys.readouterr().out


def test_a_run_that_goes_on_is_told_with_its_step(given, capsys):
    open_run(given)
    again = dataclasses.replace(given, resume=True)
    assert rehearse(again) == 0
    assert "goes on" not in capsys.readouterr().out, "it has no checkpoint"
    for step in (20, 40):
        (given.run_dir / str(step)).mkdir()
        (given.run_dir / str(step) / "manifest.json").write_text("{}")
        (given.run_dir / str(step) / "meta.json").write_text('{"data_position": {"step": 1}}')
    assert rehearse(again) == 0
    assert "it goes on from step 40\n" in capsys.readouterr().out
    assert rehearse(dataclasses.replace(again, resume_from="20")) == 0
    assert "it goes on from step 20\n" in capsys.readouterr().out
