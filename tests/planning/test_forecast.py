"""Time and memory of candidates, and the choice among them, on made-up numbers that can be added up by hand."""

import dataclasses
import re

import pytest

from openpi_train import registry
from openpi_train.cli import parse_experiment
from openpi_train.planning.costs import RematCost
from openpi_train.planning.forecast import LayoutCost, Machine, forecast, recommend
from openpi_train.planning.links import Flow
from openpi_train.planning.memory import DoesNotFit, Memory, require
from openpi_train.runtime.device_kinds import GIB, UNKNOWN, find_kind

H100 = find_kind("h100")  # 989 TFLOP/s, 450 GB/s, memory of 3350 GB/s
MACHINE = Machine(
    kind=H100, num_devices=4, num_hosts=1, available_bytes=90 * GIB, network_gb_s=50.0, efficiency=0.5
)  # of 90 GiB 81 can be used


def layout(strategy: str, gib: int, sent: float) -> LayoutCost:
    memory = Memory(params=gib * GIB, frozen=0, optimizer=0, ema=0, grads=0, compute_copy=0, activations=0)
    return LayoutCost(
        strategy=strategy,
        fsdp_devices=4,
        memory=lambda n: memory,
        flows=lambda n, summed: [Flow(within=n * sent + summed, between=0.0)],
    )


def policy(remat: str, flops: float, gib: float) -> RematCost:
    return RematCost(remat=remat, flops_per_row=flops, model_flops_per_row=flops, activation_bytes_per_row=gib * GIB)


NONE, FULL = policy("none", 1e12, 4), policy("full", 1.25e12, 1)
ALL = [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("gib", "expected"),
    # 8 rows on each of the 4 devices: 81 GiB less the state, over 4 GiB per row.
    [(40, (1, 8, 10, True)), (60, (2, 4, 5, True)), (77, (8, 1, 1, True)), (78, (8, 1, 0, False))],
)
def test_the_least_accumulation_that_fits_is_taken(gib, expected):
    one = forecast(MACHINE, layout("zero3", gib, 0), NONE, 32, ALL)
    assert (one.grad_accum, one.rows, one.most_rows, one.fits) == expected
    assert one.memory.activations == one.rows * 4 * GIB


def test_the_backward_pass_frees_activations_as_it_makes_gradients_so_the_larger_of_both_counts():
    grads = dataclasses.replace(layout("replicated", 20, 0).memory(1), grads=30 * GIB)
    held = dataclasses.replace(
        layout("replicated", 20, 0),
        memory=lambda micros: dataclasses.replace(grads, micro_grads=(micros > 1) * 10 * GIB),
    )
    assert [forecast(MACHINE, held, NONE, 4 * rows, [1]).memory.total // GIB for rows in (5, 8)] == [50, 52]
    # Of several micro-batches the sum is there, and the gradients of one or its activations.
    assert [forecast(MACHINE, held, NONE, 4 * rows, [2]).memory.total // GIB for rows in (4, 8)] == [60, 66]
    assert [forecast(MACHINE, held, NONE, 4 * 8, [n]).most_rows for n in (1, 2)] == [(81 - 20) // 4, (81 - 50) // 4]


def test_rows_are_there_beside_what_is_computed_from_them_all_micro_batches_of_them():
    of_rows = dataclasses.replace(NONE, batch_bytes_per_row=GIB)
    one = forecast(MACHINE, layout("replicated", 20, 0), of_rows, 32, [2])
    assert (one.memory.batch, one.memory.total) == (8 * GIB, (20 + 8 + 4 * 4) * GIB)


def test_where_none_fits_it_is_the_one_that_needs_least_for_sums_take_memory_too():
    memory = layout("replicated", 60, 0).memory(1)
    heavy = dataclasses.replace(
        layout("replicated", 60, 0),
        memory=lambda micros: dataclasses.replace(memory, micro_grads=(micros > 1) * 40 * GIB),
    )
    one = forecast(MACHINE, heavy, NONE, 32, ALL)
    assert (one.grad_accum, one.rows, one.fits) == (1, 8, False)


def test_time_is_work_over_rate():
    one = forecast(MACHINE, layout("zero3", 60, 3.6e9), NONE, 32, ALL)
    assert one.compute_s == pytest.approx(32e12 / (4 * 989e12 * 0.5))
    assert one.sending_s == pytest.approx(2 * 3.6e9 / (0.8 * 450e9))  # two micro-batches
    assert one.moving_s == pytest.approx(2 * 60 * GIB / (0.9 * 3350e9))
    assert one.step_s == pytest.approx(one.compute_s + one.moving_s + one.sending_s)
    assert one.overlapped_s == pytest.approx(max(one.compute_s + one.moving_s, one.sending_s))
    assert one.as_json()["samples_per_s"] == pytest.approx(32 / one.step_s)


@pytest.mark.parametrize(("beside", "rows"), [(1e9, 32), (6e9, 8)])
def test_three_quarters_of_what_is_sent_beside_products_are_hidden_or_of_the_products(beside, rows):
    plain = layout("zero3", 1, 8e9)

    def forecast_with(**flow):
        hiding = dataclasses.replace(plain, beside=lambda n: [Flow(**flow)])
        return forecast(MACHINE, hiding, NONE, rows, [1])

    one, other = forecast(MACHINE, plain, NONE, rows, [1]), forecast_with(within=beside, between=0.0)
    shorter = min(beside / (0.8 * 450e9), rows * 1e12 / (4 * 989e12 * 0.5))
    assert one.step_s - other.step_s == pytest.approx(0.75 * shorter) and one.overlapped_s == other.overlapped_s
    assert forecast_with(within=beside, between=beside).step_s == one.step_s


def test_what_has_the_size_of_the_parameters_is_written_and_read_as_often_as_it_is_made():
    memory = Memory(params=4, frozen=100, optimizer=8, ema=4, grads=2, micro_grads=1, compute_copy=3, activations=50)
    assert memory.moved(4) == 4 + 8 + 4 + 3 + 4 * (2 + 1)
    sending = dataclasses.replace(layout("zero3", 60, 0), beside_bytes=lambda n: n * 1e9)
    one = forecast(MACHINE, sending, NONE, 32, ALL)
    assert one.grad_accum == 2 and one.moving_s == pytest.approx(2 * (60 * GIB + 2e9) / (0.9 * 3350e9))


def test_devices_of_a_tensor_group_have_the_same_rows_and_send_what_they_sum():
    two = dataclasses.replace(layout("zero3", 40, 3.6e9), tensor_devices=2)
    one = forecast(
        MACHINE, two, dataclasses.replace(NONE, activation_bytes_per_row=2 * GIB, summed_bytes_per_row=5e8), 32, ALL
    )
    assert (one.grad_accum, one.rows, one.most_rows) == (1, 16, 20)
    assert one.sending_s == pytest.approx((3.6e9 + 5e8) / (0.8 * 450e9))
    assert one.compute_s == pytest.approx(32e12 / (4 * 989e12 * 0.5))


def test_what_is_fetched_from_host_memory_takes_the_room_that_activations_have_left():
    plain = layout("zero1", 40, 0)

    def off(fetched: int):
        memory = dataclasses.replace(plain.memory(1), host=50 * GIB, fetched=fetched * GIB, compute_copy=GIB)
        return forecast(MACHINE, dataclasses.replace(plain, memory=lambda n: memory), NONE, 32, ALL)

    # 81 GiB less 40 of the state and 1 of the copy; and less 40 as long as there is nothing else.
    assert [(off(n).most_rows, off(n).grad_accum, off(n).fits) for n in (1, 41, 42)] == [
        (10, 1, True),
        (10, 1, True),
        (0, 1, False),
    ]
    assert off(41).memory.total == 81 * GIB
    assert off(1).step_s == pytest.approx(off(1).compute_s + off(1).moving_s + 50 * GIB / 25e9)


def candidates(layouts, policies=(NONE, FULL)):
    return [forecast(MACHINE, layout, policy, 32, ALL) for layout in layouts for policy in policies]


def test_the_shortest_step_that_fits_is_recommended():
    best, why = recommend(candidates([layout("replicated", 79, 1e8), layout("zero3", 60, 2e8)]))
    assert best is not None and (best.layout.strategy, best.policy.remat, best.grad_accum) == ("zero3", "none", 2)
    assert why.startswith("zero3, remat none, grad_accum 2") and "the shortest step of the 3 of 4 that fit" in why


def test_the_gradient_of_a_micro_batch_beside_the_sum_is_counted():
    one = layout("zero1", 44, 0)
    summed = dataclasses.replace(one.memory(2), grads=10 * GIB, micro_grads=10 * GIB)
    more = dataclasses.replace(one, memory=lambda n: summed if n > 1 else one.memory(n))
    # 44 GiB leave 37 for 8 rows of 4 and two micro-batches of 4 do fit; with 10 more it takes four of 2.
    assert [forecast(MACHINE, cost, policy("none", 1e12, 5), 32, ALL).grad_accum for cost in (one, more)] == [2, 2]
    assert forecast(MACHINE, more, policy("none", 1e12, 7), 32, ALL).grad_accum == 4
    assert forecast(MACHINE, one, policy("none", 1e12, 7), 32, ALL).grad_accum == 2


def test_a_policy_that_costs_next_to_nothing_and_leaves_more_room_is_preferred():
    dots = policy("dots", 1.004e12, 2)
    best, why = recommend(candidates([layout("zero1", 40, 1e6), layout("zero3", 40, 2e6)], [NONE, dots, FULL]))
    assert best is not None and (best.layout.strategy, best.policy.remat) == ("zero1", "dots")
    assert "to 0.5%, with more room than zero1, remat none" in why


def test_a_policy_that_writes_less_again_is_preferred_where_that_takes_a_hundredth_of_the_time():
    """Of 32 rows a device has 8, which it writes at 90 % of 3.35 TB/s."""
    dots = policy("dots", 1e12, 2)
    again = {gib: dataclasses.replace(dots, rewritten_bytes_per_row=gib * GIB) for gib in (0, 0.05, 0.5)}
    held, products = layout("zero1", 40, 1e6), policy("products", 1e12, 3)
    times = {gib: forecast(MACHINE, held, one, 32, ALL).step_s for gib, one in again.items()}
    assert times[0.5] - times[0] == pytest.approx(8 * 0.5 * GIB / (0.9 * 3.35e12))
    found = [recommend(candidates([held], [products, one]))[0] for one in again.values()]
    assert [one.policy.remat for one in found if one] == ["dots", "dots", "products"]


def test_policies_are_compared_by_a_step_where_texts_take_more():
    plain = layout("zero1", 10, 1e6)
    texts = dataclasses.replace(plain, memory=lambda n: dataclasses.replace(plain.memory(n), generation=60 * GIB))
    best, _ = recommend(candidates([texts], [NONE, policy("dots", 1.004e12, 2)]))
    assert best is not None and best.policy.remat == "dots" and best.memory.total == 70 * GIB


def test_room_of_less_than_a_hundredth_is_worth_no_time():
    small = [policy("none", 1e12, 0.001), policy("dots", 1.004e12, 0.0005)]
    best, _ = recommend(candidates([layout("zero1", 40, 1e6)], small))
    assert best is not None and best.policy.remat == "none"


def test_among_equals_the_first_is_taken_so_a_choice_is_always_the_same():
    best, _ = recommend(
        candidates([layout("replicated", 1, 0), layout("zero1", 1, 0)], [NONE, dataclasses.replace(NONE)])
    )
    assert best is not None and (best.layout.strategy, best.policy) == ("replicated", NONE)


def test_devices_that_are_not_in_the_table_have_no_times():
    known = forecast(MACHINE, layout("zero1", 1, 1e9), NONE, 32, ALL)
    unknown = forecast(dataclasses.replace(MACHINE, kind=UNKNOWN), layout("zero1", 1, 1e9), NONE, 32, ALL)
    assert "step_s" in known.as_json() and "s per step" in known.words()
    assert "step_s" not in unknown.as_json() and "s per step" not in unknown.words()


def test_what_would_recompute_less_and_does_not_fit_is_told():
    large = dataclasses.replace(NONE, activation_bytes_per_row=50.0 * GIB)
    best, why = recommend(candidates([layout("zero3", 60, 0)], [large, FULL]))
    assert best is not None and best.policy.remat == "full"
    assert why.endswith("none would recompute less and does not fit")


def test_where_nothing_fits_the_least_need_and_what_helps_are_told():
    best, why = recommend(candidates([layout("replicated", 200, 0), layout("zero3", 90, 0)]))
    assert best is None
    assert "zero3, remat full" in why and "91.0 GiB" in why and "81.0 GiB can be used" in why
    assert "generate" not in why and why.endswith("or train low-rank adapters only")
    zero3 = layout("zero3", 70, 0)
    generating = dataclasses.replace(zero3, memory=lambda n: dataclasses.replace(zero3.memory(n), generation=12 * GIB))
    _, why = recommend(candidates([generating], [FULL]))
    assert "without the texts that are generated between steps it needs 78.0 GiB" in why
    assert "(--eval.completions-per-device, or none in training: --eval.num-prompts 0)" in why
    adapted = dataclasses.replace(zero3, memory=lambda n: dataclasses.replace(zero3.memory(n), frozen=21 * GIB))
    _, why = recommend(candidates([adapted], [FULL]))
    assert why.endswith("take more or larger devices")


def test_a_strategy_that_shards_more_is_advised_where_it_cuts_what_does_not_fit():
    def advice(strategy, grads):
        full = registry.load("pi0_libero")
        sharded = dataclasses.replace(full, sharding=dataclasses.replace(full.sharding, strategy=strategy))
        none = dict.fromkeys(("frozen", "optimizer", "ema", "compute_copy"), 0)
        with pytest.raises(DoesNotFit) as found:
            require(Memory(params=0, grads=grads, activations=8 * GIB, **none), 4 * GIB, 4, sharded)
        return str(found.value).partition("What to do:\n")[2]

    assert all("--sharding.strategy zero3" in advice(name, 8 * GIB) for name in ("replicated", "zero1", "zero2"))
    assert "--sharding.strategy" not in advice("zero3", 8 * GIB) + advice("auto", 8 * GIB) + advice("zero1", 0)


def test_more_devices_are_no_advice_where_the_state_fits_and_adapters_where_there_are_none():
    def advice(experiment, **fields):
        every = dict.fromkeys(("frozen", "optimizer", "ema", "grads", "compute_copy", "activations"), 0)
        with pytest.raises(DoesNotFit) as found:
            require(Memory(params=GIB, **{**every, **fields}), 4 * GIB, 1, experiment)
        return str(found.value).partition("What to do:\n")[2]

    full = registry.load("pi0_libero")
    assert "--fsdp-devices" not in advice(full, activations=36 * GIB)
    told = advice(full, optimizer=4 * GIB)
    assert "(about 2 of this size) with --fsdp-devices 2" in told
    (flags,) = re.findall(r"train low-rank adapters only, as pi0_lora: (.*)", told)
    adapted = parse_experiment("pi0_libero", ["--exp-name", "x", *flags.split()])
    assert adapted.model == registry.load("pi0_libero_low_mem_finetune").model and adapted.ema_decay is None
    assert "adapters" not in advice(registry.load("pi0_libero_low_mem_finetune"), optimizer=4 * GIB)
    assert "adapters only, as pi05_lora: --model" in advice(registry.load("pi05_libero"), optimizer=4 * GIB)


def test_more_devices_are_advised_only_where_it_fits_them():
    none = dict.fromkeys(("frozen", "ema", "grads", "compute_copy"), 0)

    def advice(fits_on):
        with pytest.raises(DoesNotFit) as found:
            require(Memory(params=GIB, optimizer=4 * GIB, **none), 4 * GIB, 1, registry.load("pi0_libero"), fits_on)
        return re.findall(r"about (\d+) of this size\) with --fsdp-devices (\d+)", str(found.value))

    assert advice(lambda num_devices: True) == [("2", "2")]
    assert advice(lambda num_devices: num_devices >= 10) == [("16", "16")]
    assert advice(lambda num_devices: False) == []
