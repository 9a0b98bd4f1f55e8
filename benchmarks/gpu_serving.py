"""Full-size models answering on the local GPU: an action chunk's latency beside its bound, and completions per second.

Random weights. The bound is that of the compiled program (`planning/gpu/step_account.py`); the least time to read the
parameters stands beside it. Read next: `gpu_steps.py`.
"""

import argparse
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.report import Cell, Spread, Table
from openpi_train.cli import parse_experiment
from openpi_train.generation.generator import GenerationRequest, Generator
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import module_params
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.gpu.run_account import run_account
from openpi_train.policy.sampler import Sampler
from openpi_train.runtime.device_kinds import kind_of
from openpi_train.runtime.device_limits import total_bytes
from openpi_train.training.settling import this_machine
from openpi_train.types import OPENPI_SLOTS

POLICIES = ("pi0_bridge_traj", "pi05_bridge")
# Tokens of a prompt, with padding.
TEXT_LENGTH = 48
TEXTS = "gsm8k_sft_llama32_1b"
CHUNKS = ("policy", "cameras", "parameters", "rows", "ms", "ms bound", "measured / bound", "ms to read parameters")
TOKENS = ("model", "rows", "prompt", "new tokens", "tokens/s", "ms per token", "ms to read parameters")
TOKENS += ("measured / read",)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks gpu_serving", description=__doc__)
    parser.add_argument("--policies", nargs="*", default=POLICIES, metavar="NAME", help="experiments with a flow")
    parser.add_argument("--cameras", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(1, 8))
    parser.add_argument("--dtypes", nargs="+", default=("bfloat16", "float32"), choices=("bfloat16", "float32"))
    parser.add_argument("--calls", type=int, default=20, metavar="N")
    parser.add_argument("--texts", nargs="*", default=(TEXTS,), metavar="NAME", help="experiments with texts")
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 64), help="completions at once")
    parser.add_argument("--quick", action="store_true", help="tiny sizes on any device, only to check that it runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its tables."""
    flags = parse(argv)
    if flags.quick:
        flags.policies, flags.cameras, flags.batch_sizes, flags.dtypes, flags.calls = ["debug"], 1, [1], ["float32"], 2
        flags.texts = []  # `language --quick` completes some
    answers = [row for name in flags.policies for row in _chunks(name, flags)]
    texts = [row for name in flags.texts for row in _completions(name, flags)]
    notes = ["10 denoising steps; from observations in the host's memory to actions there, one call after another."]
    greedy = ["Greedy; the prompts' prefill is part of the time."]
    return [
        Table("Action chunks on this device", CHUNKS, answers, notes),
        Table("Completions on this device", TOKENS, texts, greedy),
    ]


def _plan() -> Plan:
    return Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated")


def _params(model: Any, dtype: str) -> Mapping[str, Any]:
    """Random parameters, made on the device in their type."""

    @functools.partial(jax.jit, static_argnums=0)
    def made(kind: str) -> Any:
        params = module_params(model.build(nnx.Rngs(0)))
        return {path: leaf.astype(kind) if leaf.dtype == jnp.float32 else leaf for path, leaf in params.items()}

    return made(dtype)


def _read_ms(params: Mapping[str, Any]) -> float | None:
    bandwidth = 1e9 * kind_of(jax.devices()[0].device_kind).memory_gb_s
    return 1e3 * sum(leaf.nbytes for leaf in params.values()) / bandwidth if bandwidth else None


def _chunks(name: str, flags: argparse.Namespace) -> list[list[Cell]]:
    experiment = parse_experiment(name, ["--exp-name", "benchmark"])
    model: Any = experiment.model
    rows: list[list[Cell]] = []
    for dtype in flags.dtypes:
        params = _params(model, dtype)
        sampler = Sampler(
            model=model,
            objective=experiment.objective,
            params=params,
            plan=_plan(),
            cameras=OPENPI_SLOTS[: flags.cameras],
            seed=0,
            num_steps=10,
            batch_sizes=tuple(flags.batch_sizes),
            text_lengths=(TEXT_LENGTH,),
        )
        blank = {key: np.ones(shape, kind) for key, (shape, kind) in sampler.row_spec().items()}
        for size in sampler.sizes:
            samples = []
            for _ in range(flags.calls + 2):
                began = time.perf_counter()
                sampler.sample([blank] * size, list(range(size)))
                samples.append(time.perf_counter() - began)
            spread = Spread(tuple(samples[2:]))  # the first one compiles
            compiled = sampler._programs[size, TEXT_LENGTH, False]
            found = run_account(compiled, this_machine(total_bytes(jax.devices()[0])), 0.0)
            bound = found.bound_s if found else None
            rows.append(
                [
                    *(name, flags.cameras, dtype, size, spread.map(lambda seconds: 1e3 * seconds)),
                    *((1e3 * bound, spread.median / bound) if bound else (None, None)),
                    _read_ms(params),
                ]
            )
            print(" | ".join(str(cell) for cell in rows[-1]), flush=True)
        del params, sampler
    return rows


def _completions(name: str, flags: argparse.Namespace) -> list[list[Cell]]:
    experiment = parse_experiment(name, ["--exp-name", "benchmark"])
    model: Any = experiment.model
    graphdef = nnx.split(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))[0]
    params = _params(model, "bfloat16")
    num_prompt, num_new = 64, 192
    found: list[list[Cell]] = []
    for rows in flags.rows:
        devices = Devices(_plan(), model.compute.dtype, graphdef)
        length = num_prompt + num_new
        with jax.set_mesh(devices.plan.real_mesh):
            generator = Generator(graphdef, params, devices, num_rows=rows, max_length=length, end_ids=(), chunk=32)
            vocab_size = model.sizes.vocab_size
            prompts = np.random.default_rng(0).integers(3, vocab_size, (rows, num_prompt)).tolist()
            settings = SamplingSettings(temperature=0.0, max_new_tokens=num_new)
            requests = [GenerationRequest(id=n, prompt=one, settings=settings) for n, one in enumerate(prompts)]
            samples = []
            for _ in range(4):
                began = time.perf_counter()
                completed = sum(len(one.tokens) for one in generator.complete(requests))
                samples.append(time.perf_counter() - began)
        spread = Spread(tuple(samples[1:]))
        per_token, read = 1e3 * spread.median / num_new, _read_ms(params)
        assert completed == rows * num_new
        rates = Spread(tuple(completed / seconds for seconds in spread.samples))
        found.append([name, rows, num_prompt, num_new, rates, per_token, read, per_token / read if read else None])
        print(" | ".join(str(cell) for cell in found[-1]), flush=True)
    return found
