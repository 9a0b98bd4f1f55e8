"""The `plan` verb: the debug experiment through the compiler, pi0's real sizes by abstract evaluation only."""

import json
import re
from typing import get_args

import flops_by_hand
import pytest
from runs.command import openpi_train

from openpi_train import cli
from openpi_train.models.pi0 import Pi0Config
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.parallel.remat import Remat
from openpi_train.parallel.strategy import CUT
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.runtime.device_kinds import GIB
from openpi_train.runtime.exits import DONE, USAGE, UsageError
from openpi_train.tools import compiled_memory, plan, plan_text

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("each_step_is_traced_once")]

AUTO = ("--model.remat", "auto")


def report(name: str, *flags: str, devices=8, kind="h200", hosts=1, gib=None, network_gb_s=50.0):
    experiment = cli.parse_experiment(name, ["--exp-name", "plan", *flags])
    return plan.make_report(experiment, plan.find_machine(kind, devices, hosts, gib, network_gb_s, 0.5))


@pytest.mark.slow
def test_what_the_compiler_says_is_told_beside_the_forecast():
    flags = ("--devices", "4", "--device-kind", "RTX 4090", "--sharding.min-shard-mib", "0", *AUTO, "--json")
    done = openpi_train("plan", "debug", *flags, "--sharding.strategy", "zero3", "--compiler", "cpu")
    assert done.returncode == DONE, done.stderr
    found = json.loads(done.stdout)
    chosen, compiled = found["recommendation"]["candidate"], found["compiled"]
    assert [one["strategy"] for one in found["candidates"]] == ["zero3"] * len(get_args(Remat))
    assert compiled["num_devices"] == 4 and compiled["program_bytes"] > 0
    # The compiled arguments are the state and the batch: two rows of pictures on each device.
    batch = 2 * (32 * 32 * 3 + 2_000)
    assert compiled["state_bytes"] == pytest.approx(chosen["bytes_per_device"]["state"], rel=0.02, abs=batch)


def run(monkeypatch, capsys, *flags: str) -> tuple[int, str]:
    """Exit code and output of the verb on the debug experiment, in this process, where jax has long started."""
    monkeypatch.setattr(compiled_memory, "imitate", lambda num_devices, tensor_devices: None)
    code = cli.run(["plan", "debug", *AUTO, *flags])
    return code, capsys.readouterr().out


def test_the_tables_end_with_a_recommendation_as_flags(monkeypatch, capsys):
    code, text = run(monkeypatch, capsys, "--devices", "4", "--device-kind", "h100", "--hosts", "2", "--no-compile")
    assert code == DONE
    assert text.startswith("debug on 4 x h100, 2 hosts: batch 8") and "network: 50 GB/s out of a host" in text
    for strategy in CUT:
        assert len(re.findall(rf"^  {strategy} ", text, re.MULTILINE)) == 1 + len(get_args(Remat))
    typed = " ".join(("debug", "--exp-name", "NAME", *AUTO))
    told = f"  python -m openpi_train {typed} \\\n  --sharding.strategy replicated --model.remat none --grad-accum 1\n"
    assert text.endswith(told)
    assert "does not choose --grad-accum" not in text and "Length: " in text and " hours, without compiling" in text


@pytest.mark.slow
def test_accumulation_that_a_run_would_not_choose_by_itself_is_told(monkeypatch, capsys):
    flags = ("--devices", "1", "--device-kind", "h100", "--batch-size", "512", "--no-compile", "--device-gib", "0.5")
    code, text = run(monkeypatch, capsys, *flags)
    assert code == DONE
    number = int(re.search(r"--grad-accum (\d+)\n$", text)[1])
    assert number > 1
    assert f"does not choose --grad-accum {number} by itself: without the flag it takes 1, " in text
    assert "takes 1, and does not fit." in text or "takes 1, which needs another of these candidates, slower" in text


@pytest.mark.slow
def test_too_small_devices_are_told_with_code_2_and_what_helps(monkeypatch, capsys):
    flags = ("--devices", "2", "--device-kind", "h100", "--device-gib", "0.001")
    code, text = run(monkeypatch, capsys, *flags)
    assert code == USAGE
    assert "Nothing fits: replicated, remat full" in text and "take more or larger devices" in text
    code, text = run(monkeypatch, capsys, *flags, "--json")
    assert code == USAGE and json.loads(text)["recommendation"]["flags"] is None


@pytest.mark.parametrize(("program_gib", "verdict"), [(20, "that fits even so"), (80, "that would not fit")])
def test_the_compilers_bytes_are_compared_with_the_device(program_gib, verdict):
    chosen = report("debug", kind="h100").recommended
    assert chosen is not None
    compiled = compiled_memory.Compiled(
        num_devices=8,
        fsdp_devices=1,
        state_bytes=GIB,
        program_bytes=program_gib * GIB,
        forecast_bytes=3 * GIB,
        compile_s=1.0,
    )
    text = plan_text.compiled(compiled, chosen)
    assert f"Together {program_gib + 1}.0 GiB of 64.5: {verdict}" in text and "widens much of bfloat16" in text
    assert f"own {program_gib}.00 GiB (forecast: gradients, copy and activations 3.00)" in text


def test_impossible_flags_are_refused():
    with pytest.raises(UsageError, match="--hosts 3 does not divide --devices 8"):
        report("debug", hosts=3)
    with pytest.raises(UsageError, match="--device-gib -1 must be above 0"):
        report("debug", gib=-1.0)
    with pytest.raises(UsageError, match="--network-gb-s 0 must be above 0"):
        report("debug", network_gb_s=0.0)
    with pytest.raises(UsageError, match="--batch-size 8 is not a multiple of the 16 devices"):
        report("debug", devices=16)
    with pytest.raises(UsageError, match="--freeze 'nothing' matches no parameter"):
        report("debug", "--freeze", "nothing")


@pytest.mark.slow
def test_a_policy_that_is_given_is_the_only_one_and_its_work_is_counted():
    found = report("debug", "--model.remat", "full")
    assert {one.policy.remat for one in found.forecasts} == {"full"}
    assert found.forecasts[0].policy.flops_per_row > 1.05 * found.model_flops_per_row


@pytest.mark.slow
def test_pi0_without_recomputation_executes_what_is_counted_by_hand():
    def of(attention: str) -> tuple[plan.Report, dict[str | None, float]]:
        found = report("pi0_bridge_traj", "--model.attention", attention)
        return found, {
            one.policy.remat: one.policy.flops_per_row / found.model_flops_per_row for one in found.forecasts
        }

    (found, flops), (by_cudnn, again) = of("xla"), of("auto")
    assert 1 <= flops["none"] < 1.002  # attention's, as devices that gather layers compute them again
    assert by_cudnn.model_flops_per_row == pytest.approx(found.model_flops_per_row, rel=1e-3)  # tokens are padded
    assert again["none"] == again["products"] < 1.003  # cuDNN's backward pass computes the weights again
    by_hand = 3 * flops_by_hand.pi0(found.experiment.model, 1)  # inputs have no gradient
    assert found.model_flops_per_row == pytest.approx(by_hand, rel=1e-3)
    assert list(flops) == ["none", "products", "dots", "attention", "full"]
    assert 1 <= flops["dots"] < flops["attention"] < flops["full"] < 4 / 3


@pytest.mark.slow
def test_small_devices_get_more_cutting_recomputation_or_accumulation():
    chosen = {gib: report("pi0_bridge_traj", gib=gib).recommended for gib in (140.0, 24.0, 15.0)}
    found = {gib: (one.layout.strategy, one.policy.remat, one.grad_accum) for gib, one in chosen.items() if one}
    # XLA for GPUs needs 35.1, 18.6 where jax may take 21.6 of 24, and 10.6 where 15 leave 12.1 to plan with.
    assert found == {140.0: ("zero3", "none", 1), 24.0: ("zero3", "dots", 2), 15.0: ("zero3", "full", 1)}
    assert report("pi0_bridge_traj", gib=8.0).recommended is None


def test_a_tensor_group_shares_out_layers_and_what_they_keep_of_a_row():
    flags = ("--model.remat", "full")
    whole, shared = (report("pi0_bridge_traj", *flags, "--sharding.tensor-devices", n) for n in ("1", "2"))
    one, two = whole.forecasts[0], shared.forecasts[0]
    assert (one.layout.strategy, one.rows) == ("replicated", 32) and (two.layout.strategy, two.rows) == (
        "replicated",
        64,
    )
    assert two.layout.memory(1).total < 0.6 * one.layout.memory(1).total
    # Of the residual stream, the norms and the one key head each has all.
    assert 0.5 < two.policy.activation_bytes_per_row / one.policy.activation_bytes_per_row < 0.8
    # Keys and values, of one head, are computed by both.
    assert one.policy.flops_per_row < two.policy.flops_per_row < 1.02 * one.policy.flops_per_row
    summed = 64 * two.policy.summed_bytes_per_row  # an all-reduce of two sends as much
    assert sum(flow.within for flow in two.flows) == sum(flow.within for flow in two.layout.flows(1, 0.0)) + summed
    assert [each.layout.fsdp_devices for each in shared.forecasts] == [1, 4, 4, 4]
    assert "tensor groups of 2 devices" in plan_text.tables(shared, ["debug"])


def test_moments_in_host_memory_leave_room_and_take_time():
    flags = ("--model.remat", "full")
    plain, off = (report("pi0_bridge_traj", *flags, "--sharding.offload", n) for n in ("none", "optimizer+ema"))
    for one, two in zip(plain.forecasts, off.forecasts, strict=True):
        before, after = one.memory, two.memory
        assert before.state == after.state + after.host
        assert two.step_s - two.moving_s == pytest.approx(one.step_s - one.moving_s + after.host / 25e9)
    text = plan_text.tables(off, ["debug"])
    assert "optimizer+ema in host memory" in text and "GiB in host memory  to and fro s" in text


def test_between_slow_hosts_hsdp_is_recommended_and_its_flags_are_understood():
    found = report("pi0_bridge_traj", devices=16, kind="a100-40gb", hosts=2, network_gb_s=25.0)
    assert found.recommended is not None
    words = plan_text.flags(found.experiment, found.recommended)
    assert words == ["--sharding.strategy", "hsdp", "--fsdp-devices", "8", "--model.remat", "dots", "--grad-accum", "1"]
    experiment = cli.parse_experiment("pi0_bridge_traj", ["--exp-name", "x", *words])
    experiment.check(16)
    assert (experiment.sharding.strategy, experiment.fsdp_devices) == ("hsdp", 8)


@pytest.mark.parametrize("name", ["gsm8k_dpo_llama32_1b", "gsm8k_reward_llama32_1b", "gsm8k_grpo_qwen25_05b"])
def test_the_flags_of_a_language_model_within_another_are_understood(name):
    found = report(name, devices=8, kind="h100")
    assert found.recommended is not None
    experiment = cli.parse_experiment(name, ["--exp-name", "x", *plan_text.flags(found.experiment, found.recommended)])
    assert experiment.model.compute.remat == found.recommended.policy.remat


@pytest.mark.parametrize(
    ("name", "trained", "frozen", "backward"),
    [
        ("pi0_bridge_traj_lora", 468, 2820, 1.0),
        ("pi05_bridge", 3353, 0, 1.0),
        ("pi05_bridge_lora", 467, 2936, 1.0),
        ("pi05_bridge_insulated", 3353, 0, 1.0),
        ("pi0_fast_bridge", 2923, 0, 1.0),
        ("pi0_fast_bridge_lora", 443, 2509, 1.0),
        ("paligemma_flow", 3372, 0, 1.0),
        ("paligemma_flow_lora", 477, 2923, 1.0),
        ("paligemma_flow_head", 449, 2923, 0.5),
        ("paligemma_flow_frozen_tower", 2958, 415, 1.0),
        ("paligemma_tokens", 2923, 0, 1.0),
        ("paligemma_tokens_lora", 28, 2923, 1.0),
    ],
)
def test_every_way_of_training_a_vla_is_planned_and_what_is_frozen_takes_two_bytes(name, trained, frozen, backward):
    """Parameters in millions; the share of full training's work that is left at most."""
    flags = ("--model.remat", "full", "--batch-size", "256")
    found = report(name, *flags)
    assert (round(found.num_params / 1e6), round(found.num_frozen / 1e6)) == (trained, frozen)
    assert found.recommended is not None
    whole = found.forecasts[0].layout.memory(1)  # all gradients, as they are at the end of the backward pass
    assert found.forecasts[0].layout.strategy == "replicated"
    assert whole.frozen == 2 * found.num_frozen
    assert whole.params == 4 * found.num_params
    assert 2 * found.num_params <= whole.grads <= whole.params  # those of a stack that is cut are bfloat16
    assert whole.optimizer == pytest.approx(2 * whole.params, rel=1e-3)
    assert whole.ema == (whole.params if found.experiment.ema_decay is not None else 0)
    # Forward, forward again, and twice that backward: less where there is nothing to learn.
    by_hand = {Pi0Config: flops_by_hand.pi0, Pi0FastConfig: flops_by_hand.pi0_fast}
    model = found.experiment.model
    forward = by_hand.get(type(model), flops_by_hand.paligemma)(model, len(found.experiment.data.cameras))
    assert found.forecasts[0].policy.flops_per_row <= backward * 4 * forward
    assert ("  frozen  " in plan_text.tables(found, ["debug"])) == (frozen > 0)


def test_a_policy_whose_blocks_are_not_recomputed_is_planned_without_that_flag_and_with_its_simulators():
    found = report("metaworld_rloo", devices=4, hosts=2)
    text = plan_text.tables(found, ["metaworld_rloo"])
    assert text.endswith("metaworld_rloo --exp-name NAME \\\n  --sharding.strategy replicated --grad-accum 1")
    loop, rl = found.experiment.robot_eval.closed_loop, found.experiment.rl
    assert isinstance(rl, RobotRL)
    assert f"simulators for evaluations: {2 * loop.episodes_per_device} of " in text
    assert f"simulators for rollouts: {min(2 * rl.slots * rl.episodes_per_device, rl.num_rollouts)} of " in text
