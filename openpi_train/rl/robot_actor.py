"""`RobotActor`: acts in an environment with the parameters of the moment, and keeps what was seen and drawn.

Every process acts in the episodes of its own rows of a batch, so no picture leaves it. Its devices' rows are dealt to
programs that always have the same number of rows: results do not depend on the number of processes, bit for bit.
Read next: `envs/rollout.py`, `evaluation/row_sampling.py`, `sampling/action_distribution.py`.
"""

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key

from openpi_train.data.core.placement import local_rows
from openpi_train.data.core.source import BadRecord
from openpi_train.data.robot.opened import OpenedDatasets
from openpi_train.envs.double_buffering import SlotTimes, in_slots
from openpi_train.envs.env import EnvObservation, EnvStates
from openpi_train.envs.rollout import RolloutEpisodes
from openpi_train.envs.task_choice import chosen_tasks
from openpi_train.envs.video import picture_of
from openpi_train.evaluation.measure import EvaluationContext
from openpi_train.evaluation.robot_rows import RobotRows, translation_of
from openpi_train.evaluation.row_sampling import RowSampling
from openpi_train.models.model_config import as_policy
from openpi_train.parallel.params import Params
from openpi_train.rl.estimator import Decisions
from openpi_train.rl.initial_states import InitialStates
from openpi_train.rl.kept_episodes import EpisodeRecorder, KeptEpisodes
from openpi_train.rl.local_columns import LocalColumns
from openpi_train.rl.robot_query import ACTIONS, EXECUTED, KEPT, expectation, kept, query
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.rl.rollouts import Actor, Rollouts
from openpi_train.runtime import agree
from openpi_train.runtime.exits import DataError
from openpi_train.sampling.action_distribution import LOG_PROBS, ActionDistribution, by_query
from openpi_train.types import action_batch
from openpi_train.types import observation as observation_of

logger = logging.getLogger(__name__)

# What entries of demonstrations begin with, beside those that the policy saw and drew.
_DEMONSTRATIONS = "demonstrations/"


class RecordingPolicy:
    """A `rollout.Policy` that keeps what it saw and drew: `records` has the rows of each query, by entry."""

    def __init__(self, params: Params, rows: RobotRows, sampling: RowSampling):
        self._params, self._rows, self._sampling = params, rows, sampling
        self.records: list[dict[str, np.ndarray]] = []

    def __call__(self, observation: EnvObservation, keys: Key[Array, " b"]) -> np.ndarray:
        columns = self._rows.columns(observation)
        drawn = dict(self._sampling(self._params, columns, keys))
        actions = drawn.pop(ACTIONS)
        self.records.append({**columns, **drawn})
        return self._rows.actions(actions, observation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """The rollouts that the policy acts in at once, as rows of `RowSampling`, and what is kept of them.

    `returns` [b, q] are the environment's rewards after each query, until success or the end, and `total` [b] all of
    them.
    """

    numbers: np.ndarray
    tasks: np.ndarray
    episodes: RolloutEpisodes
    policy: RecordingPolicy
    recorder: EpisodeRecorder | None
    returns: np.ndarray
    total: np.ndarray


class RobotActor(Actor):
    """Acts by the distribution of the run's objective.

    Rollout i at the n-th draw has its initial state from the draw and its noise from both numbers.

    Raises UsageError if the environment does not fit the robot.
    """

    def __init__(self, rl: RobotRL, running: EvaluationContext):
        trainer: Any = running.trainer
        self._rl, self._distribution, self._stop_requested = rl, trainer.objective.distribution, running.stop_requested
        assert isinstance(self._distribution, ActionDistribution)
        self._model = as_policy(trainer.model)
        # States that evaluations do not use, where an environment has few.
        self._env = rl.env.for_demonstrations()
        translation = translation_of(running.data, self._env, rl.dataset, flag="--rl")
        assert isinstance(running.data, OpenedDatasets)
        self._rows, self._demonstrated = RobotRows(translation, self._env), running.data.train
        self.num_lanes, num_groups = running.batch_size, trainer.plan.num_row_groups
        self._lanes = local_rows(trainer.plan.batch, self.num_lanes)
        self._chunk = running.data.train.spec["actions"][0]
        # The rows of a batch on one device, and its episodes in one iteration.
        self._lanes_per_device = self.num_lanes // num_groups
        per_device = rl.num_rollouts // num_groups
        rows = min(rl.episodes_per_device, per_device)
        self._sampling = RowSampling(trainer, query(self._model, self._distribution), rows_per_device=rows)
        # Says what the critic expects after episodes that were cut; where nothing asks for that there is none.
        bootstraps = rl.advantages.needs_values and rl.bootstrap
        self._expectation = (
            RowSampling(trainer, expectation(self._distribution), rows_per_device=rows) if bootstraps else None
        )
        self._tasks = chosen_tasks(self._env, rl.tasks)
        names = [self._env.tasks[task] for task in self._tasks]
        self._states = InitialStates(names, rl.states_per_task, trainer.seed)
        self.identity: Mapping[str, Any] = {
            "env": repr(rl.env),
            "states_per_task": rl.states_per_task,
            "rows": running.data.train.identity,
            # Runs of all tasks, and without demonstrations, have no entry, as before these could be chosen.
            **({} if rl.tasks is None else {"tasks": names}),
            **({"num_demonstrations": rl.num_demonstrations} if rl.num_demonstrations else {}),
        }
        self._num_slots, self._times, self._acting_s = rl.slots, SlotTimes(), 0.0
        if self._num_slots > 1 and rl.episodes_per_device >= per_device:
            logger.info(
                "all %d episodes of a device are under way at once, so policy and simulators take turns: with "
                "--rl.episodes-per-device %d or less they work at the same time",
                per_device,
                max(per_device // 4, 1),
            )
        self._kept = None if rl.keep is None else self._keeping(rl.keep, running.directory)

    def prompt_id(self, draw: int) -> int:
        return self._states.prompt_id(draw)

    def begin_iteration(self, number: int) -> None:
        self._times, self._acting_s = SlotTimes(), 0.0
        if self._kept is not None:
            self._kept.begin(number)

    def end_iteration(self) -> None:
        if self._kept is not None:
            self._kept.end()

    def metrics(self) -> Mapping[str, float]:
        times = self._times
        overlap = {"rl/overlap": times.both_s / max(self._acting_s, 1e-9)} if self._num_slots > 1 else {}
        return {**overlap, "time/policy_s": times.policy_s, "time/environment_s": times.environment_s}

    def act(self, params: Params, draws: Sequence[int], group_size: int) -> Rollouts:
        started = time.monotonic()
        everything = np.arange(len(draws) * group_size)
        own = everything.reshape(-1, self.num_lanes)[:, self._lanes]
        columns: dict[str, np.ndarray] = {}
        ends: list[list[float]] = []
        for call in self._acted(params, np.asarray(draws), own, group_size):
            numbers, outcome, seen = call.numbers, call.episodes.outcome, self._seen(call.policy.records)
            places = numbers // self.num_lanes, np.searchsorted(self._lanes, numbers % self.num_lanes)
            for name, value in seen.items():
                whole = columns.setdefault(name, np.zeros((*own.shape, *value.shape[1:]), value.dtype))
                whole[places] = value
            units = self._distribution.lengths(by_query(kept(seen))).reshape(len(numbers), -1)
            expected = self._expected(params, call)
            end = [numbers, call.total, outcome.success, outcome.steps, expected, call.returns, units]
            ends += np.column_stack(end).tolist()
        columns |= self._demonstrations(np.asarray(draws)[own // group_size] * group_size + own % group_size)
        queries = self._rl.num_queries(self._model)
        table = np.zeros((len(everything), 4 + 2 * queries))
        for number, *end in (one for part in agree.gather("ends of episodes", ends) for one in part):
            table[int(number)] = end
        returns, outcomes, steps, expected = table[:, :4].T
        columns[EXECUTED] = self._executed(steps[own])
        columns["sampling_log_probs"] = self._sampling_log_probs(columns)
        if self._kept is not None:
            self._kept.end_wave(steps, outcomes)
        tasks = np.repeat([self._task(draw) for draw in draws], group_size)
        self._acting_s += time.monotonic() - started
        parts = {f"success/{self._env.tasks[one]}": np.where(tasks == one, outcomes, np.nan) for one in self._tasks}
        return Rollouts(
            prompt_ids=np.repeat([self.prompt_id(draw) for draw in draws], group_size),
            rewards=outcomes + self._rl.dense_weight * returns,
            outcomes=outcomes,
            is_cut=outcomes == 0,
            mask=self._mask(steps, table[:, 4 + queries :]),
            local=LocalColumns(rows=self._lanes, batch_size=self.num_lanes, columns=columns),
            parts={"control_steps": steps, **parts},
            decisions=self._decisions(outcomes, steps, table[:, 4 : 4 + queries], expected),
        )

    def _expected(self, params: Params, call: _Call) -> np.ndarray:
        """What the critic expects after the call's episodes: 0 after success, and where nothing asks for it."""
        success = call.episodes.outcome.success
        if self._expectation is None:
            return np.zeros(len(success))
        # The rows of a call are those of the policy's program; no randomness is asked for.
        keys = jax.random.split(jax.random.key(0), len(success))
        found = self._expectation(params, self._rows.columns(call.episodes.observation), keys)
        return np.where(success, 0.0, np.asarray(found, np.float64))

    def _decisions(
        self, outcomes: np.ndarray, steps: np.ndarray, returns: np.ndarray, expected: np.ndarray
    ) -> Decisions:
        """What was earned at each query: success where it came, and the environment's rewards until the next one."""
        rewards = self._rl.dense_weight * returns
        last = (steps.astype(int) - 1) // self._rl.num_executed(self._model)
        rewards[np.arange(len(steps)), last] += outcomes
        return Decisions(rewards=rewards, last_values=expected)

    def _keeping(self, folder: str, run: Path) -> KeptEpisodes:
        return KeptEpisodes(
            folder,
            env=self._env,
            robot=self._rows.robot,
            features=self._rows.cameras,
            tasks=self._tasks,
            every=self._rl.keep_every,
            keep_failed=self._rl.keep_failed,
            run={"run": "/".join(run.resolve().parts[-2:])},
        )

    def _task(self, draw: int) -> int:
        """The number of a draw's task in the environment."""
        return self._tasks[self._states.task(draw)]

    def _demonstrations(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """The entries of the demonstrations beside the rollouts of these numbers [n, rows], which go on for ever.

        Raises DataError if they cannot be read.
        """
        count = self._rl.num_demonstrations
        if not count:
            return {}
        positions = numbers[..., None] * count + np.arange(count)
        try:
            found, _ = self._demonstrated.batch(positions.ravel())
        except (ValueError, BadRecord) as error:
            raise DataError(f"a demonstration beside the rollouts: {error}") from error
        found["row"] = np.broadcast_to(self._lanes[:, None], positions.shape).ravel().astype(np.int32)
        return {_DEMONSTRATIONS + name: one.reshape(*positions.shape, *one.shape[1:]) for name, one in found.items()}

    def demonstrations(self, columns: Mapping[str, jax.Array]) -> Any:
        found = {
            name.removeprefix(_DEMONSTRATIONS): column
            for name, column in columns.items()
            if name.startswith(_DEMONSTRATIONS)
        }
        return action_batch(found) if found else None

    def traces(self, columns: Mapping[str, jax.Array]) -> Any:
        return self._distribution.traces(
            observation_of(dict(columns)), kept(columns), columns[EXECUTED], columns["row"]
        )

    def describe(self, rollouts: Rollouts, number: int) -> str:
        steps = int(rollouts.parts["control_steps"][number])
        end = "succeeded" if rollouts.outcomes[number] else "failed"
        return f"episode at prompt {rollouts.prompt_ids[number]} that {end} after {steps} control steps"

    def pictures(self, rollouts: Rollouts, number: int) -> list[dict[str, np.ndarray]]:
        row = np.flatnonzero(self._lanes == number % self.num_lanes)
        if not len(row) or rollouts.local is None:
            return []
        columns = rollouts.local.columns
        cameras = [name for name in columns if name.startswith("image/")]
        queries = math.ceil(rollouts.parts["control_steps"][number] / self._rl.num_executed(self._model))
        place = number // self.num_lanes, int(row[0])
        return [
            {name.removeprefix("image/"): picture_of(columns[name][place][query]) for name in cameras}
            for query in range(queries)
            if cameras
        ]

    def _dealt(self, own: np.ndarray) -> Iterator[np.ndarray]:
        """These rollouts [n, rows], this process's, as this process's rows of successive calls of `sampling`.

        Each device has those of its own rows of a batch. The last ones fill up the last call.
        """
        by_device = own.reshape(len(own), -1, self._lanes_per_device).swapaxes(0, 1)
        by_device = by_device.reshape(len(by_device), -1)
        size = len(self._sampling.rows) // len(by_device)
        for start in range(0, by_device.shape[1], size):
            columns = np.minimum(np.arange(start, start + size), by_device.shape[1] - 1)
            yield by_device[:, columns].ravel()

    def _begun(self, params: Params, draws: np.ndarray, numbers: np.ndarray, group_size: int) -> _Call:
        """These rollouts of the draws, which have not begun to act."""
        rl, policy = self._rl, RecordingPolicy(params, self._rows, self._sampling)
        draws, rollouts = draws[numbers // group_size], numbers % group_size
        tasks = np.array([self._task(int(draw)) for draw in draws])
        recorder = None if self._kept is None else self._kept.recorder(numbers)
        total, is_over = np.zeros(len(draws)), np.ones(len(draws), bool)
        returns = np.zeros((len(draws), rl.num_queries(self._model)))
        # Of control steps; the first states come before the first one, when nothing is earned.
        seen = itertools.count(-1)

        def watch(states: EnvStates, done: np.ndarray) -> None:
            query = max(next(seen), 0) // rl.num_executed(self._model)
            if rl.dense_weight:
                earned = _finite(np.asarray(self._env.reward(states))[~is_over])
                total[~is_over] += earned
                returns[~is_over, query] += earned
            is_over[:] = done

        episodes = RolloutEpisodes(
            policy,
            self._env,
            self._states.reset_keys(draws),
            tasks,
            execute=rl.num_executed(self._model),
            policy_keys=self._states.noise_keys(draws, rollouts),
            max_steps=rl.max_steps,
            history=self._model.rows.window.history,
            watch=watch,
            record=recorder,
        )
        return _Call(
            numbers=numbers,
            tasks=tasks,
            episodes=episodes,
            policy=policy,
            recorder=recorder,
            returns=returns,
            total=total,
        )

    def _acted(self, params: Params, draws: np.ndarray, own: np.ndarray, group_size: int) -> Iterator[_Call]:
        """These rollouts of the draws, [n, rows], call by call as they are over."""
        calls: dict[int, _Call] = {}

        def batches() -> Iterator[RolloutEpisodes]:
            for number, rollouts in enumerate(self._dealt(own)):
                calls[number] = self._begun(params, draws, rollouts, group_size)
                yield calls[number].episodes

        ended = in_slots(
            batches(),
            self._num_slots,
            all_done=lambda done: all(agree.gather("episodes that are over", done)),
            stop_requested=self._stop_requested,
            times=self._times,
        )
        for number, _ in ended:
            call = calls.pop(number)
            if self._kept is not None:
                self._kept.add(call.recorder, call.numbers, call.tasks)
            yield call

    def _seen(self, made: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The records of a call's queries by entry [b, q, ...]. Queries after the end of all episodes are not learnt
        from.
        """
        records = made + made[-1:] * (self._rl.num_queries(self._model) - len(made))
        return {name: np.stack([record[name] for record in records], axis=1) for name in records[0]}

    def _executed(self, steps: np.ndarray) -> np.ndarray:
        """The values [*n, q, h, a] of the chunks that were executed in episodes of so many control steps [*n].

        An episode may end within a chunk. The robot's dims are the first ones; a chunk may begin in the past.
        """
        rl, model = self._rl, self._model
        execute, (horizon, dims) = rl.num_executed(model), self._chunk
        first = np.arange(rl.num_queries(model)) * execute
        count = np.clip(steps[..., None] - first, 0, execute)
        place = np.arange(horizon) + model.rows.window.first_action
        in_time = (place >= 0) & (place < count[..., None])
        return in_time[..., None] & (np.arange(dims) < len(self._rows.robot.action_names))

    def _sampling_log_probs(self, columns: dict[str, np.ndarray]) -> np.ndarray:
        """The sampler's log-probabilities [n, rows, q * u] of all these chunks; those of single values are dropped."""
        drawn, executed = kept(columns), columns[EXECUTED]
        del columns[KEPT + LOG_PROBS]
        flat = {name: value.reshape(-1, *value.shape[3:]) for name, value in drawn.items()}
        found = self._distribution.sampling_log_probs(flat, executed.reshape(-1, *executed.shape[3:]))
        return found.reshape(*executed.shape[:2], -1).astype(np.float32)

    def _mask(self, steps: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The units [n, q * u] of the queries that were made before so many control steps; lengths [n, q]."""
        rl, model = self._rl, self._model
        queries = np.arange(rl.num_queries(model)) * rl.num_executed(model) < steps[:, None]
        units = np.arange(self._distribution.num_units) < lengths[..., None]
        return (units & queries[..., None]).reshape(len(steps), -1)


def _finite(rewards: np.ndarray) -> np.ndarray:
    if not np.isfinite(rewards).all():
        raise DataError(
            "a reward of the environment is not finite: mend it, or learn from success alone with --rl.dense-weight 0"
        )
    return rewards
