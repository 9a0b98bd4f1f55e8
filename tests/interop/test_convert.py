"""The `convert` verb: both ways without a bit lost, types and LoRA as asked, a report on what was found."""

import dataclasses
import json
import logging
import re
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exchanged import EXPERT, LORA, STATS, TINY, as_stored, made_up, tiny, training_state, write
from openpi_train_configs.robot_dp import robot_dp_tiny_14

from openpi_train import cli
from openpi_train.checkpoints.checkpoint_formats import model_params, open_checkpoint
from openpi_train.checkpoints.parity import compare_outputs
from openpi_train.experiment_flags import parse_experiment
from openpi_train.fields import as_json
from openpi_train.interop import native_format, openpi
from openpi_train.policy.experiment_json import experiment_from_json
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.tools.atomic_output import drafted, told_as
from openpi_train.tools.convert_checkpoint import plan
from openpi_train.tools.requests import ConvertRequest


def convert(source, target, experiment=TINY, **flags):
    """The result, opened, and its report."""
    path = plan(ConvertRequest(source=str(source), target=target, **flags), experiment).run()
    return open_checkpoint(path, experiment.model), json.loads((path / "parity.json").read_text())


def same(leaves, arrays):
    assert leaves.keys() == arrays.keys()
    for name, leaf in leaves.items():
        assert leaf.dtype == arrays[name].dtype
        np.testing.assert_array_equal(leaf.whole(), arrays[name], err_msg=name)


def by_path(arrays):
    """Parameters by published name as a model's own."""
    paths = {name: path for path, name in openpi.parameter_names(TINY.model).items()}
    return {paths[name]: leaf for name, leaf in as_stored(arrays).params.items()}


@pytest.mark.parametrize(
    "experiment",
    [TINY, pytest.param(tiny(language=LORA, action_expert=LORA), marks=pytest.mark.slow)],
    ids=["plain", "lora"],
)
def test_all_comes_back_bit_for_bit(tmp_path, experiment):
    params = made_up(experiment)
    paths = {name: path for path, name in openpi.parameter_names(experiment.model).items()}
    state = training_state(params, lambda name: not experiment.is_frozen(paths[name]))
    for name in state:  # as trainers of others do, both values of a frozen parameter are one
        if experiment.is_frozen(paths.get(name.removeprefix("params/"), "")):
            state[name] = params[name.removeprefix("params/")]
    source = write(tmp_path / "5", params, train_state=as_stored(state).params)
    between, first = convert(source, tmp_path / "ours", experiment, outputs=False)
    back, second = convert(tmp_path / "ours", tmp_path / "6", experiment)
    assert (between.format, back.format) == ("ours", "openpi")
    assert experiment_from_json(between.experiment, experiment).model == experiment.model
    same(back.params, params)
    same(back.train_state, state)
    assert back.norm_stats == {"robot": STATS}
    for report in (first, second):
        assert report["parameters"] == {
            "leaves": len(params),
            "bit_equal": len(params),
            "largest_difference": 0.0,
            "at": None,
        }
        assert report["training_state"] == {"leaves": len(state), "left_out": []}
    assert first["outputs"] == "not compared (--no-outputs)"
    assert second["outputs"]["velocity"]["largest_difference"] == 0.0
    assert second["outputs"]["velocity"]["largest_value"] > 0


@pytest.mark.slow
def test_rounding_is_reported_where_another_type_is_asked_for(tmp_path):
    params = made_up()
    source = write(tmp_path / "5", params, train_state=as_stored(training_state(params)).params)
    result, report = convert(source, tmp_path / "half", dtype="bfloat16", asset_id="mine")
    same(result.params, {name: value.astype(ml_dtypes.bfloat16) for name, value in params.items()})
    largest = max(
        np.abs(value - value.astype(ml_dtypes.bfloat16).astype(np.float32)).max() for value in params.values()
    )
    assert report["parameters"]["largest_difference"] == pytest.approx(float(largest))
    # What the rounding does to the outputs is what it does to a model that is given the rounded numbers themselves.
    rounded = {name: value.astype(ml_dtypes.bfloat16).astype(np.float32) for name, value in params.items()}
    before, after = (by_path(numbers) for numbers in (params, rounded))
    found = compare_outputs((TINY.model, before), (TINY.model, after), TINY.data.cameras)
    assert report["outputs"] == found and found["velocity"]["largest_difference"] > 0
    assert len(report["training_state"]["left_out"]) == len(training_state(params))
    assert result.train_state is None and list(result.norm_stats) == ["mine"]


@pytest.mark.parametrize("form", ["openpi_torch", "lerobot"])
def test_heads_of_values_are_left_out_of_forms_that_have_no_place_for_them(form, tmp_path):
    experiment = tiny(critic=True, return_bins=3)
    params = made_up(experiment)
    critic = {name for name in params if name.startswith(("value_head/", "return_head/"))}
    files = []
    for name, kept, of in (("with", params.keys(), experiment), ("without", params.keys() - critic, TINY)):
        source = write(tmp_path / name / "5", {one: params[one] for one in kept})
        asked = ConvertRequest(
            source=str(source), target=tmp_path / name / "torch", target_format=form, outputs=form == "openpi_torch"
        )
        path = plan(asked, of).run()
        files.append((path / "model.safetensors").read_bytes())
        report = json.loads((path / "parity.json").read_text())
        assert set(report["parameters_left_out"]) == (critic if name == "with" else set())
        assert form == "lerobot" or report["outputs"]["velocity"]["largest_difference"] == 0.0
    assert len(critic) == 12 and files[0] == files[1]


@pytest.mark.slow
def test_merged_factors_compute_what_they_did_apart(tmp_path):
    experiment = tiny(language=LORA, action_expert=LORA)
    params = made_up(experiment)
    source = write(tmp_path / "5", params)
    path = plan(
        ConvertRequest(source=str(source), target=tmp_path / "6", merge_lora=True, target_format="openpi"), experiment
    ).run()
    report = json.loads((path / "parity.json").read_text())
    plain = tiny(language=EXPERT, action_expert=EXPERT)
    assert model_params(open_checkpoint(path), plain.model)  # accounts for every key
    assert report["merged_into_weights"] == sorted(name for name in params if "lora" in name)
    found = report["outputs"]["velocity"]
    assert found["largest_difference"] < 1e-4 * found["largest_value"]  # sums in another order, in float32
    assert report["parameters"]["largest_difference"] > 0.01  # factors did change the weights
    merged = plan(ConvertRequest(source=str(source), target=tmp_path / "7", merge_lora=True), experiment)
    assert experiment_from_json(merged.wanted.experiment or {}, experiment).model == experiment.model.without_lora()


@pytest.mark.slow
def test_the_comparison_sees_a_wrong_weight():
    right = by_path(made_up())
    wrong = {**right, "action_out_proj/bias": right["action_out_proj/bias"].map(lambda bias: bias + np.float32(0.5))}
    found = compare_outputs((TINY.model, right), (TINY.model, wrong), TINY.data.cameras)["velocity"]
    assert found["largest_difference"] == pytest.approx(0.5, abs=1e-5)
    assert found["shape"] == [2, 1, TINY.model.action_horizon, TINY.model.action_dim]


@pytest.mark.slow
def test_the_command_line_knows_a_run_of_ours(tmp_path, capsys):
    experiment = tiny()
    file = tmp_path / "mine.py"
    file.write_text("from exchanged import TINY as mine\n")
    stored = as_stored(made_up(), experiment=json.loads(json.dumps(as_json(experiment))))
    stored.experiment["model"]["used_token_len"] = 8  # as a run recorded it until 2026-11-23
    native_format.write(tmp_path / "5", stored, None)
    words = ["convert", str(tmp_path / "5"), str(tmp_path / "out"), "--experiment", f"{file}:mine"]
    assert cli.run([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "(ours): 50 parameters" in said and "norm stats: robot" in said
    assert not (tmp_path / "out").exists()
    assert cli.run([*words, "--no-outputs"]) == 0
    assert open_checkpoint(tmp_path / "out").format == "openpi"
    # The flags of the run's model are read from the run, as long as it is a run of this experiment; others are refused.
    words = ["convert", str(tmp_path / "5"), str(tmp_path / "6"), "--dry-run", "--experiment"]
    assert cli.run([*words, "debug"]) == 0
    for other in (["debug", "--model.action-horizon", "5"], ["pi0_bridge_traj_tiny"]):
        capsys.readouterr()
        assert cli.run([*words, *other]) == 2
        said = capsys.readouterr().err
        assert re.search(r"another model.*--model flags out", said)
        assert ("model.image_size" in said) == (len(other) == 1) and "model.action_horizon" in said


@pytest.mark.slow
def test_a_run_with_model_flags_of_its_own_says_whose_model_it_is(tmp_path, capsys):
    experiment = dataclasses.replace(TINY, name="of_a_file_of_the_users")
    native_format.write(
        tmp_path / "5", as_stored(made_up(), experiment=json.loads(json.dumps(as_json(experiment)))), None
    )
    assert cli.run(["convert", str(tmp_path / "5"), str(tmp_path / "out"), "--dry-run"]) == 0
    assert "(ours): 50 parameters" in capsys.readouterr().out


@pytest.mark.slow
def test_a_diffusion_policy_is_converted_with_its_norm_stats(tmp_path):
    experiment = dataclasses.replace(robot_dp_tiny_14, name="dp", exp_name="convert")
    wide = {"mean": [0.0] * 14, "std": [1.0] * 14, "q01": [0.0] * 14, "q99": [1.0] * 14}
    stored = as_stored(made_up(experiment), experiment=json.loads(json.dumps(as_json(experiment))))
    stats = {"arms": {"norm_stats": {"state": wide, "actions": wide}}}
    native_format.write(tmp_path / "5", dataclasses.replace(stored, norm_stats=stats), None)
    assert cli.run(["convert", str(tmp_path / "5"), str(tmp_path / "out"), "--no-outputs"]) == 0
    assert open_checkpoint(tmp_path / "out").norm_stats.keys() == {"arms"}


def test_whose_model_it_is_must_be_said(tmp_path, capsys):
    source = write(tmp_path / "5", {"a": jnp.zeros(2)})
    assert cli.run(["convert", str(source), str(tmp_path / "out")]) == 2
    assert "does not say whose model it is: name an experiment with --experiment" in capsys.readouterr().err


def test_what_is_in_it_is_told_where_its_model_is_not_known(golden, tmp_path, capsys):
    """The sizes of the golden model are those of `meta.json`; its robot has 8 dims of state and 7 of actions."""
    assert cli.run(["convert", str(golden / "openpi_checkpoint/5"), str(tmp_path / "out"), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "It holds 50 parameters, " in said and "norm stats golden_robot: state 8 dims, actions 7 dims" in said
    flags = next(line for line in said.splitlines() if "sizes: " in line).partition("sizes: ")[2].split()
    model = parse_experiment("debug", ["--exp-name", "x", *flags]).model  # they are flags
    assert dataclasses.astuple(model.siglip) == (32, 2, 64, 2, 32)
    assert (model.image_size, model.action_dim) == (224, 32)


@pytest.mark.parametrize("target", ["5", "5/ours", "."], ids=["the same", "in it", "around it"])
def test_a_result_never_lies_in_its_source(tmp_path, target):
    source = write(tmp_path / "5", made_up())
    with pytest.raises(UsageError, match=r"lies in .*, or around it"):
        plan(ConvertRequest(source=str(source), target=tmp_path / target, overwrite=True), TINY)


def test_a_verb_that_is_stopped_by_ctrl_c_says_so_without_a_traceback(monkeypatch, capsys):
    def stopped(_):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.VERBS, "convert", stopped)
    assert cli.run(["convert", "a", "b"]) == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C\n"


def test_what_is_said_of_a_result_names_the_users_folder(tmp_path, caplog):
    target = tmp_path / "out"
    with caplog.at_level(logging.INFO), drafted(target, 0, overwrite=False) as draft:
        draft.mkdir()
        logging.getLogger("openpi_train.interop.any").info("%s is read from %s", draft / "params", draft)
    assert caplog.messages == [f"{target}/params is read from {target}"]
    with (
        pytest.raises(CheckpointError, match=f"^{target}2/params is damaged$"),
        drafted(Path(f"{target}2"), 0, False) as it,
    ):
        raise CheckpointError(f"{it}/params is damaged")
    assert not list(tmp_path.glob(".*partial*"))
    address = "hub:me/tiny"
    with pytest.raises(CheckpointError, match=rf"^{address} could not be written: OSError"), told_as(target, address):
        target.rename(tmp_path / "moved")
        with drafted(target, 0, overwrite=False):
            raise OSError("the link is gone")
