"""`Policy`: computes actions from observations, in the robot's own units. Read next: `sampler.py`, `loading.py`."""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from openpi_train.data.robot.translation import Translation
from openpi_train.policy.observation import ObservationError, ObservationForm
from openpi_train.policy.sampler import Row, Sampler

if TYPE_CHECKING:
    from openpi_train.policy.record import Replay


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A trained policy. Make one with `load_policy`.

    Its only state is the number of the next draw: `infer` with the same `draw` gives the same actions, bit for bit, on
    the same devices and at the same batch size.
    """

    sampler: Sampler
    form: ObservationForm
    translation: Translation
    experiment: str
    checkpoint: str
    _draws: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def infer(self, observation: Mapping[str, object], *, draw: int | None = None) -> dict[str, Any]:
        """The action chunk for one observation.

        Args:
            observation: the entries listed in `metadata["observation"]`, arrays without a batch axis.
            draw: number of the random sample; None takes the next one (0, 1, 2, ...).

        Returns: `actions` float32 [steps, a], in the robot's units, the first for the present control step; the present
        `state` float32 [s]; `draw`; and `policy_timing` with `infer_ms`, from observation to actions.

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

    def prepare(self, observation: Mapping[str, object]) -> tuple[Row, np.ndarray]:
        """The finished row of an observation, and the robot's present state [s]. Raises ObservationError."""
        with np.errstate(over="ignore", invalid="ignore"):  # overflows are refused below
            row, state = self.form.row(observation)
            try:
                finished = self.translation.finish(row)
            except ValueError as error:
                raise ObservationError(str(error)) from error
        if not all(np.isfinite(value).all() for value in finished.values() if value.dtype.kind == "f"):
            raise ObservationError("the state is so far outside the training data that its normalised value overflows")
        return finished, state

    def answer(
        self,
        prepared: Sequence[tuple[Row, np.ndarray]],
        draws: Sequence[int] | None = None,
        towards: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    ) -> list[dict[str, Any]]:
        """The answers to observations from `prepare`: `actions`, `state` and `draw` of each.

        `towards`: a normalised target, its weights and the largest strength of the guidance, for real-time chunking
        (`acting.py`).
        """
        if not prepared:
            return []
        numbers = [next(self._draws) for _ in prepared] if draws is None else [int(draw) for draw in draws]
        chunks = self.sampler.sample([row for row, _ in prepared], numbers, towards)
        return [
            {"actions": self.translation.actions(chunk, state), "state": state, "draw": number}
            for chunk, (_, state), number in zip(chunks, prepared, numbers, strict=True)
        ]

    def replay(self, record: str | Path) -> "Replay":
        """Replay recorded requests (`serve --record`) and compare the answers with the recorded ones.

        Raises UsageError if this policy's sampling settings differ from the recorded ones.
        """
        from openpi_train.policy.record import replay  # msgpack, which only serving needs

        return replay(self, record)

    def warm_up(self) -> None:
        """Compile for every shape now instead of at the first observation with it."""
        self.sampler.warm_up()

    @property
    def metadata(self) -> dict[str, Any]:
        """Information for clients: the keys of an observation, the robot, its actions and their rate."""
        robot, window = self.form.robot, self.form.window
        return {
            "observation": self.form.spec(),
            "robot": type(robot).__name__,
            "action_names": list(robot.action_names),
            "state_names": list(robot.state_names),
            "control_hz": robot.control_hz,
            "action_horizon": window.horizon + window.first_action,
            "history": window.history,
            "num_executed": window.num_executed,
            "experiment": self.experiment,
            "checkpoint": self.checkpoint,
        }
