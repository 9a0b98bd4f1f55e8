"""A loaded policy that acts, with chunks that are scripted: every action that is carried out is known in advance.

At its n-th question, counted from 0, the policy says 100 n + k for the k-th control step from the present one on, and
1000 more for every row; the second dim is the first one's negative.
"""

import dataclasses
import types

import following
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_flow import GaussianConfig, guided, noise_of

from openpi_train.data.robot.windows import WindowShape
from openpi_train.envs.env import EnvObservation
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.insulated_flow import InsulatedFlow
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.policy.acting import Acting, ActingInRealTime
from openpi_train.policy.observation import ObservationForm
from openpi_train.policy.policy import Policy, PreparedObservation
from openpi_train.policy.sampler import Sampler
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.flow import FlowSampler
from openpi_train.sampling.real_time_chunking import prefix_weights

AHEAD, STEPS, ROWS = 5, 17, 2
# With fewer of them the guidance is never so strong that it is clipped.
STEPS_OF_FLOW = 10


def said(question, row, step):
    """What the policy says, in the robot's units."""
    first = 1000 * row + 100 * question + step
    return np.array([first, -first], float)


def scripted(first_action):
    """The policy, and what it was asked, question by question: states, target, weights, largest guidance."""
    policy, asked, _ = scripted_with_draws(first_action)
    return policy, asked


def scripted_with_draws(first_action):
    """The policy, what it was asked, and the draws of its questions."""
    window, asked, drawn = WindowShape(horizon=AHEAD - first_action, first_action=first_action), [], []

    class Scripted(Sampler):
        @property
        def chunk(self):
            return window.horizon, following.MODEL_DIMS

        @property
        def flow(self):
            return FlowSampler()

        def sample(self, rows, draws, towards=None):
            drawn.append(draws)
            states = np.stack([row["state"][:2] for row in rows])
            chunks = np.full((len(rows), *self.chunk), np.nan, np.float32)
            for row, state in enumerate(states):
                told = np.stack([said(len(asked), row, step) for step in range(AHEAD)])
                chunks[row, -AHEAD:, :2] = following.in_the_models_units(told, state)
            asked.append((states, *(towards or ())))
            return np.nan_to_num(chunks, nan=-1e6)  # of the past and of dims that are none: nobody may use it

    translation = following.translation(window)
    form = ObservationForm(robot=translation.robot, window=window, image_size=(0, 0), reads_prompt=False)
    sampler = object.__new__(Scripted)
    return Policy(sampler=sampler, form=form, translation=translation, experiment="", checkpoint=""), asked, drawn


def numbers(actions):
    """The first dim [b, t]; the second is its negative."""
    # float32 normalised and back, with numbers of up to 2000.
    np.testing.assert_allclose(actions[..., 0], -actions[..., 1], atol=2e-2)
    found = np.round(actions[..., 0])
    np.testing.assert_allclose(actions[..., 0], found, atol=2e-2)
    return found


@pytest.mark.parametrize("first_action", [0, -2])
def test_without_delay_the_first_actions_of_each_chunk_are_carried_out(first_action):
    policy, _ = scripted(first_action)
    found = numbers(following.executed(Acting(policy, following.Follow()), execute=3, steps=8))
    assert found.tolist() == [[0, 1, 2, 100, 101, 102, 200, 201], [1000, 1001, 1002, 1100, 1101, 1102, 1200, 1201]]


def test_in_real_time_a_chunk_begins_to_be_carried_out_after_its_delay():
    policy, _ = scripted(0)
    acting = ActingInRealTime(policy, following.Follow(), delay=2, execute=2)
    found = numbers(following.executed(acting, execute=2, steps=10, rows=1))
    assert found.tolist() == [[0, 1, 2, 3, 102, 103, 202, 203, 302, 303]]


def test_without_real_time_chunking_the_same_chunks_are_carried_out_and_no_question_has_a_target():
    policy, asked = scripted(0)
    acting = ActingInRealTime(policy, following.Follow(), delay=2, execute=2, joins=False)
    found = numbers(following.executed(acting, execute=2, steps=10, rows=1))
    assert found.tolist() == [[0, 1, 2, 3, 102, 103, 202, 203, 302, 303]]
    assert [len(one) for one in asked] == [1] * 5


def test_the_largest_guidance_may_be_another_above_0():
    policy, asked = scripted(0)
    acting = ActingInRealTime(policy, following.Follow(), delay=2, execute=2, max_guidance=10.0)
    following.executed(acting, execute=2, steps=6, rows=1)
    assert [most.tolist() for *_, most in asked[1:]] == [[10.0]] * 2
    with pytest.raises(ValueError, match="a largest guidance of 0 must be above 0 and finite"):
        ActingInRealTime(policy, following.Follow(), delay=2, execute=2, max_guidance=0.0)


@pytest.mark.parametrize("make", [Acting, lambda policy, env: ActingInRealTime(policy, env, delay=1, execute=2)])
def test_an_episodes_noise_is_its_own_at_every_question_and_in_every_batch(make):
    policy, _, drawn = scripted_with_draws(0)
    acting, world = make(policy, following.Follow()), following.Follow()
    observation = world.observe(world.reset(jax.random.split(jax.random.key(0), 3), np.zeros(3, int)))
    first, second = jax.random.split(jax.random.key(1), 3), jax.random.split(jax.random.key(2), 3)
    for keys in (first, second, first[::-1], first):
        acting(observation, keys)
    assert len({*drawn[0], *drawn[1]}) == 6
    assert drawn[2] == drawn[0][::-1] and drawn[3] == drawn[0]


def test_an_environment_that_the_policy_cannot_read_is_refused_with_the_reason():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wider(following.Follow):
        def observe(self, states):
            seen = super().observe(states)
            return dataclasses.replace(seen, state=jnp.pad(seen.state, ((0, 0), (0, 1))))

    policy, _ = scripted(0)
    world = Wider()
    keys = jax.random.split(jax.random.key(0), 2)
    observation = world.observe(world.reset(keys, np.zeros(2, int)))
    with pytest.raises(UsageError, match=r"Wider does not suit the policy: .*state"):
        Acting(policy, world)(observation, keys)


DELAYS = [(delay, execute) for delay in range(AHEAD) for execute in range(1, AHEAD - delay + 1)]


def planned(question, time, delay, execute):
    """The newest of the questions up to this one that was answered for `time`, and its step; None beyond all plans."""
    for asked in range(question, -1, -1):
        step = time - asked * execute
        if step < AHEAD and (step >= delay or asked == 0):
            return asked, step
    return None


@pytest.mark.parametrize(("delay", "execute"), DELAYS)
@pytest.mark.parametrize("first_action", [0, -2])
def test_every_delay_carries_out_what_was_planned_and_guides_towards_the_rest_of_it(delay, execute, first_action):
    policy, asked = scripted(first_action)
    acting = ActingInRealTime(policy, following.Follow(), delay=delay, execute=execute)
    found = numbers(following.executed(acting, execute=execute, steps=STEPS, rows=ROWS))
    for time in range(STEPS):
        question, step = planned(time // execute, time, delay, execute)
        assert found[:, time].tolist() == [said(question, row, step)[0] for row in range(ROWS)]
    assert len(asked) == -(-STEPS // execute) and len(asked[0]) == 1  # the first chunk is free
    for question, (states, target, weights, most) in enumerate(asked[1:], start=1):
        assert most.tolist() == [5.0] * ROWS
        present = question * execute
        np.testing.assert_allclose(states[:, 0], found[:, present - 1], atol=2e-2)
        for row in range(ROWS):
            wanted, share = np.zeros(target.shape[1:]), np.zeros(target.shape[1:])
            for step in range(AHEAD - execute):
                asked_at, place = planned(question - 1, present + step, delay, execute)
                known = said(asked_at, row, place)
                wanted[step - first_action, :2] = following.in_the_models_units(known[None], states[row])[0]
                c = (AHEAD - execute - step) / (AHEAD - execute - delay + 1)
                share[step - first_action, :2] = 1 if step < delay else c * np.expm1(c) / np.expm1(1)
            np.testing.assert_allclose(target[row], wanted, atol=2e-2)
            np.testing.assert_allclose(weights[row], share, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [FlowMatching(augment=False), InsulatedFlow(flow=FlowMatching(augment=False))],
    ids=["flow", "insulated"],
)
def test_each_rows_chunk_is_guided_by_its_own_target_whatever_the_batch(objective):
    sampler = Sampler(
        model=GaussianConfig(),
        objective=objective,
        params={"spread": jnp.full(1, 0.5)},
        plan=Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated"),
        cameras=(),
        seed=3,
        num_steps=STEPS_OF_FLOW,
        batch_sizes=(2,),
        text_lengths=None,
    )
    random, draws = np.random.default_rng(0), (5, 2**31 - 1, 0)
    shape = (len(draws), *sampler.chunk)
    means, targets = random.normal(size=(len(draws), 4)), random.normal(size=shape)
    weights = np.stack([prefix_weights(shape[1], delay=1, execute=1)] * 3)[..., None] * np.ones(shape)
    weights[1] = 0  # the second row is free
    blank = {name: np.ones(one, dtype) for name, (one, dtype) in sampler.row_spec().items()}
    rows = [blank | {"state": mean.astype(np.float32)} for mean in means]
    bounds = np.array([5.0, 5.0, 1.5], np.float32)
    found = sampler.sample(rows, draws, (targets.astype(np.float32), weights.astype(np.float32), bounds))
    free = sampler.sample(rows, draws)
    for row, draw in enumerate(draws):
        noise, mean = noise_of(3, draw, shape[1:]), means[row][None]
        # A few float32 operations with numbers around 1 in each of the steps.
        np.testing.assert_allclose(
            found[row], guided(noise, mean, targets[row], weights[row], STEPS_OF_FLOW, bounds[row]), atol=1e-5
        )
        np.testing.assert_allclose(free[row], guided(noise, mean, 0, 0, STEPS_OF_FLOW), atol=1e-5)
    assert np.abs(found[0] - free[0]).max() > 0.1


def test_a_policy_sees_cameras_by_its_features_and_has_its_own_prompt_where_the_environment_has_none():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Seen(following.Follow):
        cameras = ("top", "side")

        def instruction(self, task):
            return "" if task == 0 else "follow"

    asked = []

    class Asked(Policy):
        form = types.SimpleNamespace(robot=types.SimpleNamespace(cameras={"base_0_rgb": "observation.images.top"}))

        def prepare(self, observation):
            asked.append(observation)
            return PreparedObservation(observation, np.zeros(2))

        def answer(self, prepared, draws):
            return [{"actions": np.zeros((1, 2))}] * len(prepared)

    policy = object.__new__(Asked)
    images = {name: np.full((2, 2, 2, 3), n, np.uint8) for n, name in enumerate(("top", "side"))}
    seen = EnvObservation(images=images, state=np.zeros((2, 2)), task=np.array([0, 1]))
    Acting(policy, Seen())(seen, jax.random.split(jax.random.key(0), 2))
    assert [set(one) for one in asked] == [
        {"observation.images.top", "side", "state"},
        {"observation.images.top", "side", "state", "prompt"},
    ]
    assert (asked[0]["observation.images.top"] == 0).all() and asked[1]["prompt"] == "follow"
