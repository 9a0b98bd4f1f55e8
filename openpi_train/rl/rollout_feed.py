"""`RolloutFeed`: the batches of a run that learns from its own rollouts.

Read next: `collection.py`, `rollout_log_probs.py`.

    iteration       rollouts -> rewards -> scores of the acting policy -> advantages
    its steps       epochs x mini-batches of these rollouts, one per optimizer step

The run's position is complete between two iterations only: then it is the number of prompts drawn so far, what came
of them, and the weight of the divergence if that is adapted. All else of an iteration follows from that, the seed and
the parameters.
"""

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from openpi_train.data.core import order
from openpi_train.data.core.feed import differences
from openpi_train.data.core.interface import Feed
from openpi_train.data.core.placement import local_rows, on_devices
from openpi_train.evaluation.measure import TrainerView
from openpi_train.json_object import JsonObject
from openpi_train.objectives.policy_objective import PolicyObjective
from openpi_train.parallel.params import Params
from openpi_train.parallel.state import TrainState
from openpi_train.rl.advantages import explained_variance
from openpi_train.rl.collection import Collection, Collector
from openpi_train.rl.local_columns import LocalColumns
from openpi_train.rl.outcomes import Outcomes
from openpi_train.rl.rollout_log_probs import NeededScores, RecordedScores, RolloutLogProbs
from openpi_train.rl.rollout_samples import keep_some
from openpi_train.rl.rollouts import Actor, RLConfig
from openpi_train.runtime.phases import phase
from openpi_train.types import RolloutBatch, tree_of

logger = logging.getLogger(__name__)


class RolloutTrainer(TrainerView, Protocol):
    """The part of `training.step.Trainer` that a feed uses."""

    @property
    def grad_accum(self) -> int: ...


class RolloutFeed(Feed):
    """Batches of the rollouts that the present parameters make.

    Args:
        trainer: the run's, whose objective is a `PolicyObjective`.
        batch_size: rollouts per optimizer step, of which each process makes arrays of those that its devices hold.
        directory: the run's, where some rollouts are kept to look at; None: nowhere.
    """

    def __init__(
        self, rl: RLConfig, actor: Actor, trainer: RolloutTrainer, *, batch_size: int, directory: Path | None = None
    ):
        self._directory = directory
        self._rl, self._actor, self._trainer = rl, actor, trainer
        self._batch_size, self._sharding = batch_size, trainer.plan.batch
        self._row_numbers = local_rows(self._sharding, batch_size)
        self._num_steps = rl.steps_per_iteration(batch_size)
        self._num_batches = rl.num_rollouts // batch_size
        self._collector = Collector(rl, actor)
        objective = trainer.objective
        assert isinstance(objective, PolicyObjective)
        needed = NeededScores.of(objective, rl, self._num_steps)
        self._needs_scores = needed.any
        self._scores = RecordedScores(trainer.devices, objective.distribution, needed, num_micros=trainer.grad_accum)
        self._iteration = self._step = 0
        self._kl_weight = rl.advantages.kl_weight
        self._metrics: dict[str, float] = {}
        self._columns: Mapping[str, np.ndarray] = {}
        self._local: LocalColumns | None = None
        self._collection: Collection | None = None

    def next(self, state: Any = None) -> RolloutBatch:
        """The batch of the next step. Acts first, where an iteration begins."""
        if self._step == 0:
            with phase("acting"):
                self._collect(state)
        numbers = self._numbers(*divmod(self._step, self._num_batches))
        batch = self._batch(numbers, self._step == 0)
        self._step += 1
        if self._step == self._num_steps:
            self._iteration, self._step = self._iteration + 1, 0
        return batch

    @property
    def can_be_saved(self) -> bool:
        return self._step == 0

    def position(self) -> dict[str, Any]:
        collector = self._collector
        return {
            "iteration": self._iteration,
            "draws": collector.draws,
            "outcomes": collector.outcomes.as_json(),
            "data": self._actor.identity,
            # Runs with a constant weight have no entry: it is that of their config.
            **({} if self._rl.advantages.kl_target is None else {"kl_weight": self._kl_weight}),
        }

    def seek(self, position: JsonObject) -> None:
        if changed := differences(position["data"], self._actor.identity):
            raise ValueError(
                "the run's rollouts were made at other prompts than this run's, so it cannot go on:\n  "
                + "\n  ".join(changed)
                + "\nrestore these settings, or start a new run from the checkpoint's weights"
            )
        self._iteration, self._step = position["iteration"], 0
        self._collector.draws, self._collector.outcomes = position["draws"], Outcomes(position["outcomes"])
        estimator = self._rl.advantages
        adapted = None if estimator.kl_target is None else position.get("kl_weight")
        self._kl_weight = estimator.kl_weight if adapted is None else adapted

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    def rows(self, step: int) -> list[str]:
        """The rollouts of the batch that was given last."""
        del step
        if self._collection is None:
            return []
        numbers = self._numbers(*divmod((self._step or self._num_steps) - 1, self._num_batches))
        return [self._actor.describe(self._collection.rollouts, int(number)) for number in numbers]

    def close(self) -> None:
        self._actor.close()

    def _collect(self, state: TrainState) -> None:
        """Make the rollouts of an iteration, and all that its steps need of them."""
        started = time.monotonic()
        params = {**state.frozen, **state.params}
        self._actor.begin_iteration(self._iteration)
        collected = self._collector.collect(params)
        self._actor.end_iteration()
        acted = time.monotonic()
        self._collection = collected
        self._show(collected)
        rollouts, rl = collected.rollouts, self._rl
        mask = rollouts.mask & collected.counts[:, None]
        if rl.mask_cut:
            mask &= ~rollouts.is_cut[:, None]
        self._columns, self._local = rollouts.columns, rollouts.local
        recorded = self._recorded(params, mask.shape)
        log_ratios = recorded.log_probs.astype(np.float64) - recorded.reference_log_probs
        advantages, returns = rl.advantages(
            np.where(collected.counts, rollouts.rewards, np.nan),
            collected.groups,
            mask,
            log_ratios,
            recorded.values.astype(np.float64),
            self._kl_weight,
            rollouts.decisions,
        )
        self._columns = {
            **rollouts.columns,
            "mask": mask,
            "is_rollout": collected.counts,
            "advantages": advantages.astype(np.float32),
            "returns": returns.astype(np.float32),
            "log_probs": recorded.log_probs,
            "reference_log_probs": recorded.reference_log_probs,
            "values": recorded.values,
        }
        units = float(rollouts.mask.sum())
        self._metrics = {f"rl/{name}": value for name, value in collected.metrics.items()}
        self._metrics |= {
            **self._actor.metrics(),
            "rl/iteration": float(self._iteration + 1),
            "time/acting_s": acted - started,
            "time/scoring_s": time.monotonic() - acted,
            "rl/units_per_s": units / max(acted - started, 1e-9),
            "rl/rollouts_per_s": collected.metrics["rollouts"] / max(acted - started, 1e-9),
        }
        if rl.advantages.needs_values:
            known = explained_variance(recorded.values.astype(np.float64), returns, mask)
            self._metrics |= {} if math.isnan(known) else {"rl/explained_variance": known}
        if rl.advantages.kl_weight:
            self._adapt(np.where(rollouts.mask, log_ratios, 0.0).sum(axis=1)[collected.counts])
        self.acting_s += time.monotonic() - started

    def _show(self, collected: Collection) -> None:
        """Keep some of the iteration's rollouts to look at, if that is due."""
        most = self._rl.num_shown
        if self._directory is not None and most and self._iteration % self._rl.show_interval == 0:
            keep_some(self._directory / "rollouts" / str(self._iteration + 1), self._actor, collected, most)

    def _adapt(self, divergences: np.ndarray) -> None:
        """Log the weight of this iteration, and set that of the next from the divergences of its rollouts.

        All rollouts count, also those that are not learnt from (`mask_cut`).
        """
        self._metrics["rl/kl_weight"] = self._kl_weight
        if len(divergences):
            self._metrics["rl/kl"] = float(divergences.mean())
        self._kl_weight = self._rl.advantages.next_kl_weight(self._kl_weight, divergences)

    def _recorded(self, params: Params, shape: tuple[int, ...]) -> RolloutLogProbs:
        """The scores of all rollouts; zeros if nothing needs them."""
        if not self._needs_scores:
            none = np.zeros(shape, np.float32)
            return RolloutLogProbs(log_probs=none, reference_log_probs=none, values=none)
        parts = np.arange(self._rl.num_rollouts).reshape(self._num_batches, -1)
        return self._scores(params, [self._actor.traces(self._placed(part)) for part in parts])

    def _numbers(self, epoch: int, batch: int) -> np.ndarray:
        """The rollouts of a batch: each row takes its own rollouts, in another order in every epoch."""
        rows = np.arange(self._batch_size)
        keys = order.scramble(self._trainer.seed, self._collector.draws, epoch, rows)
        return order.permute(np.full(len(rows), batch), self._num_batches, keys) * self._batch_size + rows

    def _batch(self, numbers: np.ndarray, is_fresh: bool) -> RolloutBatch:
        placed = self._placed(numbers, is_fresh=np.full(self._batch_size, is_fresh))
        parts = {"traces": self._actor.traces(placed), "demonstrations": self._actor.demonstrations(placed)}
        names = RolloutBatch.__dataclass_fields__.keys() - parts
        return tree_of(RolloutBatch, **parts, **{name: placed[name] for name in names})

    def _placed(self, numbers: np.ndarray, **more: np.ndarray) -> dict[str, jax.Array]:
        """The columns of a batch of rollouts as global arrays, `more` columns, and the row numbers."""
        columns = {name: column[numbers] for name, column in self._columns.items()}
        columns |= {**more, "row": np.arange(self._batch_size, dtype=np.int32)}
        own = {name: column[self._row_numbers] for name, column in columns.items()}
        if self._local is not None:
            own |= {name: column[0] for name, column in self._local.taken(numbers).columns.items()}
        return {
            name: on_devices(column, self._sharding, self._batch_size, self._row_numbers)
            for name, column in own.items()
        }
