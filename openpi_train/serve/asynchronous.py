"""A client that acts at the robot's rate while the next action chunk is computed (real-time chunking).

It needs numpy alone, so that the file can be copied to a robot; `infer` is openpi's client's, or any function like it:

    client = WebsocketClientPolicy("127.0.0.1", 8000)
    actor = AsynchronousActor(client.infer, client.get_server_metadata(), robot_hz=50)
    actor.warm_up(observe())
    act_at_rate(actor, observe, move, num_ticks=1000)

A tick is one action of the robot, a control step one action of the policy; a robot may be faster than its policy. Read
next: `policy/observation.py` for `prefix` and `delay`, `docs/howto/serve.md`.
"""

import collections
import concurrent.futures
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

# An observation, an answer, or the metadata, as openpi's client has them.
Message = Mapping[str, Any]
Infer = Callable[[dict[str, Any]], Message]
# Latencies that the forecast of the next one is made from.
_RECENT = 50


@dataclasses.dataclass
class Counts:
    """What happened so far.

    `chunks`: chunks that were taken. `late_chunks`: those among them that came after more control steps than forecast,
    so that the motion may jump. `held_ticks`: ticks without an action left, in which the robot was held.
    """

    chunks: int = 0
    late_chunks: int = 0
    held_ticks: int = 0


@dataclasses.dataclass
class _Plan:
    """A chunk [h, a], and the tick, held ones not counted, at which its first action was due."""

    actions: np.ndarray
    tick: int


class AsynchronousActor:
    """Gives one action per tick, and has the next chunk computed meanwhile, in a thread.

    Actions of a chunk whose time has passed when it comes are dropped. If no action is left before it comes, the robot
    is held, and that time does not count: the chunk goes on where the robot stands.

    Args:
        infer: sends an observation and returns the answer with `actions` [h, a]; called in one thread at a time.
        metadata: the server's: `control_hz`, `num_executed`, `action_names` and `real_time_chunking` are read.
        robot_hz: ticks per second; None: the policy's `control_hz`. Between two actions of a slower policy the robot
            moves on a straight line.
        execute: control steps between two requests; None: the server's `num_executed`. Requests come earlier where the
            chunk would end before the answer is there.
        differences: for each action dim, whether it is a difference and not a target; None: as their names say
            (`delta_...`). The robot is held by 0 in these dims, and in velocities (`..._per_s`).
        quantile: share of the recent latencies that the forecast covers.
        clock: seconds, for measuring latencies; executor: runs `infer`. Tests give their own.

    Raises ValueError for rates that cannot be, and for differences at another rate than the policy's.
    """

    def __init__(
        self,
        infer: Infer,
        metadata: Message,
        *,
        robot_hz: float | None = None,
        execute: int | None = None,
        differences: Sequence[bool] | None = None,
        quantile: float = 0.95,
        clock: Callable[[], float] = time.monotonic,
        executor: concurrent.futures.Executor | None = None,
    ):
        self._policy_hz = float(metadata["control_hz"])
        self._robot_hz = self._policy_hz if robot_hz is None else float(robot_hz)
        if not self._policy_hz <= self._robot_hz < math.inf:
            raise ValueError(
                f"robot_hz {self._robot_hz:g} must be at least {self._policy_hz:g}, the rate of the policy's actions"
            )
        names: Sequence[str] = metadata.get("action_names", ())
        is_difference = [name.startswith("delta_") for name in names] if differences is None else list(differences)
        if names and is_difference and len(is_difference) != len(names):
            raise ValueError(f"differences has {len(is_difference)} values; the actions are {', '.join(names)}")
        if any(is_difference) and self._robot_hz != self._policy_hz:
            raise ValueError(
                f"robot_hz {self._robot_hz:g}: actions that are differences cannot be interpolated. Give "
                f"{self._policy_hz:g}, or none; or `differences`, if the names of the actions say it wrongly"
            )
        is_velocity = [name.endswith("_per_s") for name in names] or [False] * len(is_difference)
        self._is_motion = np.logical_or(is_difference or is_velocity, is_velocity)
        if not 0 < quantile <= 1:
            raise ValueError(f"quantile {quantile:g} must be above 0 and at most 1")
        self._infer, self._clock = infer, clock
        self._execute = int(metadata["num_executed"] if execute is None else execute)
        if self._execute < 1:
            raise ValueError(f"execute {self._execute} must be at least 1")
        self._way: Message | None = metadata.get("real_time_chunking")
        self._quantile = quantile
        self._executor = executor or concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="infer")
        self._latencies: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._tick = 0
        self._plan: _Plan | None = None
        self._asked: tuple[concurrent.futures.Future[Any], int, int] | None = None  # and its tick and delay
        self._is_held = False
        self.counts = Counts()

    @property
    def robot_hz(self) -> float:
        """Ticks per second."""
        return self._robot_hz

    @property
    def delay(self) -> int:
        """The forecast: control steps from a request until its answer is there, rounded up."""
        if not self._latencies:
            return 0
        ordered = sorted(self._latencies)
        latency_s = ordered[math.ceil(self._quantile * len(ordered)) - 1]
        # Rounding of the clock's differences is no control step.
        return math.ceil(latency_s * self._policy_hz - 1e-6)

    def warm_up(self, observation: Message, times: int = 3) -> None:
        """Ask before the robot moves: the server compiles at the first request of a kind. Measures the latency.

        The answers are not used, since the observation is old when the robot starts. The first of each kind is not
        measured.
        """
        answer = self._timed(observation)[0]
        for number in range(times):
            request = self._request(observation, np.asarray(answer["actions"], np.float32), 0)
            answer, latency_s = self._timed(request)
            if number:
                self._latencies.append(latency_s)

    def act(self, observation: Message) -> np.ndarray:
        """The action [a] for this tick, float32. Call it once per tick.

        The observation is sent if it is time for the next chunk. The first call waits for its chunk. Raises whatever
        `infer` raised; the next call asks again.
        """
        if self._plan is None:
            self._asked = None
            answer, latency_s = self._timed(observation)
            self._latencies.append(latency_s)
            self._take(np.asarray(answer["actions"], np.float32), self._tick, delay=0)
        else:
            self._collect()
            self._ask(observation)
        return self._next()

    def reset(self) -> None:
        """Drop the chunk, before a new episode or when something else has moved the robot: the next `act` waits for a
        new one, made from its observation. Waits for a request under way."""
        if self._asked is not None:
            concurrent.futures.wait([self._asked[0]])
        self._asked, self._plan, self._is_held = None, None, False

    def close(self) -> None:
        """End the thread, without waiting for a request under way."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _timed(self, request: Message) -> tuple[Message, float]:
        started = self._clock()
        answer = self._infer(dict(request))
        return answer, self._clock() - started

    def _place(self, plan: _Plan, tick: int) -> float:
        """Control steps since the plan's first action."""
        return (tick - plan.tick) * self._policy_hz / self._robot_hz

    def _collect(self) -> None:
        """Take the answer if it is there."""
        if self._asked is None or not self._asked[0].done():
            return
        future, tick, delay = self._asked
        self._asked = None
        answer, latency_s = future.result()
        self._latencies.append(latency_s)
        self._take(np.asarray(answer["actions"], np.float32), tick, delay)

    def _take(self, actions: np.ndarray, tick: int, delay: int) -> None:
        self._plan = _Plan(actions, tick)
        self.counts.chunks += 1
        self.counts.late_chunks += self._place(self._plan, self._tick) > delay

    def _ask(self, observation: Message) -> None:
        """Ask for the next chunk if it is time to."""
        plan = self._plan
        assert plan is not None
        place, delay = self._place(plan, self._tick), self.delay
        if self._asked is not None or place < min(self._execute, len(plan.actions) - delay):
            return
        left = _from(plan.actions, place)
        delay = min(delay, len(left), self._way["max_delay"] if self._way else delay)
        request = self._request(observation, left, delay)
        self._asked = self._executor.submit(self._timed, request), self._tick, delay

    def _request(self, observation: Message, left: np.ndarray, delay: int) -> Message:
        if self._way is None:
            return observation
        return {**observation, "prefix": left[: self._way["max_prefix"]], "delay": delay}

    def _next(self) -> np.ndarray:
        """The plan's action at this tick; beyond its end, the last one again, or 0 in dims that are a motion."""
        plan = self._plan
        assert plan is not None
        place = self._place(plan, self._tick)
        if place < len(plan.actions):
            self._is_held = False
            self._tick += 1
            return _from(plan.actions, place)[0]
        if not self._is_held:
            logger.warning("no action is left and the next chunk is not there: the robot is held")
        self._is_held = True
        self.counts.held_ticks += 1
        last = plan.actions[-1]
        return np.where(self._is_motion, np.float32(0), last) if self._is_motion.size else last.copy()


def act_at_rate(
    actor: AsynchronousActor,
    observe: Callable[[], Message],
    move: Callable[[np.ndarray], None],
    *,
    num_ticks: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Observe, act and move `num_ticks` times at the actor's rate. After a tick that took too long the next begins at
    once, and none is made up for."""
    due = clock()
    for _ in range(num_ticks):
        move(actor.act(observe()))
        due = max(due + 1 / actor.robot_hz, clock())
        if (left := due - clock()) > 0:
            sleep(left)


def _from(actions: np.ndarray, place: float) -> np.ndarray:
    """The actions at `place`, `place` + 1, ... of a chunk, on straight lines between its actions; after the last one,
    which lasts a whole step, it stays."""
    first, share = int(place), np.float32(place - int(place))
    here = actions[first:]
    after = np.concatenate([here[1:], here[-1:]])
    return here + share * (after - here)
