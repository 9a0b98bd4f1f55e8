"""Flags of the `serve` command. Read next: `main.py`."""

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
        raise ValueError(f"{text!r} is not a list of numbers separated by commas") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeRequest(Request):
    """Serve a trained policy over openpi's websocket protocol, which works with an unmodified openpi-client.

    The port opens once everything is compiled; SIGTERM finishes running requests and exits. See docs/serving.md.
    """

    # A run's directory, the directory of a step in it, its `best`, or another checkpoint.
    checkpoint: Annotated[str, Positional, arg(metavar="CHECKPOINT")]

    # The run's experiment, needed if it has classes of your own.
    experiment: str | None = None
    # Number or asset id of the dataset whose robot is served, if the run had several.
    dataset: str | None = None
    # The instruction for requests without one.
    prompt: str | None = None
    # Denoising steps; None: as in the run's evaluation.
    num_sample_steps: int | None = None
    # dtype of the parameters; None: as stored.
    dtype: Literal["float32", "bfloat16"] | None = None
    # Use the parameters' average (EMA) instead of the parameters themselves.
    average: bool = True
    # Merge low-rank factors into the weights.
    merge_lora: bool = True
    # Seed of all noise; None: the run's.
    seed: int | None = None
    # Another path of the run's tokenizer.
    tokenizer: str | None = None
    # Truncate prompts that are too long, as in training.
    cut_prompts: bool = False
    # Reset pose sent to clients, for ALOHA's runtime.
    reset_pose: Annotated[tuple[float, ...], one_word(_numbers, "A,B,...")] | None = None

    # Address to listen on; 0.0.0.0 accepts other machines.
    host: str = "127.0.0.1"
    # Port; 0 for any free one.
    port: int = 8000
    # File with the key that clients must send; None: the variable OPENPI_TRAIN_API_KEY, if set.
    api_key_file: str | None = None
    # Serve wss://, with this certificate (PEM).
    tls_cert: str | None = None
    # Its private key (PEM).
    tls_key: str | None = None
    # Maximum number of requests in a batch.
    max_batch: int = at_least(1, 16)
    # Maximum time that a batch waits for more requests.
    batch_wait_ms: float = 5.0
    # Maximum number of waiting requests.
    max_queue: int = at_least(1, 64)
    # Maximum number of open connections.
    max_clients: int = at_least(1, 64)
    # Maximum size of a request.
    max_message_mib: int = at_least(1, 32)
    # Close a connection after this time without a request.
    idle_s: float = 3600.0
    # Maximum time that shutdown waits for answers.
    drain_s: float = 30.0
    # File to record every request and answer in.
    record: str | None = None
    # Do not serve: replay the requests recorded in this file and compare the answers.
    replay: str | None = None

    def check(self) -> list[str]:
        """A sentence for every conflict, with the flag to change."""
        problems = []
        if (self.tls_cert is None) != (self.tls_key is None):
            problems.append("--tls-cert and --tls-key must both be given: the certificate and its private key, in PEM")
        if self.record and self.replay:
            problems.append("--record and --replay exclude each other")
        if not 0 <= self.port < 1 << 16:
            problems.append(f"--port {self.port} is not a port: give 0 (any free one) to 65535")
        for name in ("batch_wait_ms", "idle_s", "drain_s"):
            if not 0 <= getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                problems.append(f"--{flag} {getattr(self, name)} is not a valid time; give 0 or more")
        return problems
