"""Start weights: the peak memory of a process that loads its share, against the bytes of that share.

A checkpoint of a model's shapes in float32 is written chunk by chunk, chunked as by a trainer on eight devices
(`--chunks 1`: on a single device), with values that repeat and so compress quickly. Then processes of one
CPU device each load it as a run does, sharded as by zero3, in bfloat16. Full pi0 (`--experiment pi0_bridge_traj`) has
13 GB before compression and 6.5 GB placed; with `--turns` the processes load, measure and free their shares one after
the other, for machines that cannot hold all shares. Read next: `openpi_train/interop/stored_leaves.py` (`place`),
`openpi_train/training/init.py`.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import ROOT, Cell, Spread, Table
from openpi_train import registry
from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.interop import openpi
from openpi_train.interop.orbax_item import METADATA
from openpi_train.launch.processes import free_port
from openpi_train.models.model_config import ModelConfig

MEDIUM = f"{ROOT / 'benchmarks' / 'medium.py'}:medium"
CHUNKS = 8
COLUMNS = ("processes", "checkpoint GB", "share of each MB", "seconds", "peak above start MB", "peak / share")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks weights", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the model of `debug`, 2 processes")
    parser.add_argument(
        "--experiment", default=MEDIUM, help="whose model (100 M parameters; pi0_bridge_traj: full pi0)"
    )
    parser.add_argument("--processes", type=int, default=4, help="processes of one device each (4)")
    parser.add_argument("--convert", metavar="FORM", help="convert it to this form instead, and measure that")
    parser.add_argument("--turns", action="store_true", help="processes load and free their shares one after the other")
    parser.add_argument("--chunks", type=int, default=CHUNKS, help="chunks of each large array on disk (8)")
    flags = parser.parse_args(argv)
    if flags.quick:
        flags.experiment, flags.processes = "debug", 2
    return flags


def main(argv: Sequence[str]) -> list[Table]:
    """Write the checkpoint, load it, and return a table of memory and time."""
    flags = parse(argv)
    shapes = openpi.abstract_params(registry.load(flags.experiment).model)
    total = sum(math.prod(leaf.shape) for leaf in shapes.values()) * 4
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "params", registry.load(flags.experiment).model, flags.chunks)
        if flags.convert:
            return [_convert(Path(folder), flags, total)]
        found = _load(Path(folder), flags)
    row: list[Cell] = [flags.processes, total / 1e9, *(Spread(tuple(one[name] for one in found)) for name in found[0])]
    row.append(Spread(tuple(one["peak_mb"] / one["share_mb"] for one in found)))
    largest = max(math.prod(leaf.shape) for leaf in shapes.values()) * 4
    notes = [
        f"The largest array has {largest / 1e9:.3g} GB on disk, in {flags.chunks} chunks; a share is of all "
        "parameters, in bfloat16. Peak: of resident memory, above what the process had before it opened the checkpoint."
    ]
    return [Table(f"Start weights: {flags.experiment.rpartition(':')[2]}", COLUMNS, [row], notes)]


def write(item: Path, model: ModelConfig, num_chunks: int) -> None:
    """Write a `params` item of the model's shapes in Orbax's layout, with at most one chunk in memory."""
    import tensorstore

    entries, names = {}, openpi.parameter_names(model)
    item.mkdir(parents=True)
    for path, leaf in openpi.abstract_params(model).items():
        keys = ["params", *names[path].split("/"), "value"]
        described = [{"key": key, "key_type": 2} for key in keys]
        entries[str(tuple(keys))] = {"key_metadata": described, "value_metadata": {"value_type": "jax.Array"}}
        chunk = _chunk(leaf.shape, num_chunks)
        metadata = {"shape": leaf.shape, "chunks": chunk, "dtype": "<f4", "compressor": {"id": "zstd", "level": 1}}
        store = {"driver": "ocdbt", "base": f"{item.as_uri()}/", "path": f"{'.'.join(keys)}/"}
        spec = {"driver": "zarr", "kvstore": store, "metadata": metadata, "create": True}
        array: Any = tensorstore.open(spec).result()
        for place in np.ndindex(*(size // part for size, part in zip(leaf.shape, chunk, strict=True))):
            array.kvstore.write(".".join(map(str, place)) or "0", _compressed(math.prod(chunk))).result()
    (item / METADATA).write_text(json.dumps({"tree_metadata": entries, "use_zarr3": False}))


@functools.lru_cache(maxsize=1)
def _compressed(count: int) -> bytes:
    """A chunk of `count` float32 values as compressed by Orbax, made piece by piece."""
    import zstandard

    values = np.random.default_rng(0).normal(0, 0.02, 1 << 16).astype(np.float32)
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    parts = [compressor.compress(values[: count - begin].tobytes()) for begin in range(0, count, len(values))]
    return b"".join([*parts, compressor.flush()])


def _chunk(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """The chunk shape: split along the longest divisible dim, if the array is large enough."""
    dims = [dim for dim, size in enumerate(shape) if size % parts == 0]
    if not dims or math.prod(shape) < 1 << 20:
        return shape
    longest = max(dims, key=lambda dim: shape[dim])
    return tuple(size // parts if dim == longest else size for dim, size in enumerate(shape))


def _convert(folder: Path, flags: argparse.Namespace, total: int) -> Table:
    """The memory of a conversion, above that of --dry-run."""
    words = [sys.executable, "-m", "benchmarks.weights", "convert", str(folder / "params"), str(folder / "out")]
    words += ["--experiment", flags.experiment, "--to", flags.convert, "--no-outputs"]
    environ, found = {**os.environ, "JAX_PLATFORMS": "cpu"}, []
    for more in (["--dry-run"], []):
        done = subprocess.run([*words, *more], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    dry, real = found
    row: list[Cell] = [flags.convert, total / 1e9, real["seconds"], real["peak_mb"], real["peak_mb"] - dry["peak_mb"]]
    columns = ("form", "checkpoint GB", "seconds", "peak MB", "above --dry-run MB")
    return Table(f"Convert: {flags.experiment.rpartition(':')[2]}", columns, [row], ["Outputs are not compared."])


def convert_and_measure(words: Sequence[str]) -> dict[str, float]:
    """Run `convert` with these words."""
    from openpi_train import cli

    started = time.monotonic()
    if code := cli.run(["convert", *words]):
        raise SystemExit(code)
    return {"seconds": time.monotonic() - started, "peak_mb": _resident_mb("VmHWM")}


def _load(folder: Path, flags: argparse.Namespace) -> list[Mapping[str, float]]:
    """Load in all processes; returns the measurements of each."""
    words = [sys.executable, "-m", "benchmarks.weights", str(folder), flags.experiment, f"127.0.0.1:{free_port()}"]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    counts, turns = str(flags.processes), str(int(flags.turns))
    children = [
        subprocess.Popen([*words, str(index), counts, turns], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
        for index in range(flags.processes)
    ]
    said = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError("a process that loads failed; what it said is above")
    return [json.loads(text.splitlines()[-1]) for text in said]


def load_share(
    folder: Path, name: str, coordinator: str, process: int, processes: int, turns: bool
) -> dict[str, float]:
    """Load as one process of a run, and measure."""
    import jax
    import optax

    from openpi_train.parallel.mesh import make_mesh
    from openpi_train.parallel.strategy import Plan
    from openpi_train.runtime import session
    from openpi_train.runtime.agree import barrier
    from openpi_train.runtime.world import WorldFlags, find_world
    from openpi_train.training.init import create_state, lay_out

    flags = WorldFlags(coordinator=coordinator, num_processes=processes, process_id=process)
    session.start(find_world(flags, {}), devices_per_process=1)
    model = dataclasses.replace(registry.load(name).model)
    plan = Plan(mesh=make_mesh(processes), strategy="zero3")
    rule, everything = optax.identity(), lambda path: True  # as frozen parameters: only bfloat16
    layout = lay_out(model, rule, everything, False, plan)
    found: dict[str, float] = {}
    with jax.set_mesh(plan.real_mesh):
        jax.block_until_ready(jax.numpy.zeros(1))
        for turn in range(processes if turns else 1):
            if turn == process or not turns:
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
                before, started = _resident_mb("VmRSS"), time.monotonic()
                weights = CheckpointWeightLoader(params_path=str(folder / "params")).load(model)
                state = create_state(layout, model, rule, everything, False, 0, weights)
                jax.block_until_ready(state)
                seconds, peak = time.monotonic() - started, _resident_mb("VmHWM")
                share = sum(shard.data.nbytes for leaf in state.frozen.values() for shard in leaf.addressable_shards)
                found = {"share_mb": share / 1e6, "seconds": seconds, "peak_mb": peak - before}
                del state
            barrier(f"turn {turn}", 1800)
    session.stop(60)
    return found


def _resident_mb(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024 / 1e6


if __name__ == "__main__" and sys.argv[1] == "convert":
    print(json.dumps(convert_and_measure(sys.argv[2:])))
elif __name__ == "__main__":
    place, named, address, index, count, in_turns = sys.argv[1:]
    print(json.dumps(load_share(Path(place), named, address, int(index), int(count), in_turns == "1")))
