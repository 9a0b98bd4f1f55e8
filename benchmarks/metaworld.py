"""Loss and success against CPU time of policies from states, on scripted demonstrations of five Meta-World tasks.

Uses the commands of a user: `data collect`, then a training run that acts in closed loop from initial states that no
demonstration has. Read next: `configs/metaworld_dp.py`, `openpi_train/envs/metaworld_env.py`.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Table

EXPERIMENTS = ("metaworld_mt5_flow", "metaworld_mt5_dp")
# The share of episodes in which a policy of 20 demonstrations per task should succeed.
WANTED = 0.9
_POLL_S = 0.2
_LEAST_STEPS = 500


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks metaworld", description=__doc__)
    parser.add_argument("--experiments", nargs="+", default=EXPERIMENTS, help="of configs/metaworld_dp.py")
    parser.add_argument("--demonstrations", type=int, default=20, help="per task (%(default)s)")
    parser.add_argument("--steps", type=int, default=4_000, help="optimizer steps (%(default)s)")
    parser.add_argument("--every", type=int, default=1_000, help="steps from one closed loop to the next (%(default)s)")
    parser.add_argument("--episodes", type=int, default=10, help="initial states per task (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps, to check that it runs")
    flags = parser.parse_args(argv)
    if flags.quick:
        flags.experiments, flags.demonstrations, flags.steps, flags.every, flags.episodes = EXPERIMENTS[:1], 2, 4, 4, 1
    return flags


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its tables."""
    from openpi_train.envs.metaworld_env import MetaWorldEnv

    flags, tasks = parse(argv), MetaWorldEnv().tasks
    columns = ("experiment", "step", "CPU s", "loss", "held-out loss", *tasks, "success (95 % interval)")
    title = f"Meta-World: closed loops from {flags.episodes} unseen initial states per task"
    if importlib.util.find_spec("metaworld") is None:
        return [
            Table(title, columns, [], ["not measured: Meta-World is not installed (pip install 'openpi_train[sim]')"])
        ]
    rows, notes, failures = [], [], []
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        store = base / "demonstrations.zarr"
        many = ["--tasks", *tasks, "--episodes-per-task", str(flags.demonstrations)]
        spent = _run(
            [sys.executable, "-m", "openpi_train", "data", "collect", "metaworld", *many, "--out", store], base
        )
        notes.append(f"{flags.demonstrations} demonstrations per task took {max(spent.values()):.0f} CPU s.")
        for name in flags.experiments:
            for line in _train(base, name, store, flags):
                each = [line[f"success/{task}"] for task in tasks]
                interval = (
                    f"{line['success/all']:.0%} ({line['success/all_low']:.0%} to {line['success/all_high']:.0%})"
                )
                loss, held_out = line.get("loss"), line.get("val/loss_ema")
                rows.append([name, str(line["step"]), line["CPU s"], loss, held_out, *each, interval])
            if not flags.quick and line["success/all"] < WANTED:
                failures.append(f"{name} succeeded in {line['success/all']:.0%} of the episodes; wanted: {WANTED:.0%}")
    notes.append("CPU s: from the start of the training command on, all closed loops up to there included.")
    return [Table(title, columns, rows, notes, failure="; ".join(failures))]


def _train(base: Path, name: str, store: Path, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Train; returns the lines of the closed loops, each with the last loss before it and the `CPU s` up to it."""
    every = str(flags.every)
    words = ["--exp-name", "x", "--dataset", store, "--num-train-steps", str(flags.steps), "--log-interval", every]
    words += ["--checkpoint-base-dir", base / "runs", "--assets-base-dir", base / "assets", "--eval.interval", every]
    words += ["--eval.closed-loop.interval", every, "--eval.closed-loop.num-videos", "0"]
    words += ["--eval.closed-loop.episodes-per-task", str(flags.episodes)]
    if flags.steps < _LEAST_STEPS:  # no longer than the warm-up
        words += ["--lr-schedule.warmup-steps", "1", "--eval.closed-loop.max-steps", "16"]
    metrics = base / "runs" / name / "x" / "metrics.jsonl"
    spent = _run([sys.executable, "-m", "openpi_train", name, *words], base, metrics)
    found, loss = [], None
    for line in _lines(metrics):
        loss = line.get("loss", loss)
        if "success/all" in line:
            found.append({"loss": loss, **line, "CPU s": spent[line["step"]]})
    return found


def _run(command: Sequence[str | Path], base: Path, metrics: Path | None = None) -> dict[int, float]:
    """Run a command; returns the CPU seconds until `metrics` has each step's closed loop, and until the end (-1)."""
    # Matrices this small are not worth a second thread.
    environ = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"}
    spent: dict[int, float] = {}
    with (base / "output.log").open("w") as log:
        process = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=environ, stdout=log, stderr=log)
    while process.poll() is None:
        spent[-1] = _cpu_s(process.pid) or spent.get(-1, 0.0)
        for line in _lines(metrics) if metrics is not None and metrics.is_file() else ():
            if "success/all" in line:
                spent.setdefault(line["step"], spent[-1])
        time.sleep(_POLL_S)
    if process.returncode:
        raise RuntimeError(f"it ended with code {process.returncode}:\n{(base / 'output.log').read_text()[-3000:]}")
    for line in _lines(metrics) if metrics is not None else ():  # the last one, written just before the end
        spent.setdefault(line["step"], spent[-1])
    return spent


def _lines(metrics: Path) -> list[dict[str, Any]]:
    """The complete lines of `metrics.jsonl`."""
    return [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _cpu_s(pid: int) -> float:
    """CPU seconds that a process and its threads have used; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
