"""Objectives of language models train as one device does: any accumulation, device count and sharding stage."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from trainers import make_evaluator, make_trainer

from openpi_train.models.language import LanguageConfig
from openpi_train.models.reference import ReferencedConfig
from openpi_train.models.reward import RewardConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.lora import AdapterConfig
from openpi_train.nn.params import merge_module, module_params
from openpi_train.objectives.judged_completions import JudgedCompletions
from openpi_train.objectives.preference_pairs import PreferencePairs
from openpi_train.objectives.reward_pairs import RewardPairs
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.sharding.mesh import make_mesh
from openpi_train.sharding.strategy import Plan
from openpi_train.training.init import create_state
from openpi_train.types import PreferenceBatch, TextBatch

ROWS, LENGTH, VOCABULARY = 16, 16, 24
SIZES = DecoderSizes(
    vocab_size=VOCABULARY, width=16, depth=2, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, tied=True
)
LANGUAGE = LanguageConfig(sizes=SIZES, dtype="float32", remat="none")
COPIED = ReferencedConfig(policy=LANGUAGE)
ADAPTED = dataclasses.replace(LANGUAGE, adapter=AdapterConfig(rank=2))


def pairs(seed, rows=ROWS):
    """Rows of two texts of many lengths; every fifth row only fills, every seventh has one text."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, VOCABULARY, (rows, LENGTH)).astype(np.int32)
    segments, positions, weights = (np.zeros((rows, LENGTH), np.int32) for _ in range(3))
    for row in range(rows):
        start = 0
        for number in () if row % 5 == 4 else (1 + seed % 2,) if row % 7 == 6 else (1, 2):
            prompt, length = random.integers(1, 4), random.integers(4, 9)
            segments[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            weights[row, start + prompt : start + length] = 1
            start += length
    texts = TextBatch(
        tokens=jnp.asarray(tokens),
        segments=jnp.asarray(segments),
        positions=jnp.asarray(positions),
        weights=jnp.asarray(weights, jnp.float32),
        row=jnp.arange(rows),
    )
    return PreferenceBatch(texts=texts, margin=jnp.asarray(random.uniform(0, 1, rows), jnp.float32))


def train(model, objective, strategy="replicated", fsdp=1, accum=1, devices=1, steps=2, tensor=1):
    """Metrics of each step, the last state, and the held-out loss of other rows. Steps are large, so that the policy
    leaves its reference.
    """
    plan = Plan(mesh=make_mesh(fsdp, jax.devices()[:devices], tensor), strategy=strategy, min_shard_mib=0)
    schedule = LRSchedule(warmup_steps=1, peak_lr=1e-2, decay_steps=20, decay_lr=1e-3)
    # An eps above rounding, or Adam would make steps of what is zero but for rounding.
    trainer, layout = make_trainer(model, plan, AdamW(eps=1e-4), schedule, objective=objective, accum=accum, ema=None)
    *batches, held_out = (pairs(seed) for seed in range(steps + 1))
    if isinstance(objective, SupervisedText):
        batches, held_out = [batch.texts for batch in batches], held_out.texts
    history = []
    with jax.set_mesh(plan.real_mesh):
        state = create_state(layout, model, trainer.optimizer, model.frozen, False, 7)
        step = trainer.compile_step(layout.shardings, state, jax.eval_shape(lambda: batches[0]))
        for batch in batches:
            state, metrics = step(state, jax.device_put(batch, plan.batch))
            history.append({name: float(value) for name, value in metrics.items()})
        evaluator = make_evaluator(trainer, [jax.device_put(held_out, plan.batch)], 1)
        return history, state, evaluator(state)["val/loss"]


OBJECTIVES = {
    "supervised": (LANGUAGE, SupervisedText(mean_over="sequences", label_smoothing=0.1, z_loss=0.01)),
    "sigmoid": (COPIED, PreferencePairs(nll_weight=0.5)),
    "aot_unpaired": (COPIED, PreferencePairs(variant="aot_unpaired", beta=0.5)),
    "aot_adapter": (ADAPTED, PreferencePairs(variant="aot", beta=0.5)),
    "judged": (COPIED, JudgedCompletions(undesirable_weight=2.0)),
    "reward": (RewardConfig(language=LANGUAGE), RewardPairs(centering=0.1)),
}
LAYOUTS = {"replicated x 4": ("replicated", 1, 4), "zero2 x 1": ("zero2", 4, 1), "zero3 x 4": ("zero3", 4, 4)}
# Each objective where most is sent and accumulated, and each other layout once: every case compiles for seconds.
CASES = [*((name, "zero3 x 4") for name in OBJECTIVES), ("supervised", "replicated x 4"), ("judged", "zero2 x 1")]


@functools.cache
def alone(name):
    return train(*OBJECTIVES[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_accumulation_devices_and_sharding_change_nothing(name, layout):
    strategy, fsdp, accum = LAYOUTS[layout]
    same(train(*OBJECTIVES[name], strategy, fsdp, accum, devices=4), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sigmoid", "reward"])
def test_tensor_groups_change_nothing(name):
    model, objective = OBJECTIVES[name]
    assert not model.check_tensor(2)
    same(train(model, objective, "zero3", 2, devices=4, tensor=2), name)


def same(found, name):
    """Metrics, parameters and held-out loss are those of one device."""
    history, state, held_out = found
    np.testing.assert_allclose(held_out, alone(name)[2], rtol=1e-5)
    # At first policy and reference are equal but for rounding, which decides which of two equal rewards is higher.
    history[0].pop("pair_accuracy", None)
    for found, expected in zip(history, alone(name)[0], strict=True):
        assert found.keys() | {"pair_accuracy"} == expected.keys() | {"pair_accuracy"}
        for metric in found:
            value = expected[metric]
            # The second step's values also have what Adam makes of the first step's rounding.
            np.testing.assert_allclose(found[metric], value, rtol=1e-5, atol=1e-6, err_msg=metric)
    for path, leaf in state.params.items():
        np.testing.assert_allclose(leaf, alone(name)[1].params[path], rtol=1e-3, atol=1e-5, err_msg=path)


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
    both = {f"policy/{path}": leaf for path, leaf in ADAPTED.merge_lora(params).items()}
    both |= {f"reference/{path}": leaf for path, leaf in base.items()}
    copied = merge_module(nnx.split(COPIED.build(nnx.Rngs(0)))[0], both)
    norms = objective.norms(batch)
    off, copy = (objective.loss(model, batch, norms, None)[1] for model in (adapter, copied))
    assert abs(off["chosen_reward"]) > 1e-3
    for name in copy:
        np.testing.assert_allclose(off[name], copy[name], rtol=1e-4, atol=1e-5, err_msg=name)


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
