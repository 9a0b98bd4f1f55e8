"""The flags of the `serve` verb. Nothing heavy is imported before they are understood. Read next: `main.py`."""

import argparse
import math
from collections.abc import Sequence

API_KEY_VARIABLE = "OPENPI_TRAIN_API_KEY"


def main(argv: Sequence[str]) -> int:
    """`serve <run or checkpoint>`, or `serve <run> --replay FILE`. Returns the exit code."""
    parser = _parser()
    flags = parser.parse_args(list(argv))
    if (flags.tls_cert is None) != (flags.tls_key is None):
        parser.error("--tls-cert and --tls-key go together: the certificate and its private key, in PEM")
    if flags.record and flags.replay:
        parser.error("--record and --replay exclude each other")
    if not 0 <= flags.port < 1 << 16:
        parser.error(f"--port {flags.port} is none: ports are 0 (any free one) to 65535")
    for name in ("max_batch", "max_queue", "max_clients", "max_message_mib"):
        if getattr(flags, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(flags, name)} must be at least 1")
    for name in ("batch_wait_ms", "idle_s", "drain_s"):
        if not 0 <= getattr(flags, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} {getattr(flags, name)} is no time; give 0 or more")
    from openpi_train.serve.main import replay, run

    return replay(flags) if flags.replay else run(flags)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m openpi_train serve",
        description="Serve a trained policy over openpi's websocket protocol: openpi-client talks to it as it is. The "
        "port opens once everything is compiled; SIGTERM finishes what runs and ends. See docs/serving.md.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="a run's directory, a step's in it, its `best`, or another checkpoint")
    policy = parser.add_argument_group("the policy")
    policy.add_argument("--experiment", metavar="NAME", help="the run's experiment, where it has classes of your own")
    policy.add_argument("--dataset", metavar="N|ASSET", help="whose robot, where the run had several datasets")
    policy.add_argument("--prompt", help="the instruction where a request has none")
    policy.add_argument("--num-sample-steps", type=int, metavar="N", help="denoising steps (as the run's evaluation)")
    policy.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the parameters (as they are stored)")
    policy.add_argument("--no-average", action="store_true", help="the parameters themselves, not their average (EMA)")
    policy.add_argument("--no-merge-lora", action="store_true", help="leave low-rank factors apart from the weights")
    policy.add_argument("--seed", type=int, help="of all noise (the run's)")
    policy.add_argument("--tokenizer", metavar="PATH", help="another place of the run's tokenizer")
    policy.add_argument("--cut-prompts", action="store_true", help="cut prompts that are too long, as training does")
    policy.add_argument("--reset-pose", type=_numbers, metavar="A,B,...", help="told to clients, for ALOHA's runtime")
    server = parser.add_argument_group("the server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for other machines, too")
    server.add_argument("--port", type=int, default=8000, help="port, 0 for any free one (8000)")
    server.add_argument(
        "--api-key-file", metavar="FILE", help=f"the key that clients must have (or {API_KEY_VARIABLE})"
    )
    server.add_argument("--tls-cert", metavar="FILE", help="serve wss://, with this certificate (PEM)")
    server.add_argument("--tls-key", metavar="FILE", help="its private key (PEM)")
    server.add_argument("--max-batch", type=int, default=16, metavar="N", help="most requests in a batch (16)")
    server.add_argument("--batch-wait-ms", type=float, default=5.0, help="most that a batch waits for others (5)")
    server.add_argument("--max-queue", type=int, default=64, metavar="N", help="requests that may wait (64)")
    server.add_argument("--max-clients", type=int, default=64, metavar="N", help="open connections (64)")
    server.add_argument("--max-message-mib", type=int, default=32, metavar="MIB", help="largest request (32)")
    server.add_argument("--idle-s", type=float, default=3600.0, help="close a connection without requests after (3600)")
    server.add_argument("--drain-s", type=float, default=30.0, help="most that the end waits for answers (30)")
    server.add_argument("--record", metavar="FILE", help="note every request and answer")
    server.add_argument("--replay", metavar="FILE", help="do not serve: ask again what FILE holds, and compare")
    return parser


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between them") from None
