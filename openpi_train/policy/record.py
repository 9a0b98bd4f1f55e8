"""Records of a policy's requests and answers, and their replay, which is equal bit for bit on equal devices.

A record is a file of msgpack messages (`wire.py`): first the sampling settings, then one message per batch, in the
order in which they ran. Replay keeps the batches, since another batch size is another program, which may round
differently.
"""

import dataclasses
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.json_object import JsonObject
from openpi_train.policy import wire
from openpi_train.policy.policy import Policy
from openpi_train.runtime.exits import DataError, UsageError

_FORMAT = 1
_LENGTH = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class Replay:
    """Result of a replay: the number of answers, and the draws of those that differ."""

    answers: int
    different: tuple[int, ...]


class RequestRecorder:
    """Writes requests and answers to a new file. Thread-safe."""

    def __init__(self, path: str | Path, policy: Policy):
        try:
            self._file = Path(path).open("xb", buffering=0)  # noqa: SIM115 - until `close`
        except FileExistsError:
            raise UsageError(f"{path} exists; give another file for the record, or move this one away") from None
        except OSError as error:
            raise UsageError(f"--record {path} cannot be written: {error.strerror}") from error
        self._lock = threading.Lock()
        self._write({"format": _FORMAT, **_sampling(policy), "metadata": policy.metadata})

    def write(self, observations: Sequence[Mapping[str, object]], answers: Sequence[JsonObject]) -> None:
        """Append one batch as it ran, atomically.

        Raises ValueError if it cannot be encoded, OSError if it cannot be written.
        """
        draws = [answer["draw"] for answer in answers]
        actions = [answer["actions"] for answer in answers]
        self._write({"observations": list(observations), "draws": draws, "actions": actions})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, message: object) -> None:
        data = wire.encode(message)
        with self._lock:
            end = self._file.tell()
            rest = memoryview(_LENGTH.pack(len(data)) + data)
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(end)
                self._file.seek(end)
                raise


def read_record(path: str | Path) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """The recorded policy's sampling settings, and its batches, read one by one. Raises DataError for other files."""
    messages = _messages(Path(path))
    header = next(messages, None)
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise DataError(f"{path} is not a record of a policy's answers (serve --record)")
    return header, messages


def replay(policy: Policy, path: str | Path) -> Replay:
    """Run `policy` on all recorded requests and compare the answers.

    Raises UsageError if the policy's sampling settings differ from the recorded ones, DataError for a damaged file.
    """
    header, batches = read_record(path)
    for name, value in _sampling(policy).items():
        if header.get(name) != value:
            raise UsageError(f"{path} was recorded with {name} {header.get(name)}, the policy has {value}: load it so")
    count, different = 0, []
    for batch in batches:
        prepared = [policy.prepare(observation) for observation in batch["observations"]]
        answers = policy.answer(prepared, batch["draws"])
        for answer, wanted in zip(answers, batch["actions"], strict=True):
            count += 1
            if answer["actions"].tobytes() != np.asarray(wanted).tobytes():
                different.append(answer["draw"])
    return Replay(count, tuple(different))


def _sampling(policy: Policy) -> dict[str, Any]:
    """The policy's sampling settings: what determines its answers besides the parameters."""
    sampler = policy.sampler
    found = {"batch_sizes": list(sampler.sizes), "seed": sampler.seed, "num_sample_steps": sampler.num_steps}
    # Records of policies with the run's own guidance have no entry, as those had that were made before it was a choice.
    return found if sampler.guidance is None else {**found, "guidance": sampler.guidance}


def _messages(path: Path) -> Iterator[Any]:
    try:
        with path.open("rb") as file:
            while head := file.read(_LENGTH.size):
                size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
                data = file.read(size) if 0 <= size <= path.stat().st_size else b""
                if len(data) != size:
                    raise DataError(f"{path} ends in the middle of a batch; everything before it was read")
                # Trusted: our own messages hold a whole batch, and are nested deeper than a request.
                yield wire.decode(data, wire.Bounds(items=size, text_bytes=size, depth=2 * wire.Bounds.depth))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except wire.WireError as error:
        raise DataError(f"{path} is damaged, or not a record: {error}") from error
