"""The policy server under openpi's own client: latency and throughput by clients; bad messages, and what they leave.

The model is a pi0 like the one that openpi was measured with on 2 cores (untrained, about 0.6 M parameters, bfloat16, 3
pictures of 224 px, 246 tokens, 10 denoising steps). Read next: `serving_client.py`, `hostile.py`.
"""

import argparse
import contextlib
import dataclasses
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import hostile, openpi_peer
from benchmarks.report import ROOT, Cell, Spread, Table
from benchmarks.untrained import save_untrained
from openpi_train import registry
from openpi_train.data.config import Dataset
from openpi_train.data.fake import FakeData
from openpi_train.experiment import Experiment
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.robots.bridge import Bridge

_TITLE = "Serving: latency and throughput"
_ROUNDS = 3
_MOST_GROWTH_MB = 32.0
_SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
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
    """The command line, understood."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks serving", description=__doc__)
    parser.add_argument("--checkpoint", metavar="RUN", help="a trained run in place of the made one")
    parser.add_argument("--clients", type=int, nargs="+", default=(1, 4, 16), help="clients at once")
    parser.add_argument("--requests", type=int, default=160, help="requests of all clients together")
    parser.add_argument("--bad-messages", type=int, default=1000, help="malformed, oversized and half-sent messages")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few requests, to see that it runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Measure as the flags say."""
    flags = parse(argv)
    clients = (1, 2) if flags.quick else tuple(flags.clients)
    requests, bad = (8, 40) if flags.quick else (flags.requests, flags.bad_messages)
    try:
        openpi_peer.environment()
    except openpi_peer.Unavailable as error:
        return [Table(_TITLE, COLUMNS, [], [f"not measured: {error}"])]
    with tempfile.TemporaryDirectory() as folder:
        run = flags.checkpoint or save_untrained(_experiment(flags.quick), Path(folder)).directory
        with _server(run, max(clients)) as server:
            speed = _speed(server, clients, requests, 1 if flags.quick else _ROUNDS)
            return [speed, _survival(server, bad)]


def _experiment(quick: bool) -> Experiment:
    """A pi0 of openpi's measured sizes, on made-up pictures; `debug` where it is only to run."""
    debug = registry.load("debug")
    if quick:
        return debug
    cameras = {slot: f"observation/image_{number}" for number, slot in enumerate(_SLOTS)}
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


@dataclasses.dataclass(frozen=True)
class _Server:
    port: int
    process: subprocess.Popen[str]

    def memory_mb(self) -> float:
        """Its resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * 4096 / 1e6

    def open_files(self) -> int:
        """Its open files, sockets included."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def health_ms(self) -> float:
        """How long /healthz takes."""
        started = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=60) as response:
            assert response.read() == b"OK\n"
        return 1e3 * (time.perf_counter() - started)


@contextlib.contextmanager
def _server(run: str | Path, max_batch: int) -> Iterator[_Server]:
    """A server process that is ready."""
    command = [sys.executable, "-m", "openpi_train", "serve", str(run), "--port", "0", "--max-batch", str(max_batch)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stderr=errors, text=True)
        try:
            text = ""
            while "ready after" not in text:
                assert process.poll() is None, text
                time.sleep(0.2)
                errors.seek(0)
                text = errors.read()
            yield _Server(int(text.split("://127.0.0.1:")[1].split(",")[0]), process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, "the server did not end in an orderly way"
        finally:
            process.kill()
            process.wait()


def talk(port: int, clients: int, requests: int, key: str = "") -> dict:
    """What `serving_client.py` prints; it runs with openpi's client alone. Raises `openpi_peer.Unavailable`."""
    program = Path(__file__).with_name("serving_client.py")
    command = [openpi_peer.python(), str(program), str(port), key, str(clients), str(requests)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=openpi_peer.environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _speed(server: _Server, clients: Sequence[int], requests: int, rounds: int) -> Table:
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
    notes = [
        "Latency as openpi-client 0.1.2 measures it, over the loopback interface, clients asking again at once. "
        "openpi's server (15a9616, jax 0.5.3, a model of these sizes, 2 cores beside other work) took 98 ms for one "
        "and told 9.7 ms as policy_timing.infer_ms; it took one request at a time, and 15 s for the first one.",
    ]
    return Table(_TITLE, COLUMNS, rows, notes)


def _survival(server: _Server, count: int) -> Table:
    hostile.attack(server.port, max(count // 10, 20))  # buffers and caches have their size after this
    before, files = server.memory_mb(), server.open_files()
    started = time.perf_counter()
    sent = hostile.attack(server.port, count)
    seconds = time.perf_counter() - started
    time.sleep(1.0)
    after, health = server.memory_mb(), server.health_ms()
    answered = len(talk(server.port, 1, 2)["answers"])
    columns = (
        "bad messages",
        "kinds",
        "seconds",
        "answered after",
        "healthz ms",
        "open files more",
        "memory MB",
        "growth MB",
    )
    more = server.open_files() - files
    row: list[Cell] = [count, len(sent), seconds, answered, health, more, before, after - before]
    failure = ""
    if after - before > _MOST_GROWTH_MB or more > 20 or answered != 2:
        failure = f"after {count} bad messages: {after - before:.0f} MB and {more} open files more, {answered} answers"
    return Table("Serving: bad messages", columns, [row], failure=failure)
