"""The `compile` verb, and `plan` with XLA's GPU compiler: their texts, what they refuse, and the real compiler."""

import dataclasses
import functools
import json
import re
import subprocess
from typing import get_args

import jax
import pytest
from runs.command import openpi_train

from openpi_train import cli
from openpi_train.parallel.remat import Remat
from openpi_train.planning.gpu import plugin
from openpi_train.planning.gpu.step_account import GpuAccount, PartBound, PeakBuffer
from openpi_train.planning.gpu.targets import target_of
from openpi_train.runtime.device_kinds import GIB
from openpi_train.runtime.exits import DONE, USAGE, UsageError
from openpi_train.tools import compiled_memory, gpu_programs, gpu_step, gpu_text, plan

pytestmark = pytest.mark.usefixtures("each_step_is_traced_once")
needs_plugin = pytest.mark.skipif(
    not plugin.is_installed(), reason="needs jax's CUDA plugin (no GPU): make gpu-compile makes such an environment"
)
PARTS = [
    PartBound(part="gemma/mlp", phase="forward", kernels=10, flops=2e12, moved_bytes=1e9, bound_s=0.5),
    PartBound(part="gemma/mlp", phase="backward", kernels=10, flops=4e12, moved_bytes=2e9, bound_s=1.0),
    PartBound(part="rest", phase="update", kernels=1, flops=0.0, moved_bytes=1e6, bound_s=0.001),
]
ACCOUNT = GpuAccount(
    kind="h100",
    num_devices=8,
    compile_s=30.0,
    state_bytes=2 * GIB,
    host_bytes=0,
    own_bytes=3 * GIB,
    peak_bytes=5 * GIB,
    buffers=[PeakBuffer(num_bytes=GIB, shape="f32[2,4]", instruction="fusion.7", op_name="jit(step)/optimizer/add")],
    kernels=21,
    flops=6e12,
    moved_bytes=3.001e9,
    matmul_s=1.2,
    bound_s=1.501,
    parts=PARTS,
    sent_bytes={"all-gather": 2e9},
    played_s=1.6,
    exposed_s=0.099,
    host_copies_bytes=0.0,
    libraries={},
    endless_loops=0,
)


@functools.cache
def chosen():
    experiment = cli.parse_experiment("debug", ["--exp-name", "plan", "--sharding.strategy", "zero3"])
    found = plan.make_report(experiment, plan.find_machine("h100", 8, 1, None, 50.0)).recommended
    assert found is not None
    return found


def test_the_account_is_told_as_a_table_of_parts_and_phases_beside_the_forecast():
    text = gpu_text.lines(ACCOUNT, chosen())
    assert "together 5.00 (forecast: 0.0" in text and "of 64.5: that fits" in text
    assert "1501.0 ms of kernels, of them 1200.0 ms products" in text
    assert "GB: all-gather 2.00; the schedule waits 99.0 ms of 1600.0" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("  ")]
    by_name = {row[0]: row[1:] for row in rows if row}
    assert by_name["gemma/mlp"] == ["500.0", "1000.0", "0", "0", "0", "0", "0", "1500.0", "6.00", "3.0", "20"]
    assert by_name["all"] == ["500.0", "1000.0", "0", "0", "0", "1.0", "0", "1501.0", "6.00", "3.0", "21"]
    assert by_name["1.000"] == ["f32[2,4]", "jit(step)/optimizer/add"]
    small = gpu_text.lines(dataclasses.replace(ACCOUNT, peak_bytes=65 * GIB, endless_loops=2), chosen())
    assert "that does not fit" in small and "2 loops of unknown length count once" in small


def test_several_candidates_are_compared():
    text = gpu_text.comparison([(chosen(), ACCOUNT)])
    assert text.splitlines()[-1].split()[-8:] == ["5.00", "0.01", "1501.0", "1200.0", "3", "21", "2.0", "99.0"]


def test_the_verb_is_started_with_the_flags_and_its_failure_is_told(monkeypatch):
    asked = []

    def run(command, **_):
        asked.append(command[3:])
        return subprocess.CompletedProcess(command, code, json.dumps({"account": ACCOUNT.as_json()}), "I a\nE it broke")

    monkeypatch.setattr(subprocess, "run", run)
    code = DONE
    assert gpu_step.compile_candidate(["debug", "--batch-size", "8"], chosen(), ["--devices", "8"]) == ACCOUNT
    assert asked[0][:4] == ["compile", "debug", "--batch-size", "8"] and asked[0][-3:] == ["--devices", "8", "--json"]
    code = 1
    with pytest.raises(UsageError, match=r"failed for zero3.*code 1[^$]*it broke"):
        gpu_step.compile_candidate(["debug"], chosen(), [])


@pytest.mark.parametrize("flags", [("--compiler", "gpu"), ("--compile-all",)])
def test_a_plan_without_the_plugin_says_how_to_install_it(monkeypatch, capsys, flags):
    monkeypatch.setattr(plugin, "PLUGINS", ("no_such_plugin",))
    monkeypatch.setattr(compiled_memory, "imitate", lambda *_: None)
    assert cli.run(["plan", "debug", "--devices", "8", "--device-kind", "h100", *flags]) == USAGE
    assert "pip install 'jax[cuda13]==" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_compiles_for_the_kind_where_it_can(monkeypatch, capsys):
    monkeypatch.setattr(plugin, "PLUGINS", ("no_such_plugin", "jax"))  # as if it were installed
    monkeypatch.setattr(compiled_memory, "imitate", lambda *_: None)
    seen = []
    monkeypatch.setattr(gpu_step, "compile_candidate", lambda *what: seen.append(what) or ACCOUNT)
    words = ["plan", "debug", "--devices", "8", "--device-kind", "h100", "--sharding.strategy", "zero3", "--json"]
    assert cli.run(words) == DONE
    (found,) = json.loads(capsys.readouterr().out)["compiled_for_gpus"]
    assert found["candidate"]["strategy"] == "zero3" and found["bound_s"] == ACCOUNT.bound_s
    given = ["debug", "--sharding.strategy", "zero3"]
    assert seen[0][0] == [*given, "--sharding.strategy", "zero3", "--model.remat", "full", "--grad-accum", "1"]
    assert cli.run([*words[:-1], "--compile-all", "--model.remat", "auto"]) == DONE
    assert len(seen) == 1 + len(get_args(Remat)) and "Bounds by the compiled programs" in capsys.readouterr().out


@pytest.mark.slow
def test_where_the_recommended_step_does_not_fit_the_next_one_is_compiled_and_recommended(monkeypatch, capsys):
    monkeypatch.setattr(plugin, "PLUGINS", ("jax",))
    monkeypatch.setattr(compiled_memory, "imitate", lambda *_: None)
    seen = []

    def compiled(words, one, flags):
        seen.append(one)
        return dataclasses.replace(ACCOUNT, peak_bytes=80 * GIB if len(seen) == 1 else GIB)

    monkeypatch.setattr(gpu_step, "compile_candidate", compiled)
    words = ["plan", "debug", "--devices", "8", "--device-kind", "h100", "--model.remat", "auto", "--batch-size", "512"]
    assert cli.run(words) == DONE
    text = capsys.readouterr().out
    first, other = seen
    assert other.memory.total < first.memory.total
    assert f"Recommended instead: {other.words()}, as {first.words()} needs 80.0 GiB by the compiler" in text
    seen.clear()
    assert cli.run([*words, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["recommendation"]["candidate"]["remat"] == other.policy.remat
    assert [one["candidate"]["remat"] for one in found["compiled_for_gpus"]] == [first.policy.remat, other.policy.remat]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--compile-all"], "--compile-all is for --compiler gpu"),
        (["--compiler", "gpu"], "--compiler gpu compiles, and --no-compile does not"),
    ],
)
def test_contradicting_flags_are_refused(capsys, flags, said):
    assert cli.run(["plan", "debug", "--devices", "8", "--device-kind", "h100", "--no-compile", *flags]) == USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--compiler", "gpu"), ("--compile-all",)])
def test_a_plan_that_cannot_be_compiled_for_gpus_is_refused_before_it_is_made(monkeypatch, capsys, flags):
    monkeypatch.setattr(plugin, "PLUGINS", ("no_such_plugin",))  # to install it would not help
    words = ["plan", "debug", "--devices", "8", *flags]
    assert cli.run([*words, "--device-kind", "h100", "--sharding.offload", "optimizer"]) == USAGE
    said = capsys.readouterr()
    assert "--sharding.offload optimizer cannot be compiled for GPUs" in said.err and not said.out
    for kind, wanted in (("a40", "there is no description of a40"), ("a1000", "rtx6000-ada, rtx4090. For another")):
        assert cli.run([*words, "--device-kind", kind]) == USAGE
        said = capsys.readouterr()
        assert wanted in said.err and not said.out


def test_a_plan_that_gpus_compiler_cannot_judge_is_an_estimate_where_nothing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(plugin, "PLUGINS", ("jax",))
    monkeypatch.setattr(compiled_memory, "imitate", lambda *_: None)
    monkeypatch.setattr(compiled_memory, "compile_step", lambda *_: pytest.fail("nobody asked for that"))
    words = ["plan", "debug", "--devices", "8", "--device-kind", "h100", "--sharding.offload", "optimizer"]
    assert cli.run(words) == DONE
    text = capsys.readouterr().out
    assert "memory: an estimate, within a quarter" in text
    assert "The compiler was not asked: --sharding.offload optimizer cannot be compiled for GPUs" in text
    monkeypatch.setattr(plugin, "PLUGINS", ("no_such_plugin",))
    assert cli.run(words[:-2]) == DONE
    assert "The compiler was not asked: XLA's GPU compiler comes with jax's CUDA plugin" in capsys.readouterr().out
    assert cli.run([*words[:-2], "--no-compile"]) == DONE
    assert "was not asked" not in capsys.readouterr().out


def test_an_unknown_kind_is_refused_by_the_verb_with_those_that_it_knows(monkeypatch, capsys):
    """Before the plugin is asked for, which is large."""
    monkeypatch.setattr(plugin, "PLUGINS", ("no_such_plugin",))
    assert cli.run(["compile", "debug", "--devices", "8", "--device-kind", "a1000"]) == USAGE
    said = capsys.readouterr().err
    assert "Kinds: b200, h200, h100, a100, a100-40gb, l40s, rtx6000-ada, rtx4090. For another" in said


def test_a_folder_for_the_programs_text_is_refused_before_it_is_compiled(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(plugin, "set_environment", lambda *_: [])
    words = ["compile", "debug", "--devices", "8", "--device-kind", "h100", "--dump", str(tmp_path)]
    assert cli.run(words) == USAGE
    assert f"--dump {tmp_path} is a folder" in capsys.readouterr().err


def test_a_file_for_the_programs_text_that_cannot_be_written_is_told_before_it_is_compiled(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(plugin, "set_environment", lambda *_: [])
    monkeypatch.setattr(gpu_step, "compiled_program", lambda *_: pytest.fail("it was compiled"))
    (tmp_path / "taken").touch()
    file = tmp_path / "taken" / "step.hlo"
    assert cli.run(["compile", "debug", "--devices", "8", "--device-kind", "h100", "--dump", str(file)]) == USAGE
    assert f"--dump {file} cannot be written: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "said"), [("generation", "to complete texts (--program reading, decoding)"), ("acting", "to act")]
)
def test_what_a_run_needs_between_steps_is_told_where_it_is_more(field, said):
    one = chosen()
    for between, verdict in ((one.memory.step + 10**9, "fits"), (100 * GIB, "does not fit")):
        more = dataclasses.replace(one, memory=dataclasses.replace(one.memory, **{field: between}))
        found = f"Between steps the run needs {more.memory.total / GIB:.2f} GiB by the forecast, {between / GIB:.2f} of"
        (line,) = (text for text in gpu_text.lines(ACCOUNT, more).splitlines() if text.startswith(found))
        assert said in line and line.endswith(f": that {verdict}")
    assert "Between steps" not in gpu_text.lines(ACCOUNT, one)


@pytest.mark.parametrize(
    ("name", "program", "flags", "said"),
    [
        (
            "debug",
            "step",
            ["--sharding.offload", "optimizer"],
            "--sharding.offload optimizer cannot be compiled for GPUs",
        ),
        (
            "arithmetic_sft",
            "sampling",
            [],
            "--program sampling: arithmetic_sft has no policy that samples action chunks",
        ),
        ("debug", "sampling", ["--batch-size", "0"], "--batch-size 0 must be at least 1"),
        ("debug", "decoding", [], "--program decoding: debug completes no texts"),
        ("arithmetic_sft", "reading", ["--eval.num-prompts", "0"], "arithmetic_sft completes no texts"),
        (
            "arithmetic_grpo",
            "acting",
            [],
            "--program acting: arithmetic_grpo makes no rollouts of a robot",
        ),
        ("tabletop_few_rloo", "evaluation", [], "learns from its own rollouts, and has no held-out loss"),
    ],
)
def test_a_program_that_a_run_does_not_have_is_refused(name, program, flags, said):
    experiment = cli.parse_experiment(name, ["--exp-name", "compile", *flags])
    machine = plan.find_machine("h100", 8, 1, None, 50.0)
    with pytest.raises(UsageError, match=re.escape(said)):
        gpu_programs.lowered(program, experiment, machine, target_of(machine.kind))


@pytest.mark.parametrize(
    ("name", "programs"),
    [
        ("debug", "step sampling evaluation"),
        ("arithmetic_grpo", "step reading decoding"),
        ("tabletop_few_rloo", "step sampling acting"),
    ],
)
def test_programs_of_a_run_are_not_refused(name, programs):
    experiment = cli.parse_experiment(name, ["--exp-name", "compile"])
    assert {gpu_programs.why_not(program, experiment) for program in programs.split()} == {None}


@pytest.mark.parametrize(
    ("name", "program", "cameras", "said"),
    [
        (
            "pi0_bridge_traj",
            "step",
            ["3"],
            "--cameras 3: pi0_bridge_traj has no camera slot 3; it has base_0_rgb, left_w",
        ),
        ("pi0_bridge_traj", "sampling", ["front"], "has no camera slot front"),
        ("paligemma_flow", "step", ["base_0_rgb", "front"], "--cameras base_0_rgb,front: paligemma_flow has no camera"),
        ("act_aloha_sim", "step", ["base_0_rgb"], "act_aloha_sim has no camera slot base_0_rgb; it has"),
        ("arithmetic_grpo", "step", ["base_0_rgb"], "arithmetic_grpo has a model without cameras; leave it out"),
        ("pi0_bridge_traj", "step", ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"], None),
    ],
)
def test_camera_slots_are_those_of_the_model_or_of_the_data(name, program, cameras, said):
    found = gpu_programs.why_not(program, cli.parse_experiment(name, ["--exp-name", "compile"]), cameras)
    assert found is None if said is None else said in str(found)


@pytest.mark.slow
def test_a_query_of_rl_and_the_held_out_loss_are_lowered_as_a_run_computes_them():
    """On two devices: for the rows that they act in at a time, at most all rollouts, and for one held-out batch."""
    machine = plan.find_machine("h100", 2, 1, None, 50.0)

    def training(name, *flags):
        experiment = cli.parse_experiment(name, ["--exp-name", "compile", *flags])
        return gpu_programs.Training.of(experiment, machine, jax.devices()[:2], ())

    for episodes_per_device in (8, 1_000):
        acting = training("tabletop_few_rloo", "--rl.episodes-per-device", str(episodes_per_device))
        with jax.set_mesh(acting.trainer.plan.real_mesh):
            drawn = acting.query().out_info
        model, rollouts = acting.experiment.model, acting.experiment.rl.num_rollouts
        rows = min(2 * episodes_per_device, rollouts)
        assert drawn["actions"].shape == (rows, model.action_horizon, model.action_dim)
        assert 16 < rollouts < 2_000
    assert {name for name in drawn if name.startswith("kept/")}
    held_out = training("debug")
    with jax.set_mesh(held_out.trainer.plan.real_mesh):
        assert "loss" in held_out.evaluation().out_info


def test_a_program_without_a_forecast_is_told_alone():
    machine = plan.find_machine("h100", 8, 1, None, 50.0)
    text = gpu_text.lines_alone(ACCOUNT, machine)
    assert "parameters and inputs 2.00 GiB, the program's own 3.00, together 5.00 of 64.5: that fits" in text
    assert "1501.0 ms of kernels" in text and "forecast" not in text
    large = dataclasses.replace(ACCOUNT, peak_bytes=65 * GIB)
    assert "that does not fit" in gpu_text.lines_alone(large, machine)


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("debug", "sampling"),
        ("pusht_dp", "sampling"),
        ("debug", "evaluation"),
        ("tabletop_few_rloo", "acting"),
        ("arithmetic_grpo", "reading"),
        ("arithmetic_grpo", "decoding"),
    ],
)
def test_other_programs_are_compiled_for_gpus_that_are_not_there(name, program):
    flags = ("--devices", "1", "--device-kind", "h100", "--batch-size", "64", "--program", program, "--json")
    done = openpi_train("compile", name, *flags)
    assert done.returncode == DONE, done.stderr
    found = json.loads(done.stdout)["account"]
    assert found["bound_s"] > 0 and {part["phase"] for part in found["parts"]} <= {"forward", "gather", "other"}


@needs_plugin
@pytest.mark.slow
def test_a_step_is_compiled_for_gpus_that_are_not_there(tmp_path):
    flags = ("--devices", "4", "--device-kind", "h100", "--sharding.strategy", "zero3", "--sharding.min-shard-mib", "0")
    dump = tmp_path / "step.hlo"
    done = openpi_train("compile", "debug", *flags, "--model.remat", "full", "--dump", str(dump), "--json")
    assert done.returncode == DONE, done.stderr
    found = json.loads(done.stdout)
    account, memory = found["account"], found["forecast"]["bytes_per_device"]
    batch = 2 * (32 * 32 * 3 + 2_000)  # two rows of pictures on each device
    assert account["state_bytes"] == pytest.approx(memory["state"], rel=0.02, abs=batch)
    assert account["flops"] * 4 == pytest.approx(found["forecast"]["flops_per_step"], rel=0.05)
    assert {part["phase"] for part in account["parts"]} >= {"forward", "backward", "recomputation", "gather", "update"}
    assert len(account["buffers"]) == 20 and account["endless_loops"] == 0
    assert "__cublas" in dump.read_text()


@needs_plugin
@pytest.mark.slow
def test_an_unrolled_step_multiplies_and_sends_as_much_in_fewer_kernels():
    flags = ("--devices", "4", "--device-kind", "h100", "--sharding.strategy", "zero3", "--sharding.min-shard-mib", "0")
    accounts = []
    for layers in ("False", "True"):
        done = openpi_train("compile", "debug", *flags, "--model.remat", "dots", "--unroll-layers", layers, "--json")
        assert done.returncode == DONE, done.stderr
        accounts.append(json.loads(done.stdout)["account"])
    looped, unrolled = accounts
    assert unrolled["flops"] == pytest.approx(looped["flops"], rel=0.01)
    assert unrolled["sent_bytes"] == pytest.approx(looped["sent_bytes"], rel=0.01)
    assert unrolled["kernels"] < looped["kernels"] and unrolled["moved_bytes"] < looped["moved_bytes"]


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flags", "expected"),
    [("h100", (), True), ("h100", ("--model.attention", "xla"), False), ("a100", (), False)],
)
def test_a_step_has_the_attention_that_a_run_on_such_a_device_has(kind, flags, expected, tmp_path):
    dump = tmp_path / "step.hlo"
    given = ("--devices", "2", "--device-kind", kind, "--model.dtype", "bfloat16", "--dump", str(dump))
    done = openpi_train("compile", "debug", *given, *flags)
    assert done.returncode == DONE, done.stderr
    assert ("__cudnn$fmha" in dump.read_text()) == expected
