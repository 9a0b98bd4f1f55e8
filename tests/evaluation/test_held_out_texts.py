"""Held-out loss, metrics and perplexity of texts, against numpy on the scores of all tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trainers import make_trainer, running_of

from openpi_train.evaluation.held_out_loss import HeldOutLoss
from openpi_train.evaluation.measure import Evaluated
from openpi_train.evaluation.text_evaluations import TextEvaluations
from openpi_train.models.language import LanguageConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.objectives.reward_pairs import RewardPairs
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import merge_module
from openpi_train.parallel.strategy import Plan
from openpi_train.training.init import create_state
from openpi_train.types import PreferenceBatch, TextBatch

ROWS, REAL, LENGTH, VOCABULARY = 8, 6, 12, 24
SIZES = DecoderSizes(
    vocab_size=VOCABULARY, width=16, depth=1, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, tied=False
)
LANGUAGE = LanguageConfig(sizes=SIZES, dtype="float32", remat="none", context_length=LENGTH)
OBJECTIVE = SupervisedText(mean_over="sequences", label_smoothing=0.3, z_loss=0.1)


@functools.cache
def texts():
    """Two texts of other lengths in each row; the last rows only fill a batch."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    segments, positions, weights = (np.zeros((ROWS, LENGTH), np.int32) for _ in range(3))
    for row in range(ROWS):
        start = 0
        for number in (1, 2):
            length = int(random.integers(3, 7))
            segments[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            weights[row, start + 1 + number % 2 : start + length] = row < REAL
            start += length
    return TextBatch(
        tokens=jnp.asarray(tokens),
        segments=jnp.asarray(segments),
        positions=jnp.asarray(positions),
        weights=jnp.asarray(weights, jnp.float32),
        row=jnp.arange(ROWS),
    )


def halves(batch):
    """The batch as two, with their own row numbers."""
    parts = [jax.tree.map(lambda leaf, start=start: leaf[start : start + 4], batch) for start in (0, 4)]
    own = dataclasses.replace
    if isinstance(batch, PreferenceBatch):
        return [own(part, texts=own(part.texts, row=jnp.arange(4))) for part in parts]
    return [own(part, row=jnp.arange(4)) for part in parts]


def measured(config, objective, batch):
    """What a run with these held-out rows measures of large random weights and of their halves; and the module."""
    plan = Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated")
    trainer, layout = make_trainer(config, plan, AdamW(), LRSchedule(), objective=objective, ema=None)
    with jax.set_mesh(plan.real_mesh):
        state = create_state(layout, config, trainer.optimizer, config.param_rules.frozen, False, 7)
        params = {path: leaf * 8 for path, leaf in state.params.items()}
        if "score/weight" in params:
            params["score/weight"] = jnp.asarray(np.random.default_rng(1).normal(size=(1, 16)), jnp.float32)
        half = jax.tree.map(lambda leaf: leaf / 2, params)
        running = running_of(trainer, jax.device_put(halves(batch), plan.batch))
        evaluated, values = Evaluated(step=0, weights={"": params, "_ema": half}, frozen=state.frozen), {}
        for measure in (HeldOutLoss(running), *TextEvaluations().measures(running)):
            values |= measure(evaluated)
        return values, [merge_module(trainer.graphdef, one) for one in (params, half)]


def surprises(decoder, batch):
    """The negative log-likelihood of every target, float64."""
    scores = np.asarray(decoder.logits(decoder(batch.tokens, batch.positions, batch.segments)), np.float64)[:, :-1]
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    said = np.take_along_axis(logs, np.asarray(batch.tokens)[:, 1:, None], 2)[..., 0]
    return -said[np.asarray(batch.weights)[:, 1:] > 0]


@pytest.mark.slow
def test_perplexity_is_that_of_the_mean_over_tokens_whatever_the_loss_averages_over():
    values, models = measured(LANGUAGE, OBJECTIVE, texts())
    for suffix, model in zip(("", "_ema"), models, strict=True):
        costs = surprises(model, texts())
        assert values[f"val/perplexity{suffix}"] == pytest.approx(np.exp(costs.mean()), rel=1e-5)
        assert abs(np.log(values[f"val/perplexity{suffix}"]) / values[f"val/loss{suffix}"] - 1) > 1e-2
        norms = OBJECTIVE.norms(texts())
        _, metrics = OBJECTIVE.loss(model, texts(), norms, None, train=False)
        for name in ("loss", "log_prob", "token_accuracy"):
            assert values[f"val/{name}{suffix}"] == pytest.approx(float(metrics[name]), rel=1e-5)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary():
    class Uniform:
        def __call__(self, tokens, positions, segments):
            return jnp.zeros((*tokens.shape, 4))

        def scores(self, x, tokens):
            return dataclasses.make_dataclass("Found", ["log_prob"])(jnp.full(tokens.shape, -np.log(VOCABULARY)))

    from openpi_train.evaluation.held_out_loss import negative_log_likelihood

    total, count = negative_log_likelihood(Uniform(), texts(), 0)
    assert count == texts().weights[:, 1:].sum() and np.exp(total / count) == pytest.approx(VOCABULARY, rel=1e-5)


@pytest.mark.slow
def test_the_accuracy_of_a_reward_model_is_the_share_of_held_out_pairs_that_it_ranks_rightly():
    pairs = PreferenceBatch(texts=texts(), margin=jnp.zeros(ROWS))
    values, models = measured(RewardConfig(language=LANGUAGE), RewardPairs(), pairs)
    assert "val/perplexity" not in values
    for suffix, model in zip(("", "_ema"), models, strict=True):
        chosen, rejected = np.asarray(model.rewards(pairs.texts.tokens, pairs.texts.positions, pairs.segments))[:REAL].T
        assert values[f"val/pair_accuracy{suffix}"] == pytest.approx(np.mean(chosen > rejected), abs=1e-6)
        # The difference of two rounded numbers is as exact as they are.
        rounding = 1e-5 * float(np.abs([chosen, rejected]).max())
        assert values[f"val/reward_margin{suffix}"] == pytest.approx(np.mean(chosen - rejected), abs=rounding)
    assert 0 < values["val/pair_accuracy"] < 1
