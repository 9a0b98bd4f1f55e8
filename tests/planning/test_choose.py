"""Strategy and rematerialisation policy of a run that was not told which; traffic of pi0's real sizes."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest
from openpi_train_configs.debug import debug
from planning import compiled_steps

from openpi_train.parallel.mesh import make_mesh, planned_mesh
from openpi_train.parallel.remat import RematChoice
from openpi_train.parallel.strategy import Plan, ShardingConfig
from openpi_train.planning.choose import layouts, on_kind
from openpi_train.planning.forecast import USABLE, Machine, instead, least_memory, recommend
from openpi_train.planning.memory import OFF, predict
from openpi_train.planning.traffic import bytes_beside, formula_by_axes, formula_bytes
from openpi_train.runtime.device_kinds import GIB, UNKNOWN, find_kind
from openpi_train.runtime.device_limits import memory_bytes, total_bytes
from openpi_train.runtime.exits import UsageError
from openpi_train.training.prepare import forecasts, policy_costs, whole_layout
from openpi_train.training.settling import Settling

pytestmark = pytest.mark.slow

PI0 = 3_238_048_528
AUTO = dataclasses.replace(debug.model, remat="auto")


def plan(strategy: str, shards: int) -> Plan:
    """A plan for eight devices, so many of which share one copy."""
    return Plan(mesh=make_mesh(shards, jax.devices()[:8]), strategy=strategy)


def weights(num: int) -> dict:
    return {"weight": jax.ShapeDtypeStruct((num // 16, 16), jnp.float32)}


@pytest.mark.parametrize(
    ("strategy", "shards", "micros", "gigabytes"),
    [
        # PERFORMANCE.md, pi0 on 8 devices: 8 P, 6 P, 6 P, 8 P times 7/8.
        ("replicated", 1, 1, 22.67),
        ("zero1", 8, 1, 17.0),
        ("zero2", 8, 1, 17.0),
        ("zero3", 8, 1, 22.67),
        ("zero1", 8, 4, 17.0),
        ("zero2", 8, 4, 51.0),
        ("zero3", 8, 4, 90.67),
        ("hsdp", 4, 1, 19.43 + 3.24),
    ],
)
def test_traffic_of_pi0_is_that_of_the_formula(strategy, shards, micros, gigabytes):
    sent = formula_bytes(plan(strategy, shards), weights(PI0), 2, micros)
    assert sent / 1e9 == pytest.approx(gigabytes, rel=1e-3)


@pytest.mark.parametrize(
    ("strategy", "shards", "gigabytes"),
    [("replicated", 1, 11.33), ("zero1", 8, 11.33), ("zero3", 8, 17.0), ("hsdp", 4, 14.57 + 1.62)],
)
def test_gradients_in_bfloat16_are_half_as_much(strategy, shards, gigabytes):
    narrow = dataclasses.replace(plan(strategy, shards), reduce_dtype="bfloat16")
    assert formula_bytes(narrow, weights(PI0), 2) / 1e9 == pytest.approx(gigabytes, rel=1e-3)
    beside = bytes_beside(narrow, weights(PI0), 2)
    assert beside == (formula_by_axes(narrow, weights(PI0), 2)["fsdp",] if narrow.cuts("grads") else 0)


@pytest.mark.parametrize(
    ("strategy", "micros", "unrolled", "each"),
    [  # bytes of a parameter: gathered in bfloat16, and its gradient in float32
        ("zero1", 1, False, 0),
        ("zero2", 2, False, 2 * 4),
        ("zero3", 2, False, 2 * (2 + 2 + 4)),
        ("zero1", 1, True, 2 + 4),
        ("zero1", 2, True, 0),
        ("zero2", 1, True, 2 + 4),
        ("zero3", 1, True, 2 + 2 + 4),
    ],
)
def test_what_layers_send_while_others_run(strategy, micros, unrolled, each):
    params = {**weights(PI0), "early": jax.ShapeDtypeStruct((2**20, 16), jnp.float32)}
    sent = bytes_beside(plan(strategy, 8), params, 2, micros, {"early"}, unrolled=unrolled)
    assert sent == pytest.approx(each * PI0 * 7 / 8)


@pytest.mark.parametrize(
    ("strategy", "micros", "each"), [("replicated", 1, 0), ("zero1", 2, 2), ("zero2", 2, 2), ("zero3", 2, 2 * (2 + 2))]
)
def test_fixed_weights_are_gathered_like_others_and_have_no_gradients_to_send(strategy, micros, each):
    cut, trained = plan(strategy, 1 if strategy == "replicated" else 8), weights(16 * 1024)
    fixed = {f"fixed/{path}": leaf for path, leaf in weights(PI0).items()}

    def more(formula, **how):
        return formula(cut, trained, 2, micros, (), fixed, **how) - formula(cut, trained, 2, micros, (), **how)

    sent = more(lambda *sizes: sum(formula_by_axes(*sizes).values()))
    assert sent == pytest.approx(each * PI0 * 7 / 8)
    assert more(bytes_beside, unrolled=True) == pytest.approx(sent if strategy == "zero3" else 0)


def given(strategy="auto", fsdp=None, tensor=1):
    sharding = ShardingConfig(strategy=strategy, tensor_devices=tensor)
    return dataclasses.replace(debug, sharding=sharding, fsdp_devices=fsdp)


@pytest.mark.parametrize(
    ("experiment", "devices", "per_host", "expected"),
    [
        (given(), 1, 1, [("replicated", 1)]),
        (given(fsdp=1), 8, 8, [("replicated", 1)]),
        (given(fsdp=4), 8, 8, [("zero3", 4)]),
        (given("zero2"), 8, 4, [("zero2", 8)]),
        (given("zero2", 4), 8, 4, [("zero2", 4)]),
        (given("hsdp"), 8, 4, [("hsdp", 4)]),
        (given("replicated"), 8, 4, [("replicated", 1)]),
        (given(), 8, 8, [("replicated", 1), ("zero1", 8), ("zero2", 8), ("zero3", 8)]),
        (given(), 8, 4, [("replicated", 1), ("zero1", 8), ("zero2", 8), ("hsdp", 4), ("zero3", 8)]),
        (given(), 4, 1, [("replicated", 1), ("zero1", 4), ("zero2", 4), ("zero3", 4)]),
        # What 12 devices do not divide, groups of 4 may.
        (
            given(),
            12,
            12,
            [("replicated", 1), ("zero1", 12), ("zero1", 4), ("zero2", 12), ("zero2", 4), ("zero3", 12), ("zero3", 4)],
        ),
        (
            given(),
            24,
            8,
            [
                *(("replicated", 1), ("zero1", 24), ("zero1", 8), ("zero2", 24), ("zero2", 8)),
                *(("hsdp", 8), ("zero3", 24)),
            ],
        ),
        (given(), 3, 3, [("replicated", 1), ("zero1", 3), ("zero2", 3), ("zero3", 3)]),
        (given(tensor=2), 8, 4, [("replicated", 1), ("zero1", 4), ("zero2", 4), ("hsdp", 2), ("zero3", 4)]),
        (given("hsdp", tensor=4), 8, 4, [("hsdp", 1)]),
    ],
)
def test_what_is_given_is_taken_and_the_rest_to_choose_from(experiment, devices, per_host, expected):
    assert layouts(experiment, devices, per_host) == expected


def chosen(caplog, gib: float, num_devices: int = 1, **model) -> tuple[str, str | None, str]:
    """Strategy and policy of the debug experiment on devices of so many GiB, and what the log said."""
    one = dataclasses.replace(debug, exp_name="x", model=dataclasses.replace(debug.model, **model))
    machine = Machine(kind=UNKNOWN, num_devices=num_devices, num_hosts=1, available_bytes=int(gib * GIB))
    with caplog.at_level(logging.INFO):
        found = Settling(given=one, machine=machine).chosen
    return found.layout.strategy, found.policy.remat, caplog.text


@pytest.mark.parametrize(
    ("kind", "tensor_devices", "given", "expected"),
    [
        ("h100", 1, "auto", True),
        ("h100", 2, "auto", False),
        (None, 1, "auto", False),
        ("h100", 1, False, False),
        (None, 2, True, True),
    ],
)
def test_layers_are_unrolled_on_gpus_without_tensor_groups_or_as_given(kind, tensor_devices, given, expected):
    model = dataclasses.replace(debug.model, remat="dots")
    sharding = dataclasses.replace(debug.sharding, tensor_devices=tensor_devices)
    one = dataclasses.replace(debug, model=model, unroll_layers=given, sharding=sharding)
    machine = Machine(kind=find_kind(kind) if kind else UNKNOWN, num_devices=2, num_hosts=1, available_bytes=GIB)
    assert on_kind(one, machine).unroll_layers is expected
    assert Settling(given=one, machine=machine).on_kind.unroll_layers is expected


def test_unrolled_layers_of_tensor_groups_are_never_computed_again_as_a_whole():
    """XLA for GPUs would keep what they should compute again: 23.3 GiB of full pi0 where 12.4 are forecast."""
    machine = Machine(kind=UNKNOWN, num_devices=2, num_hosts=1, available_bytes=GIB)

    def found(remat: RematChoice, tensor_devices: int) -> list[str | None]:
        sharding = dataclasses.replace(debug.sharding, tensor_devices=tensor_devices)
        model = dataclasses.replace(AUTO, remat=remat)
        one = dataclasses.replace(debug, model=model, sharding=sharding, unroll_layers=True)
        layout = whole_layout(one, Plan(mesh=planned_mesh(1, 1), strategy="replicated"))
        return list(dict.fromkeys(forecast.policy.remat for forecast in forecasts(one, layout, machine, [1])))

    assert found("auto", 1) == ["none", "products", "dots", "attention", "full"]
    assert found("auto", 2) == ["none", "products", "dots", "attention"] and found("dots", 2) == ["dots"]
    sharding = dataclasses.replace(debug.sharding, tensor_devices=2)
    refused = dataclasses.replace(debug, exp_name="x", model=dataclasses.replace(AUTO, remat="full"), sharding=sharding)
    refused.check(2)
    with pytest.raises(UsageError, match=r"tensor-devices 2 and remat full: .*Leave --unroll-layers at auto"):
        dataclasses.replace(refused, unroll_layers=True).check(2)


def test_the_policy_that_recomputes_least_of_those_that_fit_is_used_and_the_log_says_why(caplog):
    layout = whole_layout(debug, Plan(mesh=planned_mesh(1, 1), strategy="replicated"))
    memory = predict(layout, Plan(mesh=planned_mesh(1, 1), strategy="replicated"), dtype=jnp.float32)
    costs = policy_costs(dataclasses.replace(debug, model=AUTO), layout)
    rows = {one.remat: 8 * one.activation_bytes_per_row for one in costs}
    assert rows["none"] > rows["products"] > rows["dots"] > rows["attention"] > rows["full"]
    just_enough = (memory.state + memory.beside + rows["attention"] + 2**20) / USABLE / GIB
    for gib, name in ((100.0, "none"), (just_enough, "attention")):
        caplog.clear()
        _, remat, text = chosen(caplog, gib, remat="auto")
        assert remat == name and f"replicated, remat {name}, grad_accum 1" in text
        # Where a step is small no other policy is looked at.
        assert ("else there was: replicated, remat" in text) == (name != "none")
    assert "none, products, dots would recompute less and do not fit" in caplog.text


def test_where_nothing_fits_it_is_what_needs_least(caplog):
    strategy, remat, text = chosen(caplog, 0.001, remat="auto")
    assert (strategy, remat) == ("replicated", "full") and "nothing fits" in text


def test_a_policy_that_is_given_is_used_where_another_would_fit_better(caplog):
    assert chosen(caplog, 0.001, remat="dots")[1] == "dots"


def test_where_nothing_is_large_enough_to_cut_nothing_is(caplog):
    assert chosen(caplog, 100.0, num_devices=8)[0] == "replicated"


def test_the_memory_that_a_choice_goes_by_is_the_same_at_every_start():
    device = jax.devices()[0]
    assert total_bytes(device) == total_bytes(device) >= memory_bytes(device)
    assert total_bytes(device, processes_on_host=4) == total_bytes(device) // 4


@pytest.fixture(scope="module")
def of_pi0():
    """What is forecast of full pi0 on 8 H100 with every strategy and policy, and what XLA's GPU compiler says."""
    return compiled_steps.forecasts_of("pi0_bridge_traj", "", compiled_steps.h100(8)), compiled_steps.of_pi0()


def test_all_of_pi0_is_estimated_within_a_quarter(of_pi0):
    forecasts, compiled = of_pi0
    for one in forecasts:
        needed = compiled[one.layout.strategy, one.policy.remat].gib
        assert (one.memory.state + one.memory.step) / GIB == pytest.approx(needed, rel=OFF)


@pytest.mark.parametrize("off", [0.8, 1.0, 1.2])
@pytest.mark.parametrize("gib", [10, 12, 14, 16, 20, 24, 28, 32, 36, 40, 48, 60, 80, 100, 141])
def test_what_is_taken_fits_by_the_compiler_and_is_nearly_as_fast_as_the_best_that_fits(of_pi0, gib, off):
    """Devices with so much memory; `off`: as if the compiler's programs needed so many times as much."""
    forecasts, compiled = of_pi0
    machine = compiled_steps.h100(8, gib=gib)
    forecasts = [dataclasses.replace(one, machine=machine) for one in forecasts]
    fitting = [step for step in compiled.values() if off * step.gib * GIB <= machine.usable_bytes]
    taken, tried = recommend(forecasts)[0] or least_memory(forecasts), 0
    while taken is not None:
        step = compiled[taken.layout.strategy, taken.policy.remat]
        if step in fitting:
            break
        taken, tried = instead(forecasts, taken, int(off * step.gib * GIB)), tried + 1
    assert (taken is not None) == bool(fitting) and tried <= 2
    if taken is not None and off >= 1:  # who compiles what fits looks for nothing faster
        assert step.seconds <= 1.05 * min(other.seconds for other in fitting)
