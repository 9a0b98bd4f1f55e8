"""Row transforms on the host: small picklable callables from row to row, shared by training and serving.

Absent entries (no actions when serving) are skipped. Read next: the `transforms` of a model config.
"""

import dataclasses
from typing import Any

import numpy as np

from openpi_train.data.robot.normalize import Form, Stats, normalize, unnormalize
from openpi_train.data.robot.resize import resize_into_corner, resize_with_pad
from openpi_train.data.tokenizers.prompt_tokenizer import PromptTokenizer

Row = dict[str, Any]


def blank_row(num_state_dims: int, num_action_dims: int) -> Row:
    """A row with zeros for `state` [dims] and `actions` [1, dims], to try the transforms of dims on."""
    return {"state": np.zeros(num_state_dims), "actions": np.zeros((1, num_action_dims))}


@dataclasses.dataclass(frozen=True)
class Normalize:
    """Normalise `state` and `actions`, float32. Raises ValueError if the stats are narrower than the data."""

    stats: Stats
    form: Form

    def __call__(self, row: Row) -> Row:
        changed = {name: normalize(row[name], stats, self.form) for name, stats in self.stats.items() if name in row}
        return row | {name: value.astype(np.float32) for name, value in changed.items()}


@dataclasses.dataclass(frozen=True)
class Unnormalize:
    """The inverse of `Normalize`, for rows at least as wide as the stats, float32."""

    stats: Stats
    form: Form

    def __call__(self, row: Row) -> Row:
        changed = {name: unnormalize(row[name], stats, self.form) for name, stats in self.stats.items() if name in row}
        return row | {name: value.astype(np.float32) for name, value in changed.items()}


@dataclasses.dataclass(frozen=True)
class ResizeImages:
    """Resize every `image/<slot>` to height x width pixels, padded with black; without `width` to a square.

    `into_corner` puts images of other proportions at the bottom right, as SmolVLA was trained, not into the middle.
    """

    height: int
    width: int | None = None
    into_corner: bool = False

    def __call__(self, row: Row) -> Row:
        width = self.height if self.width is None else self.width
        resize = resize_into_corner if self.into_corner else resize_with_pad
        images = {name: value for name, value in row.items() if name.startswith("image/")}
        return row | {name: resize(value, self.height, width) for name, value in images.items()}


@dataclasses.dataclass(frozen=True)
class NoPrompt:
    """For a model that reads no text: `prompt` -> `prompt_tokens` and `prompt_mask` of length 0."""

    def __call__(self, row: Row) -> Row:
        rest = {name: value for name, value in row.items() if name != "prompt"}
        return rest | {"prompt_tokens": np.zeros(0, np.int32), "prompt_mask": np.zeros(0, bool)}


@dataclasses.dataclass(frozen=True)
class NumberPrompt:
    """For a model with a fixed set of instructions: `prompt` -> `prompt_tokens` int32 [1], its index in `instructions`.

    Raises ValueError for an unknown instruction.
    """

    instructions: tuple[str, ...]

    def __call__(self, row: Row) -> Row:
        row = dict(row)
        prompt = row.pop("prompt", None)
        if prompt not in self.instructions:
            raise ValueError(
                f"the model does not know the instruction {prompt!r}; it knows "
                f"{', '.join(map(repr, self.instructions))}: set --model.instructions"
            )
        number = self.instructions.index(prompt)
        return row | {"prompt_tokens": np.array([number], np.int32), "prompt_mask": np.ones(1, bool)}


@dataclasses.dataclass(frozen=True)
class TokenizePrompt:
    """`prompt` -> `prompt_tokens` int32 [length] and `prompt_mask` bool [length]; longer prompts are cut to `max_len`.

    `discrete_state` (pi0.5) writes the normalised, unpadded present `state` into the prompt: use it before `PadDims`.
    A `length` below `max_len` omits padding that no prompt of the run needs; raises ValueError if one does.
    """

    tokenizer: PromptTokenizer
    max_len: int
    discrete_state: bool = False
    length: int | None = None

    def __call__(self, row: Row) -> Row:
        if "prompt" not in row:
            raise ValueError("the row has no prompt; give the dataset one with --data.datasets.N.prompt")
        row = dict(row)
        state = None
        if self.discrete_state:
            state = row["state"] if row["state"].ndim == 1 else row["state"][-1]
        text, length = row.pop("prompt"), self.length or self.max_len
        tokens, mask = self.tokenizer.prompt(text, self.max_len, state)
        if mask[length:].any():
            raise ValueError(
                f"the prompt {text[:200]!r} has {mask.sum()} tokens, but when the run started none had more than "
                f"{length}: the data changed, or the tokenizer joins words. Start again with --resume"
            )
        return row | {"prompt_tokens": tokens[:length], "prompt_mask": mask[:length]}


@dataclasses.dataclass(frozen=True)
class PadDims:
    """Pad `state` and `actions` with zeros to the model's width; `dim_mask` [action_dim] is True on the robot's dims.

    Raises ValueError if the robot has more dims than the model.
    """

    action_dim: int

    def __call__(self, row: Row) -> Row:
        row = dict(row)
        if "actions" in row:
            row["dim_mask"] = np.arange(self.action_dim) < row["actions"].shape[-1]
        for name in ("state", "actions"):
            if name in row:
                row[name] = padded(name, row[name], self.action_dim)
        return row


def dims_of(name: str) -> str:
    """How the dims of `state` or `actions` are called."""
    return name.removesuffix("s")


def padded(name: str, values: np.ndarray, action_dim: int) -> np.ndarray:
    """`values` [..., dims] padded with zeros to `action_dim`. Raises ValueError if they are wider; `name` is for it."""
    missing = action_dim - values.shape[-1]
    if missing < 0:
        raise ValueError(
            f"the robot has {values.shape[-1]} {dims_of(name)} dims, the model takes {action_dim}: "
            f"set --model.action-dim {values.shape[-1]} or more"
        )
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])


@dataclasses.dataclass(frozen=True)
class ExactDims:
    """For a model without padded dims: adds a full `dim_mask`; ValueError if `state` or `actions` have other dims."""

    action_dim: int
    state_dim: int

    def __call__(self, row: Row) -> Row:
        for name, width, flag in (("actions", self.action_dim, "action-dim"), ("state", self.state_dim, "state-dim")):
            if name in row and row[name].shape[-1] != width:
                raise ValueError(
                    f"the robot has {row[name].shape[-1]} {dims_of(name)} dims, the model takes {width} and pads none: "
                    f"set --model.{flag} {row[name].shape[-1]}"
                )
        return row | {"dim_mask": np.ones(self.action_dim, bool)} if "actions" in row else row
