"""`python -m benchmarks [NAME ...]`: run the benchmarks and print their tables. Read next: `step_time.py`, `report.py`.

Heavy imports are inside functions, because data workers are spawned processes that import this module again.
"""

import importlib
import itertools
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = {
    "step_time": "training steps with 3, 2 and 1 present cameras, against our own step doing openpi's work",
    "traffic": "bytes that the compiled step sends between devices, against each strategy's formula; compiles only",
    "gpu_compile": "memory and bound of full-size steps by XLA's GPU compiler; needs jax's CUDA plugin, but no GPU",
    "gpu_steps": "full-size steps on the local GPU: time beside the bound, memory beside the forecast",
    "gpu_serving": "full-size models answering on the local GPU: action chunks and completions",
    "feed": "loader samples/s with 0, 1 and 2 worker processes, from RLDS and LeRobot data (against its own loader)",
    "weights": "memory and time in which processes load their shares of start weights",
    "checkpoint": "how long a save blocks training, synchronous and asynchronous",
    "tabletop": "control steps/s of the embedded environment by the number of scenes at once",
    "tabletop_dp": "a diffusion policy from images: success rate in held-out initial states, during training",
    "demo": "the same for a small pi0 with prompts (`make demo`)",
    "metaworld": "success and loss of policies from states on five Meta-World tasks, against CPU time",
    "rl": "success before and after learning from own rollouts: robots and texts, three seeds, with intervals",
    "rl_speed": "RL of robots: control steps per CPU second, where the time goes, overlap, memory",
    "real_time_delay": "success against the delay of action chunks: not joined, joined by guidance, and as trained",
    "language": "a language model on the arithmetic task: supervised, reward model, DPO; problems solved",
    "language_speed": "completions and SFT steps of language models, beside torch + transformers where installed",
    "smollm2": "SmolLM2-135M-Instruct of the package index: asked, trained for 20 steps, written, read by transformers",
    "serving": "the policy server under openpi's own client: latency, throughput, and 1,000 bad messages",
    "serving_texts": "the text server under OpenAI's client: tokens/s, latency, and 1,000 hostile requests",
    "startup": "seconds from the command to the first step with 1, 2 and 4 processes, part by part",
    "long_run": "memory, descriptors, threads and files of processes during a run of 100,000 small steps",
    "vla_runs": "all ways to train a VLA, at small size: 2 processes x 2 devices under zero3, resumed on 1 device",
    "scale": "64 to 1,024 processes on this machine: seconds to meet, agree, save, restore, notice a loss, meet again",
    "fault_drill": "random faults during a run: the seconds and steps each costs, and whether the result is the same",
    "drill.under_slurm": "the same under Slurm's real daemons: their own faults, requeueing, the time limit",
}

USAGE_TEXT = """\
usage: python -m benchmarks [NAME ...] [--quick] [--json FILE] [--record FILE] [flags of the one NAME]

Measure speed, all or the named ones, and print tables of medians (lowest to highest):
{names}

  --quick       a few repetitions at reduced size, only to check that everything runs
  --json FILE   also write every sample to FILE
  --record FILE also write the tables to FILE, as the docs show them (benchmarks/results/NAME.md)
  NAME --help   flags of one benchmark, such as step_time --experiment pi0_bridge_traj --batch-size 32
"""


def main(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    flags = list(argv[len(names) :])
    if not names and any(flag in ("-h", "--help") for flag in flags):
        print(USAGE_TEXT.format(names="\n".join(f"  {name:<14}  {text}" for name, text in BENCHMARKS.items())), end="")
        return 0
    from openpi_train.runtime.exits import UsageError

    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise UsageError(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    json_file, record = _take_file(flags, "--json"), _take_file(flags, "--record")
    if len(names) != 1 and set(flags) - {"--quick"}:
        raise UsageError(
            f"{' '.join(flags)}: flags beside --quick, --json and --record need exactly one benchmark's name"
        )
    if {"-h", "--help"} & set(flags):
        importlib.import_module(f"benchmarks.{names[0]}").parse(flags)
    _start()
    from benchmarks import report

    lacking = {} if "--quick" in flags else {name: lack for name in names or BENCHMARKS if (lack := _lack(name))}
    if names and lacking:
        raise UsageError("; ".join(f"{name} needs {lack}" for name, lack in lacking.items()))
    for name, lack in lacking.items():
        print(f"{name} is left out: it needs {lack}", file=sys.stderr)
    facts, warning, tables = report.provenance(argv), report.busy(), []
    for name in names or [one for one in BENCHMARKS if one not in lacking]:
        for table in importlib.import_module(f"benchmarks.{name}").main(flags):
            tables.append(table)
            print(f"\n{table.markdown()}", flush=True)
    print("\n".join(f"{name}: {value}  " for name, value in facts.items()))
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    if json_file:
        report.write_json(json_file, facts, tables)
    if record:
        report.write_record(record, facts, tables)
    for failure in (failures := [table.failure for table in tables if table.failure]):
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _lack(name: str) -> str:
    """What a benchmark needs at full size and this machine does not have; empty for nothing."""
    if name == "gpu_compile":
        from openpi_train.planning.gpu import plugin

        return "" if plugin.is_installed() else "jax's CUDA plugin: make gpu-compile makes an environment with it"
    import jax

    if name not in ("gpu_steps", "gpu_serving") or jax.default_backend() != "cpu":
        return ""
    return "a GPU, and jax finds none here; --quick only checks that it runs"


def _take_file(flags: list[str], option: str) -> Path | None:
    """Remove `--json FILE`, or another such option, from `flags`."""
    if option not in flags:
        return None
    place = flags.index(option)
    if place + 1 == len(flags):
        from openpi_train.runtime.exits import UsageError

        raise UsageError(f"{option} needs the name of a file")
    return Path([flags.pop(place), flags.pop(place)][1])


def _start() -> None:
    """Start jax as a training run of one process does: same environment, same compilation cache."""
    from openpi_train.runtime import logs, session
    from openpi_train.runtime.world import WorldFlags, find_world

    logs.configure(0)
    session.start(find_world(WorldFlags(), {}))
    # A benchmark has only one phase, so its lines need no phase and duration.
    logging.getLogger("openpi_train.runtime.watchdog").setLevel(logging.WARNING)
    # jax treats SIGTERM as a preemption notice, which nothing here would handle.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    from openpi_train.runtime.exits import run_guarded

    run_guarded(lambda: main(sys.argv[1:]))
