"""Compiled sampling of normalised action chunks, in a few fixed shapes. Read next: `sampling/action_sampler.py`.

Batches are padded to a batch size, and prompts to a length, that a program was compiled for; a row's result does not
depend on the other rows of its batch.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from openpi_train.data.robot.opened import row_spec
from openpi_train.models.model_config import PolicyConfig
from openpi_train.objectives.objective import Objective
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.params import ParamLeaves, Params, merge_module
from openpi_train.parallel.strategy import Plan
from openpi_train.sampling.action_sampler import ActionSampler, sample_keys
from openpi_train.sampling.flow import FlowSampler, as_flow, with_guidance
from openpi_train.sampling.real_time_chunking import Guide
from openpi_train.types import TOKEN_MASKS, Tree, observation

Row = Mapping[str, Any]
# For real-time chunking: a normalised target and its weights, both float32 [n, h, a], and the largest strength of the
# guidance towards it, float32 [n].
Towards = tuple[np.ndarray, np.ndarray, np.ndarray]

_TEXT = ("prompt_tokens", "prompt_mask", *TOKEN_MASKS)
_NOT_OBSERVED = ("actions", "action_mask", "dim_mask")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """Draws chunks with `params` (by path, laid out by `plan`). Thread-safe: one program runs at a time.

    `batch_sizes` are the compiled batch sizes, rounded up to multiples of the number of devices; `text_lengths` are the
    compiled prompt lengths, None for a model that reads no text. Rows have the longest. `guidance` replaces the
    objective's (`sampling/indicator.py`). `guided`: prefixes are continued by guidance, even if the model
    was trained to continue them.
    """

    model: PolicyConfig
    objective: Objective
    params: Params
    plan: Plan
    cameras: tuple[str, ...]
    seed: int
    num_steps: int
    batch_sizes: tuple[int, ...]
    text_lengths: tuple[int, ...] | None
    guidance: float | None = None
    guided: bool = False
    _programs: dict[tuple[int, int | None, bool], Any] = dataclasses.field(default_factory=dict)
    _lock: Any = dataclasses.field(default_factory=threading.Lock)

    @property
    def action_sampler(self) -> ActionSampler:
        """How chunks are drawn. Raises UsageError if `guidance` is given and the model has no indicator."""
        own = self.objective.action_sampler
        own = own if self.guidance is None else with_guidance(own, self.guidance)
        return dataclasses.replace(own, max_delay=0) if self.guided and isinstance(own, FlowSampler) else own

    @property
    def flow(self) -> FlowSampler | None:
        """The sampler of a flow, which takes a target; None if chunks are drawn in another way."""
        sampler = self.action_sampler
        return sampler if isinstance(sampler, FlowSampler) else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes that are compiled, smallest first."""
        unit = self.plan.num_row_groups
        return tuple(sorted({-(-size // unit) * unit for size in self.batch_sizes}))

    def row_spec(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every entry of a row, as `sample` takes it."""
        longest = max(self.text_lengths) if self.text_lengths else None
        spec = row_spec(self.model.rows.batch_spec(1, self.cameras, longest))
        return {name: one for name, one in spec.items() if name not in _NOT_OBSERVED}

    @property
    def chunk(self) -> tuple[int, int]:
        """Number of actions in a chunk, and of action dims in the model."""
        horizon, width = self.model.rows.batch_spec(1, self.cameras).actions.shape[1:]
        return horizon, width

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the model's images; zeros if it has none."""
        shapes = [shape for name, (shape, _) in self.row_spec().items() if name.startswith("image/")]
        return (shapes[0][-3], shapes[0][-2]) if shapes else (0, 0)

    def sample(self, rows: Sequence[Row], draws: Sequence[int], towards: Towards | None = None) -> np.ndarray:
        """The normalised chunks float32 [n, h, a] of these rows; a row's noise is a function of seed and draw alone.

        With `towards` another program runs, which is the same for all targets and weights.
        """
        found, most = [], self.sizes[-1]
        for start in range(0, len(rows), most):
            part = slice(start, start + most)
            guides = () if towards is None else tuple(one[part] for one in towards)
            found.append(self._sample(rows[part], draws[part], guides))
        return np.concatenate(found)

    def warm_up(self, *, prefixes: bool = False) -> None:
        """Compile every program, and run each once; with `prefixes` those for real-time chunking, too.

        Raises UsageError if there are none.
        """
        if prefixes:
            as_flow(self.action_sampler)
        blank = {name: np.ones(shape, dtype) for name, (shape, dtype) in self.row_spec().items()}
        for size in self.sizes:
            free = np.zeros((size, *self.chunk), np.float32)
            for guides in ((), (free, free, np.ones(size, np.float32)))[: 1 + prefixes]:
                for length in self.text_lengths or (None,):
                    self._run(size, length, self._columns([blank] * size, length), np.zeros(size, np.int32), *guides)

    def lower(self, size: int) -> Any:
        """The program for `size` rows with the longest prompt, lowered (a `jax.stages.Lowered`); `params` may be
        shapes with their shardings."""

        def spec(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((size, *shape), dtype, sharding=self.plan.batch)

        columns = {name: spec(shape, dtype) for name, (shape, dtype) in self.row_spec().items()}
        with jax.set_mesh(self.plan.real_mesh):
            return jax.jit(self._program()).lower(self.params, (observation(columns), spec((), np.int32)))

    def _sample(self, rows: Sequence[Row], draws: Sequence[int], guides: tuple[np.ndarray, ...]) -> np.ndarray:
        size = next(size for size in self.sizes if size >= len(rows))
        length = None
        if self.text_lengths:
            needed = max(int(np.flatnonzero(row["prompt_mask"]).max(initial=-1)) + 1 for row in rows)
            length = next(length for length in sorted(self.text_lengths) if length >= needed)
        filler = size - len(rows)
        columns = self._columns([*rows, *[rows[-1]] * filler], length)
        numbers = np.array([*draws, *[draws[-1]] * filler], np.int32)
        filled = [np.concatenate([guide, *[guide[-1:]] * filler]) for guide in guides]
        return self._run(size, length, columns, numbers, *filled)[: len(rows)]

    def _columns(self, rows: Sequence[Row], length: int | None) -> dict[str, np.ndarray]:
        stacked = {name: np.stack([row[name] for row in rows]) for name in self.row_spec()}
        return {name: column[:, :length] if name in _TEXT else column for name, column in stacked.items()}

    def _run(
        self, size: int, length: int | None, columns: Mapping[str, np.ndarray], draws: np.ndarray, *guides: np.ndarray
    ) -> np.ndarray:
        with self._lock, jax.set_mesh(self.plan.real_mesh):
            inputs = jax.device_put((observation(dict(columns)), draws, *guides), self.plan.batch)
            which = (size, length, bool(guides))
            if which not in self._programs:
                self._programs[which] = jax.jit(self._program()).lower(self.params, inputs).compile()
            return np.asarray(jax.device_get(self._programs[which](self.params, inputs)), np.float32)

    def _program(self) -> Any:
        """The function to compile, of parameters and (observation, draws, and optionally a target with its weights)."""
        graphdef = nnx.split(nnx.eval_shape(lambda: self.model.build(nnx.Rngs(0))))[0]

        def share(params: ParamLeaves, batch: Tree, rest: None) -> Any:
            seen, draws, *towards = batch
            keys = sample_keys(self.seed, draws)
            module = merge_module(graphdef, params)
            sampler = self.action_sampler
            if towards:
                guide = Guide(target=towards[0], weights=towards[1], max_guidance=towards[2])
                sampler = dataclasses.replace(as_flow(sampler), guide=guide)
            return sampler.chunks(module, seen, keys, self.num_steps, self.chunk)

        devices = Devices(self.plan, self.model.compute.dtype, graphdef)
        return lambda params, batch: devices.rows(share, params, batch, None)
