"""Objectives of language models train as one device does: any accumulation, devices, processes and sharding stage."""

import dataclasses
import functools
import math
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_training
from flax import nnx
from runs.command import environment
from text_training import ADAPTED, COPIED, LANGUAGE, LENGTH, OBJECTIVES, PROCESSES, ROWS, pairs, train
from trainers import make_trainer

from openpi_train.launch.processes import free_port
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.nn.lora import AdapterConfig
from openpi_train.objectives.preference_pairs import PreferencePairs
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import merge_module, module_params
from openpi_train.parallel.strategy import Plan
from openpi_train.types import TextBatch

LAYOUTS = {"replicated x 4": ("replicated", 1, 4), "zero2 x 1": ("zero2", 4, 1), "zero3 x 4": ("zero3", 4, 4)}
# With label smoothing every token adds to every gradient of the table. XLA for CPUs adds them one after the other, and
# each sum is rounded: 15e-6 at most, of which 4e-6 were seen. All else agrees to 1e-6.
SUM_OF_TOKENS = ROWS * LENGTH * 2.0**-24
MORE_LAYOUTS = {"replicated x 1": ("replicated", 1, 1), "zero2 x 4": ("zero2", 4, 4), "zero3 x 1": ("zero3", 4, 1)}
# Each objective where most is sent and accumulated, and each other layout with one: every case compiles for seconds.
CASES = [
    *((name, "zero3 x 4") for name in OBJECTIVES),
    *((name, "replicated x 4") for name in ("supervised", "policy")),
    ("judged", "zero2 x 1"),
]
# Without an evaluation.
MORE_CASES = [("supervised", "replicated x 1"), ("sigmoid", "zero2 x 4"), ("reward", "zero3 x 1")]


@functools.cache
def alone(name):
    return train(*OBJECTIVES[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_accumulation_devices_and_sharding_change_nothing(name, layout):
    strategy, fsdp, accum = LAYOUTS[layout]
    same(train(*OBJECTIVES[name], strategy, fsdp, accum, devices=4, evaluated=strategy == "zero3"), name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), MORE_CASES)
def test_every_stage_and_accumulation_changes_nothing(name, layout):
    strategy, fsdp, accum = MORE_LAYOUTS[layout]
    same(train(*OBJECTIVES[name], strategy, fsdp, accum, devices=4, evaluated=False), name)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_change_nothing(tmp_path):
    """Two processes with two devices each: as one process with one device."""
    program = [sys.executable, text_training.__file__, tmp_path, *(str(free_port()) for _ in PROCESSES)]
    tests = Path(text_training.__file__).parent
    path = {"PYTHONPATH": f"{tests.parent}:{tests}"}
    done = subprocess.run(program, capture_output=True, text=True, env=environment(**path), timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for count, cases in PROCESSES.items():
        for name in cases:
            of_processes = [
                pickle.loads((tmp_path / f"{count}_{name}_{index}.pickle").read_bytes()) for index in range(count)
            ]
            history = of_processes[0][0]
            assert all(found == history for found, _ in of_processes)
            same_history(history, name)
            shards = [shard for _, found in of_processes for shard in found]
            assert {path for path, _, _ in shards} == alone(name)[1].params.keys()
            for path, index, values in shards:
                same_params(values, alone(name)[1].params[path][index], path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sigmoid", "policy"])
def test_tensor_groups_change_nothing(name):
    model, objective = OBJECTIVES[name]
    assert not model.compute.check_tensor(2)
    same(train(model, objective, "zero3", 2, devices=4, tensor=2), name)


def same(found, name):
    """Metrics, parameters and held-out loss are those of one device."""
    history, state, held_out = found
    if held_out is not None:
        np.testing.assert_allclose(held_out, alone(name)[2], rtol=1e-6)
    same_history(history, name)
    for path, leaf in state.params.items():
        same_params(leaf, alone(name)[1].params[path], path)


def same_history(history, name):
    for number, (found, expected) in enumerate(zip(history, alone(name)[0], strict=True)):
        assert found.keys() == expected.keys()
        for metric in found:
            # At first policy and reference are equal but for rounding, which decides which of two rewards is higher.
            if number or metric != "pair_accuracy":
                rtol = SUM_OF_TOKENS if (name, metric) == ("supervised", "grad_norm") else 1e-6
                # A reward is the difference of log-probabilities of up to 20, which float32 rounds to 1e-6 each.
                np.testing.assert_allclose(found[metric], expected[metric], rtol=rtol, atol=1e-6, err_msg=metric)


def same_params(found, expected, path):
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("accum", [1, 2, 4])
def test_values_of_rows_come_in_the_rows_order(accum):
    plan = Plan(mesh=make_mesh(4, jax.devices()[:4]), strategy="zero3", min_shard_mib=0)
    schedule = LRSchedule(warmup_steps=1, peak_lr=1e-2, decay_steps=20, decay_lr=1e-3)
    trainer, _ = make_trainer(LANGUAGE, plan, AdamW(), schedule, objective=SupervisedText(), accum=accum, ema=None)
    params, batch = module_params(LANGUAGE.build(nnx.Rngs(0))), pairs(0)
    seen = []

    def values(model, rows):
        seen.append(rows.texts.tokens.shape)
        return {"row": 2 * rows.row, "first": rows.texts.tokens[:, :1]}

    with jax.set_mesh(plan.real_mesh):
        run = jax.jit(lambda batch: trainer.devices.row_values(params, accum)(values, batch))
        found = run(jax.device_put(batch, plan.batch))
    np.testing.assert_array_equal(found["row"], 2 * np.arange(ROWS))
    np.testing.assert_array_equal(found["first"], batch.texts.tokens[:, :1])
    assert set(seen) == {(ROWS // 4 // accum, LENGTH)}


@pytest.mark.slow
@pytest.mark.parametrize(("form", "dtype"), [("copy", "float32"), ("adapter", "bfloat16")])
def test_first_loss_is_log_two(form, dtype):
    language = dataclasses.replace(LANGUAGE, dtype=dtype, remat="full")
    model = ReferencedConfig(policy=language)
    if form == "adapter":
        model = dataclasses.replace(language, adapter=AdapterConfig(rank=2))
    history, state, _ = train(model, PreferencePairs(), "zero3", 2, 2, devices=4, steps=1)
    assert abs(history[0]["loss"] - math.log(2)) < 1e-6 and history[0]["chosen_fell"] == 0
    if form == "copy":
        assert all(leaf.dtype == jnp.float32 for leaf in state.frozen.values())


@pytest.mark.slow
def test_policy_without_its_adapter_gives_what_a_frozen_copy_gives():
    """The adapter's additions are folded into the policy that has the copy; both start and move alike."""
    objective = PreferencePairs(variant="sigmoid")
    adapter, batch = ADAPTED.build(nnx.Rngs(0)), pairs(0)
    random = np.random.default_rng(0)
    params = module_params(adapter)
    for path in params:
        if path.endswith("lora_b"):
            params[path] = jnp.asarray(random.normal(size=params[path].shape), jnp.float32)
    adapter = merge_module(nnx.split(adapter)[0], params)
    base = {path: leaf for path, leaf in params.items() if "lora" not in path}
    both = {f"policy/{path}": leaf for path, leaf in ADAPTED.param_rules.merge_lora(params).items()}
    both |= {f"reference/{path}": leaf for path, leaf in base.items()}
    copied = merge_module(nnx.split(COPIED.build(nnx.Rngs(0)))[0], both)
    norms = objective.norms(batch)
    off, copy = (objective.loss(model, batch, norms, None)[1] for model in (adapter, copied))
    assert abs(off["chosen_reward"]) > 1e-3
    for name in copy:
        np.testing.assert_allclose(off[name], copy[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_packed_texts_have_the_loss_of_texts_alone():
    """Two texts in a row, or each in a row of its own, at other places of their rows."""
    packed = pairs(0).texts
    columns = [{name: [] for name in ("tokens", "segments", "positions", "weights")} for _ in range(2)]
    for number, found in enumerate(columns, start=1):
        own = np.asarray(packed.segments) == number
        order = np.argsort(~own, axis=1, kind="stable")
        for name in found:
            values = np.take_along_axis(np.asarray(getattr(packed, name)), order, axis=1)
            found[name] = np.where(np.take_along_axis(own, order, axis=1), values, 0)
    apart = TextBatch(
        **{name: jnp.concatenate([jnp.asarray(one[name]) for one in columns]) for name in columns[0]},
        row=jnp.arange(2 * ROWS),
    )
    model = LANGUAGE.build(nnx.Rngs(0))
    for over in ("tokens", "sequences"):
        objective = SupervisedText(mean_over=over, z_loss=0.01)
        expected, found = (objective.loss(model, batch, objective.norms(batch), None)[1] for batch in (packed, apart))
        np.testing.assert_allclose(objective.norms(packed)["targets"], objective.norms(apart)["targets"], rtol=1e-6)
        for name in found:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=name)
