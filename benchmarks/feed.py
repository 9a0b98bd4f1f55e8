"""Loader throughput: samples/s and CPU time with 0, 1 and 2 worker processes, without training.

Measures the run's own `Feed`, from files to arrays on the devices, on the BridgeData sample if present, otherwise on a
newly written embedded tabletop dataset. Worker counts alternate within each round. Read next:
`lerobot_feed.py` for LeRobot data, alternating with lerobot's own loader.
"""

import argparse
import dataclasses
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks.report import ROOT, Cell, Spread, Table
from openpi_train import registry
from openpi_train.data.core.feed import RowFeed
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.make.embedded import prepare
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.opened import OpenedDatasets
from openpi_train.data.robot.rows import Rows
from openpi_train.parallel.mesh import batch_sharding, make_mesh
from openpi_train.robots.bridge import Bridge
from openpi_train.robots.tabletop import Tabletop

EXPERIMENT = "pi0_bridge_traj"
NUM_ROUNDS = 5
_CAMERAS = {
    "base_0_rgb": "observation/image_0",
    "left_wrist_0_rgb": "observation/image_1",
    "right_wrist_0_rgb": "observation/image_2",
}
COLUMNS = ("workers", "time to first batch s", "CPU ms/sample", "samples/s", "samples/s vs first row")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One pass of one feed."""

    first_batch_s: float
    samples_per_s: float
    cpu_ms_per_sample: float


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks feed", description=__doc__)
    default = Path(os.environ.get("OPENPI_TRAIN_DATA", ROOT.parent / "shared" / "data")) / "bridge_dataset"
    parser.add_argument("--data", type=Path, help=f"BridgeData as written by tfds (default: {default} if present)")
    parser.add_argument("--workers", type=int, nargs="+", help="numbers of worker processes (default: 0 1 2)")
    parser.add_argument("--cameras", type=int, choices=(1, 2, 3), default=3, help="pictures per sample")
    parser.add_argument("--image-size", type=int, default=224, help="pixels that pictures are scaled to")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=24, help="measured batches per pass")
    parser.add_argument("--format", choices=("rlds", "lerobot"), nargs="+", default=("rlds", "lerobot"))
    parser.add_argument("--peer-python", type=Path, help="Python of an environment with lerobot, for its own loader")
    parser.add_argument("--quick", action="store_true", help="one short round, to check that it runs")
    flags = parser.parse_args(argv)
    flags.workers = flags.workers or ((0, 1) if flags.quick else (0, 1, 2))
    if flags.quick:
        flags.batch_size = 4
    if flags.data is None and default.is_dir():
        flags.data = default
    return flags


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its tables."""
    flags = parse(argv)
    tables = []
    with tempfile.TemporaryDirectory(prefix="benchmark-feed-") as scratch:
        if "rlds" in flags.format:
            tables.append(_rlds_table(flags, Path(scratch)))
        if "lerobot" in flags.format:
            from benchmarks import lerobot_feed

            tables += lerobot_feed.tables(flags, Path(scratch))
    return tables


def _rlds_table(flags: argparse.Namespace, scratch: Path) -> Table:
    opened = _open(flags, scratch)
    rounds = [
        [measure(opened.train, flags, workers) for workers in flags.workers]
        for _ in range(1 if flags.quick else NUM_ROUNDS)
    ]
    size = flags.image_size
    title = (
        f"Feed: {opened.train.names[0]} from {flags.data or 'the embedded dataset'}, {len(opened.cameras)} cameras "
        f"scaled to {size} px, batch {flags.batch_size}"
    )
    return Table(title, COLUMNS, _rows(flags.workers, list(zip(*rounds, strict=True))), [_note()])


def _rows(workers: Sequence[int], samples: Sequence[Sequence[Sample]]) -> list[list[Cell]]:
    def spread(name: str, passes: Sequence[Sample]) -> Spread:
        return Spread(tuple(getattr(sample, name) for sample in passes))

    reference = spread("samples_per_s", samples[0])
    names = ("first_batch_s", "cpu_ms_per_sample", "samples_per_s")
    return [
        [count, *(spread(name, passes) for name in names), spread("samples_per_s", passes).over(reference)]
        for count, passes in zip(workers, samples, strict=True)
    ]


def _note() -> str:
    return (
        f"0 workers read in {min(16, os.cpu_count() or 1)} threads of the main process. CPU time is that of the main "
        "process and its workers after the first batches; time to first batch includes starting the workers."
    )


def _open(flags: argparse.Namespace, scratch: Path) -> OpenedDatasets:
    """Open the rows as a run of pi0 does, with index and norm stats below `scratch`."""
    experiment = registry.load(EXPERIMENT)
    if flags.data is None:
        changes = {"tasks": ("reach_red",), "episodes_per_task": 4} if flags.quick else {"episodes_per_task": 4}
        path = prepare(scratch, val_episodes_per_task=1, **changes).dataset
        cameras = dict(list(Tabletop().cameras.items())[: flags.cameras])
        robot = Tabletop(cameras=cameras)
    else:
        path = flags.data
        robot = Bridge(trajectory=True, cameras=dict(list(_CAMERAS.items())[: flags.cameras]))
    source = Rlds(path=str(path), cache_dir=str(scratch / "index"))
    data = DataConfig(datasets=(Dataset(source=source, robot=robot, asset_id="benchmark"),), tokenizer="bytes")
    model = dataclasses.replace(experiment.model, image_size=flags.image_size)
    return dataclasses.replace(experiment, data=data, model=model, assets_base_dir=str(scratch / "assets")).open_data()


def num_warm(flags: argparse.Namespace, workers: int) -> int:
    """Number of warm-up batches after the first, which fill the pipeline."""
    return 1 if flags.quick else min(16, os.cpu_count() or 1) + 2 * workers + 2


def num_batches(flags: argparse.Namespace) -> int:
    """Measured batches."""
    return 2 if flags.quick else flags.batches


def measure(rows: Rows, flags: argparse.Namespace, workers: int) -> Sample:
    """Measure one feed from its start: the first batch, warm-up batches that fill the pipeline, then the measured
    ones."""
    feed = RowFeed(rows, batch_size=flags.batch_size, sharding=batch_sharding(make_mesh(1)), num_workers=workers)
    try:
        started = time.perf_counter()
        jax.block_until_ready(feed.next())
        first_batch_s = time.perf_counter() - started
        for _ in range(num_warm(flags, workers)):
            jax.block_until_ready(feed.next())
        started, cpu_s = time.perf_counter(), _cpu_s()
        for _ in range(num_batches(flags)):
            jax.block_until_ready(feed.next())
        elapsed_s, cpu_s = time.perf_counter() - started, _cpu_s() - cpu_s
    finally:
        feed.close()
    num_samples = num_batches(flags) * flags.batch_size
    return Sample(first_batch_s, num_samples / elapsed_s, 1e3 * cpu_s / num_samples)


def _cpu_s() -> float:
    """CPU seconds of this process and its live workers so far; `getrusage` counts only children that have ended."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    total = time.process_time()
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / ticks_per_s  # user and system time, fields 14 and 15 in proc(5)
    return total
