"""`Policy`: computes actions from observations, in the robot's own units. Read next: `sampler.py`, `loading.py`."""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from openpi_train.data.robot.translation import Translation
from openpi_train.policy.observation import ActionPrefix, ObservationError, ObservationForm
from openpi_train.policy.sampler import Row, Sampler, Towards
from openpi_train.sampling.real_time_chunking import MAX_GUIDANCE, prefix_weights

if TYPE_CHECKING:
    from openpi_train.policy.record import Replay


class PreparedObservation(NamedTuple):
    """An observation, ready for the device: the model's row, the robot's present state [s], and the prefix if any.

    `target` and `weights`, float32 [h, a], are the prefix for the sampler.
    """

    row: Row
    state: np.ndarray
    prefix: ActionPrefix | None = None
    target: np.ndarray | None = None
    weights: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A trained policy. Make one with `load_policy`.

    Its only state is the number of the next draw: `infer` with the same `draw` gives the same actions, bit for bit, on
    the same devices and at the same batch size. `max_guidance` bounds the guidance towards a prefix.
    """

    sampler: Sampler
    form: ObservationForm
    translation: Translation
    experiment: str
    checkpoint: str
    max_guidance: float = MAX_GUIDANCE
    _draws: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def infer(self, observation: Mapping[str, object], *, draw: int | None = None) -> dict[str, Any]:
        """The action chunk for one observation.

        Args:
            observation: the entries listed in `metadata["observation"]`, arrays without a batch axis. For real-time
                chunking also `prefix` and `delay` (`observation.py: ActionPrefix`), as
                `metadata["real_time_chunking"]` says.
            draw: number of the random sample; None takes the next one (0, 1, 2, ...).

        Returns: `actions` float32 [steps, a], in the robot's units, the first for the present control step, with a
        prefix its first `delay` actions; the present `state` float32 [s]; `draw`; and `policy_timing` with `infer_ms`,
        from observation to actions.

        Raises ObservationError, which names the invalid key and what is expected.
        """
        return self.infer_batch([observation], draws=None if draw is None else [draw])[0]

    def infer_batch(
        self, observations: Sequence[Mapping[str, object]], *, draws: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """As `infer`, for several observations at once."""
        started = time.perf_counter()
        if draws is not None and len(draws) != len(observations):
            raise ValueError(f"{len(draws)} draws for {len(observations)} observations; give one for each")
        prepared = [self.prepare(one) for one in observations]
        answers = self.answer(prepared, draws)
        elapsed_ms = 1e3 * (time.perf_counter() - started)
        return [{**one, "policy_timing": {"infer_ms": elapsed_ms}} for one in answers]

    def prepare(self, observation: Mapping[str, object]) -> PreparedObservation:
        """The observation, ready for the device. Raises ObservationError."""
        with np.errstate(over="ignore", invalid="ignore"):  # overflows are refused below
            row, state = self.form.row(observation)
            prefix = self.form.prefix(observation)
            try:
                finished = self.translation.finish(row)
            except ValueError as error:
                raise ObservationError(str(error)) from error
        if not all(np.isfinite(value).all() for value in finished.values() if value.dtype.kind == "f"):
            raise ObservationError("the state is so far outside the training data that its normalised value overflows")
        return (
            PreparedObservation(finished, state)
            if prefix is None
            else self._with_prefix(PreparedObservation(finished, state, prefix))
        )

    def _with_prefix(self, prepared: PreparedObservation) -> PreparedObservation:
        """With the prefix as a target for the sampler, and its weights; of the same shape, however long it is."""
        prefix, (horizon, width), ahead = prepared.prefix, self.sampler.chunk, self.form.window.num_ahead
        assert prefix is not None
        flow = self.sampler.flow
        if flow is None:
            raise ObservationError(
                "this policy takes no 'prefix': real-time chunking is for flow policies; leave 'prefix' and 'delay' out"
            )
        if flow.max_delay and prefix.delay > flow.max_delay:
            raise ObservationError(
                f"'delay' is {prefix.delay}, but the policy was trained with delays of at most {flow.max_delay}"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            actions = self.translation.chunk(prefix.actions, prepared.state)
        if not np.isfinite(actions).all():
            raise ObservationError("'prefix' is so far outside the training data that its normalised value overflows")
        target, weights = np.zeros((horizon, width), np.float32), np.zeros((horizon, width), np.float32)
        first = horizon - ahead  # earlier actions are in the past
        # Dims that only pad the robot's weigh nothing: after training with mask_action_dims they mean nothing.
        own = slice(actions.shape[1])
        target[first : first + len(actions), own] = actions
        if flow.max_delay:
            weights[first : first + prefix.delay, own] = 1
        else:
            weights[first:, own] = prefix_weights(ahead, prefix.delay, ahead - len(actions))[:, None]
        return prepared._replace(target=target, weights=weights)

    def answer(
        self, prepared: Sequence[PreparedObservation], draws: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """The answers to observations from `prepare`: `actions`, `state` and `draw` of each."""
        numbers = [next(self._draws) for _ in prepared] if draws is None else [int(draw) for draw in draws]
        answers: list[dict[str, Any]] = [{} for _ in prepared]
        # Those without a prefix get the bits that they would get alone: another program computes the others.
        for is_prefixed in (False, True):
            places = [place for place, one in enumerate(prepared) if (one.prefix is not None) == is_prefixed]
            some = [prepared[place] for place in places]
            if not some:
                continue
            towards = self._towards(some) if is_prefixed else None
            chunks = self.sampler.sample([one.row for one in some], [numbers[place] for place in places], towards)
            for place, one, chunk in zip(places, some, chunks, strict=True):
                actions = self.translation.actions(chunk, one.state)
                if one.prefix is not None:  # what is executed, without the rounding of the way there and back
                    actions[: one.prefix.delay] = one.prefix.actions[: one.prefix.delay]
                answers[place] = {"actions": actions, "state": one.state, "draw": numbers[place]}
        return answers

    def _towards(self, prepared: Sequence[PreparedObservation]) -> Towards:
        """The prefixes of observations that all have one."""
        targets, weights = ([getattr(one, name) for one in prepared] for name in ("target", "weights"))
        return np.stack(targets), np.stack(weights), np.full(len(prepared), self.max_guidance, np.float32)

    def replay(self, record: str | Path) -> "Replay":
        """Replay recorded requests (`serve --record`) and compare the answers with the recorded ones.

        Raises UsageError if this policy's sampling settings differ from the recorded ones.
        """
        from openpi_train.policy.record import replay  # msgpack, which only serving needs

        return replay(self, record)

    def warm_up(self, *, prefixes: bool | None = None) -> None:
        """Compile for every shape now instead of at the first observation with it.

        `prefixes`: also for observations with a prefix, of any length; None: if the policy was trained with prefixes.
        Raises UsageError if it takes none.
        """
        if prefixes is None:
            flow = self.sampler.flow
            prefixes = flow is not None and flow.max_delay > 0
        self.sampler.warm_up(prefixes=prefixes)

    @property
    def metadata(self) -> dict[str, Any]:
        """Information for clients: the keys of an observation, the robot, its actions and their rate."""
        robot, window, flow = self.form.robot, self.form.window, self.sampler.flow
        return {
            "observation": self.form.spec(),
            "robot": type(robot).__name__,
            "action_names": list(robot.action_names),
            "state_names": list(robot.state_names),
            "control_hz": robot.control_hz,
            "action_horizon": window.horizon + window.first_action,
            "history": window.history,
            "num_executed": window.num_executed,
            "real_time_chunking": flow
            and {
                "method": "trained" if flow.max_delay else "guided",
                "max_prefix": window.num_ahead,
                "max_delay": flow.max_delay or window.num_ahead,
            },
            "experiment": self.experiment,
            "checkpoint": self.checkpoint,
        }
