"""Held-out evaluation against numpy, and that batch size, filler rows and devices cannot change it."""

import dataclasses
import functools
import types
import zlib
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx
from trainers import make_evaluator, make_trainer, running_of

from openpi_train.data.core.feed import RowFeed
from openpi_train.evaluation.measure import Evaluated, Evaluations
from openpi_train.evaluation.sums import Ratio
from openpi_train.objectives.diffusion import Diffusion
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.insulated_flow import InsulatedFlow
from openpi_train.objectives.next_token import NextToken
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import merge_module
from openpi_train.parallel.strategy import Plan
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.noise_schedule import NoiseSchedule
from openpi_train.training.evaluate import Evaluator
from openpi_train.training.init import create_state
from openpi_train.types import mask_rows

NUM_ROWS, NUM_TRAIN_ROWS, SEED, NUM_SAMPLE_STEPS = 14, 4, 3, 3
TOKENS, WORDS = 5, 6
MEAN_ACTION = np.array([0.5, -1.0, 0.0, 2.0])


class Seeing(nnx.Module):
    """A policy of every kind, linear in what it sees: the square of a picture, of which every augmentation tells."""

    def __init__(self, config, rngs):
        def normal(*shape):
            return nnx.Param(jax.random.normal(rngs.params(), shape))

        self.kernel, self.bias = normal(config.action_dim, config.action_dim), normal(config.action_dim)
        self.picture, self.words = normal(3, config.action_dim), normal(WORDS, WORDS)

    def seen(self, observation):
        return jnp.square(observation.images["base_0_rgb"]).mean((1, 2)) @ self.picture[...]  # b a

    def velocity(self, observation, noisy, time):
        seen = self.seen(observation)[:, None, None]
        return noisy @ self.kernel[...] + seen + time[..., None, None] * self.bias[...]

    def logits(self, observation):
        seen = self.seen(observation).sum(-1)[:, None, None]
        return self.words[...][observation.prompt_tokens[:, :-1]] * (1 + seen)  # b n v

    def token_log_probs(self, observation):
        scores, said = jax.nn.log_softmax(self.logits(observation)), observation.prompt_tokens[:, 1:]
        return jnp.take_along_axis(scores, said[..., None], 2)[..., 0], scores.argmax(-1) == said

    def velocity_and_log_probs(self, observation, noisy, time):
        return self.velocity(observation, noisy, time), *self.token_log_probs(observation)

    def context(self, observation):
        return observation

    def denoise(self, observation, noisy, step):
        return self.velocity(observation, noisy, step)

    def sample_actions(self, observation, noise, num_steps):
        return noise @ self.kernel[...] + num_steps * self.seen(observation)[:, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeeingConfig(toy.LinearConfig):
    provides: ClassVar[frozenset[str]] = frozenset({"velocity", "denoise", "logits", "insulation", "sample"})

    def build(self, rngs):
        return Seeing(self, rngs)


def rows_of(count, seed=0):
    """Rows with a picture, and of whose tokens some are to be said: in one row none, in the others 1 to 3."""
    rows, random = toy.batch(count, seed=seed, vocab_size=WORDS), np.random.default_rng(seed + 100)
    seen = dataclasses.replace(
        rows.observation,
        images={"base_0_rgb": jnp.asarray(random.uniform(-1, 1, (count, 8, 8, 3)), jnp.float32)},
        image_masks={"base_0_rgb": jnp.ones(count, bool)},
        prompt_tokens=jnp.asarray(random.integers(0, WORDS, (count, TOKENS)), jnp.int32),
        prompt_mask=jnp.ones((count, TOKENS), bool),
        token_ar_mask=jnp.ones((count, TOKENS), bool),
        token_loss_mask=jnp.asarray(np.arange(TOKENS) >= TOKENS - np.arange(count)[:, None] % 4),
    )
    return dataclasses.replace(rows, observation=seen)


def first_rows(count, seed=0):
    return jax.tree.map(lambda leaf: leaf[:count], rows_of(2 * NUM_ROWS, seed))


def cut(rows, batch_size, num_rows, plan):
    """The first `num_rows` rows as batches, of which the last is filled up with rows that do not count."""
    rows = dataclasses.replace(rows, action_mask=rows.action_mask & (rows.row < num_rows)[:, None])
    batches = []
    for start in range(0, num_rows, batch_size):
        part = jax.tree.map(lambda leaf, start=start: leaf[start : start + batch_size], rows)
        batches.append(jax.device_put(dataclasses.replace(part, row=jnp.arange(batch_size)), plan.batch))
    return batches


def evaluate(batch_size=4, devices=1, objective=None):
    """The values of a fresh state with another average, the module of its parameters, and that of the average."""
    config, plan = SeeingConfig(), Plan(mesh=make_mesh(1, jax.devices()[:devices]), strategy="replicated")
    trainer, layout = make_trainer(config, plan, AdamW(), LRSchedule(), objective=objective, seed=SEED)
    with jax.set_mesh(plan.real_mesh):
        state = create_state(layout, config, trainer.optimizer, config.param_rules.frozen, True, 3)
        state = dataclasses.replace(state, ema=jax.tree.map(lambda leaf: 0.5 * leaf + 0.2, state.ema))
        batches = cut(rows_of(2 * NUM_ROWS), batch_size, NUM_ROWS, plan)
        train_batches = cut(rows_of(2 * NUM_ROWS, seed=1), batch_size, NUM_TRAIN_ROWS, plan)
        values = make_evaluator(trainer, batches, NUM_SAMPLE_STEPS, train_batches, MEAN_ACTION)(state)
    return values, *(merge_module(trainer.graphdef, params) for params in (state.params, state.ema))


FLOW = FlowMatching(num_flow_draws=2)
OBJECTIVES = {
    "flow": FLOW,
    "tokens": NextToken(),
    "every token": NextToken(mean_over="tokens"),
    "insulated": InsulatedFlow(flow=FLOW, flow_weight=2.0, token_weight=0.5, mean_over="tokens"),
    "diffusion": Diffusion(num_draws=2, noise_schedule=NoiseSchedule(num_train_timesteps=9, beta_schedule="linear")),
}


def key_of(row, *purposes):
    """As `keys.py` says: of seed, step 0 and the row's number among all; then of what it is for."""
    numbers = (0, row, *(zlib.crc32(purpose.encode()) for purpose in purposes))
    return functools.reduce(jax.random.fold_in, numbers, jax.random.key(SEED))


def drawn(draw, count, *purposes):
    return np.stack([np.asarray(draw(key_of(row, *purposes))) for row in range(count)])


def mean(values, counts):
    counts = np.broadcast_to(counts, values.shape)
    return np.asarray(values, np.float64)[counts].mean()


def flow_loss(model, rows):
    noise = drawn(lambda key: jax.random.normal(key, (2, *rows.actions.shape[1:])), NUM_ROWS, "validation", "noise")
    time = drawn(lambda key: jax.random.uniform(key, (2,)), NUM_ROWS, "validation", "time") ** (2 / 3) * 0.999 + 0.001
    actions, t = np.asarray(rows.actions)[:, None], time[:, :, None, None]
    velocity = model.velocity(rows.observation, jnp.asarray(t * noise + (1 - t) * actions), jnp.asarray(time))
    return mean((velocity - (noise - actions)) ** 2, rows.action_mask[:, None, :, None])


def diffusion_loss(model, rows):
    noise = drawn(lambda key: jax.random.normal(key, (2, *rows.actions.shape[1:])), NUM_ROWS, "validation", "noise")
    step = drawn(lambda key: jax.random.randint(key, (2,), 0, 9), NUM_ROWS, "validation", "time")
    kept = np.cumprod(1 - np.linspace(0.0001, 0.02, 9))[step][:, :, None, None]
    noisy = np.sqrt(kept) * np.asarray(rows.actions)[:, None] + np.sqrt(1 - kept) * noise
    predicted = model.denoise(rows.observation, jnp.asarray(noisy, jnp.float32), jnp.asarray(step, jnp.float32))
    return mean((predicted - noise) ** 2, True)  # the steps beyond an episode's end count


def token_loss(model, rows, every_token=False):
    scores = np.asarray(model.logits(rows.observation), np.float64)
    said, counts = (np.asarray(rows.observation.prompt_tokens), np.asarray(rows.observation.token_loss_mask))
    cost = np.log(np.exp(scores).sum(-1)) - np.take_along_axis(scores, said[:, 1:, None], 2)[..., 0]
    if every_token:
        return cost[counts[:, 1:]].mean()
    return np.mean([one[mask].mean() for one, mask in zip(cost, counts[:, 1:], strict=True) if mask.any()])


LOSSES = {
    "flow": flow_loss,
    "tokens": token_loss,
    "every token": functools.partial(token_loss, every_token=True),
    "insulated": lambda model, rows: 2 * flow_loss(model, rows) + 0.5 * token_loss(model, rows, every_token=True),
    "diffusion": diffusion_loss,
}


def token_accuracy(model, rows, every_token=False):
    best = np.asarray(model.logits(rows.observation)).argmax(-1)
    said, counts = (np.asarray(rows.observation.prompt_tokens), np.asarray(rows.observation.token_loss_mask)[:, 1:])
    hits = best == said[:, 1:]
    if every_token:
        return hits[counts].mean()
    return np.mean([one[mask].mean() for one, mask in zip(hits, counts, strict=True) if mask.any()])


# The losses' further metrics.
METRICS = {
    "tokens": {"token_accuracy": token_accuracy},
    "every token": {"token_accuracy": functools.partial(token_accuracy, every_token=True)},
    "insulated": {
        "flow_loss": flow_loss,
        "token_loss": functools.partial(token_loss, every_token=True),
        "token_accuracy": functools.partial(token_accuracy, every_token=True),
    },
}


def action_error(objective, model, rows):
    """The mean over own dims of the steps inside the episode."""
    count = len(rows.actions)
    keys = jnp.stack([key_of(row, "validation/sample") for row in range(count)])
    noise = jnp.asarray(drawn(lambda key: jax.random.normal(key, rows.actions.shape[1:]), count, "validation/sample"))
    if isinstance(objective, Diffusion):  # whose sampler has its own tests
        chunks = objective.action_sampler.sample(model, rows.observation, noise, keys, NUM_SAMPLE_STEPS)
    elif isinstance(objective, NextToken):
        chunks = model.sample_actions(rows.observation, noise, NUM_SAMPLE_STEPS)
    else:
        chunks = noise
        for number in range(NUM_SAMPLE_STEPS):
            time = jnp.full((count, 1), 1 - number / NUM_SAMPLE_STEPS)
            chunks = chunks - model.velocity(rows.observation, chunks[:, None], time)[:, 0] / NUM_SAMPLE_STEPS
    return mean((chunks - rows.actions) ** 2, rows.action_mask[:, :, None] & rows.dim_mask[:, None])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.slow
def test_losses_and_action_errors_of_weights_and_average_are_those_of_numpy(name):
    values, *models = evaluate(objective=OBJECTIVES[name])
    held_out, trained = first_rows(NUM_ROWS), first_rows(NUM_TRAIN_ROWS, seed=1)
    expected = {}
    for model, suffix in zip(models, ("", "_ema"), strict=True):
        expected[f"val/loss{suffix}"] = LOSSES[name](model, held_out)
        expected[f"val/action_mse{suffix}"] = action_error(OBJECTIVES[name], model, held_out)
        expected[f"train/action_mse{suffix}"] = action_error(OBJECTIVES[name], model, trained)
        for metric, value_of in METRICS.get(name, {}).items():
            expected[f"val/{metric}{suffix}"] = value_of(model, held_out)
    assert values.keys() == {*expected, "val/action_mse_of_mean_action"}
    for key, value in expected.items():
        assert values[key] == pytest.approx(value, rel=1e-5), key  # sums of some hundred float32 values
    assert abs(values["val/loss"] / values["val/loss_ema"] - 1) > 1e-2  # a thousand times that


class Recorded(nnx.Module):
    """A policy whose chunks are what its observation says, `shift` steps on; the last one repeats."""

    def __init__(self, config, rngs):
        self.none, self.shift = nnx.Param(jnp.zeros(1)), config.shift

    def velocity(self, observation, noisy, time):
        return noisy * self.none[...]

    def sample_actions(self, observation, noise, num_steps):
        chunk = observation.state.reshape(noise.shape)
        return chunk[:, np.minimum(np.arange(noise.shape[1]) + self.shift, noise.shape[1] - 1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedConfig(toy.LinearConfig):
    shift: int = 0

    def build(self, rngs):
        return Recorded(self, rngs)


@pytest.mark.parametrize(
    ("shift", "expected"),
    # A step further the dims are 1, 2 and 3 more. Of six rows with 3, 2, 1, 3, 2, 1 steps all have the first and four
    # the second; the third is the last of a chunk, and repeats: (1 + 4 + 9) * 10 over 12 steps of 3 dims.
    [(0, 0.0), (1, 140 / 36)],
)
@pytest.mark.slow
def test_recorded_actions_have_no_error_and_shifted_ones_the_known_one(shift, expected):
    config, plan = RecordedConfig(shift=shift), Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated")
    objective = toy.FlowThatSamplesItself()
    trainer, layout = make_trainer(config, plan, AdamW(), LRSchedule(), objective=objective, seed=SEED, ema=None)
    rows = toy.batch(6)
    actions = jnp.broadcast_to(jnp.arange(1.0, 4.0)[:, None] * jnp.arange(1.0, 5.0), rows.actions.shape)
    seen = dataclasses.replace(rows.observation, state=actions.reshape(6, -1))
    rows = dataclasses.replace(rows, actions=actions, observation=seen)
    with jax.set_mesh(plan.real_mesh):
        state = create_state(layout, config, trainer.optimizer, config.param_rules.frozen, False, 3)
        values = make_evaluator(trainer, cut(rows, 2, 6, plan), 1)(state)
    assert values["val/action_mse"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_an_experiments_own_measure_is_of_the_weights_and_of_their_average():
    config, plan = SeeingConfig(), Plan(mesh=make_mesh(1, jax.devices()[:2]), strategy="replicated")
    trainer, layout = make_trainer(config, plan, AdamW(), LRSchedule(), seed=SEED)
    rows = rows_of(2 * NUM_ROWS)

    def share(model, batch, first):
        real = batch.action_mask.any(1)
        return (real * model.kernel[0, 0] * (first + batch.row)).sum(), real.sum()

    with jax.set_mesh(plan.real_mesh):
        state = create_state(layout, config, trainer.optimizer, config.param_rules.frozen, True, 3)
        evaluated = Evaluated(
            step=0, weights={"": state.params, "_ema": jax.tree.map(lambda leaf: 2 * leaf, state.params)}, frozen={}
        )
        found = Ratio(running_of(trainer, cut(rows, 4, NUM_ROWS, plan)), "weighted", share)(evaluated)
    expected = float(state.params["kernel"][0, 0]) * (NUM_ROWS - 1) / 2
    assert found == pytest.approx({"val/weighted": expected, "val/weighted_ema": 2 * expected}, rel=1e-5)


def test_two_measures_of_one_name_are_refused():
    class Own(Evaluations):
        def measures(self, running):
            return [Ratio(running, "loss", lambda model, batch, first: (model.kernel.sum(), 1.0))]

    config, plan = SeeingConfig(), Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated")
    trainer, layout = make_trainer(config, plan, AdamW(), LRSchedule(), seed=SEED, ema=None)
    with jax.set_mesh(plan.real_mesh):
        state = create_state(layout, config, trainer.optimizer, config.param_rules.frozen, False, 3)
        evaluator = Evaluator(running_of(trainer, cut(rows_of(2 * NUM_ROWS), 4, 4, plan)), Own())
        with pytest.raises(UsageError, match="two measures are called val/loss: rename one"):
            evaluator(state)


def test_held_out_batches_are_the_first_rows_and_mask_those_that_fill_the_last_one():
    class Few(RowFeed):
        def __init__(self):
            self._rows, self._batch_size = types.SimpleNamespace(num_samples=100), 4

        def batch(self, step):
            return dataclasses.replace(toy.batch(4, seed=step, ragged=False), row=jnp.arange(4))

    batches = Few().first(6, mask_rows)
    assert [batch.action_mask.any(1).tolist() for batch in batches] == [[True] * 4, [True, True, False, False]]
    for index, batch in enumerate(batches):
        np.testing.assert_array_equal(batch.actions, toy.batch(4, seed=index).actions)


@pytest.fixture(scope="module")
def whole():
    return evaluate(NUM_ROWS)[0]


@pytest.mark.parametrize(
    ("batch_size", "devices"),
    [pytest.param(7, 1, marks=pytest.mark.slow), (8, 4), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_batch_size_devices_and_filler_change_nothing(whole, batch_size, devices):
    values, *_ = evaluate(batch_size, devices)
    assert values.keys() == whole.keys()
    for name, value in values.items():
        assert value == pytest.approx(whole[name], rel=2e-6), name


def test_the_baseline_is_the_error_of_the_training_datas_mean_action(whole):
    rows = first_rows(NUM_ROWS)
    actions, steps = np.asarray(rows.actions, np.float64), np.asarray(rows.action_mask)
    own = [dim for dim in range(actions.shape[-1]) if rows.dim_mask[0, dim]]
    error = np.concatenate([actions[..., dim][steps] - MEAN_ACTION[dim] for dim in own])
    assert whole["val/action_mse_of_mean_action"] == pytest.approx(np.mean(error**2), rel=1e-6)
