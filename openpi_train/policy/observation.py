"""Observations of a policy: their keys, their checks, and their conversion to a model row.

An observation is a dictionary, nested or with "/" in its keys: the robot's image features, its `state` as a whole or in
the parts of `Robot.state_keys`, and a `prompt` if the model reads text. As openpi's clients send them, names with or
without "observation/", images with channels first, and images as fractions are accepted too.

For real-time chunking, `prefix` and `delay` may be added: the actions of the chunk before from the present control step
on, and how many of them will have been executed when the answer comes (`ActionPrefix`).
"""

import contextlib
import dataclasses
import difflib
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from openpi_train.data.robot.windows import WindowShape
from openpi_train.robots.robot import Robot

logger = logging.getLogger(__name__)

_PREFIX = "observation/"
PROMPT, STATE = "prompt", "state"
PREFIX, DELAY = "prefix", "delay"
_MAX_DEPTH, _MAX_KEYS, _MAX_KEY_LENGTH = 8, 1000, 200
# Maximum number of characters; models read a few hundred tokens.
_MAX_PROMPT_LENGTH = 20_000
# Maximum pixels along a side: resizing a longer one takes memory and time out of proportion to its bytes.
MAX_SIDE = 8192
# By how much fractions may lie outside 0..1 through rounding: a quarter of a pixel's step.
_OVERSHOOT = 1e-3


class ObservationError(ValueError):
    """An invalid observation; the message names the key, what was given and what is expected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActionPrefix:
    """What a new chunk continues: `actions` float32 [p, a] of the chunk before, in the robot's units, the first for the
    present control step; the first `delay` of them are executed before the new chunk can be."""

    actions: np.ndarray
    delay: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservationForm:
    """The observations of a robot for a model that sees `window.history` control steps, the present one last.

    `image_size` is the model's height and width: other images are resized as in training. `prompt` is the default
    for observations without one; `reads_prompt` is whether the model reads text at all.
    """

    robot: Robot
    window: WindowShape
    image_size: tuple[int, int]
    reads_prompt: bool
    prompt: str | None = None

    @property
    def _history(self) -> tuple[int, ...]:
        """The axis of control steps, if there is one."""
        return (self.window.history,) if self.window.history > 1 else ()

    def spec(self) -> dict[str, dict[str, Any]]:
        """Shape and dtype of every key, for clients to build requests; images may have any other size."""
        images = {"shape": [*self._history, *self.image_size, 3], "dtype": "uint8"}
        spec: dict[str, dict[str, Any]] = {feature: dict(images) for feature in self.robot.cameras.values()}
        spec[STATE] = {"shape": [*self._history, len(self.robot.state_names)], "dtype": "float32"}
        if self.reads_prompt:
            spec[PROMPT] = {"shape": [], "dtype": "str"}
        return spec

    def row(self, observation: Mapping[str, object]) -> tuple[dict[str, Any], np.ndarray]:
        """The row of an observation in the model's units, not normalised; and the robot's present state [s].

        Raises ObservationError, naming the key, what was given, and what is expected.
        """
        given = _flat(observation)
        cameras = self.robot.cameras.items()
        images = {slot: self._image(feature, self._find(given, feature, slot)) for slot, feature in cameras}
        state = self._state(given)
        row = self.robot.row(images, state, self._prompt(given) if self.reads_prompt else None)
        return row, state if state.ndim == 1 else state[-1]

    def prefix(self, observation: Mapping[str, object]) -> ActionPrefix | None:
        """The observation's prefix, checked; None if it has none. Raises ObservationError."""
        given = [key for key in (PREFIX, DELAY) if key in observation]
        if not given:
            return None
        if len(given) == 1:
            other = DELAY if given == [PREFIX] else PREFIX
            raise ObservationError(
                f"the observation has {given[0]!r} and no {other!r}; real-time chunking needs both: the actions of the "
                "chunk before from the present control step on, and how many of them are executed meanwhile"
            )
        names, ahead = self.robot.action_names, self.window.num_ahead
        actions = _numbers(PREFIX, observation[PREFIX])
        if actions.ndim != 2 or actions.shape[1] != len(names):
            raise ObservationError(
                f"{PREFIX!r} has the shape {list(actions.shape)}; expected [p, {len(names)}]: {', '.join(names)}"
            )
        if len(actions) > ahead:
            raise ObservationError(f"{PREFIX!r} has {len(actions)} actions; an action chunk has {ahead}")
        actions = actions.astype(np.float32)
        if not np.isfinite(actions).all():
            raise ObservationError(f"{PREFIX!r} holds NaN or infinity; every number must be finite")
        delay = observation[DELAY]
        if isinstance(delay, np.ndarray) and delay.ndim == 0:
            delay = delay.item()
        if isinstance(delay, bool | np.bool_) or not isinstance(delay, int | np.integer):
            raise ObservationError(f"{DELAY!r} is a {type(delay).__name__}; expected an int, a number of actions")
        if not 0 <= delay <= len(actions):
            raise ObservationError(
                f"{DELAY!r} is {delay}; expected 0 to {len(actions)}, the number of actions in {PREFIX!r}"
            )
        return ActionPrefix(actions=actions, delay=int(delay))

    def _find(self, given: Mapping[str, object], key: str, *others: str) -> Any:
        for name in (*_names(key), *others):
            if name in given:
                return given[name]
        strangers = [name for name in given if name not in self.spec()]
        close = difflib.get_close_matches(key, strangers, n=1, cutoff=0.8)
        hint = f" (is {close[0]!r} meant for it?)" if close else ""
        raise ObservationError(
            f"the observation lacks {key!r}{hint}. It has {_listing(given)}; expected: {_listing(self.spec())}"
        )

    def _image(self, key: str, value: object) -> np.ndarray:
        image = _numbers(key, value)
        lead = len(self._history)
        if image.ndim == 3 + lead and image.shape[:lead] == self._history and image.size:
            if image.shape[-1] != 3 and image.shape[lead] == 3:
                image = np.moveaxis(image, lead, -1)
            if max(image.shape[lead:-1]) > MAX_SIDE:
                raise ObservationError(f"{key!r} has the shape {list(image.shape)}; sides are at most {MAX_SIDE}")
            if image.shape[-1] == 3:
                return _as_bytes(key, image)
        raise ObservationError(f"{key!r} has the shape {list(image.shape)}; {self._expected('height, width, 3')}")

    def _state(self, given: Mapping[str, object]) -> np.ndarray:
        width, keys = len(self.robot.state_names), self.robot.state_keys
        whole = next((name for name in (STATE, _PREFIX + STATE) if name in given), None)
        if whole is None and len(keys) > 1 and any(name in given for key in keys for name in _names(key)):
            parts = [_numbers(key, self._find(given, key)) for key in keys]
            state = np.zeros(0)
            if sum(part.size for part in parts) == width * self.window.history:
                with contextlib.suppress(ValueError):
                    state = np.concatenate([part.reshape(*self._history, -1) for part in parts], axis=-1)
            what = ", ".join(f"{key!r} {list(part.shape)}" for key, part in zip(keys, parts, strict=True))
        else:
            state = _numbers(STATE, self._find(given, STATE, *(name for key in keys for name in _names(key))))
            what = f"{whole or STATE!r} {list(state.shape)}"
        if state.shape != (*self._history, width):
            names = ", ".join(self.robot.state_names)
            raise ObservationError(f"the state has the shape of {what}; {self._expected(str(width))}: {names}")
        state = state.astype(np.float32)
        if not np.isfinite(state).all():
            raise ObservationError("the state holds NaN or infinity; every number must be finite")
        return state

    def _prompt(self, given: Mapping[str, object]) -> str:
        if PROMPT not in given and self.prompt is not None:
            return self.prompt
        value = self._find(given, PROMPT)
        try:
            if isinstance(value, np.ndarray) and value.dtype.kind == "U" and value.ndim == 0:
                value = value.item()
            if isinstance(value, str):
                value.encode()
        except ValueError as error:  # numpy does not check characters, and half of a surrogate pair has no UTF-8
            raise ObservationError(f"'prompt' is not valid text: {error}") from error
        if not isinstance(value, str):
            raise ObservationError(f"'prompt' is a {type(value).__name__}; expected a str, the instruction")
        if len(value) > _MAX_PROMPT_LENGTH:
            raise ObservationError(f"'prompt' has {len(value)} characters, more than {_MAX_PROMPT_LENGTH}")
        return str(value)

    def _expected(self, shape: str) -> str:
        if not self._history:
            return f"expected [{shape}]"
        steps = self.window.history
        return (
            f"expected [{steps}, {shape}]: the last {steps} control steps, the present one last; at an episode's "
            "start, repeat its first step for those before it"
        )


def stack_history(observations: Iterable[Mapping[str, object]], history: int) -> dict[str, Any]:
    """Stack the last `history` observations of an episode, given those so far, oldest first.

    At an episode's start its first observation is repeated, as in training.
    """
    steps = [_flat(one) for one in observations]
    if not steps:
        raise ObservationError("no observations to stack; give those of the episode so far")
    if history == 1:
        return steps[-1]
    steps = [steps[0]] * max(history - len(steps), 0) + steps[-history:]
    return {key: value if key == PROMPT else np.stack([one[key] for one in steps]) for key, value in steps[-1].items()}


def _flat(observation: Mapping[Any, object], prefix: str = "", depth: int = 1) -> dict[str, Any]:
    """The observation with the keys of nested dictionaries joined by "/". Checks limits early, at little cost."""
    if depth > _MAX_DEPTH:
        raise ObservationError(f"the observation has dictionaries nested more than {_MAX_DEPTH} deep")
    found: dict[str, Any] = {}
    for key, value in observation.items():
        if not isinstance(key, str):
            raise ObservationError(f"the key {str(key)[:40]} is a {type(key).__name__}; keys must be strings")
        if len(key) > _MAX_KEY_LENGTH:
            raise ObservationError(f"the key {key[:40]!r}... has {len(key)} characters, more than {_MAX_KEY_LENGTH}")
        name = prefix + key
        found |= _flat(value, f"{name}/", depth + 1) if isinstance(value, Mapping) else {name: value}
        if len(found) > _MAX_KEYS:
            raise ObservationError(f"the observation has more than {_MAX_KEYS} keys")
    return found


def _names(key: str) -> tuple[str, ...]:
    """The accepted names of a key."""
    short = key.removeprefix(_PREFIX)
    return key, short, _PREFIX + short


def _numbers(key: str, value: object) -> np.ndarray:
    """Convert a number, an array, or lists of numbers or of arrays with the same dtype and shape, to one array.

    Checks before numpy joins them, since numpy would give each number or text of a list the size of the largest.
    """
    with contextlib.suppress(ValueError):  # lists of different lengths
        kinds = set(map(_kind, _leaves(value)))
        array = np.asarray(value) if None not in kinds and len(kinds) <= 1 else np.array(None)
        if array.dtype.kind in "fiu":
            return array
    what = value.dtype if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    raise ObservationError(
        f"{key!r} is {what}; expected numbers: an array, or lists of equal length of numbers or of equal arrays"
    )


def _leaves(value: object) -> Iterator[Any]:
    """The leaves of nested lists; the value itself if it is not a list."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _kind(leaf: object) -> object:
    """A key that is equal for leaves that numpy joins without making any larger; None for non-numbers."""
    if isinstance(leaf, int | float | np.number):
        return "number"
    array = np.array(None) if isinstance(leaf, memoryview) else np.asarray(leaf)
    return (array.dtype, array.shape) if array.dtype.kind in "fiu" else None


def _as_bytes(key: str, image: np.ndarray) -> np.ndarray:
    """The image as uint8; fractions are rounded down, as in openpi's policies.

    Fractions that overshoot by rounding, as after resizing, are clipped, with one warning.
    """
    if image.dtype == np.uint8:
        return image
    low, high = image.min(), image.max()
    if image.dtype.kind in "iu" and low >= 0 and high <= 255:
        return image.astype(np.uint8)
    if image.dtype.kind == "f" and low >= -_OVERSHOOT and high <= 1 + _OVERSHOOT:
        if low < 0 or high > 1:
            _tell_overshoot(key)
        made = np.empty(image.shape, np.uint8)
        for row in np.ndindex(image.shape[:-2]):  # row by row, to save memory
            made[row] = 255 * np.clip(image[row], 0, 1)
        return made
    raise ObservationError(
        f"{key!r} is {image.dtype} from {low} to {high}; expected uint8, or whole numbers from 0 to 255, or fractions "
        "from 0 to 1"
    )


@functools.cache
def _tell_overshoot(key: str) -> None:
    logger.warning("%r has fractions below 0 or above 1, by at most %g: clipped", key, _OVERSHOOT)


def _listing(keys: Iterable[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"
