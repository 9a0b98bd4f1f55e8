"""Collects the rollouts of an iteration: which prompts are drawn, which groups are kept. Read next: `rollouts.py`."""

import dataclasses
import logging

import numpy as np

from openpi_train.parallel.params import Params
from openpi_train.rl.advantages import mixed
from openpi_train.rl.outcomes import SOLVED, Outcomes
from openpi_train.rl.rollouts import Actor, RLConfig, Rollouts, joined_rollouts
from openpi_train.runtime.preempt import StoppedError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collection:
    """The rollouts that an iteration learns from, the id of each one's group, and which are more than filler."""

    rollouts: Rollouts
    groups: np.ndarray
    counts: np.ndarray
    metrics: dict[str, float]


class Collector:
    """Collects rollouts, an iteration at a time.

    What it collects is a pure function of the parameters and of its own `draws`, the number of prompts drawn so far,
    and `outcomes`. Contexts are drawn in waves of a fixed number, so that devices always run the same programs.
    """

    def __init__(self, rl: RLConfig, actor: Actor):
        self._rl, self._actor = rl, actor
        self.draws, self.outcomes = 0, Outcomes()
        self._told_of_solved = False

    def collect(self, params: Params) -> Collection:
        """The rollouts of the next iteration. Every process must call it.

        Raises StoppedError as the actor does; what comes next is then what would have come.
        """
        draws, outcomes = self.draws, self.outcomes.as_json()
        try:
            return self._collected(params)
        except StoppedError:
            self.draws, self.outcomes = draws, Outcomes(outcomes)
            raise

    def _collected(self, params: Params) -> Collection:
        """The rollouts of as many waves as are needed.

        With `mixed_only` mixed groups are kept in the order of their draws until there are enough. The others of their
        wave are not kept for later, when they would be another policy's. After `max_waves` the missing ones are filled.
        Of an actor whose rollouts stay in their process, each lane has its own: a group only takes the place of one
        in the same process.
        """
        rl = self._rl
        everything, groups = self._wave(params)
        waves = 1
        while True:
            is_mixed = mixed(everything.outcomes, groups)
            is_kept = is_mixed if rl.mixed_only else np.ones(len(everything), bool)
            numbers, counts = self._chosen(is_kept)
            if counts.all() or waves == rl.max_waves:
                break
            more, their_groups = self._wave(params)
            everything, groups = joined_rollouts([everything, more]), np.concatenate([groups, their_groups])
            waves += 1
        if not counts.any():
            logger.warning(
                "all groups of %d waves have equal outcomes: nothing is learnt from this iteration. Check the rewards "
                "of the rollouts, or raise --rl.group-size",
                waves,
            )
        elif rl.advantages.kind in ("grpo", "rloo") and not mixed(everything.rewards, groups).any():
            logger.warning(
                "in all %d groups all rollouts have the same reward: none is better than another of its group. Check "
                "the rewards of the rollouts, or raise --rl.group-size",
                len(np.unique(groups)),
            )
        metrics = _metrics(everything, groups, is_mixed)
        metrics |= {"waves": float(waves), "filled": float((~counts).mean())}
        return Collection(rollouts=everything.taken(numbers), groups=groups[numbers], counts=counts, metrics=metrics)

    def _chosen(self, is_kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rollouts that take the places of an iteration, and which of them count: the others only fill."""
        lanes = self._actor.num_lanes
        numbers, counts = np.zeros((2, self._rl.num_rollouts // lanes, lanes), int)
        for lane in range(lanes):
            kept = np.flatnonzero(is_kept[lane::lanes])[: len(numbers)] * lanes + lane
            numbers[:, lane] = lane
            numbers[: len(kept), lane], counts[: len(kept), lane] = kept, 1
        return numbers.ravel(), counts.ravel() > 0

    def _wave(self, params: Params) -> tuple[Rollouts, np.ndarray]:
        """Rollouts at the next prompts, and the id of each one's group, which is the draw's number."""
        draws = [self._draw() for _ in range(self._rl.num_groups)]
        rollouts = self._actor.act(params, draws, self._rl.group_size)
        self.outcomes.record(rollouts.prompt_ids, rollouts.outcomes)
        return rollouts, np.repeat(draws, self._rl.group_size)

    def _draw(self) -> int:
        """The next draw whose prompt is not passed over; of prompts that are all, the one that comes up again."""
        passed: set[int] = set()
        while True:
            draw, self.draws = self.draws, self.draws + 1
            prompt_id = self._actor.prompt_id(draw)
            if prompt_id in passed:
                if not self._told_of_solved:
                    self._told_of_solved = True
                    logger.warning("all prompts are solved: they are drawn again in spite of --rl.skip-solved")
                return draw
            if not self.outcomes.passes_over(prompt_id, self._rl.skip_solved):
                return draw
            passed.add(prompt_id)


def _metrics(rollouts: Rollouts, groups: np.ndarray, is_mixed: np.ndarray) -> dict[str, float]:
    """Of all rollouts that were made, kept or not."""
    known = ~np.isnan(rollouts.rewards)
    rewards, outcomes = rollouts.rewards[known], rollouts.outcomes[~np.isnan(rollouts.outcomes)]
    lengths = rollouts.mask.sum(axis=1)
    _, first = np.unique(groups, return_index=True)
    return {
        "rollouts": float(len(rollouts)),
        "success": float((outcomes >= SOLVED).mean()) if len(outcomes) else 0.0,
        "reward": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "without_reward": float(1 - known.mean()),
        "groups_mixed": float(is_mixed[first].mean()),
        "length_mean": float(lengths.mean()),
        "length_min": float(lengths.min()),
        "length_max": float(lengths.max()),
        "cut": float(rollouts.is_cut.mean()),
        **{name: float(np.nanmean(values)) for name, values in rollouts.parts.items() if not np.isnan(values).all()},
    }
