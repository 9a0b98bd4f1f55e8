"""Steps at full size compiled by XLA's GPU compiler, on a machine without a GPU: memory and the bound of a step.

Needs jax's CUDA plugin (`make gpu-compile` makes an environment with it). Each step is compiled in a process of its own
by the verb `compile`. Nothing is run, and no figure is a speed. Read next: `planning/gpu/step_account.py`.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks import gpu_openpi
from benchmarks.report import ROOT, Cell, Table
from openpi_train.parallel.remat import Remat
from openpi_train.planning.gpu import plugin
from openpi_train.planning.memory import Memory
from openpi_train.runtime.device_kinds import GIB
from openpi_train.types import OPENPI_SLOTS

COLUMNS = ("experiment", "flags", "devices", "compile s", "GiB by the GPU's compiler", "GiB forecast")
COLUMNS += ("forecast / compiled", "bound ms", "of it products ms", "GB moved", "kernels", "GB sent", "waited for ms")


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to compile: an experiment, its flags as on the command line, XLA's own flags, and the devices."""

    experiment: str
    flags: str = ""
    devices: int = 8
    hosts: int = 1
    xla: str = ""
    # Ours, ours doing openpi's work (`reference.py`), or openpi's own (`gpu_openpi.py`).
    whose: Literal["ours", "reference", "openpi"] = "ours"


# Sizes of Qwen2.5-7B, as in its config.json.
_QWEN_7B = " ".join(
    f"--model.policy.sizes.{flag}"
    for flag in (
        "vocab-size 152064",
        "width 3584",
        "depth 28",
        "mlp-dim 18944",
        "num-heads 28",
        "num-kv-heads 4",
        "head-dim 128",
        "no-tied",
    )
)
_QWEN_7B_ALONE = _QWEN_7B.replace("policy.", "")
# After --xla_gpu_.
XLA_FLAGS = (
    "enable_latency_hiding_scheduler=false",
    "enable_analytical_sol_latency_estimator=true",
    "enable_analytical_sol_latency_estimator=false",
    "enable_pipelined_reduce_scatter=false",
    "enable_pipelined_all_gather=true",
    "enable_while_loop_double_buffering=true",
    "all_gather_combine_threshold_bytes=268435456 --xla_gpu_reduce_scatter_combine_threshold_bytes=268435456",
)
_ZERO1, _ZERO3 = "--sharding.strategy zero1", "--sharding.strategy zero3"
_HSDP, _BFLOAT16 = "--sharding.strategy hsdp", "--sharding.reduce-dtype bfloat16"
_PI0 = "pi0_bridge_traj"
_OTHER_POLICIES = ("pusht_dp", "robot_dp_14", "act_aloha_sim", "smolvla_bridge")
SETS = {
    # Full pi0: attention by XLA and by cuDNN, with one and with three cameras.
    "attention": [
        Case(
            _PI0,
            f"{_ZERO3} --model.remat {remat} --model.attention {kind} --cameras {','.join(OPENPI_SLOTS[:cameras])}",
        )
        for cameras, remat, kind in itertools.product((1, 3), ("full", "dots"), ("xla", "cudnn"))
    ],
    # Every strategy and policy of full pi0.
    "strategies": [
        *(
            Case(_PI0, f"--sharding.strategy {strategy} --model.remat {remat}")
            for strategy, remat in itertools.product(("replicated", "zero1", "zero2", "zero3"), get_args(Remat))
        ),
    ],
    # Layers in a loop, and unrolled.
    "layers": [
        Case(name, f"{flags} {layers}")
        for name, flags in (
            (_PI0, f"{_ZERO3} --model.remat dots --model.attention cudnn"),
            *((_PI0, f"{_ZERO3} --model.remat {remat} --model.attention cudnn") for remat in ("attention", "full")),
            (_PI0, f"{_ZERO3} --model.remat dots --model.attention cudnn --cameras {','.join(OPENPI_SLOTS)}"),
            (_PI0, f"{_ZERO3} --model.remat dots --model.attention cudnn --batch-size 32"),
            *((_PI0, f"{_ZERO1} --model.remat dots --model.attention cudnn --batch-size {rows}") for rows in (256, 32)),
            *(
                ("gsm8k_sft_llama32_1b", f"--sharding.strategy {strategy} --model.remat dots --model.attention cudnn")
                for strategy in ("zero1", "zero3", "zero3 --batch-size 256")
            ),
            ("gsm8k_sft_qwen25_05b", f"{_ZERO3} --model.remat attention {_QWEN_7B_ALONE} --model.attention cudnn"),
            *(
                (
                    "gsm8k_grpo_qwen25_05b",
                    f"{_ZERO3} --model.policy.remat attention {_QWEN_7B} --model.policy.attention {kind}",
                )
                for kind in ("xla", "cudnn")
            ),
        )
        for layers in ("--unroll-layers False", "--unroll-layers True")
    ],
    # The same of other models and other ways to train.
    "loops": [
        Case(name, f"{flags} {layers}", devices, hosts)
        for name, flags, devices, hosts in (
            *(
                (f"{_PI0}_lora", f"{strategy} --model.remat dots --model.attention cudnn --batch-size 256", 8, 1)
                for strategy in (_ZERO1, _ZERO3)
            ),
            (f"{_PI0}_lora", "--model.remat full --batch-size 32", 1, 1),
            ("pi05_bridge", f"{_ZERO3} --model.remat dots --model.attention cudnn", 8, 1),
            *((name, f"{_ZERO3} --model.remat dots", 8, 1) for name in ("pi0_fast_bridge", "paligemma_flow")),
            *(("smolvla_bridge", strategy, 8, 1) for strategy in (_ZERO1, _ZERO3)),
            *((name, "", 1, 1) for name in ("smolvla_bridge", "act_aloha_sim")),
            ("gsm8k_sft_llama32_1b", "--sharding.strategy zero2 --model.remat dots", 8, 1),
            ("gsm8k_sft_llama32_1b", "--model.remat dots --model.attention cudnn --batch-size 16", 1, 1),
            *((f"gsm8k_sft_{name}", f"{_ZERO1} --model.remat dots", 8, 1) for name in ("lora_llama32_1b", "gemma3_1b")),
            ("gsm8k_dpo_llama32_1b", f"{_ZERO1} --model.policy.remat dots", 8, 1),
            (_PI0, f"{_ZERO3} --model.remat full --grad-accum 4", 8, 1),
            (_PI0, f"{_HSDP} --model.remat full", 16, 2),
            (_PI0, f"{_ZERO3} --model.remat attention --sharding.tensor-devices 2", 8, 1),
        )
        for layers in ("--unroll-layers False", "--unroll-layers True")
    ],
    # openpi's work, and beside it ours. openpi always pads to three cameras and 48 tokens; 24 tokens hold the prompts
    # of BridgeData's sample. The last four steps have 4 rows a device.
    "openpi": [
        Case(_PI0, f"{_ZERO3} --model.remat full", whose="reference"),
        *(
            Case(
                _PI0,
                f"{_ZERO1} {_BFLOAT16} --model.remat {remat} --model.attention cudnn "
                f"--model.max-token-len {tokens} {more}",
            )
            for remat, more in (
                ("products", ""),
                ("dots", ""),
                ("dots", f"--cameras {','.join(OPENPI_SLOTS)}"),
                ("products", "--batch-size 32"),
                ("dots", "--batch-size 32"),
            )
            for tokens in (48, 24)
        ),
    ],
    # XLA's flags for communication: 4 rows a device on one host, 32 rows on one, 2 and 4 hosts. And what is sent in
    # bfloat16, or by hsdp.
    "flags": [
        Case(_PI0, f"{way} --model.remat dots --model.attention cudnn {rows}", devices, hosts, xla)
        for rows, devices, hosts, ways in (
            ("--batch-size 32", 8, 1, (_ZERO3, f"{_ZERO3} {_BFLOAT16}")),
            ("--batch-size 256", 8, 1, (_ZERO3, f"{_ZERO3} {_BFLOAT16}")),
            ("--batch-size 512", 16, 2, (_ZERO3, f"{_ZERO3} {_BFLOAT16}", _HSDP, f"{_HSDP} {_BFLOAT16}")),
            ("--batch-size 1024", 32, 4, (_ZERO3,)),
        )
        for way in ways
        for xla in (("", *(f"--xla_gpu_{flag}" for flag in XLA_FLAGS)) if way == _ZERO3 else ("",))
    ],
    # What samples action chunks, for one observation; not tokens, whose action tokenizer is a file that no set has.
    "sampling": [
        Case(name, "--program sampling --batch-size 1", devices=1)
        for name in (_PI0, "pi05_bridge", "paligemma_flow", *_OTHER_POLICIES)
    ],
    # RL at full size: learning, acting (texts: reading prompts, making tokens). And evaluations' programs.
    "programs": [
        Case("pi0_tabletop_rloo", f"{_ZERO3} --model.remat full"),
        Case("pi0_tabletop_rloo", f"{_ZERO3} --program acting"),
        Case("gsm8k_grpo_qwen25_05b", f"{_ZERO3} --model.policy.remat attention {_QWEN_7B}"),
        *(Case("gsm8k_grpo_qwen25_05b", f"--program {one} {_QWEN_7B}") for one in ("reading", "decoding")),
        *(Case("gsm8k_sft_llama32_1b", f"--program {one}") for one in ("reading", "decoding", "evaluation")),
        *(Case(name, f"{_ZERO3} --program evaluation") for name in (_PI0, "pi0_fast_bridge", "robot_dp_14")),
    ],
    # Every family of models and every way to train them.
    "families": [
        Case(_PI0, f"{_HSDP} --model.remat full", devices=16, hosts=2),
        Case(_PI0, f"{_ZERO3} --model.remat full --sharding.tensor-devices 2"),
        Case(_PI0, f"{_ZERO3} --model.remat full --grad-accum 4"),
        Case(_PI0, f"{_ZERO3} --model.remat full --model.dtype float16"),
        Case("pi0_bridge_traj_lora", "--model.remat full --batch-size 32", devices=1),
        *(
            Case(name, f"{_ZERO3} --model.remat full")
            for name in (
                "pi05_bridge",
                "pi05_bridge_insulated",
                "pi0_fast_bridge",
                "paligemma_flow",
                "paligemma_tokens",
                "pi05_bridge_lora",
                "pi0_fast_bridge_lora",
                "paligemma_flow_lora",
                "paligemma_tokens_lora",
                "paligemma_flow_frozen_tower",
            )
        ),
        # Adapters of whole weights: what is recommended for 8 H100, and policies that store less.
        *(
            Case(name, f"--sharding.strategy replicated --model.remat {remat}")
            for name, remats in (
                ("pi0_bridge_traj_lora", ("none", "products", "full")),
                ("paligemma_flow_lora", ("none", "products")),
                ("gsm8k_sft_lora_llama32_1b", ("none", "dots")),
            )
            for remat in remats
        ),
        Case("paligemma_flow_head", "--model.remat full", devices=1),
        Case("pusht_dp"),
        Case("robot_dp_14"),
        Case("robot_dp_14", "--model.dtype bfloat16"),
        Case("robot_dp_14", devices=1),
        Case("tabletop_dp", devices=1),
        Case("act_aloha_sim", devices=1),
        Case("smolvla_bridge", devices=1),
        Case("smolvla_bridge", _ZERO1),
        *(Case(f"gsm8k_{kind}_llama32_1b", f"{_ZERO1} --model.remat dots") for kind in ("sft", "sft_lora", "dpo_lora")),
        Case("gsm8k_dpo_llama32_1b", f"{_ZERO1} --model.policy.remat dots"),
        Case("gsm8k_kto_llama32_1b", f"{_ZERO1} --model.policy.remat dots"),
        Case("gsm8k_reward_llama32_1b", f"{_ZERO1} --model.language.remat dots"),
        Case("gsm8k_sft_gemma3_1b", f"{_ZERO1} --model.remat dots"),
        Case("arithmetic_grpo", devices=1),
        Case("arithmetic_ppo", devices=1),
        Case("tabletop_few_rloo", devices=1),
        Case("tabletop_dp_rloo", devices=1),
    ],
    # On devices that have little more memory than the forecast: XLA's scheduler gathers early what else finds room.
    "tight": [
        *(
            Case(name, f"{_ZERO3} --model.remat full {memory}".strip())
            for name, gib in (("pi05_bridge_lora", 2.7), ("paligemma_flow_lora", 2.6), ("paligemma_tokens_lora", 1.8))
            for memory in ("", f"--device-gib {gib}")
        ),
        *(
            Case("pi0_bridge_traj_lora", f"{_ZERO3} --model.remat full --batch-size 8 {memory}".strip())
            for memory in ("", "--device-gib 2.3")
        ),
        *(Case("tabletop_dp_rloo", memory, devices=1) for memory in ("", "--device-gib 0.55")),
    ],
}
OPENPIS_OWN = Case(_PI0, whose="openpi")
_SAID = {"reference": ", openpi's work", "openpi": "openpi's own step"}
QUICK = [Case("debug", "--model.remat full", devices=1)]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks gpu_compile", description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=tuple(SETS), default=["attention"], help="which steps to compile")
    parser.add_argument("--device-kind", default="h100")
    parser.add_argument("--processes", type=int, default=1, help="compile so many steps at a time (5 GB each)")
    text = (
        "a checkout of openpi, whose own step begins the set openpi; its packages are installed into the user's cache"
    )
    parser.add_argument("--openpi", type=Path, metavar="CHECKOUT", help=f"{text} (4 GB)")
    parser.add_argument("--peer-python", type=Path, help="Python of an environment that has openpi's packages")
    parser.add_argument("--quick", action="store_true", help="only check that it runs")
    args = parser.parse_args(argv)
    if args.processes < 1:
        parser.error(f"--processes {args.processes} must be at least 1")
    if args.openpi and not gpu_openpi.is_checkout(args.openpi):
        parser.error(f"{args.openpi} has no scripts/train.py: --openpi takes a checkout of openpi")
    if args.openpi and (args.quick or "openpi" not in args.sets):
        parser.error("--openpi is for the set openpi: add --sets openpi")
    if args.peer_python and not args.openpi:
        parser.error("--peer-python is for --openpi")
    return args


def main(argv: Sequence[str]) -> list[Table]:
    """Compile and tabulate; the default is full pi0 on 8 H100 with either attention."""
    args = parse(argv)
    named = {"quick": QUICK} if args.quick else {name: SETS[name] for name in args.sets}
    tables = []
    for name, cases in named.items():
        cases = [OPENPIS_OWN, *cases] if args.openpi and name == "openpi" else cases
        title = f"Compiled for {args.device_kind}: {name}"
        if not plugin.is_installed():
            note = "not compiled: jax's CUDA plugin is not installed; see make gpu-compile"
            tables.append(Table(title, COLUMNS, [], [note]))
            continue
        rows: list[list[Cell]] = []
        problems: list[str] = []
        for case, (found, problem) in zip(cases, _all_compiled(cases, args), strict=True):
            devices = f"{case.devices} on {case.hosts}" if case.hosts > 1 else case.devices
            said = f"{case.flags} {case.xla}".strip() + _SAID.get(case.whose, "")
            for sizes in (_QWEN_7B, _QWEN_7B_ALONE):
                said = said.replace(sizes, "(sizes of Qwen2.5-7B)")
            told: list[Cell] = [case.experiment, said, devices]
            rows.append([*told, *(_figures(found) if found else [None] * (len(COLUMNS) - len(told)))])
            problems += [f"{case.experiment} {case.flags}: {problem}"] if problem else []
            print(" | ".join("-" if cell is None else str(cell) for cell in rows[-1]), file=sys.stderr, flush=True)
        notes = ["Bounds by the compiled program on one device, not measured.", *problems]
        tables.append(Table(title, COLUMNS, rows, notes, "; ".join(problems)))
    return tables


def _all_compiled(cases: Sequence[Case], args: argparse.Namespace) -> Iterator[tuple[dict[str, Any] | None, str]]:
    """What the verb `compile` says of each step, in order, as soon as it is known."""
    with concurrent.futures.ThreadPoolExecutor(args.processes) as pool:
        yield from pool.map(lambda case: _compiled(case, args), cases)


def _compiled(case: Case, args: argparse.Namespace) -> tuple[dict[str, Any] | None, str]:
    """What the verb `compile` says of one step, or why it cannot be compiled."""
    if case.whose == "openpi":
        return gpu_openpi.compiled(args.openpi, args.peer_python, args.device_kind, case.devices)
    program = ("benchmarks.gpu_reference",) if case.whose == "reference" else ("openpi_train", "compile")
    command = [sys.executable, "-m", *program, case.experiment, "--device-kind", args.device_kind, "--json"]
    command += ["--devices", str(case.devices), "--hosts", str(case.hosts), *case.flags.split()]
    environ = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {case.xla}".strip()}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if any(map(str.isalpha, line))]
        return None, (said or [f"code {done.returncode}"])[-1][:300]
    return json.loads(done.stdout), ""


def _figures(found: dict[str, Any]) -> Iterator[Cell]:
    account, forecast = found["account"], _forecast(found)
    compiled = account["peak_bytes"] / GIB
    yield from (account["compile_s"], compiled, forecast, forecast / compiled if forecast else None)
    yield from (1e3 * account["bound_s"], 1e3 * account["matmul_s"], account["moved_bytes"] / 1e9, account["kernels"])
    yield from (sum(account["sent_bytes"].values()) / 1e9, 1e3 * account["exposed_s"])


def _forecast(found: dict[str, Any]) -> float | None:
    """GiB; None of a program that has no forecast."""
    if "forecast" not in found:
        return None
    memory = found["forecast"]["bytes_per_device"]
    # Without what a run needs to complete texts, or to act, between its steps.
    fields = {field.name: memory[field.name] for field in dataclasses.fields(Memory)}
    return (memory["state"] + Memory(**fields).step) / GIB
