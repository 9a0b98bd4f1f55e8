"""Moments and average in host memory: the same bits, fetched one parameter after the other, and checkpoints alike."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import strategies
import toy
from checkpoint_process import SAVED_WITH
from trainers import make_evaluator

from openpi_train.checkpoints.checkpoint_store import Checkpoints
from openpi_train.checkpoints.layout import leaves_by_item, state_from_items
from openpi_train.checkpoints.pieces import fetch, place
from openpi_train.optim import OPTIMIZERS, EmaWarmup, LRSchedule
from openpi_train.parallel.strategy import HOST_MEMORY
from openpi_train.planning.memory import DoesNotFit, predict, require_host
from openpi_train.planning.traffic import collectives
from openpi_train.runtime.exits import UsageError
from openpi_train.training.init import create_state, lay_out
from openpi_train.training.start_check import check_host_memory

pytestmark = pytest.mark.slow

CONFIG = toy.StackedConfig(depth=2)
SPEC = CONFIG.rows.batch_spec(strategies.ROWS, ())
LARGE_MIB = 1e-3  # only the token table and the stacked kernel are as large


def prepare(devices: int, accum: int, offload: str, min_shard_mib: float = LARGE_MIB, optimizer=None):
    """Trainer and state layout, cut over all devices."""
    trainer, layout = strategies.prepare(CONFIG, "zero3", devices, accum, jax.devices()[:devices])
    plan = dataclasses.replace(trainer.plan, offload=offload, min_shard_mib=min_shard_mib)
    if optimizer is not None:
        rule = optimizer.create(LRSchedule(kind="constant", warmup_steps=0, peak_lr=1e-2).create())
        trainer = dataclasses.replace(trainer, optimizer=rule)
        layout = lay_out(CONFIG, rule, CONFIG.param_rules.frozen, True, plan)
    # By the third step, before which these runs change places, the average keeps something of itself.
    return dataclasses.replace(trainer, plan=plan, ema_warmup=EmaWarmup(power=0.75)), layout.under(plan)


def start(trainer, layout):
    with jax.set_mesh(trainer.plan.real_mesh):
        return create_state(layout, CONFIG, trainer.optimizer, CONFIG.param_rules.frozen, True, 7)


def compiled(trainer, layout):
    with jax.set_mesh(trainer.plan.real_mesh):
        return trainer.compile_step(layout.shardings, layout.abstract(), SPEC)


def batch(trainer, number):
    return jax.device_put(toy.batch(strategies.ROWS, seed=number, vocab_size=CONFIG.vocab_size), trainer.plan.batch)


def advance(trainer, step, state, numbers=range(3)):
    """The state after the steps of these numbers."""
    for number in numbers:
        state, _ = step(state, batch(trainer, number))
    return state


def bits(state):
    """The bytes of every array, wherever it lies."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def on_host(tree):
    """The shapes of the arrays that lie in host memory."""
    return {leaf.shape for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind == HOST_MEMORY}


@pytest.mark.parametrize(("devices", "accum"), [(4, 1), (1, 4)])
def test_a_run_with_offload_has_the_bits_of_one_without_and_each_continues_the_other(devices, accum, tmp_path):
    trainer, layout = prepare(devices, accum, "none")
    plain = compiled(trainer, layout)
    expected = bits(advance(trainer, plain, start(trainer, layout)))
    off, off_layout = prepare(devices, accum, "optimizer+ema")
    step = compiled(off, off_layout)
    state = advance(off, step, start(off, off_layout), range(2))
    assert on_host(state.opt_state) == on_host(state.ema) == {(40, 16), (2, 16, 16)}
    assert on_host((state.params, state.step)) == set()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, **SAVED_WITH)
    assert bits(advance(off, step, state, [2])) == expected
    restored, _ = Checkpoints(tmp_path).restore(layout.abstract())
    assert on_host(restored) == set()
    assert bits(advance(trainer, plain, restored, [2])) == expected
    restored, _ = Checkpoints(tmp_path).restore(off_layout.abstract())
    items = leaves_by_item(restored, str)
    again = state_from_items(place(fetch(items), items), restored, str)  # as a local checkpoint keeps it
    assert on_host(again) == {(40, 16), (2, 16, 16)}
    assert bits(advance(off, step, again, [2])) == expected
    sent = [sum(one.sent_bytes for one in collectives(each.as_text(), devices)) for each in (step, plain)]
    assert sent[0] == sent[1]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_has_the_same_bits_with_its_state_on_the_host(name):
    optimizer = OPTIMIZERS[name](**({"min_dim_size_to_factor": 4} if name == "adafactor" else {}))
    found = []
    for offload in ("none", "optimizer"):
        trainer, layout = prepare(4, 1, offload, 0, optimizer)
        state = advance(trainer, compiled(trainer, layout), start(trainer, layout), range(2))
        found.append(bits(state))
    assert (40, 16) in on_host(state.opt_state) or name == "adafactor"  # which keeps rows and columns of it
    assert on_host(state.opt_state) and not on_host(state.ema)
    assert found[0] == found[1]


def test_on_a_gpu_a_parameter_is_fetched_when_the_last_but_one_is_put_back_and_not_before_the_gradients_are_there():
    trainer, layout = prepare(4, 1, "optimizer+ema", 0)
    with jax.set_mesh(trainer.plan.real_mesh):
        traced = trainer.jitted_step(layout.shardings).trace(layout.abstract(), SPEC)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    main = text[text.index("@main") :].partition("func.func private")[0]
    said = dict(re.findall(r"^ *%(\w+)(?::\d+)? = (.*)$", main, re.MULTILINE))
    operands = {name: {one for one in re.findall(r"%(\w+)", line) if one in said} for name, line in said.items()}

    def before(name):
        """All that it depends on."""
        found, rest = set(), [name]
        while rest:
            new = operands[rest.pop()] - found
            found |= new
            rest += new
        return found

    gates = [name for name, line in said.items() if "optimization_barrier" in line]
    stored = {name for name, line in said.items() if "annotate_device_placement" in line and '"pinned_host"' in line}
    fetched = [name for name, line in said.items() if "annotate_device_placement" in line and '"device"' in line]
    assert len(gates) == len(layout.shapes.params) + 1
    assert gates.pop() not in set().union(*map(before, stored)), "what is put back waits for the norm of parameters"
    for number, gate in enumerate(gates):
        behind = [name for name in said if gate in operands[name] and "sharding_constraint" in said[name]]
        assert sum(operands[name] <= set(behind) for name in fetched) == 3  # two moments and the average
        if number < 2:  # whether the update is finite is known when all gradients are
            assert any("is_finite" in said[name] for name in before(gate))
            continue
        waits_for = operands[gate] & stored
        assert len(waits_for) == 3 and all(gates[number - 2] in before(name) for name in waits_for)
        assert gates[number - 1] not in before(gate)


def test_the_plan_counts_what_lies_on_the_host_and_how_much_of_it_is_on_the_device_at_once():
    _, layout = prepare(4, 1, "none")
    trainer, off_layout = prepare(4, 1, "optimizer+ema")
    plain, memory = (predict(one, trainer.plan) for one in (layout, off_layout))
    table, kernel = 3 * 4 * 40 * 16 // 4, 3 * 4 * 2 * 16 * 16 // 4  # two moments and the average, a quarter on each
    assert (plain.host, plain.fetched) == (0, 0)
    assert (memory.host, memory.fetched) == (table + kernel, table + kernel)
    assert memory.state == plain.state - memory.host
    assert memory.total == memory.state + memory.grads + max(memory.compute_copy + memory.layer, table + kernel)
    assert memory.host_link_s == pytest.approx(memory.host / 25e9)
    require_host(memory, memory.host, "optimizer+ema")
    with pytest.raises(DoesNotFit, match=r"offload optimizer\+ema keeps .* in host memory; there are 0\.0 GiB"):
        require_host(memory, memory.host - 1, "optimizer+ema")


def test_the_average_is_evaluated_on_the_devices():
    values = []
    for offload in ("none", "optimizer+ema"):
        trainer, layout = prepare(4, 1, offload)
        state = start(trainer, layout)
        other = jax.device_put(jax.tree.map(lambda leaf: 2 * np.asarray(leaf), state.ema), layout.shardings.ema)
        state = dataclasses.replace(state, ema=other)
        with jax.set_mesh(trainer.plan.real_mesh):
            values.append(make_evaluator(trainer, [batch(trainer, 0)], 1)(state))
    assert values[0] == values[1]
    assert values[0]["val/loss"] != values[0]["val/loss_ema"]


def test_devices_that_do_not_read_host_memory_are_refused(monkeypatch):
    check_host_memory("optimizer")  # CPU devices do
    device = SimpleNamespace(device_kind="Gizmo", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(UsageError, match="Gizmo has: device"):
        check_host_memory("optimizer")
