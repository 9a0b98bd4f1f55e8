"""A tiny pi0 learns from rollouts: its batches, what episodes depend on, and that what is scored was drawn."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rl.made import Made
from rl.wandering import SIZE, Wander, wandering
from scipy.stats import norm
from trainers import make_trainer, running_of

from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.envs.closed_loop import ClosedLoop, episode_keys
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.evaluation.eval_config import EvalConfig
from openpi_train.evaluation.measure import EvaluationContext
from openpi_train.evaluation.row_sampling import RowSampling
from openpi_train.models.compute import Compute
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.indicator_flow import IndicatorFlow
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import merge_module
from openpi_train.parallel.strategy import Plan
from openpi_train.rl.estimator import AdvantageEstimator
from openpi_train.rl.rollout_feed import RolloutFeed
from openpi_train.runtime.exits import DataError, UsageError
from openpi_train.runtime.preempt import StoppedError
from openpi_train.sampling.action_sampler import OwnSampler
from openpi_train.sampling.denoising import DenoisingSampler
from openpi_train.sampling.denoising_distribution import DenoisingDistribution
from openpi_train.sampling.flow import FlowSampler
from openpi_train.sampling.flow_distribution import FlowDistribution
from openpi_train.sampling.noise_schedule import NoiseSchedule
from openpi_train.sampling.token_distribution import TokenDistribution
from openpi_train.training.init import create_state
from openpi_train.types import RolloutBatch, tree_of
from openpi_train.types import observation as observation_of

STEPS, QUERIES = 2, 3
GAE = AdvantageEstimator(kind="gae", gamma=0.9, whiten=False)
# Succeeds at each place in a chunk of two executed actions, and never.
TIMED = Wander(distances=(1, 2, 3, 4, 5, 6, 7, 0.999))
STILL = LRSchedule(warmup_steps=0, peak_lr=0.0, decay_steps=10, decay_lr=0.0)


@dataclasses.dataclass
class MadeRobot(Made):
    data: object
    running: EvaluationContext

    @property
    def actor(self):
        return self.feed._actor

    def act(self, draws, group_size=4):
        with jax.set_mesh(self.plan.real_mesh):
            return self.actor.act({**self.state.frozen, **self.state.params}, draws, group_size)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")

    def made(
        devices=1,
        accum=1,
        schedule=STILL,
        objective=wandering.objective,
        indicator=False,
        critic=False,
        strategy="replicated",
        **changes,
    ):
        mesh = make_mesh(1 if strategy == "replicated" else devices, jax.devices()[:devices])
        plan = Plan(mesh=mesh, strategy=strategy, min_shard_mib=0)
        rl = dataclasses.replace(wandering.rl, **changes)
        model = dataclasses.replace(wandering.model, indicator=indicator, critic=critic)
        experiment = dataclasses.replace(
            wandering, exp_name="x", rl=rl, assets_base_dir=str(folder), objective=objective, model=model
        )
        data = experiment.open_data()
        trainer, layout = make_trainer(
            experiment.model, plan, AdamW(), schedule, objective=experiment.objective, accum=accum, ema=None
        )
        with jax.set_mesh(plan.real_mesh):
            state = create_state(layout, experiment.model, trainer.optimizer, lambda _: False, False, 7)
            running = dataclasses.replace(running_of(trainer, []), data=data, batch_size=8)
            feed = RolloutFeed(rl, rl.actor(running, experiment.data), trainer, batch_size=8)
        return MadeRobot(feed, state, trainer.jitted_step(layout.shardings), plan, experiment, data, running)

    return made


@pytest.fixture(scope="module")
def still(make):
    """Four steps in which nothing is learnt."""
    made = make()
    return made, *made.steps(4)


@pytest.mark.slow
def test_batches_have_the_shapes_that_programs_are_compiled_for(still):
    made, batches, _ = still
    spec = made.experiment.batch_spec(8, made.data)

    def shapes(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    assert shapes(batches[0]) == shapes(spec)
    assert batches[0].traces.noisy.shape == (8, QUERIES, STEPS + 1, 3, 8)


def test_what_acts_is_scored_with_the_probability_that_it_was_drawn_with(still):
    """The first ratio is exactly 1, and stays 1 where nothing is learnt."""
    made, batches, found = still
    distribution = made.experiment.objective.distribution
    # Of the Gaussians of a step: of the seven dims of every control step that took place, mean over the steps.
    of_value = norm.entropy(scale=np.asarray(distribution.std(jnp.asarray(distribution.times())), np.float64))
    executed = np.asarray(batches[0].traces.is_executed).sum(axis=(2, 3))
    assert set(np.unique(executed)) == {0, 7, 14}
    units = np.asarray(batches[0].mask).sum()
    assert found[0]["entropy"] == pytest.approx((executed[..., None] * of_value).sum() / units, rel=1e-5)
    assert found[0]["ratio"] == 1
    for one in found[1:]:
        assert one["ratio"] == pytest.approx(1, abs=1e-5) and one["clip_fraction"] == 0
    for one in found:
        assert one["sampling_difference"] < 1e-3 and one["sampling_ratio"] == pytest.approx(1, abs=1e-3)
    counts = np.asarray(batches[1].mask)
    assert (np.asarray(batches[1].log_probs)[counts] != 0).all()


@pytest.mark.slow
def test_demonstrations_stand_beside_the_rollouts_and_are_never_the_same(make):
    """The rollout of this number has the next rows of the run's data, in each of its epochs."""
    objective = IndicatorFlow(distribution=FlowDistribution(num_steps=STEPS, guidance=1.0), num_flow_draws=1)
    made = make(objective=objective, indicator=True, num_demonstrations=3)
    spec = made.experiment.batch_spec(8, made.data)
    batches = [made.feed.next(made.state) for _ in range(4)]
    assert jax.tree.structure(batches[0]) == jax.tree.structure(spec)
    assert [leaf.shape for leaf in jax.tree.leaves(batches[0])] == [leaf.shape for leaf in jax.tree.leaves(spec)]
    groups = made.feed._collection.groups
    numbers = groups * 4 + np.tile(np.arange(4), 4)
    expected, _ = made.data.train.batch((numbers[:, None] * 3 + np.arange(3)).ravel())
    for first in (0, 2):
        found = np.concatenate([batch.demonstrations.actions for batch in batches[first : first + 2]])
        order = [int(number) for n in range(2) for number in made.feed._numbers(first // 2, n)]
        np.testing.assert_array_equal(found, expected["actions"].reshape(16, 3, *found.shape[2:])[order])
    _, (metrics, *_) = made.steps(1)
    assert metrics["loss"] > 0 and metrics["better"] + metrics["worse"] <= 1


class Unrewarded(Wander):
    """Its rewards are no numbers."""

    def reward(self, states):
        return super().reward(states) * np.nan


@pytest.mark.slow
def test_a_reward_that_is_no_number_ends_the_run(make):
    made = make(env=Unrewarded(distances=(1, 2)), num_groups=8, group_size=2, dense_weight=0.1)
    with pytest.raises(DataError, match=r"reward of the environment is not finite: .* --rl.dense-weight 0"):
        made.act(range(8), 2)


@pytest.mark.slow
def test_success_anywhere_in_a_chunk_counts_and_later_queries_do_not(make):
    made = make(env=TIMED, num_groups=8, group_size=2, execute=2, dense_weight=0.1)
    rollouts = made.act(range(8), 2)
    ends = {"away_1": 1, "away_2": 2, "away_3": 3, "away_4": 4, "away_5": 5, "away_6": None, "away_7": None}
    ends["away_0.999"] = None
    tasks = [made.actor._env.tasks[prompt_id] for prompt_id in rollouts.prompt_ids]
    assert sorted(tasks) == sorted([*ends, *ends])
    for number, task in enumerate(tasks):
        end = ends[task]
        assert rollouts.outcomes[number] == (end is not None)
        dense = sum(range((end or 5) + 1))
        assert rollouts.rewards[number] == pytest.approx(rollouts.outcomes[number] + 0.1 * dense)
        assert rollouts.is_cut[number] == (end is None)
        executed = rollouts.local.columns["is_executed"].reshape(16, QUERIES, 3, 8)[number]
        # Two of a chunk's three actions, up to the end of the episode; the model has one dim more than the robot.
        assert executed.sum(axis=(1, 2)).tolist() == [7 * n for n in np.clip((end or 5) - np.array([0, 2, 4]), 0, 2)]
        assert not executed[:, 2].any() and not executed[..., 7].any()
        valid = -(-(end or 5) // 2)
        assert rollouts.mask[number].tolist() == [True] * valid * STEPS + [False] * (QUERIES - valid) * STEPS
        assert rollouts.parts[f"success/{task}"][number] == rollouts.outcomes[number]
        assert np.isnan(rollouts.parts["success/away_1"][number]) == (task != "away_1")
    # Every query has the picture of its own control step.
    pictures = rollouts.local.columns["image/base_0_rgb"]
    assert pictures.shape == (2, 8, QUERIES, SIZE, SIZE, 3)
    assert (pictures == np.array([0, 2, 4])[:, None, None, None]).all()


@pytest.fixture(scope="module")
def with_critic(make):
    """A run with a critic that says something, in episodes that end at each place, or never."""

    def made(devices=1, accum=1, **changes):
        objective = dataclasses.replace(wandering.objective, value_weight=0.5)
        settings = {"env": TIMED, "num_groups": 8, "group_size": 1, "advantages": GAE, "dense_weight": 0.1, **changes}
        found = make(devices, accum, objective=objective, critic=True, **settings)
        name = "value_head/layer_out/kernel"
        kernel = found.state.params[name]
        drawn = jax.device_put(np.random.default_rng(0).normal(size=kernel.shape).astype(np.float32), kernel.sharding)
        found.state = dataclasses.replace(found.state, params={**found.state.params, name: drawn})
        return found

    return made


def test_only_episodes_that_were_cut_go_on_with_the_critics_value(with_critic):
    """The value is that of what was seen after the last control step; success pays at its own query."""
    made = with_critic()
    rollouts = made.act(range(8), 1)
    found = rollouts.decisions
    tasks = [made.actor._env.tasks[prompt_id] for prompt_id in rollouts.prompt_ids]
    model = merge_module(made.feed._trainer.graphdef, {**made.state.frozen, **made.state.params})
    for number, task in enumerate(tasks):
        distance = float(task.removeprefix("away_"))
        end = int(distance) if 1 <= distance <= 5 else 5
        by_query = [0.0] * QUERIES
        for step in range(1, end + 1):
            by_query[(step - 1) // 2] += 0.1 * step
        by_query[(end - 1) // 2] += rollouts.outcomes[number]
        np.testing.assert_allclose(found.rewards[number], by_query, rtol=1e-12)
        assert found.rewards[number].sum() == pytest.approx(rollouts.rewards[number])
        assert (found.last_values[number] == 0) == (rollouts.outcomes[number] == 1)
    # What follows the last control step has its picture, and the state there; of the end nothing else is recorded.
    cut = np.flatnonzero(rollouts.outcomes == 0)
    assert len(cut) == 3
    columns = {name: one.reshape(8, *one.shape[2:]) for name, one in rollouts.local.columns.items()}
    call = made.actor._begun({**made.state.frozen, **made.state.params}, np.arange(8), cut, 1)
    call.episodes.begin()
    with jax.set_mesh(made.plan.real_mesh):
        while not call.episodes.is_over():
            call.episodes.query()
            call.episodes.execute()
    seen = made.actor._env.observe(call.episodes.outcome.states)
    assert (seen.images["image_0"] == 5).all()
    after = made.actor._rows.columns(seen)
    last = model.value(observation_of({name: jnp.asarray(one) for name, one in after.items()}))
    np.testing.assert_allclose(found.last_values[cut], last, rtol=1e-4, atol=1e-5)
    before = {name: jnp.asarray(one[cut, -1]) for name, one in columns.items() if name in after}
    assert np.abs(np.asarray(model.value(observation_of(before))) - last).max() > 1e-4


def test_a_limit_that_is_part_of_the_task_is_followed_by_nothing(with_critic):
    rollouts = with_critic(bootstrap=False).act(range(8), 1)
    assert (rollouts.outcomes == 0).any() and (rollouts.decisions.last_values == 0).all()


def test_all_units_of_a_query_have_its_value_and_its_advantage(with_critic):
    """By the definition of GAE, from the batch's own values and what was earned."""
    made = with_critic()
    [batch], [metrics] = made.steps(1)
    found = {name: np.asarray(getattr(batch, name)) for name in ("values", "advantages", "returns", "mask")}
    for name in ("values", "advantages", "returns"):
        by_query = found[name].reshape(8, QUERIES, STEPS)
        assert (by_query == by_query[:, :, :1]).all() and np.abs(by_query).max() > 0.01, name
    values, advantages, mask = (found[name][:, ::STEPS] for name in ("values", "advantages", "mask"))
    rollouts = made.feed._collection.rollouts
    numbers = made.feed._numbers(0, 0)
    earned, last = rollouts.decisions.rewards[numbers], rollouts.decisions.last_values[numbers]
    for row in range(8):
        length = mask[row].sum()
        following = np.array([*values[row, 1:length], last[row]])
        surprise = earned[row, :length] + 0.9 * following - values[row, :length]
        expected = [surprise[place:] @ (0.9 * 0.95) ** np.arange(length - place) for place in range(length)]
        np.testing.assert_allclose(advantages[row, :length], expected, rtol=1e-4, atol=1e-5)
    # Nothing was learnt before: the critic still says what it said, and its error is half of the squared advantages'.
    assert metrics["value_loss"] == pytest.approx(0.5 * np.square(advantages[mask]).mean(), rel=1e-4)


@pytest.mark.slow
def test_devices_and_accumulation_change_nothing_with_a_critic(with_critic):
    one, other = with_critic(), with_critic(2, 4)
    [batch], [expected] = one.steps(1)
    [same], [found] = other.steps(1)
    for name in ("values", "advantages", "returns"):
        np.testing.assert_allclose(getattr(same, name), getattr(batch, name), rtol=1e-4, atol=1e-5, err_msg=name)
    for name in ("loss", "value_loss", "value", "return", "grad_norm"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_only_chosen_tasks_are_trained_from_the_states_that_they_have_among_all(make):
    made = make(env=TIMED, tasks=("away_6", "2"), num_groups=4, group_size=2)
    rollouts = made.act(range(4), 2)
    tasks = {name.removeprefix("success/") for name in rollouts.parts if name.startswith("success/")}
    assert tasks == {"away_6", "away_3"} and made.actor.identity["tasks"] == ["away_6", "away_3"]
    # Only the third task can be achieved within five control steps.
    steps = np.where(rollouts.prompt_ids == 1, 3, 5)
    assert (
        sorted(rollouts.prompt_ids) == [0] * 4 + [1] * 4 and rollouts.parts["control_steps"].tolist() == steps.tolist()
    )
    assert rollouts.outcomes.tolist() == (rollouts.prompt_ids == 1).tolist()


def test_rollouts_of_a_group_begin_alike_and_differ_by_their_noise(still):
    made, *_ = still
    rollouts = made.act([3, 4, 7, 9])
    state, noisy = (rollouts.local.columns[name].reshape(16, QUERIES, -1) for name in ("state", "kept/noisy"))
    starts = state[:, 0].reshape(4, 4, -1)
    assert (starts == starts[:, :1]).all() and len(np.unique(starts[:, 0], axis=0)) == 4
    assert len(np.unique(noisy[:, 0], axis=0)) == 16
    again = made.act([9, 3, 7, 4])
    np.testing.assert_array_equal(again.local.columns["kept/noisy"].reshape(16, QUERIES, -1)[4:8, 0], noisy[:4, 0])


def assert_same_rollouts(one, other):
    for name, column in other.local.columns.items():
        np.testing.assert_array_equal(one.local.columns[name], column, err_msg=name)
    for name in ("outcomes", "rewards", "mask", "prompt_ids"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def test_two_slots_change_no_rollout_and_tell_their_overlap(still, monkeypatch):
    """Six calls of the policy's program, the last of which is filled up."""
    made, *_ = still
    expected = made.act([3, 4, 7, 9])
    assert "rl/overlap" not in made.actor.metrics()
    monkeypatch.setattr(made.actor, "_num_slots", 2)
    made.actor.begin_iteration(0)
    assert_same_rollouts(made.act([3, 4, 7, 9]), expected)
    found = made.actor.metrics()
    assert 0 <= found["rl/overlap"] < 1 and found["time/policy_s"] > 0 and found["time/environment_s"] > 0


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_stop_ends_a_collection_before_the_next_query(still, monkeypatch, num_slots):
    made, *_ = still
    expected, asked, queries = made.act([3, 4, 7, 9]), iter([False, False, False, True]), []
    sampling = made.actor._sampling
    with monkeypatch.context() as patched:
        patched.setattr(made.actor, "_num_slots", num_slots)
        patched.setattr(made.actor, "_stop_requested", asked.__next__)
        patched.setattr(made.actor, "_sampling", CountedSampling(sampling, queries))
        with pytest.raises(StoppedError):
            made.act([3, 4, 7, 9])
    assert len(queries) == 3
    assert_same_rollouts(made.act([3, 4, 7, 9]), expected)


class CountedSampling(RowSampling):
    def __init__(self, sampling, queries):
        self.__dict__ |= sampling.__dict__
        self._queries = queries

    def __call__(self, params, columns, keys):
        self._queries.append(1)
        return super().__call__(params, columns, keys)


@pytest.mark.slow
def test_keeping_changes_no_rollout_and_has_every_one_of_both_waves(still, tmp_path, monkeypatch):
    made, *_ = still
    waves = [made.act([3, 4, 7, 9]), made.act([10, 11, 12, 13])]
    monkeypatch.setattr(made.actor, "_kept", made.actor._keeping(str(tmp_path / "kept"), tmp_path / "x"))
    monkeypatch.setattr(made.actor, "_num_slots", 2)
    made.actor.begin_iteration(0)
    for draws, expected in zip(([3, 4, 7, 9], [10, 11, 12, 13]), waves, strict=True):
        assert_same_rollouts(made.act(draws), expected)
    made.actor.end_iteration()
    source = LeRobot(path=str(tmp_path / "kept"), cache_dir=str(tmp_path / "cache")).open()
    steps = np.concatenate([one.parts["control_steps"] for one in waves])
    assert np.diff([0, *source.episode_ends]).tolist() == steps.tolist()
    achieved = np.asarray(source.columns["next/success"])[source.episode_ends - 1]
    assert achieved.tolist() == np.concatenate([one.outcomes for one in waves]).astype(bool).tolist()
    assert set(source.columns) == {"observation/state", "action", "next/reward", "next/success", "next/done"}


def test_evaluation_and_rl_share_no_initial_state(still):
    made, *_ = still
    env, draws = made.actor._env, np.arange(40)
    tasks = np.array([made.actor._states.task(draw) for draw in draws.tolist()])
    config = ClosedLoop(env=env, episodes_per_task=20, seed=wandering.seed)
    trained = env.reset(made.actor._states.reset_keys(draws), tasks)[0]
    evaluated = env.reset(episode_keys(config, draws), draws % 2)[0]
    assert len(np.unique(np.concatenate([trained, evaluated]), axis=0)) == 80


@pytest.mark.slow
def test_devices_and_accumulation_change_nothing(make):
    """The same rollouts, on one device at once and on two in four parts of one row."""
    schedule = dataclasses.replace(STILL, peak_lr=1e-3, decay_lr=1e-3)
    one, other = make(schedule=schedule), make(2, 4, schedule=schedule)
    batches, found = one.steps(3)
    for number, (batch, expected) in enumerate(zip(batches, found, strict=True)):
        with jax.set_mesh(other.plan.real_mesh):
            placed = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), other.plan.batch), batch)
            other.state, metrics = other.step(other.state, placed)
        # Afterwards parameters differ by rounding, since Adam's steps do where a gradient is hardly more than that, and
        # logarithms of ratios are sums of squares over the least standard deviation, 1e-3.
        loss, norm = (1e-6, 1e-6) if number == 0 else (1e-5, 1e-4)
        for name in ("loss", "policy_loss", "ratio", "entropy"):
            np.testing.assert_allclose(metrics[name], expected[name], rtol=loss, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=norm)
    assert found[2]["approx_kl"] > 0


@pytest.mark.slow
def test_accumulation_and_stages_only_change_the_order_of_sums(make, still, monkeypatch):
    """In float64 loss and gradient are the same to 1e-12, also where ratios are far from 1: what differs in float32 is
    its rounding. On one device at once, and on two in four and in two parts, with gradients and with parameters cut.
    """
    # What computes in float32 takes its type from there.
    monkeypatch.setattr(jnp, "float32", jnp.float64)
    monkeypatch.setattr(type(wandering.model), "compute", property(lambda _: Compute(dtype=jnp.float64)))

    def wide(leaf):
        return np.asarray(leaf, np.float64 if leaf.dtype == np.float32 else leaf.dtype)

    # Another policy than the one that acted.
    batch, params = jax.tree.map(wide, (still[1][1], still[0].state.params))
    params = {path: leaf * 1.05 for path, leaf in params.items()}

    def shares(made):
        trainer, is_cut = (
            made.feed._trainer,
            [not leaf.sharding.is_fully_replicated for leaf in made.state.params.values()],
        )
        assert any(is_cut) == (made.plan.strategy != "replicated")
        with jax.set_mesh(made.plan.real_mesh):
            own = {path: jax.device_put(leaf, made.state.params[path].sharding) for path, leaf in params.items()}
            state = dataclasses.replace(made.state, params=own)
            placed = jax.device_put(batch, made.plan.batch)
            return jax.jit(lambda *given: trainer.accumulate(*given, trainer.objective.norms(given[1])))(state, placed)

    with jax.enable_x64(True):
        expected, metrics = shares(make())
        assert metrics["approx_kl"] > 0.01 and optax.tree.norm(expected).dtype == np.float64
        most = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
        for found, others in (shares(make(2, 4, strategy="zero2")), shares(make(2, 2, strategy="zero3"))):
            for name, value in metrics.items():
                np.testing.assert_allclose(others[name], value, rtol=1e-12, atol=1e-13, err_msg=name)
            for path, leaf in expected.items():
                np.testing.assert_allclose(found[path], leaf, rtol=0, atol=1e-12 * most, err_msg=path)


def test_a_unit_counts_by_the_length_of_its_episode(still):
    made, batches, _ = still
    mask = np.concatenate([batch.mask for batch in batches[:2]])
    lengths = mask.sum(axis=1, keepdims=True)
    assert len(np.unique(lengths)) > 1
    given = tree_of(RolloutBatch, mask=jnp.asarray(mask), is_rollout=jnp.ones(len(mask), bool))
    objective = made.experiment.objective
    weights = objective._weights(jnp.asarray(mask, jnp.float32), jnp.asarray(lengths), objective.norms(given))
    np.testing.assert_allclose(weights, mask / (16 * lengths), rtol=1e-6)


def test_what_trained_is_evaluated_without_chance():
    schedule = NoiseSchedule(num_train_timesteps=50)
    assert wandering.objective.action_sampler == FlowSampler()
    distribution = DenoisingDistribution(noise_schedule=schedule)
    assert PolicyGradient(distribution=distribution).action_sampler == DenoisingSampler(
        noise_schedule=schedule, kind="ddim"
    )
    assert PolicyGradient().action_sampler == OwnSampler()


@pytest.mark.parametrize("steps", [2, 10])
def test_evaluations_of_other_denoising_steps_than_rl_has_are_told(still, caplog, steps):
    made, *_ = still
    with caplog.at_level(logging.WARNING):
        EvalConfig(num_sample_steps=steps).measures(made.running)
    assert ("RL acts in 2" in caplog.text and "Give --eval.num-sample-steps 2" in caplog.text) == (steps != 2)


REFUSED = [
    ({"dense_weight": 0.5, "env": TabletopEnv()}, {}, "TabletopEnv has no rewards but success"),
    ({"num_slots": 2}, {}, "--rl.num-slots 2: an environment in worker processes (ProcessEnv) has 1 or 2"),
    ({"execute": 4}, {}, "--rl.execute 4: a chunk has 3 actions"),
    ({"env": dataclasses.replace(Wander(), distances=())}, {}, "--rl.env has no task"),
    ({"tasks": ("away_0.6",)}, {}, "--rl.tasks away_0.6: there is no task away_0.6; did you mean away_0.06?"),
    (
        {},
        {"eval": dataclasses.replace(wandering.eval, closed_loop=ClosedLoop(env=Wander(), tasks=("2",)))},
        "--eval.closed-loop.tasks 2: there is no task 2; Wander has 0 away_0.06, 1 away_0.08",
    ),
    (
        {"mixed_only": True, "num_groups": 4, "group_size": 6},
        {},
        "--batch-size 8 is not a multiple of --rl.group-size 6",
    ),
    ({"num_demonstrations": 2}, {}, "--rl.num-demonstrations 2: PolicyGradient learns from own rollouts only"),
    ({}, {"objective": IndicatorFlow()}, "objective IndicatorFlow tells the model how good a chunk was"),
    (
        {},
        {"objective": PolicyGradient(distribution=FlowDistribution(guidance=1.0))},
        "objective PolicyGradient tells the model how good a chunk was: give --model.indicator",
    ),
    ({"skip_solved": 1}, {}, "give --rl.states-per-task"),
    ({"group_size": 1, "num_groups": 16}, {}, "every advantage would be 0"),
    ({"advantages": GAE}, {}, "gae needs a critic: --objective.value-weight, such as 0.5"),
    (
        {"advantages": GAE},
        {"objective": dataclasses.replace(wandering.objective, value_weight=0.5)},
        "objective PolicyGradient trains a critic (--objective.value-weight): give --model.critic",
    ),
    (
        {},
        {"objective": PolicyGradient(distribution=TokenDistribution())},
        "whose distribution draws actions: give it FlowDistribution in an experiment's",
    ),
    (
        {},
        {"objective": PolicyGradient(distribution=DenoisingDistribution())},
        "DenoisingDistribution is no distribution of a Pi0Config: give it FlowDistribution",
    ),
    ({}, {"objective": PolicyGradient(distribution=FlowDistribution(noise=0.0))}, "without chance nothing is scored"),
    ({}, {"objective": FlowMatching()}, "does not learn from own rollouts"),
    ({}, {"num_epochs": 2}, "--num-epochs counts passes over the data, which RobotRL does not make"),
    ({}, {"save_interval": 6}, "--save-interval 6 is not a multiple of the 4 optimizer steps"),
]


@pytest.mark.parametrize(("rl", "changes", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_settings_that_cannot_work_are_refused(rl, changes, message):
    rl = dataclasses.replace(wandering.rl, **rl)
    with pytest.raises(UsageError) as caught:
        dataclasses.replace(wandering, exp_name="x", rl=rl, **changes).check(1)
    assert message in str(caught.value)
