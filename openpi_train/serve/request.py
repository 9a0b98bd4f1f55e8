"""What `serve` can be asked for: its flags. Read next: `main.py`."""

import dataclasses
import math
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from openpi_train.command_line import Request, one_word
from openpi_train.fields import at_least

API_KEY_VARIABLE = "OPENPI_TRAIN_API_KEY"


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not numbers with commas between them") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeRequest(Request):
    """Serve a trained policy over openpi's websocket protocol: openpi-client talks to it as it is.

    The port opens once everything is compiled; SIGTERM finishes what runs and ends. See docs/serving.md.
    """

    # A run's directory, a step's in it, its `best`, or another checkpoint.
    checkpoint: Annotated[str, Positional, arg(metavar="CHECKPOINT")]

    # The run's experiment, where it has classes of your own.
    experiment: str | None = None
    # Whose robot, where the run had several datasets: a number or asset id.
    dataset: str | None = None
    # The instruction where a request has none.
    prompt: str | None = None
    # Denoising steps; None: as the run's evaluation.
    num_sample_steps: int | None = None
    # Of the parameters; None: as they are stored.
    dtype: Literal["float32", "bfloat16"] | None = None
    # Take the parameters' average (EMA), and not the parameters themselves.
    average: bool = True
    # Fold low-rank factors into the weights.
    merge_lora: bool = True
    # Of all noise; None: the run's.
    seed: int | None = None
    # Another place of the run's tokenizer.
    tokenizer: str | None = None
    # Cut prompts that are too long, as training does.
    cut_prompts: bool = False
    # Told to clients, for ALOHA's runtime.
    reset_pose: Annotated[tuple[float, ...], one_word(_numbers, "A,B,...")] | None = None

    # Address to listen on; 0.0.0.0 for other machines, too.
    host: str = "127.0.0.1"
    # Port, 0 for any free one.
    port: int = 8000
    # The key that clients must have; None: that in the variable OPENPI_TRAIN_API_KEY, if it is set.
    api_key_file: str | None = None
    # Serve wss://, with this certificate (PEM).
    tls_cert: str | None = None
    # Its private key (PEM).
    tls_key: str | None = None
    # Most requests in a batch.
    max_batch: int = at_least(1, 16)
    # Most that a batch waits for others.
    batch_wait_ms: float = 5.0
    # Requests that may wait.
    max_queue: int = at_least(1, 64)
    # Open connections.
    max_clients: int = at_least(1, 64)
    # Largest request.
    max_message_mib: int = at_least(1, 32)
    # Close a connection after so long without a request.
    idle_s: float = 3600.0
    # Most that the end waits for answers.
    drain_s: float = 30.0
    # A file in which to note every request and answer.
    record: str | None = None
    # Do not serve: ask again what this file holds, and compare.
    replay: str | None = None

    def check(self) -> list[str]:
        """A sentence for every conflict, with the flag to change."""
        problems = []
        if (self.tls_cert is None) != (self.tls_key is None):
            problems.append("--tls-cert and --tls-key go together: the certificate and its private key, in PEM")
        if self.record and self.replay:
            problems.append("--record and --replay exclude each other")
        if not 0 <= self.port < 1 << 16:
            problems.append(f"--port {self.port} is none: ports are 0 (any free one) to 65535")
        for name in ("batch_wait_ms", "idle_s", "drain_s"):
            if not 0 <= getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                problems.append(f"--{flag} {getattr(self, name)} is no time; give 0 or more")
        return problems
