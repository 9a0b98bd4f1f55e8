"""Full-size training steps on the local GPU: the time beside the bound of the compiled program, and the memory.

The bound (`planning/gpu/step_account.py`) is what no run of the same program can beat; the forecast is that of `plan`.
All cases of a set share one donated state. "openpi's work" is the reference of `step_time.py`. `--details DIR`
keeps every program's text and account, and with `--traced` a trace of two steps, of which a second table gives the time
of every part of the model beside its bound. Read next: `gpu_times.py`, `reference.py`.
"""

import argparse
import dataclasses
import functools
import gzip
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import gpu_times
from benchmarks.language_speed import whole_texts
from benchmarks.reference import reference
from benchmarks.report import Cell, Spread, Table
from benchmarks.steps import QUICK, Trial, timed_steps
from openpi_train.cli import parse_experiment
from openpi_train.planning.flops import product_flops
from openpi_train.planning.gpu.run_account import run_account
from openpi_train.planning.gpu.step_account import GpuAccount
from openpi_train.runtime.device_kinds import GIB
from openpi_train.runtime.device_limits import peak_flops, total_bytes
from openpi_train.training.settling import Settling, this_machine
from openpi_train.types import OPENPI_SLOTS

COLUMNS = ("case", "rows", "compile s", "step ms", "samples/s", "MFU", "bound ms", "step / bound", "of it products ms")
COLUMNS += ("GiB in use at the peak", "GiB compiled", "GiB forecast", "forecast / compiled", "loss")
# Steps before the timed ones, and timed samples of as many steps as take `SAMPLE_S`.
WARM_UP, SAMPLES, SAMPLE_S = 2, 5, 0.5


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to run: its flags as on the command line, how many cameras are present (0: the data's), and whether it
    does openpi's work (`reference.py`)."""

    flags: str = ""
    cameras: int = 1
    is_reference: bool = False

    @property
    def name(self) -> str:
        """Its words in the table."""
        flags = self.flags.replace("--model.", "").replace("--", "")
        cameras = f"{self.cameras} camera{'s' * (self.cameras > 1)}" if self.cameras else ""
        words = (cameras, flags, "openpi's work" if self.is_reference else "")
        return ", ".join(word for word in words if word)


def _case(remat: str, attention: str, cameras: int = 1, *, loops: bool = False, **rest: Any) -> Case:
    layers = " --unroll-layers False" if loops else ""
    return Case(f"--model.remat {remat} --model.attention {attention}{layers}", cameras, **rest)


# By name: the experiment, its rows on one GPU, and the cases in order of the memory that they take.
SETS: dict[str, tuple[str, int, list[Case]]] = {
    "pi0": (
        "pi0_bridge_traj",
        32,
        [
            _case("full", "cudnn"),
            _case("full", "xla"),
            _case("full", "cudnn", 3),
            _case("full", "xla", 3, is_reference=True),
            _case("attention", "cudnn"),
            _case("dots", "cudnn"),
            _case("dots", "xla"),
            _case("dots", "cudnn", 3),
        ],
    ),
    "loops": (
        "pi0_bridge_traj",
        32,
        [_case(remat, "cudnn", count, loops=True) for remat, count in (("attention", 1), ("dots", 1), ("dots", 3))],
    ),
    # What stores more than `dots`: an H100 has not enough memory for it on one device.
    "policies": ("pi0_bridge_traj", 32, [_case("products", "cudnn"), _case("none", "cudnn")]),
    # A set of its own, as its state lies elsewhere.
    "offload": (
        "pi0_bridge_traj",
        32,
        [Case("--model.remat full --model.attention cudnn --sharding.offload optimizer+ema")],
    ),
    "lora": ("pi0_bridge_traj_lora", 32, [_case("full", "cudnn"), _case("dots", "cudnn")]),
    "pi05": ("pi05_bridge", 32, [_case("full", "cudnn"), _case("dots", "cudnn")]),
    "tokens": ("pi0_fast_bridge", 16, [_case("full", "cudnn")]),
    "dp": ("robot_dp_14", 64, [Case(cameras=0)]),
    "llama": (
        "gsm8k_sft_llama32_1b",
        16,
        [
            *(_case("dots", kind, 0) for kind in ("xla", "cudnn")),
            _case("full", "cudnn", 0),
            _case("dots", "cudnn", 0, loops=True),
        ],
    ),
    # The program of `step_time --quick`, which need not be compiled again.
    "quick": (QUICK[0], 2, [Case(" ".join(QUICK[1:]))]),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks gpu_steps", description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=[*SETS][:-1], default=["pi0"], help="which steps to run")
    parser.add_argument("--cases", nargs="+", type=int, metavar="N", help="only these of each set, from 0")
    parser.add_argument("--limit-s", type=float, default=480, help="no case starts later than this (default: 480)")
    parser.add_argument("--details", type=Path, metavar="DIR", help="where programs, accounts and traces are kept")
    parser.add_argument("--traced", nargs="+", type=int, default=[], metavar="N", help="the cases of each set to trace")
    parser.add_argument("--quick", action="store_true", help="only check that it runs, on any device")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its tables."""
    flags, began = parse(argv), time.monotonic()
    if flags.details:
        flags.details.mkdir(parents=True, exist_ok=True)
    tables = [] if flags.quick else [gpu_times.ceilings()]
    for name in ["quick"] if flags.quick else flags.sets:
        experiment, batch_size, cases = SETS[name]
        words, rows, notes, parts, failed = [experiment, "--batch-size", str(batch_size)], [], [], [], []
        chosen = {place: case for place, case in enumerate(cases) if flags.cases is None or place in flags.cases}
        state = None
        for place, case in chosen.items():
            if time.monotonic() - began > flags.limit_s:
                notes.append(f"Not run for lack of time: {case.name}.")
                continue
            try:
                is_traced = place in flags.traced and flags.details is not None
                running = EvaluationContext(words, case, is_traced)
                row, state = running.measure(state, 1 if flags.quick else SAMPLES)
            except Exception as error:  # a case that cannot run must not cost the others
                rows.append([case.name, batch_size, *[None] * (len(COLUMNS) - 2)])
                failed.append(f"{case.name}: {type(error).__name__}: {str(error).strip()[:300]}")
                print(failed[-1], file=sys.stderr, flush=True)
                state = None  # it may have been donated
                continue
            rows.append(row)
            print(" | ".join(str(cell) for cell in row), file=sys.stderr, flush=True)
            if flags.details:
                running.keep(flags.details / f"{name}_{place}")
            if is_traced:
                found, state = running.trace(state, flags.details / f"{name}_{place}_trace")
                parts.append(found)
        notes.append("MFU counts the model's own FLOPs. The bound is the compiled program's, not a speed.")
        title = f"Steps on this device: {experiment}"
        tables += [Table(title, COLUMNS, rows, [*notes, *failed], "; ".join(failed)), *parts]
        del state
    return tables


class EvaluationContext:
    """A compiled case with its batch. One that `is_traced` runs kernel by kernel: of captured command buffers a trace
    does not tell whose kernels they are."""

    def __init__(self, words: Sequence[str], case: Case, is_traced: bool = False):
        name, *rest = words
        experiment = parse_experiment(name, ["--exp-name", "benchmark", *rest, *case.flags.split()])
        present = OPENPI_SLOTS[: case.cameras] or getattr(experiment.data, "cameras", ())
        self.case, slots = case, OPENPI_SLOTS if case.is_reference else present
        own = Trial.of(experiment)
        model: Any = own.experiment.model
        self.trial = reference(own, model.remat) if case.is_reference else own
        trainer, layout = self.trial.prepared.trainer, self.trial.prepared.layout
        with jax.set_mesh(self.trial.mesh):
            self.batch = self._texts() if _reads_texts(experiment) else self.trial.batch(slots, present)
            spec = jax.eval_shape(lambda: self.batch)
            traced = trainer.traced_step(layout.shardings, layout.abstract(), spec)
            # Of openpi's work only what the model asks for counts.
            counted = traced.jaxpr.jaxpr
            if case.is_reference:
                seen = own.experiment.model.rows.batch_spec(own.experiment.batch_size, present)
                counted = jax.make_jaxpr(own.prepared.trainer.step)(layout.abstract(), seen).jaxpr
            self.model_flops = product_flops(counted, recomputed=False)
            began = time.monotonic()
            self.step = traced.lower().compile({"xla_gpu_enable_command_buffer": ""} if is_traced else None)
            self.compile_s = time.monotonic() - began
        machine = this_machine(total_bytes(jax.devices()[0]))
        self.account = run_account(self.step, machine, self.compile_s)
        spec_of = None if _reads_texts(experiment) else functools.partial(model.rows.batch_spec, cameras=slots)
        memory = Settling(given=self.trial.experiment, machine=machine, batch_spec=spec_of).chosen.memory
        self.forecast_bytes = memory.state + memory.step

    def _texts(self) -> Any:
        experiment = self.trial.experiment
        shape = experiment.batch_spec(experiment.batch_size).tokens.shape
        tokens = np.random.default_rng(0).integers(3, experiment.model.sizes.vocab_size, shape, np.int32)
        return jax.device_put(whole_texts(tokens), self.trial.prepared.trainer.plan.batch)

    def measure(self, state: Any, num_samples: int) -> tuple[list[Cell], Any]:
        """The table's row, and the state after the steps (None: it begins with a fresh one)."""
        with jax.set_mesh(self.trial.mesh):
            state = self.trial.fresh_state() if state is None else state
            step_s, state = timed_steps(self.step, state, self.batch, WARM_UP)
            step_s, state = timed_steps(self.step, state, self.batch, 1)
            count = 1 if num_samples == 1 else max(1, round(SAMPLE_S / step_s))
            samples = []
            for _ in range(num_samples):
                seconds, state = timed_steps(self.step, state, self.batch, count)
                samples.append(seconds)
            state, metrics = self.step(state, self.batch)
        spread, experiment = Spread(tuple(samples)), self.trial.experiment
        peak = peak_flops(jax.devices()[0].device_kind, experiment.model.compute.dtype)
        used = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        forecast, found = self.forecast_bytes / GIB, self.account
        return [
            self.case.name,
            experiment.batch_size,
            self.compile_s,
            spread.map(lambda seconds: 1e3 * seconds),
            experiment.batch_size / spread.median,
            f"{100 * self.model_flops / spread.median / peak:.1f} %" if peak else None,
            *(_bounds(found, spread.median) if found else (None, None, None)),
            used / GIB if used else None,
            found.peak_bytes / GIB if found else None,
            forecast,
            forecast / (found.peak_bytes / GIB) if found else None,
            float(metrics["loss"]),
        ], state

    def keep(self, file: Path) -> None:
        """Write the program's text and its account."""
        with gzip.open(file.with_suffix(".hlo.gz"), "wt", compresslevel=6) as hlo:
            hlo.write(self.step.as_text())
        if self.account:
            file.with_suffix(".json").write_text(json.dumps({"case": self.case.name, **self.account.as_json()}))

    def trace(self, state: Any, directory: Path, num_steps: int = 2) -> tuple[Table, Any]:
        """The time of every part of the model, read from a trace of some steps, and the state after them."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level, options.host_tracer_level = 0, 0
        with jax.set_mesh(self.trial.mesh):
            jax.block_until_ready(state)
            jax.profiler.start_trace(directory, profiler_options=options)
            for _ in range(num_steps):
                state, metrics = self.step(state, self.batch)
            jax.block_until_ready((state, metrics))
            jax.profiler.stop_trace()
        file = max(directory.rglob("*.xplane.pb"))
        machine = this_machine(total_bytes(jax.devices()[0]))
        kernels, text = gpu_times.kernel_times(file), self.step.as_text()
        return gpu_times.by_part(kernels, text, machine, num_steps, self.case.name), state


def _bounds(found: GpuAccount, step_s: float) -> Iterator[Cell]:
    yield from (1e3 * found.bound_s, step_s / found.bound_s, 1e3 * found.matmul_s)


def _reads_texts(experiment: Any) -> bool:
    return hasattr(experiment.batch_spec(1), "tokens")
