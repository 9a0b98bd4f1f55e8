"""Acting while the next chunk is computed, in a time that stands still unless a test moves it.

The scripted policy says, for the k-th control step from the present one on, the control step's number and the number of
its own question: what is carried out is known for every tick, whatever the latency.
"""

import concurrent.futures
import contextlib
import math

import following
import numpy as np
import pytest
from gaussian_flow import HORIZON, gaussian_policy
from stub import serving
from websockets.sync.client import connect

from openpi_train.policy import wire
from openpi_train.serve.asynchronous import AsynchronousActor, act_at_rate

GUIDED = {"method": "guided", "max_prefix": 8, "max_delay": 8}


class Clock:
    """Seconds, which pass only if told to."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class LaterExecutor(concurrent.futures.Executor):
    """Runs at once what it is given; it is done when the clock is as late as it was at its end."""

    def __init__(self, clock):
        self.clock = clock

    def submit(self, function, /, *args):
        began_s, clock = self.clock.now_s, self.clock
        future = concurrent.futures.Future()
        try:
            future.set_result(function(*args))
        except RuntimeError as error:
            future.set_exception(error)
        ends_s, clock.now_s = clock.now_s, began_s
        future.done = lambda: clock.now_s >= ends_s - 1e-9
        return future

    def shutdown(self, wait=True, *, cancel_futures=False):
        self.is_closed = True


class Script:
    """A policy of 10 Hz and chunks of 8. `latency_s` gives the seconds that each question takes, the last for all."""

    def __init__(self, *latency_s, horizon=8, way=GUIDED, names=(), **options):
        self.clock, self.latency_s, self.horizon = Clock(), latency_s, horizon
        self.asked = []
        metadata = {"control_hz": 10.0, "num_executed": 4, "real_time_chunking": way}
        metadata |= {"action_names": list(names)} if names else {}
        self.actor = AsynchronousActor(
            self.infer, metadata, clock=self.clock, executor=LaterExecutor(self.clock), **options
        )

    def infer(self, observation):
        number = len(self.asked)
        self.asked.append(observation)
        took_s = self.latency_s[min(number, len(self.latency_s) - 1)]
        if took_s is None:
            raise RuntimeError("the server is away")
        self.clock.now_s += took_s
        steps = observation["step"] + np.arange(self.horizon)
        return {"actions": np.stack([steps, np.full(self.horizon, number)], axis=1).astype(np.float32)}

    def ticks(self, count):
        """The actions of so many ticks, [count, 2]; the observation has the number of the control step."""
        period_s, found = 1 / self.actor.robot_hz, []
        began_s = self.clock.now_s
        for tick in range(count):
            observation = {"step": self.step_at(tick)}
            if not tick:  # the robot stands until the first chunk is there
                found.append(self.actor.act(observation))
                began_s = self.clock.now_s
            else:
                self.clock.now_s = began_s + tick * period_s
                found.append(self.actor.act(observation))
        return np.stack(found)

    def step_at(self, tick):
        return tick * 10.0 / self.actor.robot_hz


@pytest.mark.parametrize("latency_s", [0.0, 0.05, 0.1, 0.25, 0.4])
def test_the_old_chunk_is_carried_out_until_the_new_one_is_there_and_that_from_the_present_step_on(latency_s):
    script = Script(latency_s)
    found = script.ticks(24)
    assert found[:, 0].tolist() == list(range(24))
    delay = math.ceil(latency_s * 10)
    # Questions every 4 steps; an answer to a question of step n is there at step n + delay, and not in the same tick.
    since = max(delay, 1)
    wanted = [max((tick - since) // 4, 0) for tick in range(24)]
    assert found[:, 1].tolist() == wanted
    for number, asked in enumerate(script.asked[1:], start=1):
        assert asked["step"] == 4 * number and asked["delay"] == delay
        np.testing.assert_array_equal(asked["prefix"], np.stack([np.arange(4) + 4 * number, [number - 1] * 4], axis=1))
    assert (script.actor.counts.held_ticks, script.actor.counts.late_chunks) == (
        0,
        0 if delay else len(script.asked) - 1,
    )


def test_the_first_question_has_no_prefix_and_a_policy_that_takes_none_is_never_sent_one():
    script = Script(0.1)
    script.ticks(6)
    assert set(script.asked[0]) == {"step"} and set(script.asked[1]) == {"step", "prefix", "delay"}
    script = Script(0.1, way=None)
    assert script.ticks(12)[:, 0].tolist() == list(range(12))
    assert {key for asked in script.asked for key in asked} == {"step"}


def test_the_delay_covers_a_high_quantile_of_the_recent_latencies_and_no_more_than_the_policy_takes():
    latencies = [0.11] * 18 + [0.35, 0.55] + [0.11] * 100
    script = Script(*latencies, horizon=16, way={**GUIDED, "max_prefix": 16, "max_delay": 16})
    assert script.ticks(84)[:, 0].tolist() == list(range(84))
    assert [asked["delay"] for asked in script.asked[1:]] == [2] * 18 + [4, 4]  # the 19th of 20: 95 % take no longer
    assert script.actor.counts.late_chunks == 2  # of 4 and of 6 steps, where 2 had been forecast, and then 4
    trained = Script(0.3, way={"method": "trained", "max_prefix": 8, "max_delay": 2})
    trained.ticks(10)
    assert [asked["delay"] for asked in trained.asked[1:]] == [2, 2] and trained.actor.delay == 3
    assert trained.actor.counts.late_chunks == 1  # the second is under way


def test_after_a_reset_the_chunk_is_of_the_new_observation_and_the_request_under_way_is_not_used():
    script = Script(0.3)
    assert script.ticks(6)[-1].tolist() == [5, 0] and len(script.asked) == 2  # the second is under way
    script.actor.reset()
    assert script.actor.act({"step": 70}).tolist() == [70, 2]
    assert set(script.asked[2]) == {"step"} and script.actor.counts.late_chunks == 0
    script.clock.now_s += 0.1
    assert script.actor.act({"step": 71}).tolist() == [71, 2]


def test_a_robot_is_held_at_its_last_action_until_the_chunk_comes_and_goes_on_where_it_stands(caplog):
    script = Script(0.1, 1.0, 0.1)
    found = [script.actor.act({"step": 0})]
    began_s, moved = script.clock.now_s, 1
    for tick in range(1, 17):
        script.clock.now_s = began_s + tick / 10
        held = script.actor.counts.held_ticks
        found.append(script.actor.act({"step": moved}))
        moved += script.actor.counts.held_ticks == held
    found = np.stack(found)
    # Asked at step 4, the answer is there ten ticks later; the old chunk ends after step 7, six ticks are held.
    assert found[:, 0].tolist() == [*range(8), *[7] * 6, 8, 9, 10]
    assert found[:, 1].tolist() == [0] * 14 + [1, 2, 3]  # after such a latency it asks all the time
    counts = script.actor.counts
    assert (counts.held_ticks, counts.late_chunks, counts.chunks) == (6, 1, 4)
    assert [one.message for one in caplog.records].count(
        "no action is left and the next chunk is not there: the robot is held"
    ) == 1


@pytest.mark.parametrize(
    ("names", "options", "held"),
    [
        ((), {}, [8, 1]),
        ((), {"differences": (True, False)}, [0, 1]),
        (("delta_x_m", "gripper_fraction"), {}, [0, 1]),
        (("delta_x_m", "gripper_fraction"), {"differences": (False, False)}, [8, 1]),
        (("x_m", "joint_0_rad_per_s"), {}, [8, 0]),
        (("x_m", "joint_0_rad_per_s"), {"differences": (True, False)}, [0, 0]),
    ],
)
def test_what_is_a_motion_is_0_while_the_robot_is_held(names, options, held):
    script = Script(0.1, 0.1, 9.0, names=names, execute=1, **options)
    found = script.ticks(13)
    assert found[8:].tolist() == [[8, 1], *[held] * 4]


@pytest.mark.parametrize(("robot_hz", "latency_s"), [(50, 0.0), (50, 0.13), (25, 0.2), (30, 0.3), (10, 0.1)])
def test_a_faster_robot_moves_on_a_straight_line_between_the_policys_actions(robot_hz, latency_s):
    script = Script(latency_s, robot_hz=robot_hz)
    found = script.ticks(100)
    np.testing.assert_allclose(found[:, 0], np.arange(100) * 10 / robot_hz, rtol=1e-6)
    assert script.actor.counts.held_ticks == 0
    for asked in script.asked[1:]:
        steps = asked["step"] + np.arange(len(asked["prefix"]))
        # The last action lasts until the next one would be due.
        np.testing.assert_allclose(asked["prefix"][:-1, 0], steps[:-1], rtol=1e-6)
        assert asked["delay"] == math.ceil(latency_s * 10)


def test_questions_come_earlier_where_the_chunk_would_end_before_the_answer():
    script = Script(0.3, execute=6)
    found = script.ticks(30)
    assert found[:, 0].tolist() == list(range(30)) and script.actor.counts.held_ticks == 0
    assert [asked["step"] for asked in script.asked[:3]] == [0, 5, 10]


def test_what_the_server_says_is_wrong_is_raised_once_and_the_next_tick_asks_again():
    script = Script(0.1, None, 0.1)
    found = []
    with pytest.raises(RuntimeError, match="the server is away"):
        script.ticks(20)
    for _ in range(3):
        script.clock.now_s += 0.1
        found.append(script.actor.act({"step": 4 + len(found) + 1})[0])
    assert found == [5, 6, 7] and len(script.asked) == 3


def test_warming_up_asks_both_kinds_and_measures_neither_first_answer():
    script = Script(30.0, 20.0, 0.25)
    script.actor.warm_up({"step": 0})
    assert ["prefix" in asked for asked in script.asked] == [False, True, True, True]
    assert script.actor.delay == 3
    assert script.ticks(6)[:, 0].tolist() == list(range(6))


def test_ticks_keep_the_robots_rate_and_make_none_up():
    script, slept = Script(0.0), []
    clock, costs = script.clock, [0.02, 0.25, 0.02, 0.02]

    def sleep(seconds):
        slept.append(round(seconds, 6))
        clock.now_s += seconds

    def move(action):
        clock.now_s += costs[int(action[0]) % 4]

    act_at_rate(script.actor, lambda: {"step": 0}, move, num_ticks=4, clock=clock, sleep=sleep)
    assert slept == [0.08, 0.08, 0.08]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"robot_hz": 5}, "robot_hz 5 must be at least 10"),
        ({"robot_hz": 20, "differences": (True,)}, "robot_hz 20: actions that are differences cannot be interpolated"),
        ({"robot_hz": 20, "names": ("delta_x_m",)}, "robot_hz 20: actions that are differences cannot be interpolated"),
        ({"differences": (True,), "names": ("x_m", "y_m")}, "differences has 1 values; the actions are x_m, y_m"),
        ({"quantile": 0}, "quantile 0 must be above 0"),
        ({"execute": 0}, "execute 0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Script(0.1, **options)


def test_it_acts_through_the_server_and_every_action_until_the_delay_is_the_old_chunks():
    policy, clock, answers = gaussian_policy(), Clock(), []
    with (
        serving(policy) as (port, _),
        connect(f"ws://127.0.0.1:{port}", compression=None) as connection,
    ):
        metadata = wire.decode(connection.recv(timeout=20))

        def infer(observation):
            connection.send(wire.encode(observation))
            answers.append(wire.decode(connection.recv(timeout=120)) | {"asked": observation})
            clock.now_s += 1.5
            return answers[-1]

        actor = AsynchronousActor(infer, metadata, clock=clock, executor=LaterExecutor(clock), execute=2)
        with contextlib.closing(actor):
            state, moved = np.full(2, following.START, np.float32), []
            for _ in range(12):
                state = actor.act({"state": state})
                moved.append(state)
                clock.now_s += 1.0
    moved, place = np.stack(moved), 0
    assert metadata["control_hz"] == 1.0 and metadata["real_time_chunking"]["max_prefix"] == HORIZON
    # Asked every two steps; an answer comes after 1.5 of them.
    np.testing.assert_array_equal(moved[:4], answers[0]["actions"][:4])
    for answer in answers[1:]:
        place += 2
        asked = answer["asked"]
        assert asked["delay"] == 2 and len(asked["prefix"]) == HORIZON - 2
        np.testing.assert_array_equal(asked["state"], moved[place - 1])
        np.testing.assert_array_equal(answer["actions"][:2], moved[place : place + 2][: len(answer["actions"][:2])])
        np.testing.assert_array_equal(moved[place + 2 : place + 4], answer["actions"][2:4][: len(moved) - place - 2])
    assert actor.counts.held_ticks == 0 and actor.counts.late_chunks == 0 and len(answers) == 6
