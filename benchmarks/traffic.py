"""Bytes that one device sends in a step of the compiled program, against the strategy's formula; nothing is run.

The step is compiled for the available devices, or for eight CPU devices if there is only one. XLA for CPUs
sends bfloat16 gathers as float32; they are counted in the program's dtype. Read next: `planning/traffic.py`.
"""

import argparse
import collections
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks import steps
from benchmarks.report import ROOT, Cell, Table
from openpi_train.experiment import Experiment
from openpi_train.parallel.strategy import CUT, Strategy
from openpi_train.planning.traffic import as_asked, collectives
from openpi_train.runtime.device_kinds import GIB
from openpi_train.runtime.world import WorldFlags, find_world
from openpi_train.training.settling import Settling
from openpi_train.types import OPENPI_SLOTS

NUM_DEVICES = 8
FULL = "pi0_bridge_traj"
# One that shares the state within groups, and sends between groups, too.
QUICK_STRATEGIES = ("hsdp",)
KINDS = ("all-gather", "reduce-scatter", "all-reduce")
COLUMNS = ("strategy", "micro-batches", "compile s", "state GiB", "planned GiB", "program's own GiB")
COLUMNS += (*(f"{kind} GB" for kind in KINDS), "sent GB", "formula GB", "sent / formula")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Experiment]:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks traffic", description=__doc__)
    parser.add_argument("--strategies", nargs="+", choices=tuple(CUT), help="rows to measure (default: all)")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=(1, 4), metavar="N", help="rows to measure")
    given = {"--quick", "--model", "--experiment"} & set(argv)
    whole = [] if given else ["--experiment", FULL, "--model.remat", "full"]
    flags, experiment = steps.parse(parser, [*whole, *argv])
    flags.strategies = flags.strategies or (QUICK_STRATEGIES if flags.quick else tuple(CUT))
    return flags, experiment


def main(argv: Sequence[str]) -> list[Table]:
    """Compile and measure; the default without --experiment or --model is full pi0 with three cameras."""
    flags, experiment = parse(argv)
    if jax.device_count() == 1:
        return _with_eight_devices(argv)
    micros = (1,) if flags.quick else flags.micro_batches
    rows = [_row(experiment, strategy, num_micros) for strategy in flags.strategies for num_micros in micros]
    model = f"{experiment.name}, {len(OPENPI_SLOTS)} cameras, batch {experiment.batch_size}"
    notes = [
        "state: of the compiled program's arguments; planned: of the forecast. hsdp: two hosts of half the devices."
    ]
    return [Table(f"Traffic of a step on {jax.device_count()} devices: {model}", COLUMNS, rows, notes, _failure(rows))]


def _row(experiment: Experiment, strategy: Strategy, num_micros: int) -> list[Cell]:
    groups = jax.device_count() // experiment.sharding.tensor_devices
    experiment = dataclasses.replace(
        experiment,
        sharding=dataclasses.replace(experiment.sharding, strategy=strategy),
        fsdp_devices=groups // 2 if strategy == "hsdp" else None,
        grad_accum=num_micros,
    )
    prepared = Settling.here(experiment, find_world(WorldFlags(), {})).prepared
    trainer, layout = prepared.trainer, prepared.layout
    batch = experiment.model.rows.batch_spec(experiment.batch_size, OPENPI_SLOTS)
    began = time.monotonic()
    with jax.set_mesh(trainer.plan.real_mesh):
        traced = trainer.jitted_step(layout.shardings).trace(layout.abstract(), batch)
        compiled = traced.lower().compile()
    seconds, memory = time.monotonic() - began, compiled.memory_analysis()
    sent: collections.Counter[str] = collections.Counter()
    for one in as_asked(collectives(compiled.as_text(), jax.device_count()), traced.jaxpr):
        sent[one.kind] += one.sent_bytes
    formula = sum(flow.within for flow in prepared.forecast.flows)
    total = sum(sent.values())
    arguments = memory.argument_size_in_bytes
    gib = (size / GIB for size in (arguments, prepared.memory.state, memory.temp_size_in_bytes))
    each = (sent[kind] / 1e9 for kind in KINDS)
    return [strategy, num_micros, seconds, *gib, *each, total / 1e9, formula / 1e9, total / formula]


def _failure(rows: Sequence[Sequence[Cell]]) -> str:
    wrong = [f"{row[0]} x {row[1]}" for row in rows if isinstance(row[-1], float) and row[-1] > 1.05]
    return f"{', '.join(wrong)}: more than 1.05 of the formula is sent" if wrong else ""


def _with_eight_devices(argv: Sequence[str]) -> list[Table]:
    """Run this benchmark in a new process, because the number of devices is fixed when jax starts."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "traffic.json"
        command = [sys.executable, "-m", "benchmarks", "traffic", *argv, "--json", str(file)]
        environ = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(NUM_DEVICES)}
        done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL)
        if not file.exists():
            raise RuntimeError(f"the program with {NUM_DEVICES} devices ended with code {done.returncode}")
        tables = json.loads(file.read_text())["tables"]
    rows = [[list(row.values()) for row in table["rows"]] for table in tables]
    return [
        Table(table["title"], COLUMNS, lines, table["notes"], _failure(lines))
        for table, lines in zip(tables, rows, strict=True)
    ]
