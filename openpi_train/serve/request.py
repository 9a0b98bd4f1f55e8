"""Flags of the `serve` command. Read next: `main.py`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from openpi_train.command_line import Request, one_word
from openpi_train.fields import at_least

API_KEY_VARIABLE = "OPENPI_TRAIN_API_KEY"
# Flags that only a robot policy has.
_OF_ROBOTS = (
    *("dataset", "prompt", "num_sample_steps", "guidance", "seed", "cut_prompts"),
    *("real_time_chunking", "reset_pose", "vla_eval_names", "vla_eval_execute", "batch_wait_ms", "record", "replay"),
)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers separated by commas") from None


def _pairs(text: str) -> tuple[str, ...]:
    pairs = tuple(text.split(","))
    for pair in pairs:
        name, _, entry = pair.partition("=")
        if not name or not entry:
            raise ValueError(f"{pair!r} is not NAME=ENTRY: a key of the policy, and the benchmark's name of it")
    return pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeRequest(Request):
    """Serve a checkpoint: a robot policy over openpi's websocket protocol, a language model over OpenAI's HTTP API.

    The port opens at once, and says "starting" until everything is compiled. SIGTERM finishes running requests and
    exits. See docs/howto/serve.md.
    """

    # A run's directory, the directory of a step in it, its `best`, or another checkpoint, such as hub:USER/NAME.
    checkpoint: Annotated[str, Positional, arg(metavar="CHECKPOINT")]

    # The run's experiment, needed if it has classes of your own and their file was moved.
    experiment: str | None = None
    # Number or asset id of the dataset whose robot is served, if the run had several.
    dataset: str | None = None
    # The instruction for requests without one.
    prompt: str | None = None
    # Denoising steps; None: as in the run's evaluation.
    num_sample_steps: int | None = None
    # Guidance towards what is better than expected, of a policy that was told so (IndicatorFlow); None: as in the run's
    # evaluation.
    guidance: float | None = None
    # dtype of the parameters; None: as stored. Language models also compute in it; None: a run's `model.dtype`, or that
    # of the folder's tensors.
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
    # Compile at the start for requests with a prefix, too (real-time chunking), as is always done for a policy that was
    # trained with prefixes. Otherwise the first such request waits for that.
    real_time_chunking: bool = False
    # Reset pose sent to clients, for ALOHA's runtime.
    reset_pose: Annotated[tuple[float, ...], one_word(_numbers, "A,B,...")] | None = None
    # What benchmarks of vla-evaluation-harness call the keys of the policy, where that differs.
    vla_eval_names: Annotated[tuple[str, ...], one_word(_pairs, "NAME=ENTRY,...")] = ()
    # Actions of a chunk that these benchmarks execute before the next one is computed; None: the policy's own number.
    vla_eval_execute: int | None = at_least(1, None)

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
    # Maximum number of requests in a batch; of a language model, completions that are made together.
    max_batch: int = at_least(1, 16)
    # Maximum time that a batch waits for more requests.
    batch_wait_ms: float = 5.0
    # Maximum number of waiting requests; of a language model, waiting completions.
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

    def only_of_robots(self) -> list[str]:
        """The given flags that a language model does not have."""
        return _given(self, _OF_ROBOTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFlags(Request):
    """Further flags of `serve` for language models."""

    # The model's name for clients; None: the run's, or that of the folder.
    model_name: str | None = None
    # Maximum tokens of a prompt and its completion; None: the model's context, at most 2048.
    max_length: int | None = at_least(2, None)
    # A jinja file; None: the model's own chat template.
    chat_template: str | None = None
    # Maximum time that a request takes.
    request_s: float = 600.0

    def check(self) -> list[str]:
        """A sentence for every conflict, with the flag to change."""
        problems = []
        if not 0 < self.request_s < math.inf:
            problems.append(f"--request-s {self.request_s} is not a valid time; give more than 0")
        if self.model_name == "":
            problems.append("--model-name is empty; leave it out, or give the name that clients use")
        return problems

    def given(self) -> list[str]:
        """The given flags, which a robot policy does not have."""
        return _given(self, [field.name for field in dataclasses.fields(self)])


def _given(request: Request, names: Sequence[str]) -> list[str]:
    defaults = {field.name: field.default for field in dataclasses.fields(request)}
    return [f"--{name.replace('_', '-')}" for name in names if getattr(request, name) != defaults[name]]
