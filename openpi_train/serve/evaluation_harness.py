"""The protocol of vla-evaluation-harness, whose benchmarks ask the server for one action after another.

    `hello`                        -> `hello`: what the policy reads and what its actions are
    `episode_start`, `episode_end` -> nothing: the episode's actions and observations are forgotten
    `observation`                  -> `action`: one action [a], or `error` with a text

A message is a msgpack map of `type`, `payload`, `seq` and `timestamp`; an answer has the `seq` of its question. An
array is a map with the key `__ndarray__`, a picture one with `__image__`: PNG, JPEG or raw. This is version 1 of the
protocol, as the package vla-eval 0.8.0 has it.

A chunk is executed action by action, before the policy is asked for the next one. Cameras have the names of the
harness's `images`, everything else the payload's own.
Read next: `dialogue.py`, `policy/observation.py`.
"""

import collections
import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from openpi_train.data.core import image
from openpi_train.json_object import JsonObject
from openpi_train.policy import wire
from openpi_train.policy.observation import MAX_SIDE, PROMPT, STATE, ObservationError, stack_history
from openpi_train.runtime.exits import UsageError
from openpi_train.serve.dialogue import Observation

logger = logging.getLogger(__name__)

HARNESS_PATH = "/vla-eval"
_VERSION = 1
_ARRAY, _IMAGE = "__ndarray__", "__image__"
# Bytes that PNG and JPEG begin with: no other decoder is given what comes from a network.
_MAGIC = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")
# What benchmarks call the state and the instruction.
_COMMON = {STATE: ("states", "state"), PROMPT: ("task_description",)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HarnessConvention:
    """What a robot of ours and benchmarks have in common, in the harness's words.

    `actions`: name, dims, format and range of their parts. `state`: its format. `cameras`: the benchmark's names of the
    robot's. `params`: what the benchmark is asked for.
    """

    actions: Sequence[JsonObject]
    state: str = "raw"
    cameras: Mapping[str, str] = dataclasses.field(default_factory=dict)
    params: JsonObject = dataclasses.field(default_factory=dict)


# By the robot's class. LIBERO's data have robosuite's rotations, of up to 2 pi; those of the harness are up to pi.
_CONVENTIONS = {
    "Libero": HarnessConvention(
        actions=(
            {"name": "position", "dims": 3, "format": "delta_xyz", "range": [-1, 1]},
            {"name": "rotation", "dims": 3, "format": "axis_angle", "range": [-3.15, 3.15]},
            {"name": "gripper", "dims": 1, "format": "binary_close_positive", "range": [-1, 1]},
        ),
        state="eef_pos3_axisangle3_gripper2",
        cameras={"image": "agentview", "wrist_image": "wrist"},
        params={"quat_no_antipodal": True},
    )
}


class HarnessForm:
    """What a policy reads of the harness's observations, and what is said of it to the harness.

    Args:
        metadata: the policy's.
        names: the benchmark's entry for a key of the policy, each as KEY=ENTRY; a camera may be named without the
            folders of its feature. For others the key itself and the names that benchmarks commonly use.
        execute: actions of a chunk to execute before the next one; None: the policy's `num_executed`.

    Raises UsageError for names that the policy has not, and if a chunk has fewer actions.
    """

    def __init__(self, metadata: JsonObject, *, names: Iterable[str] = (), execute: int | None = None):
        self._metadata = metadata
        actions = metadata["action_names"]
        raw = {**_spec("actions", "raw", len(actions)), "description": ", ".join(actions)}
        self._convention = _CONVENTIONS.get(metadata["robot"], HarnessConvention(actions=(raw,)))
        self.history: int = metadata["history"]
        self.execute: int = metadata["num_executed"] if execute is None else execute
        if self.execute > metadata["action_horizon"]:
            raise UsageError(
                f"--vla-eval-execute {self.execute}: the policy's chunks have {metadata['action_horizon']} actions"
            )
        self._keys: list[str] = list(metadata["observation"])
        given: dict[str, str] = {}
        for pair in names:
            name, _, entry = pair.partition("=")
            keys = [key for key in self._keys if name in (key, _last(key))]
            if len(keys) != 1:
                raise UsageError(f"--vla-eval-names {pair}: the policy reads {', '.join(self._keys)}, not one {name!r}")
            given[keys[0]] = entry
        self._entries = {key: (given[key],) if key in given else self._usual(key) for key in self._keys}

    @property
    def _cameras(self) -> list[str]:
        return [key for key in self._keys if key not in (STATE, PROMPT)]

    def _usual(self, key: str) -> tuple[str, ...]:
        """The entries that are taken for a key, in this order."""
        if key in _COMMON:
            return _COMMON[key]
        last = _last(key)
        return tuple(dict.fromkeys((key, last, self._convention.cameras.get(last, last))))

    def greeting(self) -> JsonObject:
        """The payload of the server's `hello`."""
        convention, width = self._convention, len(self._metadata["state_names"])
        cameras = {self._entries[key][-1]: _spec("image", "rgb_hwc_uint8") for key in self._cameras}
        params = {"send_state": True, "send_wrist_image": len(self._cameras) > 1}
        text = {"language": _spec("language", "language")} if PROMPT in self._keys else {}
        return {
            "protocol_version": _VERSION,
            "model_server": "openpi_train",
            "capabilities": {},
            "observation_params": {**params, **convention.params},
            "action_spec": {part["name"]: part for part in convention.actions},
            "observation_spec": {**cameras, "state": _spec("state", convention.state, width), **text},
            "policy": {key: self._metadata[key] for key in ("experiment", "checkpoint") if key in self._metadata},
        }

    def observation(self, payload: Mapping[str, object]) -> dict[str, object]:
        """The policy's observation of one control step. Raises ObservationError, with the names of both sides."""
        images = payload.get("images")
        every = {**payload, **(images if isinstance(images, Mapping) else {})}
        sent = {entry: value for entry, value in every.items() if isinstance(entry, str) and entry != "images"}
        found, missing = {}, []
        for key, entries in self._entries.items():
            entry = next((entry for entry in entries if entry in sent), None)
            if entry is not None:
                found[key] = _value(entry, sent[entry])
            elif key != PROMPT:  # the policy may have one of its own
                missing.append(f"{key!r} (from {' or '.join(map(repr, entries))})")
        if isinstance(text := found.get(PROMPT), str) and not text:
            del found[PROMPT]
        if missing:
            raise ObservationError(
                f"the benchmark's observation lacks {' and '.join(missing)}. The policy reads {', '.join(self._keys)}; "
                f"the benchmark sends {', '.join(sorted(sent)) or 'nothing'}. If a name differs, give serve "
                "--vla-eval-names NAME=ENTRY,...; some benchmarks send state and wrist camera only if their params say "
                "send_state and send_wrist_image"
            )
        return found


class HarnessDialogue:
    """The harness's `Dialogue` (`dialogue.py`): remembers what is left of an episode's chunk, and its observations."""

    def __init__(self, form: HarnessForm):
        self._form, self._seq = form, 0
        self._actions: collections.deque[np.ndarray] = collections.deque()
        self._seen: collections.deque[Observation] = collections.deque(maxlen=form.history)

    def read(self, message: bytes) -> Observation | bytes | None:
        """What is asked of the policy, an answer that needs none, or None. Raises WireError or ObservationError."""
        self._seq = 0
        kind, payload = self._opened(message)
        match kind:
            case "hello":
                return self._hello(payload)
            case "episode_start" | "episode_end":
                self._actions.clear()
                self._seen.clear()
                return None
            case "observation":
                if not self._actions or self._form.history > 1:
                    self._seen.append(self._form.observation(payload))
                return self._action() if self._actions else stack_history(self._seen, self._form.history)
        raise wire.WireError(f"a message of the type {str(kind)[:40]!r} is not one of vla-evaluation-harness")

    def answer(self, answer: Mapping[str, object], timing: JsonObject) -> bytes:
        """The first action of the chunk; the others are kept."""
        chunk = np.asarray(answer["actions"], np.float32)
        self._actions.extend(chunk[: self._form.execute])
        return self._action()

    def refusal(self, text: str) -> bytes:
        """The text as an `error`."""
        return self._message("error", {"error": text})

    def _opened(self, message: bytes) -> tuple[object, Mapping[str, object]]:
        """The type and the payload of a message."""
        opened = wire.decode(message)
        if not isinstance(opened, dict) or not isinstance(opened.get("payload"), dict):
            raise wire.WireError("the message is not one of vla-evaluation-harness: a map with `type` and `payload`")
        if type(seq := opened.get("seq")) is int:
            self._seq = seq
        return opened.get("type"), opened["payload"]

    def _hello(self, payload: Mapping[str, object]) -> bytes:
        version = payload.get("protocol_version")
        if version != _VERSION:
            problem = f"version {str(version)[:20]} of the protocol is not known here, only {_VERSION}"
            logger.warning("vla-evaluation-harness: %s", problem)  # its client does not show it
            raise wire.WireError(problem)
        return self._message("hello", self._form.greeting())

    def _action(self) -> bytes:
        action = self._actions.popleft()
        packed = {_ARRAY: True, "data": action.tobytes(), "dtype": action.dtype.str, "shape": list(action.shape)}
        return self._message("action", {"actions": packed})

    def _message(self, kind: str, payload: JsonObject) -> bytes:
        return wire.encode({"type": kind, "payload": payload, "seq": self._seq, "timestamp": time.time()})


def _spec(name: str, form: str, dims: int = 0) -> JsonObject:
    """The harness's description of an entry; 0 dims for what is no vector."""
    return {"name": name, "dims": dims, "format": form}


def _last(key: str) -> str:
    """A feature's name without its folders, which datasets join by slashes or dots."""
    return key.replace(".", "/").rpartition("/")[2]


def _value(entry: str, value: object) -> object:
    """An entry's array or picture; anything else as it is. Raises WireError or ObservationError."""
    if not isinstance(value, Mapping):
        return value
    if _ARRAY in value or value.get("format") == "raw":
        return wire.array({key.encode(): part for key, part in value.items() if isinstance(key, str)})
    data = value.get("data")
    if _IMAGE not in value or not isinstance(data, memoryview):
        raise ObservationError(f"{entry!r} is a map; expected an array or a picture")
    if not bytes(data[:8]).startswith(_MAGIC):
        raise ObservationError(f"{entry!r} is neither a PNG nor a JPEG")
    try:
        if max(image.image_size(bytes(data))) > MAX_SIDE:
            raise ValueError(f"a side has more than {MAX_SIDE} pixels")
        return image.decode(bytes(data))
    except ValueError as error:
        raise ObservationError(f"{entry!r} is a picture that cannot be read: {error}") from error
