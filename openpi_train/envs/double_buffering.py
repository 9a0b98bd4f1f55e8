"""Two batches of episodes in turn: while the simulators of one step, the policy acts for the other.

Episodes are the same as alone: a batch is what the policy computes at once, in either case. Read next: `rollout.py`,
`in_processes.py` for the environments that this is for.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from openpi_train.envs.rollout import RolloutEpisodes
from openpi_train.runtime.preempt import StoppedError

# When something began and ended, in seconds of the monotonic clock.
Span = tuple[float, float]


@dataclasses.dataclass(kw_only=True)
class SlotTimes:
    """When the policy acted and when the environment did, each one thing after the other."""

    policy: list[Span] = dataclasses.field(default_factory=list)
    environment: list[Span] = dataclasses.field(default_factory=list)

    @property
    def policy_s(self) -> float:
        """Seconds in which the policy acted."""
        return sum(end - start for start, end in self.policy)

    @property
    def environment_s(self) -> float:
        """Seconds in which the environment acted."""
        return sum(end - start for start, end in self.environment)

    @property
    def both_s(self) -> float:
        """Seconds in which both did."""
        total, one, other = 0.0, 0, 0
        while one < len(self.policy) and other < len(self.environment):
            (start, end), (begin, finish) = self.policy[one], self.environment[other]
            total += max(0.0, min(end, finish) - max(start, begin))
            if end < finish:
                one += 1
            else:
                other += 1
        return total


def in_slots(
    batches: Iterable[RolloutEpisodes],
    num_slots: int,
    *,
    all_done: Callable[[bool], bool] = bool,
    stop_requested: Callable[[], bool] = lambda: False,
    times: SlotTimes | None = None,
) -> Iterator[tuple[int, RolloutEpisodes]]:
    """The number of each of these batches and its episodes, as they are over; `num_slots` are under way at a time.

    With more than one slot the environment is used in a thread of its own, which does one thing at a time. The policy,
    `all_done` and `stop_requested` are called in this thread, and in an order that does not depend on how long
    anything takes: several processes do the same.

    Args: `all_done` and `stop_requested` are those of `rollout`; `times` is added to.

    Raises StoppedError if `stop_requested` returned True, ValueError for chunks that do not fit, and what the
    environment raises.
    """
    times = SlotTimes() if times is None else times
    left = enumerate(batches)
    # Each with what the environment does for it.
    running: collections.deque[tuple[int, RolloutEpisodes, Future[None] | None]] = collections.deque()
    with contextlib.ExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1, "environment")) if num_slots > 1 else None

        def handed(work: Callable[[], None]) -> Future[None] | None:
            """This work of the environment: in its thread, or done."""
            if thread is not None:
                return thread.submit(_timed, work, times.environment)
            return _timed(work, times.environment)

        while True:
            while len(running) < num_slots and (one := next(left, None)) is not None:
                running.append((*one, handed(one[1].begin)))
            if not running:
                return
            number, episodes, pending = running.popleft()
            if pending is not None:
                pending.result()
            if episodes.is_over(all_done):
                yield number, episodes
                continue
            if stop_requested():
                raise StoppedError
            _timed(episodes.query, times.policy)
            running.append((number, episodes, handed(episodes.execute)))


def _timed(work: Callable[[], None], spans: list[Span]) -> None:
    started = time.monotonic()
    work()
    spans.append((started, time.monotonic()))
