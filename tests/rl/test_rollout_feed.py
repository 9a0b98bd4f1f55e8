"""The feed that acts: what its batches hold, when it acts, and where its position is complete."""

import dataclasses
import json
import types
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rl.scripted import UNITS, ScriptedActor, ScriptedRL
from trainers import make_trainer

from openpi_train.models.model_config import ModelConfig
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import merge_module
from openpi_train.parallel.strategy import Plan
from openpi_train.rl.advantages import group_relative
from openpi_train.rl.collection import Collection
from openpi_train.rl.estimator import AdvantageEstimator
from openpi_train.rl.rollout_feed import RolloutFeed
from openpi_train.rl.rollout_samples import best_and_worst
from openpi_train.sampling.distribution import Distribution, UnitScores
from openpi_train.training.init import create_state

BATCH = 4


class Weight(nnx.Module):
    """A parameter that everything is computed from."""

    def __init__(self, value=1.0):
        self.weight = nnx.Param(jnp.full((1, 1), value))

    @property
    def reference(self):
        return Weight(0.25)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightConfig(ModelConfig):
    provides: ClassVar[frozenset[str]] = frozenset({"weight", "reference", "value"})

    def build(self, rngs):
        return Weight()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLaw(Distribution):
    """log p = -weight x (the number in the group + 1); the value is twice the weight."""

    needs: ClassVar[frozenset[str]] = frozenset({"weight"})

    def scores(self, model, traces):
        numbers = traces.texts.tokens[:, 1:2].astype(jnp.float32) + jnp.ones((1, UNITS))
        return UnitScores(log_prob=-model.weight[...] * numbers, entropy=numbers * 0)

    def values(self, model, traces):
        return model.weight[...] * 2 * jnp.ones((len(traces.row), UNITS))


PLAIN = PolicyGradient(distribution=WeightLaw())


def made(
    devices=1,
    accum=1,
    objective=PLAIN,
    reward=lambda c, n: float(n == 0),
    directory=None,
    batch_size=BATCH,
    **settings,
):
    """A feed, the state and the compiled step of its run."""
    plan = Plan(mesh=make_mesh(1, jax.devices()[:devices]), strategy="replicated")
    # No step moves a ratio or a value to exactly where it is clipped.
    schedule = LRSchedule(warmup_steps=0, peak_lr=0.07, decay_steps=100, decay_lr=0.07)
    trainer, layout = make_trainer(
        WeightConfig(), plan, AdamW(), schedule, objective=objective, accum=accum, ema=None, seed=3
    )
    rl = ScriptedRL(**{"num_groups": 4, "group_size": 3, "epochs": 2, **settings})
    feed = RolloutFeed(rl, ScriptedActor(reward), trainer, batch_size=batch_size, directory=directory)
    with jax.set_mesh(plan.real_mesh):
        state = create_state(layout, WeightConfig(), trainer.optimizer, lambda _: False, False, 7)
    return feed, state, trainer.jitted_step(layout.shardings), plan


def trained(feed, state, step, plan, steps):
    """Losses and parameters of so many steps."""
    found = []
    with jax.set_mesh(plan.real_mesh):
        for _ in range(steps):
            state, metrics = step(state, feed.next(state))
            found.append({name: float(value) for name, value in metrics.items()})
    return found, state


def rollouts_of(batch):
    return [tuple(row) for row in np.asarray(batch.traces.texts.tokens)[:, :2].tolist()]


def test_an_epoch_has_every_rollout_once_each_in_its_own_row():
    feed, state, *_ = made()
    batches = [feed.next(state) for _ in range(6)]
    everything = [(draw, number) for draw in range(4) for number in range(3)]
    for epoch in (batches[:3], batches[3:]):
        assert sorted(rollout for batch in epoch for rollout in rollouts_of(batch)) == everything
    places = [
        {everything.index(one) % BATCH for one in column} for column in zip(*map(rollouts_of, batches), strict=True)
    ]
    assert places == [{0}, {1}, {2}, {3}]
    assert [rollouts_of(batch) for batch in batches[:3]] != [rollouts_of(batch) for batch in batches[3:]]


def test_it_acts_where_an_iteration_begins_and_only_the_first_batch_is_fresh():
    feed, state, *_ = made()
    acted, can_be_saved, fresh = [], [feed.can_be_saved], []
    for _ in range(12):
        batch = feed.next(state)
        acted.append(len(feed._actor.acted))
        can_be_saved.append(feed.can_be_saved)
        fresh.append(bool(batch.is_fresh.all()))
    assert acted == [4] * 6 + [8] * 6
    assert can_be_saved == [True, *[False] * 5, True, *[False] * 5, True]
    assert fresh == [True, *[False] * 5] * 2


def test_batches_have_advantages_of_their_groups_and_the_acting_policys_scores():
    objective = PolicyGradient(distribution=WeightLaw(), kl_weight=0.1, value_weight=0.1)
    feed, state, *_ = made(objective=objective)
    batch = feed.next(state)
    rewards = np.array([float(number == 0) for _ in range(4) for number in range(3)])
    one = dict(
        zip(
            [(draw, number) for draw in range(4) for number in range(3)],
            group_relative(rewards, np.repeat(range(4), 3)),
            strict=True,
        )
    )
    mask = np.asarray(batch.mask)
    for row, rollout in enumerate(rollouts_of(batch)):
        np.testing.assert_allclose(batch.advantages[row], one[rollout] * mask[row], rtol=1e-6)
        np.testing.assert_allclose(batch.log_probs[row], -1.0 * (rollout[1] + 1))
        np.testing.assert_allclose(batch.reference_log_probs[row], -0.25 * (rollout[1] + 1))
        np.testing.assert_allclose(batch.values[row], 2.0)


def test_the_divergence_from_the_reference_is_taken_off_the_reward():
    estimator = AdvantageEstimator(kind="rloo", kl_weight=0.5)
    feed, state, *_ = made(advantages=estimator, reward=lambda *_: 0.0)
    batch = feed.next(state)
    rollouts = feed._collection.rollouts
    log_ratio = -0.75 * (rollouts.columns["tokens"][:, 1:2] + 1) * np.ones((1, UNITS))
    expected, _ = estimator(rollouts.rewards, feed._collection.groups, rollouts.mask, log_ratio, None)
    numbers = [draw * 3 + number for draw, number in rollouts_of(batch)]
    np.testing.assert_allclose(batch.advantages, expected[numbers], rtol=1e-6)
    assert np.abs(expected).max() > 0


ADAPTED = AdvantageEstimator(kind="gae", whiten=False, kl_weight=0.4, kl_target=0.3, kl_horizon=24)


def iterations_at(feed, state, weights):
    """The first batch of an iteration at each of these parameters, and what is logged of its divergence."""
    found = []
    for weight in weights:
        now = dataclasses.replace(state, params={"weight": jnp.full((1, 1), weight)})
        batches = [feed.next(now) for _ in range(feed._num_steps)]
        found.append((batches[0], feed.metrics()["rl/kl_weight"], feed.metrics()["rl/kl"]))
    return found


def test_an_adapted_weight_of_the_divergence_has_the_closed_form():
    """log(policy / reference) of a unit is (0.25 - weight) times the rollout's number: above the target, within the
    limits on either side of it, far below.
    """
    objective = PolicyGradient(distribution=WeightLaw(), value_weight=0.1)
    feed, state, *_ = made(objective=objective, advantages=ADAPTED, epochs=1, mask_cut=True)
    weights, expected_weight = [0.0, 0.2125, 0.225, 1.0, 0.0], 0.4
    for iteration, (batch, used, divergence) in enumerate(iterations_at(feed, state, weights)):
        rollouts = feed._collection.rollouts if iteration == len(weights) - 1 else None
        draws = range(4 * iteration, 4 * iteration + 4)
        lengths = np.array([[2 + (draw + number) % (UNITS - 1) for number in range(3)] for draw in draws])
        expected = ((0.25 - weights[iteration]) * np.arange(1, 4) * lengths).mean()
        assert divergence == pytest.approx(expected, rel=1e-5)
        assert used == pytest.approx(expected_weight, rel=1e-5)
        if rollouts is not None:
            log_ratio = 0.25 * (rollouts.columns["tokens"][:, 1:2] + 1) * np.ones((1, UNITS))
            mask = rollouts.mask & ~rollouts.is_cut[:, None]
            by_hand, _ = dataclasses.replace(ADAPTED, kl_weight=used, kl_target=None, kl_horizon=None)(
                rollouts.rewards, feed._collection.groups, mask, log_ratio, np.zeros_like(log_ratio)
            )
            numbers = [(draw - draws[0]) * 3 + number for draw, number in rollouts_of(batch)]
            np.testing.assert_allclose(batch.advantages, by_hand[numbers], rtol=1e-5, atol=1e-6)
        # 12 rollouts over a horizon of 24.
        expected_weight *= 1 + np.clip(expected / 0.3 - 1, -0.2, 0.2) / 2
    assert feed.position()["kl_weight"] == pytest.approx(expected_weight, rel=1e-5)
    # All three cases occurred.
    errors = [np.clip((0.25 - weight) * 7 / 0.3 - 1, -0.2, 0.2) for weight in weights]
    assert max(errors) == 0.2 and min(errors) == -0.2 and any(-0.2 < error < 0.2 for error in errors)


def test_an_adapted_weight_goes_on_bit_for_bit():
    settings = {
        "objective": PolicyGradient(distribution=WeightLaw(), value_weight=0.1),
        "advantages": ADAPTED,
        "epochs": 1,
    }
    feed, state, *_ = made(**settings)
    iterations_at(feed, state, [0.0, 0.21])
    other, *_ = made(**settings)
    other.seek(json.loads(json.dumps(feed.position())))
    for one, two in zip(iterations_at(feed, state, [0.22, 0.6]), iterations_at(other, state, [0.22, 0.6]), strict=True):
        assert one[1:] == two[1:]
        jax.tree.map(np.testing.assert_array_equal, one[0], two[0])
    assert feed.position() == other.position() and feed.position()["kl_weight"] != ADAPTED.kl_weight
    # The position of a run whose weight was constant: it begins with the config's.
    position = feed.position()
    del position["kl_weight"]
    other.seek(position)
    assert other.position()["kl_weight"] == ADAPTED.kl_weight
    constant, *_ = made()
    assert "kl_weight" not in constant.position()


def test_rollouts_that_were_cut_may_stay_out_of_the_loss():
    feed, state, *_ = made(mask_cut=True)
    batches = [feed.next(state) for _ in range(3)]
    masks = np.concatenate([batch.mask for batch in batches])
    rollouts = [rollout for batch in batches for rollout in rollouts_of(batch)]
    is_cut = [2 + (draw + number) % (UNITS - 1) == UNITS for draw, number in rollouts]
    assert masks.any(axis=1).tolist() == [not cut for cut in is_cut] and any(is_cut)
    assert all(batch.is_rollout.all() for batch in batches)


def test_rows_that_fill_an_iteration_count_nowhere():
    """One mixed group of the four that are asked for."""
    feed, state, *_ = made(
        mixed_only=True, max_waves=1, reward=lambda prompt_id, number: float(prompt_id == 2 > number)
    )
    batches = [feed.next(state) for _ in range(3)]
    masks, advantages = (np.concatenate([getattr(batch, name) for batch in batches]) for name in ("mask", "advantages"))
    assert masks.any(axis=1).sum() == 3 and not advantages[~masks].any()
    np.testing.assert_array_equal(np.concatenate([batch.is_rollout for batch in batches]), masks.any(axis=1))


@pytest.mark.slow
def test_a_run_without_two_different_rewards_changes_nothing():
    feed, state, step, plan = made(reward=lambda *_: 1.0, mixed_only=True, max_waves=2)
    before = np.asarray(state.params["weight"])
    found, state = trained(feed, state, step, plan, 6)
    assert all(one["loss"] == one["grad_norm"] == 0 for one in found)
    np.testing.assert_allclose(state.params["weight"], before, rtol=1e-6)


@pytest.mark.slow
def test_the_first_ratio_is_exactly_one():
    feed, state, step, plan = made()
    found, _ = trained(feed, state, step, plan, 12)
    assert [one["ratio"] == 1 for one in found] == [True, *[False] * 5] * 2
    # In the first iteration the sampler says what training does; then the parameter has changed, not what is scripted.
    assert [one["sampling_difference"] == 0 for one in found] == [True] * 6 + [False] * 6


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "accum"), [(4, 1), (2, 2), (1, 4)])
def test_devices_and_accumulation_change_nothing(devices, accum):
    """Ragged masks, a reference and a critic; sums of a few terms in another order."""
    objective = PolicyGradient(distribution=WeightLaw(), average="rollouts", kl_weight=0.1, value_weight=0.1)
    alone, alone_state = trained(*made(objective=objective), 8)
    found, state = trained(*made(devices, accum, objective=objective), 8)
    for one, expected in zip(found, alone, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(one[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(state.params["weight"], alone_state.params["weight"], rtol=1e-5)


@pytest.mark.slow
def test_it_goes_on_from_its_position_with_the_same_batches():
    feed, state, *_ = made(skip_solved=1, reward=lambda prompt_id, _: float(prompt_id % 2))
    for _ in range(6):
        feed.next(state)
    other, *_ = made(skip_solved=1, reward=lambda prompt_id, _: float(prompt_id % 2))
    other.seek(feed.position())
    for _ in range(12):
        one, two = feed.next(state), other.next(state)
        jax.tree.map(np.testing.assert_array_equal, one, two)
    assert feed.position() == other.position()


def test_it_goes_on_with_another_batch_size_at_the_contexts_that_follow():
    feed, state, *_ = made()
    for _ in range(6):
        feed.next(state)
    other, *_ = made(batch_size=6)
    other.seek(json.loads(json.dumps(feed.position())))
    batches = [other.next(state) for _ in range(2 * 12 // 6)]
    rollouts = [rollout for batch in batches for rollout in rollouts_of(batch)]
    assert sorted(rollouts) == sorted(2 * [(draw, number) for draw in range(4, 8) for number in range(3)])
    assert other.position()["iteration"] == 2 and other.can_be_saved


def test_the_position_of_other_prompts_is_refused():
    feed, *_ = made()
    position = {**feed.position(), "data": {"prompt_ids": 77}}
    with pytest.raises(ValueError, match="prompt_ids: then 77, now 1000"):
        feed.seek(position)


def test_acting_needs_no_buffer_of_a_state_that_is_gone():
    feed, state, *_ = made(epochs=1, num_groups=4)
    feed.next(state)
    later = dataclasses.replace(state, params={name: leaf + 0 for name, leaf in state.params.items()})
    for leaf in state.params.values():
        leaf.delete()
    for _ in range(6):
        feed.next(later)


def test_numbers_of_the_iteration_are_logged():
    feed, state, *_ = made()
    feed.next(state)
    found = feed.metrics()
    assert found["rl/reward"] == pytest.approx(1 / 3) and found["rl/groups_mixed"] == 1
    assert feed.acting_s >= found["time/acting_s"] >= 0 and feed.acting_s > 0 and feed.wait_s == 0
    assert len(feed.rows(0)) == BATCH and "reward" in feed.rows(0)[0]


def test_the_recorded_scores_are_those_of_the_module():
    feed, state, *_ = made()
    feed.next(state)
    model = merge_module(feed._trainer.graphdef, state.params)
    given = types.SimpleNamespace(texts=types.SimpleNamespace(tokens=jnp.asarray(feed._columns["tokens"])))
    np.testing.assert_array_equal(feed._columns["log_probs"], WeightLaw().scores(model, given).log_prob)


def test_some_rollouts_are_kept_to_look_at(tmp_path, caplog):
    """Context 1's and 3's groups differ; prompt 2's rollouts are all solved, prompt 0's none."""
    rewards = {0: (0, 0, 0), 1: (0, 1, 0), 2: (1, 1, 1), 3: (1, 0, float("nan"))}
    scripted = {"reward": lambda prompt_id, number: float(rewards[prompt_id % 4][number]), "show_interval": 2}
    feed, state, step, plan = made(**scripted, directory=tmp_path, num_shown=5)
    trained(feed, state, step, plan, 3 * 6)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["1", "3"]
    lines = [json.loads(line) for line in (tmp_path / "rollouts" / "1" / "rollouts.jsonl").read_text().splitlines()]
    assert [(line["prompt_id"], line["outcome"]) for line in lines] == [(1, 1), (1, 0), (3, 1), (3, 0), (0, 0)]
    assert lines[0]["what"] == "rollout at prompt 1, reward 1" and "video" not in lines[0]
    # Looking on never ends a run.
    (tmp_path / "file").touch()
    feed, state, step, plan = made(**scripted, directory=tmp_path / "file")
    trained(feed, state, step, plan, 1)
    assert "no rollouts are kept in" in caplog.text
    feed, state, step, plan = made(**scripted, directory=tmp_path / "none", num_shown=0)
    trained(feed, state, step, plan, 1)
    assert not (tmp_path / "none").exists()


def test_fillers_are_not_shown():
    rollouts = ScriptedActor(lambda prompt_id, number: float(prompt_id == number)).act({}, [0, 1], 2)
    counts = np.array([False, False, True, True])
    found = Collection(rollouts=rollouts, groups=np.array([0, 0, 1, 1]), counts=counts, metrics={})
    assert best_and_worst(found, 9) == [3, 2]
