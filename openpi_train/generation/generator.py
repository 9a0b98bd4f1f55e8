"""`Generator`: completes prompts on the devices of a mesh, in a fixed number of rows that are refilled as they end.

Tokens only; `text_generator.py` has the texts. All processes of a run must make the same calls with the same requests:
every process knows all prompts and gets all completions. Read next: `token_rows.py`, the programs.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from openpi_train.generation import token_rows
from openpi_train.generation.generation_size import dtype_held
from openpi_train.generation.sampling_settings import MAX_STOP_IDS, SamplingSettings
from openpi_train.generation.token_rows import NONE, NUM_TOP, Admission, NewRowTokens, TokenRows
from openpi_train.nn.decoder import Decoder
from openpi_train.nn.key_value_cache import KeyValueCache
from openpi_train.nn.token_limits import RowSettings
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.mesh import FSDP, REPLICA, TENSOR
from openpi_train.parallel.params import ParamLeaves, Params, merge_module
from openpi_train.types import Tree, tree_of

# Why a completion ended: a token or text that ends it; its largest number of tokens.
FinishReason = Literal["stop", "length"]

# (decoder, what the program is given, the rows) -> (what it finds, the rows after it).
RowProgram = Callable[[Decoder, Any, TokenRows], tuple[Any, TokenRows]]
# The least length that programs are compiled for; others are this times a power of two.
_LEAST_LENGTH = 32
# Rows of a device whose prompts are read by one call: this or less, by powers of this.
_ADMITTED_BY = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A prompt to complete. Its random numbers depend only on the settings' seed, `row`, and the token's place."""

    id: Hashable
    prompt: Sequence[int]
    settings: SamplingSettings = dataclasses.field(default_factory=SamplingSettings)
    row: int = 0
    # The number of most probable tokens to tell with each token, at most `NUM_TOP`.
    num_top: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewTokens:
    """What a request got in a step. `tokens` are without the one that ended it, which is `ending`, if one did.

    Log-probabilities are the model's at the request's temperature (1 if it is 0), before top-k, top-p and min-p, if the
    generator is not asked for those after them.
    `top` has the most probable tokens at each place, with theirs, where asked for.
    """

    id: Hashable
    tokens: list[int]
    log_probs: list[float]
    top: list[list[tuple[int, float]]]
    finish_reason: FinishReason | None = None
    ending: tuple[int, float] | None = None


@dataclasses.dataclass(kw_only=True)
class _Running:
    request: GenerationRequest
    length: int  # tokens in the cache


class Generator:
    """Completes prompts with the parameters of a language model.

    Args:
        graphdef, params: the decoder, and its parameters by path, laid out by the devices' plan.
        devices: `training.devices.Devices` of a run.
        num_rows: completions that decode together; rounded up to a multiple of the devices that share the rows.
        max_length: the most tokens of a prompt and its completion together.
        end_ids: the tokens after which every completion ends.
        vocab_size: the tokens that the tokenizer has; None: all of the model's. Others are never chosen.
        chunk: tokens per call of the program; between calls rows are refilled.
        after_limits: tell the log-probabilities with which tokens are drawn, after top-k, top-p and min-p.

    The parameters are gathered once, in the compute dtype, and split only within tensor groups. Not thread-safe.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Params,
        devices: Devices,
        *,
        num_rows: int,
        max_length: int,
        end_ids: Sequence[int],
        vocab_size: int | None = None,
        chunk: int = 8,
        after_limits: bool = False,
    ):
        self._graphdef, self._chunk, self.max_length = graphdef, chunk, max_length
        self._after_limits = after_limits
        self._end_ids = tuple(dict.fromkeys(end_ids))
        self._devices = dataclasses.replace(devices, plan=dataclasses.replace(devices.plan, strategy="replicated"))
        mesh = self._devices.plan.mesh
        self._groups = self._devices.plan.num_row_groups
        self.num_rows = -(-num_rows // self._groups) * self._groups
        decoder: Any = merge_module(graphdef, params)
        self._vocab_size = min(vocab_size or decoder.sizes.vocab_size, decoder.sizes.vocab_size)
        self._num_stops = len(self._end_ids) + MAX_STOP_IDS
        is_split = decoder.sizes.num_kv_heads % mesh.shape[TENSOR] == 0 and mesh.shape[TENSOR] > 1
        heads = PartitionSpec(TENSOR) if is_split else PartitionSpec()
        everywhere = PartitionSpec()
        of_cache = tree_of(KeyValueCache, keys=heads, values=heads, length=everywhere)
        fields = [field.name for field in dataclasses.fields(TokenRows)]
        self._row_specs = tree_of(TokenRows, **{**dict.fromkeys(fields, everywhere), "cache": of_cache})
        self._programs: dict[Hashable, Any] = {}
        self._gather: Any = None
        self._slots: list[_Running | None] = [None] * self.num_rows
        self._waiting: collections.deque[GenerationRequest] = collections.deque()
        self._ids: set[Hashable] = set()  # of all that wait or run
        self._make_rows = functools.partial(
            token_rows.free_rows,
            decoder.sizes,
            decoder.dtype,
            self.num_rows,
            self._rounded(max_length),
            self._num_stops,
        )
        self._params: Any = None
        self._rows: Any = None
        self.use(params)

    def use(self, params: Params) -> None:
        """Complete with these parameters from now on, of the same shapes. Raises RuntimeError if rows are in use."""
        self._require_no_running()
        plan, dtype = self._devices.plan, self._devices.dtype

        def cast(params: Params) -> Params:
            return {path: leaf.astype(dtype_held(path, leaf, dtype)) for path, leaf in params.items()}

        if self._gather is None:
            self._gather = jax.jit(cast, out_shardings=plan.tree("copy", params))
        with jax.set_mesh(plan.real_mesh):
            self._params = self._gather(params)
            if self._rows is None:
                self._rows = jax.jit(self._make_rows, out_shardings=self._row_shardings())()

    def release(self) -> None:
        """Free the memory on the devices until the next `use`; programs are kept. Raises RuntimeError as `use`."""
        self._require_no_running()
        self._params = self._rows = None

    def _require_no_running(self) -> None:
        if self.num_running:
            raise RuntimeError(f"{self.num_running} completions are not finished: their tokens would be of two models")

    @property
    def num_running(self) -> int:
        """The rows that are in use."""
        return sum(slot is not None for slot in self._slots)

    @property
    def num_waiting(self) -> int:
        """The requests that have no row yet."""
        return len(self._waiting)

    def check(self, prompt: Sequence[int], settings: SamplingSettings) -> list[str]:
        """Why a prompt cannot be completed, as sentences."""
        problems = settings.check()
        if not prompt:
            problems.append("the prompt has no token: a completion needs at least one to follow")
        elif len(prompt) >= self.max_length:
            problems.append(
                f"the prompt has {len(prompt)} tokens, which leaves no room for a completion: both together have at "
                f"most {self.max_length}"
            )
        elif not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            problems.append(
                f"the prompt has tokens from {min(prompt)} to {max(prompt)}; allowed are 0 to {self._vocab_size - 1}"
            )
        return problems

    def submit(self, request: GenerationRequest) -> None:
        """Complete this prompt as soon as a row is free. Raises ValueError for what `check` finds, or an id in use."""
        if problems := self.check(request.prompt, request.settings):
            raise ValueError("; ".join(problems))
        if not 0 <= request.num_top <= NUM_TOP:
            raise ValueError(f"num_top {request.num_top} must be from 0 to {NUM_TOP}")
        if request.id in self._ids:
            raise ValueError(f"there is a request {request.id!r} already")
        self._ids.add(request.id)
        self._waiting.append(request)

    def cancel(self, id: Hashable) -> None:
        """Forget a request; what is unknown or finished is ignored."""
        if id not in self._ids:
            return
        self._ids.remove(id)
        self._waiting = collections.deque(one for one in self._waiting if one.id != id)
        for number, slot in enumerate(self._slots):
            if slot is not None and slot.request.id == id:
                self._slots[number] = None
                self._free([number])

    def step(self) -> list[NewTokens]:
        """Give free rows to waiting requests, and make up to `chunk` tokens in all rows; what each request got."""
        self._admit()
        if not self.num_running:
            return []
        found = self._decode()
        events = []
        for number, slot in enumerate(self._slots):
            if slot is not None:
                event = self._event(slot, found, number)
                slot.length += len(event.tokens)
                events.append(event)
                if event.finish_reason:
                    self._slots[number] = None
                    self._ids.remove(event.id)
        return events

    def warm_up(self) -> int:
        """Compile every program that requests may need, so that none waits for it; returns their number."""
        for length in lengths(self.max_length):
            for count in _powers(_ADMITTED_BY, 1, self.num_rows // self._groups):
                self._take({}, count, length)
            for with_top in (False, True):
                self._decoded(length, with_top)
        self._free([])
        return len(self._programs)

    def complete(self, requests: Iterable[GenerationRequest]) -> list[NewTokens]:
        """The whole completions, in the order of the requests. Raises ValueError as `submit`."""
        requests = list(requests)
        parts: dict[Hashable, list[NewTokens]] = {request.id: [] for request in requests}
        for request in requests:
            self.submit(request)
        while self.num_running or self.num_waiting:
            for event in self.step():
                parts[event.id].append(event)
        return [joined(parts[request.id]) for request in requests]

    def _event(self, slot: _Running, found: NewRowTokens, number: int) -> NewTokens:
        made = int((found.tokens[number] != NONE).sum())
        tokens, log_probs = found.tokens[number, :made].tolist(), found.log_probs[number, :made].tolist()
        top = [
            list(zip(ids.tolist(), probs.tolist(), strict=True))[: slot.request.num_top]
            for ids, probs in zip(found.top_tokens[number, :made], found.top_log_probs[number, :made], strict=True)
        ]
        reason, ending = None, None
        if not found.left[number]:
            reason = "length"
            if tokens and tokens[-1] in (*self._end_ids, *slot.request.settings.stop_ids):
                reason, ending = "stop", (tokens.pop(), log_probs.pop())
        return NewTokens(
            id=slot.request.id,
            tokens=tokens,
            log_probs=log_probs,
            top=top[: len(tokens)],
            finish_reason=reason,
            ending=ending,
        )

    def _admit(self) -> None:
        """Read as many waiting prompts as there are free rows, evenly on the devices."""
        own = self.num_rows // self._groups
        free = [
            [number for number in range(group * own, (group + 1) * own) if self._slots[number] is None]
            for group in range(self._groups)
        ]
        taken: dict[int, GenerationRequest] = {}
        while self._waiting and any(free):
            taken[max(free, key=len).pop(0)] = self._waiting.popleft()
        if not taken:
            return
        for number, request in taken.items():
            self._slots[number] = _Running(request=request, length=len(request.prompt) - 1)
        longest = max(len(request.prompt) for request in taken.values()) - 1
        length = self._rounded(longest)
        most = max(collections.Counter(number // own for number in taken).values())
        self._take(taken, next(count for count in _powers(_ADMITTED_BY, 1, own) if count >= most), length)

    def _take(self, taken: Mapping[int, GenerationRequest], count: int, length: int) -> None:
        """Read the prompts of these rows, at most `count` per device and `length` tokens each."""
        numbers, places = self._places(taken, count)
        new = self._admission([taken.get(number) for number in numbers], places, length)

        def program(decoder: Decoder, new: Admission, rows: TokenRows) -> tuple[None, TokenRows]:
            return None, token_rows.admitted(decoder, new, rows)

        self._call(("admit", count, length), program, jax.tree.map(self._on_devices, new))

    def _free(self, numbers: Sequence[int]) -> None:
        """End the completion in at most one row."""
        places = self._on_devices(self._places(numbers, 1)[1])
        self._call("free", lambda _, slots, rows: (None, token_rows.freed(slots, rows)), places)

    def _places(self, taken: Iterable[int], count: int) -> tuple[list[int], np.ndarray]:
        """For `count` places per device the row in it, or `NONE`; and its number among that device's rows.

        That of no row is beyond the last one.
        """
        own = self.num_rows // self._groups
        numbers = []
        for group in range(self._groups):
            mine = [number for number in taken if number // own == group]
            numbers += [*mine, *[NONE] * (count - len(mine))]
        local = [own + place if number == NONE else number % own for place, number in enumerate(numbers)]
        return numbers, np.asarray(local, np.int32)

    def _admission(self, requests: Sequence[GenerationRequest | None], slots: np.ndarray, length: int) -> Admission:
        tokens = np.zeros((len(requests), length), np.int32)
        stop_ids = np.full((len(requests), self._num_stops), NONE, np.int32)
        for number, request in enumerate(requests):
            if request is not None:
                tokens[number, : len(request.prompt) - 1] = request.prompt[:-1]
                stops = (*self._end_ids, *request.settings.stop_ids)
                stop_ids[number, : len(stops)] = stops

        def values(of: Callable[[GenerationRequest], float], dtype: DTypeLike = np.int32) -> np.ndarray:
            return np.asarray([0 if request is None else of(request) for request in requests], dtype)

        def setting(name: str, dtype: DTypeLike) -> np.ndarray:
            return values(lambda request: getattr(request.settings, name), dtype)

        return tree_of(
            Admission,
            slot=slots,
            tokens=tokens,
            length=values(lambda request: len(request.prompt) - 1),
            last=values(lambda request: request.prompt[-1]),
            limit=values(self._limit),
            stop_ids=stop_ids,
            seed=setting("seed", np.uint32),
            row=values(lambda request: request.row),
            settings=tree_of(
                RowSettings,
                temperature=setting("temperature", np.float32),
                top_k=setting("top_k", np.int32),
                top_p=setting("top_p", np.float32),
                min_p=setting("min_p", np.float32),
            ),
        )

    def _limit(self, request: GenerationRequest) -> int:
        """The most tokens of its completion."""
        return min(request.settings.max_new_tokens, self.max_length - len(request.prompt))

    def _decode(self) -> NewRowTokens:
        running = [slot for slot in self._slots if slot is not None]
        slots = self._rounded(max(slot.length for slot in running) + self._chunk)
        return self._decoded(slots, any(slot.request.num_top for slot in running))

    def _decoded(self, slots: int, with_top: bool) -> NewRowTokens:
        return jax.device_get(self._call(*self._decoding(slots, with_top), None))

    def _decoding(self, slots: int, with_top: bool) -> tuple[Hashable, Callable[..., tuple[Any, TokenRows]]]:
        """The key and the function of the program that makes tokens."""
        fixed = {"num_tokens": self._chunk, "num_slots": slots, "vocab_size": self._vocab_size, "with_top": with_top}

        def program(decoder: Decoder, _: None, rows: TokenRows) -> tuple[NewRowTokens, TokenRows]:
            return token_rows.decoded(decoder, rows, **fixed, after_limits=self._after_limits)

        return ("decode", *fixed.values()), program

    def _call(self, key: Hashable, function: RowProgram, given: object) -> Any:
        """Run the program `key`, which is made of `function`, on all rows; keep the rows, and return what it found."""
        with jax.set_mesh(self._devices.plan.real_mesh):
            found, self._rows = self._program(key, function)(self._params, given, self._rows)
        return found

    def _program(self, key: Hashable, function: RowProgram) -> Any:
        """The compiled program `key`, made of `function`."""
        plan, specs = self._devices.plan, (PartitionSpec(), self._row_specs)

        def on_rows(params: ParamLeaves, both: tuple[Tree, TokenRows], _: None) -> tuple[Any, TokenRows]:
            decoder: Any = merge_module(self._graphdef, params)
            return function(decoder, *both)

        def run(params: Params, given: object, rows: TokenRows) -> tuple[Any, TokenRows]:
            found, rows = self._devices.rows(on_rows, params, (given, rows), None, tensor_specs=(specs, specs))
            return jax.lax.with_sharding_constraint(found, plan.replicated), rows

        if key not in self._programs:
            self._programs[key] = jax.jit(run, donate_argnums=2)
        return self._programs[key]

    def _row_shardings(self) -> TokenRows:
        """Those of the rows, a prefix of their tree."""
        mesh, rows = self._devices.plan.real_mesh, (REPLICA, FSDP)
        return jax.tree.map(lambda spec: NamedSharding(mesh, PartitionSpec(rows, *spec)), self._row_specs)

    def _on_devices(self, value: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(value.shape, self._devices.plan.batch, lambda index: value[index])

    def _rounded(self, length: int) -> int:
        """The length to compile for."""
        return next(size for size in lengths(self.max_length) if size >= min(length, self.max_length))


def joined(parts: Sequence[NewTokens]) -> NewTokens:
    """Everything that a request got, in order."""
    last = parts[-1]
    return dataclasses.replace(
        last,
        tokens=[token for part in parts for token in part.tokens],
        log_probs=[value for part in parts for value in part.log_probs],
        top=[one for part in parts for one in part.top],
    )


def lengths(max_length: int) -> list[int]:
    """The lengths that programs are compiled for, ascending, where rows have at most `max_length` tokens."""
    return _powers(2, _LEAST_LENGTH, max_length)


def _powers(base: int, first: int, last: int) -> list[int]:
    """`first` times the powers of `base`, below `last`, and `last`."""
    found = []
    while first < last:
        found.append(first)
        first *= base
    return [*found, last]
