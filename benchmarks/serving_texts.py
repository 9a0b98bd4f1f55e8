"""The text server with OpenAI's client: tokens per second and latency by clients; 1,000 hostile requests.

The model is a small llama (untrained, about 5 M parameters) with a token per byte. Read next: `hostile_http.py`.
"""

import argparse
import concurrent.futures
import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openai
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks import hostile_http
from benchmarks.report import Cell, Spread, Table
from benchmarks.server_process import ServerProcess, asked_for_health, running
from openpi_train.data.core.files import write_bytes, write_json
from openpi_train.interop.openpi import parameter_names
from openpi_train.interop.stored_leaves import Stored, in_memory
from openpi_train.models.language import LanguageConfig, huggingface
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.parallel.params import module_params

_ROUNDS = 3
_MAX_LENGTH, _NUM_ROWS = 256, 16
_MOST_GROWTH_MB = 64.0
_LONGEST_HEALTH_MS = 1000.0
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
COLUMNS = (
    "clients",
    "requests/s",
    "first text p50 ms",
    "answer p50 ms",
    "answer p95 ms",
    "tokens/s",
    "tokens/s vs first row",
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks serving_texts", description=__doc__)
    parser.add_argument("--checkpoint", metavar="RUN", help="a language model instead of the untrained one")
    parser.add_argument("--clients", type=int, nargs="+", default=(1, 4, 16), help="clients at once")
    parser.add_argument("--requests", type=int, default=64, help="requests of all clients together")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--hostile", type=int, default=1000, help="hostile requests")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few requests, to check that it runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its tables."""
    flags = parse(argv)
    clients = (1, 2) if flags.quick else tuple(flags.clients)
    requests, hostile, rounds, tokens = (
        (4, 60, 1, 8) if flags.quick else (flags.requests, flags.hostile, _ROUNDS, flags.tokens)
    )
    longest_ms = math.inf if flags.quick else _LONGEST_HEALTH_MS  # the suite asserts no speed
    with tempfile.TemporaryDirectory() as folder:
        model = flags.checkpoint or write_untrained(Path(folder) / "untrained", quick=flags.quick)
        length, rows = (32, 2) if flags.quick else (_MAX_LENGTH, _NUM_ROWS)
        words = ("--max-length", str(length), "--max-batch", str(rows), "--model-name", "model")
        with running(model, *words) as server:
            speed = _speed(server, clients, requests, tokens, rounds)
            return [speed, _survival(server, hostile, longest_ms)]


def write_untrained(folder: Path, *, quick: bool = False) -> Path:
    """Write an untrained model in Hugging Face's form, with a tokenizer of bytes and a chat template."""
    width, depth = (16, 2) if quick else (256, 6)
    sizes = DecoderSizes(
        vocab_size=258, width=width, depth=depth, mlp_dim=4 * width, num_heads=4, num_kv_heads=2, head_dim=width // 4
    )
    config = LanguageConfig(sizes=sizes, context_length=_MAX_LENGTH, dtype="float32")
    names, params = parameter_names(config), module_params(config.build(nnx.Rngs(0)))
    leaves = {names[path]: in_memory(np.asarray(leaf)) for path, leaf in params.items()}
    huggingface.write(folder, Stored(where="memory", format="ours", params=leaves), config)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    write_bytes(folder / "tokenizer.json", tokenizer.to_str().encode())
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": _CHATML})
    return folder


def _speed(server: ServerProcess, clients: Sequence[int], requests: int, tokens: int, rounds: int) -> Table:
    """Clients that ask for the next stream at once; each answer has the same number of tokens, or ends before."""
    found: dict[int, list[tuple[float, list[_Timed]]]] = {count: [] for count in clients}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0) as client:
        _timed(client, 0, tokens)
        for _ in range(rounds):
            for count in clients:
                started = time.perf_counter()
                with concurrent.futures.ThreadPoolExecutor(count) as pool:
                    timed = list(pool.map(lambda seed: _timed(client, seed, tokens), range(requests)))
                found[count].append((time.perf_counter() - started, timed))
    rates = {
        count: Spread(tuple(sum(one.tokens for one in timed) / seconds for seconds, timed in runs))
        for count, runs in found.items()
    }
    rows: list[Sequence[Cell]] = []
    for count, runs in found.items():
        answers = [sorted(one.answer_ms for one in timed) for _, timed in runs]
        rows.append(
            [
                count,
                Spread(tuple(len(timed) / seconds for seconds, timed in runs)),
                Spread(tuple(statistics.median(one.first_ms for one in timed) for _, timed in runs)),
                Spread(tuple(statistics.median(some) for some in answers)),
                Spread(tuple(some[int(0.95 * (len(some) - 1))] for some in answers)),
                rates[count],
                rates[count].over(rates[clients[0]]),
            ]
        )
    notes = [
        f"Streams of {tokens} tokens with OpenAI's client, which runs on the same cores, over the loopback interface."
    ]
    return Table("Serving texts: latency and throughput", COLUMNS, rows, notes)


@dataclasses.dataclass(frozen=True)
class _Timed:
    """A streamed answer: the times of its first text and of its end, and its number of tokens."""

    first_ms: float
    answer_ms: float
    tokens: int


def _timed(client: openai.OpenAI, seed: int, tokens: int) -> _Timed:
    started, first, count = time.perf_counter(), None, 0
    stream = client.completions.create(
        model="model", prompt="go on", max_tokens=tokens, seed=seed, stream=True, stream_options={"include_usage": True}
    )
    for part in stream:
        first = first or time.perf_counter()
        count = part.usage.completion_tokens if part.usage else count
    ended = time.perf_counter()
    return _Timed(1e3 * ((first or ended) - started), 1e3 * (ended - started), count)


def _survival(server: ServerProcess, count: int, longest_ms: float) -> Table:
    """The server's health during hostile requests, and its memory and an answer after them."""
    num_kinds = len(hostile_http.kinds("model"))
    # Buffers, threads and caches have their size after this.
    hostile_http.attack(server.port, "model", min(count, num_kinds))
    before, files = server.memory_mb(), server.open_files()
    started = time.perf_counter()
    with asked_for_health(server) as health:
        sent = hostile_http.attack(server.port, "model", count)
    seconds = time.perf_counter() - started
    time.sleep(1.0)
    growth, more = server.memory_mb() - before, server.open_files() - files
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0) as client:
        one, two = (_text(client) for _ in range(2))
    columns = (
        "hostile requests",
        "kinds",
        "seconds",
        "refused",
        "same answer after",
        "longest healthz ms",
        "open files more",
        "memory MB",
        "growth MB",
    )
    refused = sum(number for status, number in sent.items() if status.startswith("4"))
    row: list[Cell] = [
        count,
        min(count, num_kinds),
        seconds,
        refused,
        "yes" if one == two else "no",
        max(health),
        more,
        before,
        growth,
    ]
    failure = ""
    if growth > _MOST_GROWTH_MB or more > 20 or one != two or max(health) > longest_ms:
        failure = (
            f"after {count} hostile requests: {growth:.0f} MB and {more} open files more, /healthz in up to "
            f"{max(health):.0f} ms, the same answer: {one == two}"
        )
    return Table("Serving texts: hostile requests", columns, [row], failure=failure)


def _text(client: openai.OpenAI) -> str:
    return client.completions.create(model="model", prompt="go on", max_tokens=8, seed=1).choices[0].text
