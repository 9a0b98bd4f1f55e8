"""A flag that sets many fields does the same for an experiment by name, by file, of a config, and of a run."""

import dataclasses
from pathlib import Path

import pytest
from text_models import write_model

from openpi_train import registry
from openpi_train.command_line import OverrideFlags
from openpi_train.data.core.files import write_json
from openpi_train.experiment_flags import OVERRIDES, parse_experiment, with_flags
from openpi_train.runtime.exits import CheckpointError, DataError, UsageError

ROOT = Path(__file__).resolve().parent
RUNS = f"{ROOT / 'runs' / 'text_runs.py'}:sft"
STORE = ROOT / "data" / "formats" / "zarr" / "fixtures"


def of_a_config(name, *flags):
    """The experiment as the verbs of other tools' configs build it: from one that is already there."""
    return with_flags(registry.load(name), ["--exp-name", "x", *map(str, flags)], "vla", "An experiment.")


def by_name(name, *flags):
    return parse_experiment(name, ["--exp-name", "x", *map(str, flags)])


def test_every_flag_of_many_fields_is_applied():
    fields = {field.name for field in dataclasses.fields(OverrideFlags)}
    of_env = {name for name in fields if name.startswith("env_")}
    assert {override.field for override in OVERRIDES} == fields - of_env - {"deepspeed"} | {"env_settings"}


@pytest.mark.parametrize(
    ("name", "flag", "value"),
    [
        ("debug", "--optimizer", "lion"),
        ("debug", "--dataset", "store"),
        ("debug", "--data.mixture", "store"),
        ("debug", "--env", "tabletop"),
        ("debug", "--num-train-steps", "7"),
        (RUNS, "--model.path", "model"),
        (RUNS, "--data.mixture", "texts.jsonl"),
    ],
)
def test_a_flag_does_the_same_wherever_the_experiment_comes_from(name, flag, value, tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    store = next(STORE.glob("*.zarr"))
    given = {"store": store, "model": tmp_path / "model", "texts.jsonl": tmp_path / "texts.jsonl"}.get(value, value)
    found, named = of_a_config(name, flag, given), by_name(name, flag, given)
    assert found == dataclasses.replace(named, lr_schedule=found.lr_schedule)
    assert found != of_a_config(name)


@pytest.mark.parametrize(
    ("name", "flags", "error", "message"),
    [
        (RUNS, ("--model.path", "/nope/nothing"), CheckpointError, "no such folder"),
        ("debug", ("--model.path", "model"), UsageError, "is for language models, and debug"),
        ("debug", ("--data.robot", "recorded"), UsageError, "is for LeRobot datasets"),
        ("debug", ("--dataset", "/nope/nothing"), DataError, "/nope/nothing"),
        ("debug", ("--dataset", "a", "--data.repo-id", "b"), UsageError, "--dataset and --data.repo-id both"),
        ("debug", ("--env", "nowhere"), UsageError, "nowhere"),
    ],
)
@pytest.mark.parametrize("built", [by_name, of_a_config])
def test_what_cannot_be_applied_is_refused_wherever_the_experiment_comes_from(
    built, name, flags, error, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    with pytest.raises(error, match=message):
        built(name, *flags)


def test_a_deepspeed_file_is_taken_by_a_run_that_goes_on_and_refused_beside_a_config(tmp_path):
    write_json(tmp_path / "ds.json", {"train_batch_size": 6})
    words = ["--exp-name", "x", "--deepspeed", str(tmp_path / "ds.json")]
    default = registry.load("debug")
    assert with_flags(default, words, "resume", "A run.", goes_on=True).batch_size == 6
    with pytest.raises(UsageError, match="--deepspeed-config"):
        with_flags(default, words, "posttrain", "A config.")
