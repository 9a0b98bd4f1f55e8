"""Limits of the servers. Read next: `server.py`, `openai/text_server.py`."""

import dataclasses


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
