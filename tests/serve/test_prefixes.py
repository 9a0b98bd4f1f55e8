"""Requests with a prefix and a delay, over the websocket, to a flow whose every answer is known."""

import contextlib
import dataclasses

import following
import jax
import numpy as np
import pytest
import toy
from gaussian_flow import HORIZON, NUM_STEPS, SEED, Gaussian, GaussianConfig, gaussian_policy, guided, noise_of
from stub import serving
from websockets.sync.client import connect

from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.policy import wire
from openpi_train.policy.acting import ActingInRealTime
from openpi_train.policy.record import RequestRecorder, read_record
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.real_time_chunking import prefix_weights

STATE = np.array([7.0, -2.0], np.float32)
PREFIX = np.array([[8.0, 1.0], [7.5, -3.0], [9.0, 2.0]], np.float32)


@pytest.fixture(scope="module")
def policy():
    return gaussian_policy()


@contextlib.contextmanager
def client(policy, **options):
    """Asks the served policy: metadata, and a function from an observation to the answer."""
    with serving(policy, **options) as (port, _), connect(f"ws://127.0.0.1:{port}", compression=None) as connection:
        metadata = wire.decode(connection.recv(timeout=20))

        def ask(**observation):
            connection.send(wire.encode({"state": STATE, **observation}))
            answer = connection.recv(timeout=120)
            return answer if isinstance(answer, str) else wire.decode(answer)

        yield metadata, ask


def expected(draw, prefix, delay, most=5.0):
    """The answer by the paper's equations, in the robot's units."""
    target, weights = np.zeros((HORIZON, following.MODEL_DIMS)), np.zeros((HORIZON, following.MODEL_DIMS))
    target[: len(prefix), :2] = following.in_the_models_units(prefix, STATE)
    weights[:] = prefix_weights(HORIZON, delay, HORIZON - len(prefix))[:, None]
    mean = np.array([*STATE, 0.0])[None]
    chunk = guided(noise_of(SEED, draw, target.shape), mean, target, weights, NUM_STEPS, most)
    actions = chunk[:, :2] * following.STD + following.MEAN + np.array([STATE[0], 0.0])
    actions[:delay] = prefix[:delay]
    return actions


def test_an_answer_continues_the_prefix_and_without_one_has_the_same_bits_as_ever(policy):
    with client(policy) as (metadata, ask):
        assert metadata["real_time_chunking"] == {"method": "guided", "max_prefix": HORIZON, "max_delay": HORIZON}
        plain, continued, free = ask(), ask(prefix=PREFIX, delay=2), ask(prefix=PREFIX[:0], delay=0)
    np.testing.assert_array_equal(plain["actions"], policy.infer({"state": STATE}, draw=plain["draw"])["actions"])
    np.testing.assert_array_equal(continued["actions"][:2], PREFIX[:2])
    for answer, prefix, delay in ((plain, PREFIX[:0], 0), (continued, PREFIX, 2), (free, PREFIX[:0], 0)):
        # float32 steps with numbers of up to 30, in units of up to 4.
        np.testing.assert_allclose(answer["actions"], expected(answer["draw"], prefix, delay), atol=2e-4)
    assert np.abs(continued["actions"][2] - expected(continued["draw"], PREFIX[:0], 0)[2]).max() > 0.1
    assert continued["server_timing"]["infer_ms"] > 0 and set(continued) == set(plain)


class Leaky(Gaussian):
    """The same, with a third dim that only pads the robot's two; it was not trained, and reads the first."""

    def velocity(self, observation, noisy, time):
        return super().velocity(observation, noisy, time).at[..., 2].set(9 * noisy[..., 0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeakyConfig(GaussianConfig):
    def build(self, rngs):
        return Leaky(self, rngs)


def test_dims_that_only_pad_the_robots_actions_guide_nothing(policy):
    """As after training with mask_action_dims, in which nothing says what they are."""
    model = LeakyConfig(action_dim=following.MODEL_DIMS, action_horizon=HORIZON)
    leaky = dataclasses.replace(policy, sampler=dataclasses.replace(policy.sampler, model=model, _programs={}))
    answer = leaky.infer({"state": STATE, "prefix": PREFIX, "delay": 2}, draw=0)
    # As for the flow without such a dim.
    np.testing.assert_allclose(answer["actions"], expected(0, PREFIX, 2), atol=2e-4)


def test_no_length_and_no_delay_compiles_another_program():
    policy = gaussian_policy()
    policy.warm_up(prefixes=True)
    with client(policy) as (_, ask):
        for length in range(HORIZON + 1):
            for delay in (0, length):
                answer = ask(prefix=np.ones((length, 2)), delay=delay)
                np.testing.assert_array_equal(answer["actions"][:delay], np.ones((delay, 2)))
        ask()
    assert set(policy.sampler._programs) == {(2, None, False), (2, None, True)}


def test_a_batch_of_requests_with_and_without_a_prefix_answers_each_as_alone(policy):
    plain, continued = {"state": STATE}, {"state": STATE, "prefix": PREFIX, "delay": 1}
    together = policy.infer_batch([continued, plain, continued], draws=[4, 5, 6])
    for answer, observation in zip(together, (continued, plain, continued), strict=True):
        alone = policy.infer(observation, draw=answer["draw"])
        np.testing.assert_array_equal(answer["actions"], alone["actions"])
    assert [one["draw"] for one in together] == [4, 5, 6]


def test_the_answer_is_that_of_the_closed_loop_evaluation(policy):
    world, asked = following.Follow(), []

    class Noting(type(policy)):
        def prepare(self, observation):
            asked.append(observation)
            return super().prepare(observation)

    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    noting = Noting(**fields)
    acting = ActingInRealTime(noting, world, delay=1, execute=2)
    observation = world.observe(world.reset(jax.random.split(jax.random.key(0), 1), np.zeros(1, int)))
    plans = [acting(observation, jax.random.split(jax.random.key(number), 1))[0] for number in (1, 2)]
    draw = int(np.asarray(jax.random.bits(jax.random.split(jax.random.key(2), 1)[0])) >> 1)
    np.testing.assert_array_equal(asked[1]["prefix"], plans[0][2:])
    again = policy.infer({"state": np.full(2, following.START), "prefix": plans[0][2:], "delay": 1}, draw=draw)
    np.testing.assert_array_equal(again["actions"], plans[1])


BAD = {
    "too long": ({"prefix": np.zeros((HORIZON + 1, 2)), "delay": 1}, "'prefix' has 6 actions; an action chunk has 5"),
    "wrong width": ({"prefix": np.zeros((3, 3)), "delay": 1}, "'prefix' has the shape [3, 3]; expected [p, 2]: x_m"),
    "one action": ({"prefix": np.zeros(2), "delay": 0}, "'prefix' has the shape [2]; expected [p, 2]"),
    "text": ({"prefix": "go", "delay": 0}, "'prefix' is a str; expected numbers"),
    "NaN": ({"prefix": np.full((1, 2), np.nan), "delay": 0}, "'prefix' holds NaN or infinity"),
    "too large": ({"prefix": np.full((1, 2), 1e300), "delay": 0}, "'prefix' holds NaN or infinity"),
    "negative delay": ({"prefix": PREFIX, "delay": -1}, "'delay' is -1; expected 0 to 3, the number of actions in"),
    "delay beyond": ({"prefix": PREFIX, "delay": 4}, "'delay' is 4; expected 0 to 3"),
    "fraction": ({"prefix": PREFIX, "delay": 1.5}, "'delay' is a float; expected an int"),
    "true": ({"prefix": PREFIX, "delay": True}, "'delay' is a bool; expected an int"),
    "no delay": ({"prefix": PREFIX}, "the observation has 'prefix' and no 'delay'; real-time chunking needs both"),
    "no prefix": ({"delay": 1}, "the observation has 'delay' and no 'prefix'"),
}


def test_what_is_wrong_is_told_in_text_and_the_connection_goes_on(policy):
    with client(policy) as (_, ask):
        for case, (entries, says) in BAD.items():
            answer = ask(**entries)
            assert isinstance(answer, str) and says in answer, (case, answer)
        assert ask(prefix=PREFIX.tolist(), delay=np.int64(3))["actions"].shape == (HORIZON, 2)


def test_a_policy_that_was_trained_with_delays_continues_the_first_actions_and_refuses_longer_delays():
    policy = gaussian_policy(FlowMatching(augment=False, max_delay=2))
    policy.warm_up()
    assert set(policy.sampler._programs) == {(2, None, False), (2, None, True)}
    with client(policy) as (metadata, ask):
        assert metadata["real_time_chunking"] == {"method": "trained", "max_prefix": HORIZON, "max_delay": 2}
        continued, other = ask(prefix=PREFIX, delay=2), ask(prefix=PREFIX[:2], delay=2)
        assert ask(prefix=PREFIX, delay=3) == "'delay' is 3, but the policy was trained with delays of at most 2"
    for answer in (continued, other):
        np.testing.assert_array_equal(answer["actions"][:2], PREFIX[:2])
        # Actions are independent in this flow, and nothing is guided towards the rest of the prefix.
        free = expected(answer["draw"], PREFIX[:0], 0)
        np.testing.assert_allclose(answer["actions"][2:], free[2:], atol=2e-4)
    normalised = policy.sampler.sample(*([one] for one in (policy.prepare({"state": STATE}).row, 7)))
    prepared = policy.prepare({"state": STATE, "prefix": PREFIX, "delay": 2})
    held = policy.sampler.sample([prepared.row], [7], policy._towards([prepared]))
    np.testing.assert_allclose(held[0, :2, :2], following.in_the_models_units(PREFIX[:2], STATE), rtol=1e-6)
    np.testing.assert_allclose(held[0, 2:], normalised[0, 2:], rtol=1e-5, atol=1e-5)
    sampler = dataclasses.replace(policy.sampler, guided=True, _programs={})
    guided = dataclasses.replace(policy, sampler=sampler)
    assert guided.metadata["real_time_chunking"]["method"] == "guided"
    answer = guided.infer({"state": STATE, "prefix": PREFIX, "delay": 3}, draw=7)
    np.testing.assert_allclose(answer["actions"], expected(7, PREFIX, 3), atol=2e-4)
    with pytest.raises(ValueError, match="a delay of 3 control steps: the policy was trained with at most 2"):
        ActingInRealTime(policy, following.Follow(), delay=3, execute=1)


def test_a_policy_that_is_no_flow_says_so_and_refuses_a_prefix():
    policy = gaussian_policy(toy.FlowThatSamplesItself())
    assert policy.metadata["real_time_chunking"] is None
    with serving(policy) as (port, _), connect(f"ws://127.0.0.1:{port}", compression=None) as connection:
        connection.recv(timeout=20)
        connection.send(wire.encode({"state": STATE, "prefix": PREFIX, "delay": 1}))
        assert connection.recv(timeout=20).startswith("this policy takes no 'prefix': real-time chunking is for flow")
    with pytest.raises(UsageError, match="guides the velocity of a flow"):
        policy.warm_up(prefixes=True)


def test_a_recorded_request_with_a_prefix_is_answered_the_same_again(policy, tmp_path):
    with contextlib.closing(RequestRecorder(tmp_path / "answers.rec", policy)) as recorder:
        with client(policy, recorder=recorder) as (_, ask):
            ask(), ask(prefix=PREFIX, delay=2)
    assert sum(len(batch["draws"]) for batch in read_record(tmp_path / "answers.rec")[1]) == 2
    replayed = policy.replay(tmp_path / "answers.rec")
    assert (replayed.answers, replayed.different) == (2, ())
