"""All ways to train a VLA, at small size: on 2 processes x 2 devices under zero3, and continued on one device.

Each runs as a user starts it, once entirely on four devices, and again from the middle checkpoint on one: the losses
must be the same to rounding, the compiled state as large as planned, and frozen parameters bit-identical at the end.
Read next: `vla_small.py`, the experiments.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import vla_small
from benchmarks.report import ROOT, Cell, Table
from openpi_train.data.tokenizers.fast_tokenizer import fit_fast
from openpi_train.experiment import Experiment
from openpi_train.interop.native_format import open_checkpoint
from openpi_train.interop.openpi import parameter_names
from openpi_train.interop.place import Place

NAMES = tuple(name for name, value in vars(vla_small).items() if isinstance(value, Experiment))
FILE = Path(vla_small.__file__)
# First step: rounding in another order of sums. Last steps: the same, amplified by Adam's division by small moments
# over 25 steps. The compiler pads small arrays of the state.
FIRST_RTOL, LAST_RTOL, STATE_RTOL = 1e-5, 1e-2, 0.02
_ZERO3 = ("--sharding.strategy", "zero3", "--sharding.min-shard-mib", "0")
# Processes, devices of each.
_LAYOUT, _QUICK_LAYOUT = (2, 2), (1, 2)

COLUMNS = (
    "experiment",
    "trained",
    "frozen",
    "state, planned bytes",
    "state, compiled bytes",
    "first loss",
    "last loss",
    "first step on one device differs by",
    "last steps' mean differs by",
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks vla_runs", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps, half of them before the resume")
    parser.add_argument("--quick", action="store_true", help="one experiment, four steps, one process, no resume")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Train all experiments and return a table."""
    flags = parse(argv)
    names, steps, layout = flags.only, flags.steps, _LAYOUT
    if flags.quick:
        names, steps, layout = ("paligemma_flow_lora",), 4, _QUICK_LAYOUT
    with tempfile.TemporaryDirectory(prefix="benchmark-vla-") as folder:
        chunks = np.clip(np.random.default_rng(0).normal(scale=0.5, size=(200, 4, 7)), -1, 1)
        fit_fast(chunks, vocab_size=300).save(Path(folder) / "fast")
        rows, failures = [], []
        for name in names:
            row, wrong = _train(Path(folder), name, steps, layout, resumed=not flags.quick)
            print("  ".join(map(str, row)), file=sys.stderr, flush=True)
            rows.append(row)
            failures += [f"{name}: {what}" for what in wrong]
    processes, devices = layout
    title = f"VLA experiments in small: {steps} steps on {processes} processes x {devices} CPU devices under zero3"
    notes = ["Made-up data."]
    if not flags.quick:
        title += ", resumed on 1"
        notes += [f"Last steps: a fifth of the second half's. Steps {steps // 2 + 1} to {steps} were run twice."]
    return [Table(title, COLUMNS, rows, notes, "; ".join(failures))]


def _train(
    folder: Path, name: str, steps: int, layout: tuple[int, int], *, resumed: bool
) -> tuple[list[Cell], list[str]]:
    """One experiment's row, and its failures."""
    experiment = getattr(vla_small, name)
    flags = ["--num-train-steps", steps, "--save-interval", steps // 2, "--keep-last", 2, "--no-tensorboard"]
    if hasattr(experiment.model, "fast_tokenizer"):
        flags += ["--model.fast-tokenizer", folder / "fast"]
    processes, devices = layout
    launcher = ("launch", "local", "--processes", processes, "--devices-per-process", devices)
    launcher += ("--log-dir", folder / "output", "--")
    said = _program(folder, *launcher, f"{FILE}:{name}", *flags, *_ZERO3, "--fsdp-devices", processes * devices)
    (trained, frozen) = re.findall(r"parameters: ([\d,]+) train, ([\d,]+) are kept fixed", said)[0]
    run = folder / "runs" / name / "x"
    plan, before = json.loads((run / "plan.json").read_text()), _losses(run)
    if resumed:
        shutil.rmtree(run / str(steps))  # the second half is trained again, on one device
        _program(folder, f"{FILE}:{name}", *flags, "--resume", "--devices-per-process", 1)
    after = _losses(run)
    middle, tail = steps // 2 + 1, range(steps - max(steps // 10, 1) + 1, steps + 1)
    first = abs(after[middle] / before[middle] - 1)
    last = abs(np.mean([after[step] for step in tail]) / np.mean([before[step] for step in tail]) - 1)
    planned, compiled = (plan[key]["state"] for key in ("bytes_per_device", "compiled_bytes_per_device"))
    moved = _moved(experiment, run, steps)
    wrong = {
        f"the first step on one device differs by {first:.1e}": first > FIRST_RTOL,
        f"the last steps differ by {last:.1e}": last > LAST_RTOL,
        f"the state was planned with {planned} bytes and compiled with {compiled}": abs(compiled / planned - 1)
        > STATE_RTOL,
        f"frozen parameters moved: {', '.join(moved[:3])}": bool(moved),
        f"the loss rose from {before[1]:.4g} to {after[steps]:.4g}": steps >= 50 and after[steps] >= before[1],
    }
    cells = [name, trained, frozen, planned, compiled, f"{before[1]:.4f}", f"{after[steps]:.4f}"]
    differences = [f"{first:.1e}", f"{last:.1e}"] if resumed else [None, None]
    return [*cells, *differences], [what for what, is_so in wrong.items() if is_so]


def _program(folder: Path, *words: object) -> str:
    """The output of the program. Raises RuntimeError if it fails."""
    places = ("--exp-name", "x", "--checkpoint-base-dir", folder / "runs", "--assets-base-dir", folder / "assets")
    command = [sys.executable, "-m", "openpi_train", *map(str, (*words, *places))]
    # Compiling is most of the time, and how fast the program then is does not matter here.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    environ = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def _losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def _moved(experiment: Experiment, run: Path, steps: int) -> list[str]:
    """Frozen parameters whose bits differ between the middle and the end."""
    middle, end = (open_checkpoint(Place.of(run / str(step))).params for step in (steps // 2, steps))
    names = [name for path, name in parameter_names(experiment.model).items() if experiment.is_frozen(path)]
    return [name for name in names if middle[name].whole().tobytes() != end[name].whole().tobytes()]
