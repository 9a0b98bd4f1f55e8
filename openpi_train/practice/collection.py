"""Collects the attempts of an iteration: which contexts are drawn, which groups are kept. Read next: `practice.py`."""

import dataclasses
import logging

import numpy as np

from openpi_train.parallel.params import Params
from openpi_train.practice.advantages import mixed
from openpi_train.practice.outcomes import SOLVED, Outcomes
from openpi_train.practice.practice import Actor, Attempts, Practice, joined_attempts
from openpi_train.runtime.preempt import StoppedError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collection:
    """The attempts that an iteration learns from, the id of each one's group, and which are more than filler."""

    attempts: Attempts
    groups: np.ndarray
    counts: np.ndarray
    metrics: dict[str, float]


class Collector:
    """Collects attempts, an iteration at a time.

    What it collects is a pure function of the parameters and of its own `draws`, the number of contexts drawn so far,
    and `outcomes`. Contexts are drawn in waves of a fixed number, so that devices always run the same programs.
    """

    def __init__(self, practice: Practice, actor: Actor):
        self._practice, self._actor = practice, actor
        self.draws, self.outcomes = 0, Outcomes()
        self._told_of_solved = False

    def collect(self, params: Params) -> Collection:
        """The attempts of the next iteration. Every process must call it.

        Raises StoppedError as the actor does; what comes next is then what would have come.
        """
        draws, outcomes = self.draws, self.outcomes.as_json()
        try:
            return self._collected(params)
        except StoppedError:
            self.draws, self.outcomes = draws, Outcomes(outcomes)
            raise

    def _collected(self, params: Params) -> Collection:
        """The attempts of as many waves as are needed.

        With `mixed_only` mixed groups are kept in the order of their draws until there are enough. The others of their
        wave are not kept for later, when they would be another policy's. After `max_waves` the missing ones are filled.
        Of an actor whose attempts stay in their process, each lane has its own: a group only takes the place of one
        in the same process.
        """
        practice = self._practice
        everything, groups = self._wave(params)
        waves = 1
        while True:
            is_mixed = mixed(everything.outcomes, groups)
            is_kept = is_mixed if practice.mixed_only else np.ones(len(everything), bool)
            numbers, counts = self._chosen(is_kept)
            if counts.all() or waves == practice.max_waves:
                break
            more, their_groups = self._wave(params)
            everything, groups = joined_attempts([everything, more]), np.concatenate([groups, their_groups])
            waves += 1
        if not counts.any():
            logger.warning(
                "all groups of %d waves have equal outcomes: nothing is learnt from this iteration. Check the rewards "
                "of the attempts, or raise --practice.group-size",
                waves,
            )
        elif practice.advantages.kind in ("grpo", "rloo") and not mixed(everything.rewards, groups).any():
            logger.warning(
                "in all %d groups all attempts have the same reward: none is better than another of its group. Check "
                "the rewards of the attempts, or raise --practice.group-size",
                len(np.unique(groups)),
            )
        metrics = _metrics(everything, groups, is_mixed)
        metrics |= {"waves": float(waves), "filled": float((~counts).mean())}
        return Collection(attempts=everything.taken(numbers), groups=groups[numbers], counts=counts, metrics=metrics)

    def _chosen(self, is_kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The attempts that take the places of an iteration, and which of them count: the others only fill."""
        lanes = self._actor.num_lanes
        numbers, counts = np.zeros((2, self._practice.num_attempts // lanes, lanes), int)
        for lane in range(lanes):
            kept = np.flatnonzero(is_kept[lane::lanes])[: len(numbers)] * lanes + lane
            numbers[:, lane] = lane
            numbers[: len(kept), lane], counts[: len(kept), lane] = kept, 1
        return numbers.ravel(), counts.ravel() > 0

    def _wave(self, params: Params) -> tuple[Attempts, np.ndarray]:
        """Attempts at the next contexts, and the id of each one's group, which is the draw's number."""
        draws = [self._draw() for _ in range(self._practice.num_groups)]
        attempts = self._actor.act(params, draws, self._practice.group_size)
        self.outcomes.record(attempts.contexts, attempts.outcomes)
        return attempts, np.repeat(draws, self._practice.group_size)

    def _draw(self) -> int:
        """The next draw whose context is not passed over; of contexts that are all, the one that comes up again."""
        passed: set[int] = set()
        while True:
            draw, self.draws = self.draws, self.draws + 1
            context = self._actor.context(draw)
            if context in passed:
                if not self._told_of_solved:
                    self._told_of_solved = True
                    logger.warning("all contexts are solved: they are drawn again in spite of --practice.skip-solved")
                return draw
            if not self.outcomes.passes_over(context, self._practice.skip_solved):
                return draw
            passed.add(context)


def _metrics(attempts: Attempts, groups: np.ndarray, is_mixed: np.ndarray) -> dict[str, float]:
    """Of all attempts that were made, kept or not."""
    known = ~np.isnan(attempts.rewards)
    rewards, outcomes = attempts.rewards[known], attempts.outcomes[~np.isnan(attempts.outcomes)]
    lengths = attempts.mask.sum(axis=1)
    _, first = np.unique(groups, return_index=True)
    return {
        "attempts": float(len(attempts)),
        "success": float((outcomes >= SOLVED).mean()) if len(outcomes) else 0.0,
        "reward": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "without_reward": float(1 - known.mean()),
        "groups_mixed": float(is_mixed[first].mean()),
        "length_mean": float(lengths.mean()),
        "length_min": float(lengths.min()),
        "length_max": float(lengths.max()),
        "cut": float(attempts.is_cut.mean()),
        **{name: float(np.nanmean(values)) for name, values in attempts.parts.items() if not np.isnan(values).all()},
    }
