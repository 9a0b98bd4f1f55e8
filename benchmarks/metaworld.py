"""Policies from states learn five Meta-World tasks from scripted demonstrations: loss and success against CPU time.

All is done as a user would: `data collect`, a training run, `load_policy` on its checkpoints, closed loops from initial
states that no demonstration has. Read next: `configs/metaworld.py`, `openpi_train/envs/metaworld.py`.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import ROOT, Table

EXPERIMENTS = ("metaworld_mt5_flow", "metaworld_mt5_dp")
# Actions of each chunk that are carried out, and the seed of the closed loops' initial states.
EXECUTE, SEED = 8, 0
# Least success that a policy of these demonstrations should reach.
WANTED = 0.9
_POLL_S = 0.2


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, understood."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks metaworld", description=__doc__)
    parser.add_argument("--experiments", nargs="+", default=EXPERIMENTS, help="of configs/metaworld.py (%(default)s)")
    parser.add_argument("--demonstrations", type=int, default=20, help="per task (%(default)s)")
    parser.add_argument("--steps", type=int, default=4_000, help="optimizer steps (%(default)s)")
    parser.add_argument("--points", type=int, default=4, help="checkpoints that are evaluated (%(default)s)")
    parser.add_argument("--episodes", type=int, default=10, help="initial states per task and checkpoint (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    flags = parser.parse_args(argv)
    if flags.quick:
        flags.experiments, flags.demonstrations, flags.steps, flags.points, flags.episodes = EXPERIMENTS[:1], 2, 4, 1, 1
    return flags


def main(argv: Sequence[str]) -> list[Table]:
    """Measure as the flags say."""
    from openpi_train import registry
    from openpi_train.envs.metaworld import MetaWorld

    flags, env = parse(argv), MetaWorld(split="held_out")
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        demonstrations = base / "demonstrations.zarr"
        spent_s = _collect(demonstrations, env.tasks, flags.demonstrations)
        notes = [f"{flags.demonstrations} demonstrations per task took {spent_s:.0f} CPU s."]
        rows, failures = [], []
        for name in flags.experiments:
            experiment = registry.load(name)
            notes.append(f"{name}: {experiment.eval.num_sample_steps} denoising steps, {EXECUTE} actions of a chunk.")
            points = list(_train(base, name, demonstrations, flags.steps, flags.steps // flags.points))
            for step, loss, train_s in points:
                success, loop_s = _closed_loop(base / "runs" / name / "x" / str(step), env, flags.episodes)
                each = [float(success[:, task].mean()) for task in range(len(env.tasks))]
                rows.append([name, str(step), loss, train_s, loop_s, *each, _with_interval(success)])
            if success.mean() < WANTED and not flags.quick:
                failures.append(f"{name} succeeded in {success.mean():.0%} of the episodes, wanted are {WANTED:.0%}")
    columns = ("experiment", "step", "loss", "training CPU s", "closed loop CPU s", *env.tasks, "success (95 % interval)")
    title = f"Meta-World: success from {flags.episodes} unseen initial states per task"
    return [Table(title, columns, rows, notes, failure="; ".join(failures))]


def _collect(store: Path, tasks: Sequence[str], count: int) -> float:
    """CPU seconds in which the demonstrations were made."""
    before = _children_s()
    words = ["data", "collect", "metaworld", "--tasks", *tasks, "--episodes-per-task", str(count), "--out", str(store)]
    subprocess.run([sys.executable, "-m", "openpi_train", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return _children_s() - before


def _train(base: Path, name: str, store: Path, steps: int, every: int) -> Iterator[tuple[int, float, float]]:
    """Every checkpoint of a run: its step, the last loss, and CPU seconds from the command on."""
    places = {"--checkpoint-base-dir": base / "runs", "--assets-base-dir": base / "assets", "--dataset": store}
    numbers = {"--num-train-steps": steps, "--save-interval": every, "--keep-period": every, "--log-interval": every}
    if steps < 500:  # behind the warm-up
        numbers["--lr-schedule.warmup-steps"] = 1
    flags = [str(word) for pair in {**places, **numbers}.items() for word in pair]
    # Matrices this small are not worth a second thread.
    environ = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"}
    command = [sys.executable, "-m", "openpi_train", name, "--exp-name", "x", *flags]
    folder, spent = base / "runs" / name / "x", {}
    with (base / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
        while process.poll() is None:
            for step in range(every, steps + 1, every):
                if step not in spent and (folder / str(step) / "manifest.json").is_file():
                    spent[step] = _process_s(process.pid)
            time.sleep(_POLL_S)
        log.seek(0)
        if process.returncode:
            raise RuntimeError(f"{name} ended with code {process.returncode}:\n{log.read()[-3000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    for step in range(every, steps + 1, every):
        yield step, losses[step], spent.get(step, float("nan"))  # not seen where the run ended in that moment
