"""The feed on LeRobot data, alternating with lerobot's own loader on the same rows; the cost of decoding one picture.

Read next: `lerobot_data.py` (the dataset), `lerobot_peer.py` (lerobot's side, in a separate environment).
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks import lerobot_data
from benchmarks.feed import Sample, measure, num_batches, num_warm
from benchmarks.report import Cell, Spread, Table
from openpi_train import registry
from openpi_train.data.core import image
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.rows import Rows
from openpi_train.data.robot.transforms import ResizeImages
from openpi_train.robots.bridge import Bridge
from openpi_train.types import OPENPI_SLOTS

EXPERIMENT = "pi0_bridge_traj"
NUM_PAIRS, NUM_DECODED = 3, 60
COLUMNS = (
    "workers",
    "pictures",
    "samples/s",
    "CPU ms/sample",
    "samples/s per core",
    "lerobot samples/s",
    "lerobot CPU ms/sample",
    "samples/s per core vs lerobot",
)
_DECODE_COLUMNS = ("picture", "decoder", "CPU ms/picture", "pictures/s per core", "CPU time / ours")


class Peer:
    """The process with lerobot, which answers requests with its measurements."""

    def __init__(self, process: subprocess.Popen, answers):
        self._process, self._answers = process, answers
        self.versions = self._answer()

    def ask(self, what: str, **options) -> dict:
        """Request a measurement, and wait for the result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({what: options}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        line = self._answers.readline()
        if not line:
            code = self._process.wait(60)
            raise RuntimeError(f"lerobot's side ended with code {code}; its own words stand above")
        return json.loads(line)


@contextlib.contextmanager
def start_peer(python: Path | None) -> Iterator[Peer | None]:
    """Start the process with lerobot in the environment of that Python; yields None if none is given."""
    if python is None:
        yield None
        return
    read, write = os.pipe()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    program = [str(python), str(Path(__file__).with_name("lerobot_peer.py")), str(write)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, text=True, env=environ, pass_fds=[write]) as process:
        os.close(write)
        with os.fdopen(read) as answers:
            try:
                yield Peer(process, answers)
            finally:
                process.kill()


def tables(flags: argparse.Namespace, scratch: Path) -> list[Table]:
    """Run the benchmark with the feed's flags."""
    height, width = (48, 64) if flags.quick else (480, 640)
    written = lerobot_data.write(
        scratch / "arms", num_episodes=3, episode_length=20 if flags.quick else 100, height=height, width=width
    )
    scaled, stored = _rows(flags, scratch, written.root, height, width)
    with start_peer(flags.peer_python) as peer:
        rounds = 1 if flags.quick else NUM_PAIRS
        feed = [
            row for workers in flags.workers for row in _pairs(flags, workers, rounds, scaled, stored, written, peer)
        ]
        decoding = _decoding(flags, stored, written, height, width, peer)
        versions = "not measured: give --peer-python, an environment with lerobot"
        if peer is not None:
            versions = ", ".join(f"{name} {version}" for name, version in peer.versions.items())
    title = f"LeRobot: 3 cameras of {width} x {height}, AV1, {written.frame_bytes / 1e3:.1f} kB a frame"
    notes = [
        f"The same rows in the same order, batch {flags.batch_size}, {stored.windows[0].shape.horizon} actions each. "
        "lerobot's pictures are float32, and scaled by torchvision's antialiased Resize where ours are. "
        f"lerobot: {versions}."
    ]
    return [Table(title, COLUMNS, feed, notes), decoding]


def _rows(flags: argparse.Namespace, scratch: Path, root: Path, height: int, width: int) -> tuple[Rows, Rows]:
    """The rows of a run, and the same rows with pictures at their stored size."""
    experiment = registry.load(EXPERIMENT)
    cameras = dict(zip(OPENPI_SLOTS, (name.replace(".", "/") for name in lerobot_data.CAMERAS), strict=True))
    source = LeRobot(path=str(root), cache_dir=str(scratch / "index"))
    dataset = Dataset(source=source, robot=Bridge(cameras=cameras), asset_id="benchmark")
    data = DataConfig(datasets=(dataset,), tokenizer="bytes", validation_fraction=0.0)
    model = dataclasses.replace(experiment.model, image_size=flags.image_size)
    scaled = (
        dataclasses.replace(experiment, data=data, model=model, assets_base_dir=str(scratch / "assets"))
        .open_data()
        .train
    )
    spec = {
        name: ((height, width, 3), dtype) if name.startswith("image/") else (shape, dtype)
        for name, (shape, dtype) in scaled.spec.items()
    }
    (transforms,) = scaled.transforms
    kept = [transform for transform in transforms if not isinstance(transform, ResizeImages)]
    stored = Rows(scaled.windows, scaled.names, [1.0], [kept], spec=spec, seed=scaled.mixture.seed)
    return scaled, stored


def _pairs(flags, workers, rounds, scaled, stored, written, peer) -> list[list[Cell]]:
    """Measure ours and lerobot's alternately on the same rows, pictures scaled and as stored; one table row for
    each."""
    warm, batches = num_warm(flags, workers), num_batches(flags)
    positions = np.arange((1 + warm + batches + 2 * max(workers, 1)) * flags.batch_size)
    height, width = stored.spec[f"image/{OPENPI_SLOTS[0]}"][0][:2]
    inside = [side * flags.image_size // max(height, width) for side in (height, width)]
    request = {
        "root": str(written.root),
        "horizon": stored.windows[0].shape.horizon,
        "fps": lerobot_data.FPS,
        "batch_size": flags.batch_size,
        "workers": workers,
        "num_warm": 1 + warm,
        "indices": stored.windows[0].starts[stored.mixture.locate(positions)[2]].tolist(),
    }
    kinds = {f"scaled to {flags.image_size} px": (scaled, inside), "as stored": (stored, None)}
    ours: dict[str, list[Sample]] = {name: [] for name in kinds}
    theirs: dict[str, list[dict]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, (rows, size) in kinds.items():
            ours[name].append(measure(rows, flags, workers))
            if peer is not None:
                theirs[name].append(peer.ask("loader", **request, size=size))
    return [_table_row(workers, name, ours[name], theirs[name]) for name in kinds]


def _table_row(workers: int, name: str, samples: list[Sample], theirs: list[dict]) -> list[Cell]:
    rate, cpu_ms = (Spread(tuple(getattr(s, n) for s in samples)) for n in ("samples_per_s", "cpu_ms_per_sample"))
    row: list[Cell] = [workers, name, rate, cpu_ms, cpu_ms.map(lambda ms: 1e3 / ms)]
    if not theirs:
        return [*row, None, None, None]
    their_rate, their_ms = (Spread(tuple(s[n] for s in theirs)) for n in ("samples_per_s", "cpu_ms_per_sample"))
    return [*row, their_rate, their_ms, their_ms.over(cpu_ms)]


def _decoding(flags, rows: Rows, written, height: int, width: int, peer: Peer | None) -> Table:
    """One picture at a time, in random order, in one thread."""
    source, camera = rows.windows[0].source, lerobot_data.CAMERAS[0]
    rounds, count = (1, 5) if flags.quick else (NUM_PAIRS, NUM_DECODED)
    steps = np.random.default_rng(0).integers(0, source.num_steps, count)
    frame = source.frames(steps[:1], camera.replace(".", "/"))[0]
    pictures = {f"JPEG {width} x {height}": image.encode(frame)}
    if not flags.quick:
        pictures["JPEG 256 x 256"] = image.encode(np.ascontiguousarray(frame[:256, :256]))
    video = str(written.root / "videos" / camera / "chunk-000" / "file-000.mp4")
    times = (steps / lerobot_data.FPS).tolist()
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, data in pictures.items():
            for decoder, decode in {"ours": image.decode, "Pillow": _pillow}.items():
                samples.setdefault((name, decoder), []).append(
                    _cpu_ms(lambda _, decode=decode, data=data: decode(data), steps)
                )
        ours = _cpu_ms(lambda step: source.frames(np.array([step]), camera.replace(".", "/")), steps)
        samples.setdefault((f"AV1 {width} x {height}", "ours"), []).append(ours)
        for backend in ("torchcodec", "pyav") if peer is not None else ():
            answer = peer.ask("decode", video=video, times=times, backend=backend)
            samples.setdefault((f"AV1 {width} x {height}", f"lerobot, {backend}"), []).append(answer["cpu_ms"])
    table: list[list[Cell]] = []
    for (picture, decoder), values in samples.items():
        spread = Spread(tuple(values))
        ratio = None if decoder == "ours" else spread.over(Spread(tuple(samples[picture, "ours"])))
        table.append([picture, decoder, spread, spread.map(lambda ms: 1e3 / ms), ratio])
    return Table("Decoding one picture alone, one thread", _DECODE_COLUMNS, table)


def _pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


def _cpu_ms(decode: Callable, steps: np.ndarray) -> float:
    decode(steps[0])
    started = time.process_time()
    for step in steps:
        decode(step)
    return 1e3 * (time.process_time() - started) / len(steps)
