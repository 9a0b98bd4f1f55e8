"""The policy server with openpi's own client: latency and throughput by clients; the cost of bad messages.

The model is a small pi0 (untrained, about 0.6 M parameters, bfloat16, 3 pictures of 224 px, 10 denoising steps).
Read next: `serving_client.py`, `hostile.py`.
"""

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import hostile, openpi_peer
from benchmarks.report import Cell, Spread, Table
from benchmarks.server_process import ServerProcess, asked_for_health, running
from benchmarks.untrained import save_untrained
from openpi_train import registry
from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import Dataset
from openpi_train.experiment import Experiment
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.robots.bridge import Bridge
from openpi_train.types import OPENPI_SLOTS

_TITLE = "Serving: latency and throughput"
_ROUNDS = 3
_MOST_GROWTH_MB = 32.0
_LONGEST_HEALTH_MS = 1000.0
# Relative to the message; in addition there are 256 KiB per read and memory that the allocator keeps.
_MOST_HELD = 2.0
_HELD_BESIDE_MB = 4.0
COLUMNS = (
    "clients",
    "requests/s",
    "latency p50 ms",
    "latency p95 ms",
    "device ms",
    "rows per batch",
    "requests/s vs first row",
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks serving", description=__doc__)
    parser.add_argument("--checkpoint", metavar="RUN", help="a trained run instead of the untrained one")
    parser.add_argument("--clients", type=int, nargs="+", default=(1, 4, 16), help="clients at once")
    parser.add_argument("--requests", type=int, default=160, help="requests of all clients together")
    parser.add_argument("--bad-messages", type=int, default=1000, help="malformed, oversized and incomplete messages")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few requests, to check that it runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its tables."""
    flags = parse(argv)
    clients = (1, 2) if flags.quick else tuple(flags.clients)
    requests, bad, rounds = (8, 40, 1) if flags.quick else (flags.requests, flags.bad_messages, _ROUNDS)
    longest_ms = math.inf if flags.quick else _LONGEST_HEALTH_MS  # the suite asserts no speed
    try:
        openpi_peer.environment()
    except openpi_peer.Unavailable as error:
        return [Table(_TITLE, COLUMNS, [], [f"not measured: {error}"])]
    with tempfile.TemporaryDirectory() as folder:
        run = flags.checkpoint or save_untrained(_experiment(flags.quick), Path(folder)).directory
        with running(run, "--max-batch", str(max(clients))) as server:
            speed = _speed(server, clients, requests, rounds)
            return [speed, _survival(server, bad, longest_ms), _largest(server, rounds, longest_ms)]


def _experiment(quick: bool) -> Experiment:
    """A small pi0 on synthetic pictures; `debug` with --quick."""
    debug = registry.load("debug")
    if quick:
        return debug
    cameras = {slot: f"observation/image_{number}" for number, slot in enumerate(OPENPI_SLOTS)}
    source = FakeData(num_episodes=4, cameras=tuple(cameras.values()))
    tower = SiglipConfig(width=64, depth=2, mlp_dim=128, num_heads=2, patch_size=32)
    sizes = {"siglip": tower, "image_size": 224, "action_horizon": 50, "vocab_size": 1024, "dtype": "bfloat16"}
    return dataclasses.replace(
        debug,
        model=dataclasses.replace(debug.model, **sizes),
        data=dataclasses.replace(
            debug.data, datasets=(Dataset(source=source, robot=Bridge(cameras=cameras), asset_id="fake"),)
        ),
        eval=dataclasses.replace(debug.eval, num_sample_steps=10),
    )


def talk(port: int, clients: int, requests: int, key: str = "") -> dict:
    """What `serving_client.py` prints; it runs with openpi's client alone. Raises `openpi_peer.Unavailable`."""
    program = Path(__file__).with_name("serving_client.py")
    command = [openpi_peer.python(), str(program), str(port), key, str(clients), str(requests)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=openpi_peer.environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _speed(server: ServerProcess, clients: Sequence[int], requests: int, rounds: int) -> Table:
    found: dict[int, list[dict]] = {count: [] for count in clients}
    health: list[float] = []
    for _ in range(rounds):
        for count in clients:
            found[count].append(talk(server.port, count, max(requests // count, 2)))
            health.append(server.health_ms())
    rates = {
        count: Spread(tuple(len(one["answers"]) / one["seconds"] for one in all_)) for count, all_ in found.items()
    }
    rows: list[Sequence[Cell]] = []
    for count, all_ in found.items():
        times = [sorted(answer["ms"] for answer in one["answers"]) for one in all_]
        rows.append(
            [
                count,
                rates[count],
                Spread(tuple(statistics.median(some) for some in times)),
                Spread(tuple(some[int(0.95 * (len(some) - 1))] for some in times)),
                Spread(tuple(statistics.median(answer["device_ms"] for answer in one["answers"]) for one in all_)),
                Spread(tuple(statistics.fmean(answer["rows"] for answer in one["answers"]) for one in all_)),
                rates[count].over(rates[clients[0]]),
            ]
        )
    notes = ["Latency as openpi-client 0.1.2 measures it, over the loopback interface, clients asking again at once."]
    return Table(_TITLE, COLUMNS, rows, notes)


def _survival(server: ServerProcess, count: int, longest_ms: float) -> Table:
    hostile.attack(server.port, max(count // 10, 20))  # buffers and caches have their size after this
    before, files = server.memory_mb(), server.open_files()
    started = time.perf_counter()
    with asked_for_health(server) as health:
        sent = hostile.attack(server.port, count)
    seconds = time.perf_counter() - started
    time.sleep(1.0)
    after = server.memory_mb()
    answered = len(talk(server.port, 1, 2)["answers"])
    columns = (
        "bad messages",
        "kinds",
        "seconds",
        "answered after",
        "longest healthz ms",
        "open files more",
        "memory MB",
        "growth MB",
    )
    more = server.open_files() - files
    row: list[Cell] = [count, len(sent), seconds, answered, max(health), more, before, after - before]
    failure = ""
    if after - before > _MOST_GROWTH_MB or more > 20 or answered != 2 or max(health) > longest_ms:
        failure = (
            f"after {count} bad messages: {after - before:.0f} MB and {more} open files more, {answered} answers, "
            f"/healthz in up to {max(health):.0f} ms"
        )
    return Table("Serving: bad messages", columns, [row], failure=failure)


def _largest(server: ServerProcess, rounds: int, longest_ms: float) -> Table:
    """One client sends the largest messages that the server accepts, each kind in turn."""
    rows: list[Sequence[Cell]] = []
    wrong: list[str] = []
    for name, make in hostile.LARGE.items():
        found: list[tuple[hostile.Answer, float, float]] = []
        for _ in range(rounds):
            before = server.memory_mb()
            with asked_for_health(server) as health:
                answer = hostile.send_large(server.port, make, server.forget_peak, times=3)
            found.append((answer, server.peak_mb() - before, max(health)))
        size, most, longest = found[0][0].size_mb, max(held for _, held, _ in found), max(ms for _, _, ms in found)
        times, held = (Spread(tuple(some)) for some in zip(*((1e3 * a.seconds, b) for a, b, _ in found), strict=True))
        slowest = Spread(tuple(ms for _, _, ms in found))
        rows.append([name, size, "yes" if found[0][0].refused else "no", times, slowest, held, most / size])
        if most > _MOST_HELD * size + _HELD_BESIDE_MB or longest > longest_ms:
            wrong.append(f"{name}: {most:.0f} MB for {size:.0f} MB, /healthz in up to {longest:.0f} ms")
    columns = ("message", "MB", "refused", "answer ms", "longest healthz ms", "memory held MB", "held / message")
    notes = [
        "One client sends each three times; *memory held* is the most that the process had meanwhile beyond what it "
        "had before, the message included. /healthz is asked again and again: it needs Python's lock and the event "
        "loop, so that its longest answer is more than the longest time for which a client holds either."
    ]
    return Table("Serving: the largest messages", columns, rows, notes, failure="; ".join(wrong))
