"""Limits of the servers. Read next: `server.py`, `openai/text_server.py`."""

import dataclasses
from typing import Any, TypeVar

from openpi_train.serve.request import ServeRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a server; all times in seconds."""

    max_batch: int = 16
    max_queue: int = 64
    max_clients: int = 64
    max_opening: int = 128
    max_message_bytes: int = 32 << 20
    batch_wait_s: float = 0.005
    idle_s: float = 3600.0
    open_s: float = 10.0
    ping_s: float = 20.0
    send_s: float = 60.0
    drain_s: float = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextLimits(Limits):
    """Limits of a text server: `max_queue` counts completions, and a body must arrive within `send_s`."""

    request_s: float = 600.0


L = TypeVar("L", bound=Limits)


def limits_of(kind: type[L], flags: ServeRequest, **more: Any) -> L:
    """The limits that the flags give; `more` are those that not all servers have."""
    return kind(
        max_queue=flags.max_queue,
        max_clients=flags.max_clients,
        max_message_bytes=flags.max_message_mib << 20,
        idle_s=flags.idle_s,
        drain_s=flags.drain_s,
        **more,
    )
