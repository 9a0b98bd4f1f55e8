"""The command line: a first word that is a verb or an experiment. Read next: `registry.py`, `training/start.py`.

Nothing heavy is imported before the arguments are understood, so that every verb's `--help` is quick.
"""

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Sequence

from openpi_train.runtime import logs
from openpi_train.runtime.exits import INTERRUPTED, USAGE, DataError, RunError, UsageError, reported_as, run_guarded
from openpi_train.runtime.world import WorldFlags, find_world

logger = logging.getLogger(__name__)

USAGE_TEXT = """\
usage: python -m openpi_train <experiment> --exp-name NAME [--any.field value ...]
       python -m openpi_train my_runs.py:NAME --exp-name NAME
       python -m openpi_train <verb> ...

Train an experiment, or run one of the verbs:
{verbs}

`python -m openpi_train list` names the experiments; `<experiment> --help` explains every field.
"""


def run(argv: Sequence[str]) -> int:
    """Run one command line. Returns the exit code (`runtime/exits.py` says what each means)."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage(), end="")
        return 0 if argv else USAGE
    verb, rest = argv[0], list(argv[1:])
    if verb in VERBS:
        return _reported(lambda: VERBS[verb](rest))
    return _reported(lambda: train(verb, rest))


def _reported(command: Callable[[], int]) -> int:
    """The command's exit code; an error meant for the user is shown as its message alone."""
    try:
        return command()
    except (RunError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, RunError) else USAGE
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED


def train(name: str, argv: Sequence[str]) -> int:
    """Train the experiment `name` (or `file.py:name`). Leaves through the guard, so that no peer waits for us."""
    process, rest = _process_flags(argv)
    if not {"-h", "--help"} & set(rest):  # process 0 says which experiment a dataset chooses, what DeepSpeed's file is
        logs.configure(find_world(process.world, os.environ).process_index)
    experiment = parse_experiment(name, rest)
    from openpi_train.training import prepare, start

    if process.dry_run:
        return prepare.dry_run(experiment, process.world, process.devices_per_process)
    run_guarded(lambda: start.main(experiment, process.world, process.devices_per_process))


@dataclasses.dataclass(frozen=True)
class ProcessFlags:
    """Flags that say which process of the run this is; no part of the experiment."""

    world: WorldFlags
    devices_per_process: int | None
    dry_run: bool


def _process_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    group = parser.add_argument_group(
        "process flags (detected from RANK.., Slurm, Open MPI or Kubernetes where not given; see docs/launching.md)"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--num-processes", type=int, help="processes of the run")
    group.add_argument("--process-id", type=int, help="this process, from 0")
    group.add_argument("--devices-per-process", type=_count, metavar="N", help="CPU devices to make in this process")
    group.add_argument("--dry-run", action="store_true", help="print what the run needs, and start nothing")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _process_flags(argv: Sequence[str]) -> tuple[ProcessFlags, list[str]]:
    flags, rest = _process_parser().parse_known_args(list(argv))
    world = WorldFlags(coordinator=flags.coordinator, num_processes=flags.num_processes, process_id=flags.process_id)
    return ProcessFlags(world, flags.devices_per_process, flags.dry_run), rest


def _base_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    group = parser.add_argument_group("flags for many fields at once (a field that is given too wins)")
    group.add_argument("--deepspeed", metavar="FILE", help="a DeepSpeed JSON config: its equivalent is shown and used")
    group.add_argument("--optimizer", metavar="NAME", help="adamw, adafactor, lion, muon or sgd, whose fields follow")
    group.add_argument("--dataset", metavar="PATH", help="train on this one; its format is detected")
    return parser


def parse_experiment(name: str, argv: Sequence[str]):
    """The experiment of this name with the flags of `argv` applied.

    Exits with code 2 on an unknown flag, naming the closest ones; raises UnknownName for an unknown experiment.
    """
    from openpi_train import registry

    if ".py" not in name and name not in registry.entries():
        raise UsageError(registry.unknown(name, [*registry.entries(), *VERBS], "experiment or verb"))
    import tyro

    from openpi_train.choice import moved, on_dataset, source_of
    from openpi_train.experiment import Experiment, of_one_length
    from openpi_train.optim import named_optimizer

    wants_help = any(word in ("-h", "--help") for word in argv)
    if wants_help:
        print(_process_parser().format_help() + _base_parser().format_help())
    base, argv = _base_parser().parse_known_args(argv)
    source = None if base.dataset is None else source_of(base.dataset)
    default = registry.load(name, lambda own: source or moved(own, argv), any_dims=wants_help)
    if base.deepspeed is not None:
        given = argv if base.optimizer is None else [*argv, "--optimizer", base.optimizer]
        base, argv = _base_parser().parse_known_args(_from_deepspeed(base.deepspeed, given))
    if base.optimizer is not None:
        default = dataclasses.replace(default, optimizer=named_optimizer(base.optimizer, default.optimizer))
    if source is not None:
        default = on_dataset(default, source)
    return tyro.cli(
        Experiment,
        default=of_one_length(default, argv),
        args=list(argv),
        prog=f"python -m openpi_train {name}",
        # A blank line between lines: the help would run them together.
        description=registry.description(name).replace("\n", "\n\n"),
    )


def _from_deepspeed(file: str, given: Sequence[str]) -> list[str]:
    """The given flags behind those that a DeepSpeed config stands for, which are logged."""
    from openpi_train.interop.deepspeed import translate_file

    translation = translate_file(file)
    words = translation.before(given)
    logger.info("%s, key by key:\n%s", file, translation.report())
    return words


def list_experiments(argv: Sequence[str]) -> int:
    """`list`: every experiment with the first line of its description."""
    argparse.ArgumentParser(prog="python -m openpi_train list", description="Name every experiment.").parse_args(argv)
    from openpi_train import registry

    found = registry.entries()
    width = max(map(len, found), default=0)
    for name, entry in found.items():
        print(f"{name:<{width}}  {entry.summary}")
    return 0


def stats(argv: Sequence[str]) -> int:
    """`stats <experiment>`: compute the norm stats and print a table per dimension."""
    parser = argparse.ArgumentParser(
        prog="python -m openpi_train stats",
        description="Norm statistics of an experiment's data, per dimension, written where training finds them. "
        "Columns only: no image is decoded.",
        epilog="Any field of the experiment may be set as in training: --data.datasets.0.source.path DIR",
    )
    parser.add_argument("experiment", help="a name from `list`, or file.py:name")
    known, rest = parser.parse_known_args(argv)
    experiment = parse_experiment(known.experiment, ["--exp-name", "stats", *rest])
    from openpi_train.tools.stats import stats_table

    with reported_as(DataError):
        print(stats_table(experiment.demonstrations, shape=experiment.policy.window, assets_dir=experiment.assets_dir))
    return 0


def data(argv: Sequence[str]) -> int:
    """`data prepare|index|repack|merge|convert|fit-fast`: make, index or join datasets, fit a FAST tokenizer to one."""
    from openpi_train.tools.data import main

    return main(argv, parse_experiment)


def launch(argv: Sequence[str]) -> int:
    """`launch local|manual`: start the processes of a run."""
    from openpi_train.launch.forms import main

    return main(list(argv))


def convert(argv: Sequence[str]) -> int:
    """`convert SOURCE TARGET|deepspeed`: a checkpoint of one form into another; a DeepSpeed config as flags."""
    if argv and argv[0] == "deepspeed":
        return convert_deepspeed(argv[1:])
    from openpi_train.tools.convert_flags import main

    return main(argv, parse_experiment)


def convert_deepspeed(argv: Sequence[str]) -> int:
    """`convert deepspeed <file>`: every key of a DeepSpeed config, and the flags that it stands for."""
    parser = argparse.ArgumentParser(
        prog="python -m openpi_train convert deepspeed",
        description="Show what every key of a DeepSpeed JSON config is here: a flag, or the reason why there is none. "
        "Batch sizes and accumulation are checked against each other.",
        epilog="A run takes the file as it is: python -m openpi_train debug --exp-name x --deepspeed FILE",
    )
    parser.add_argument("file", help="the JSON file")
    parser.add_argument("--devices", type=_count, metavar="N", help="devices of the run, to be checked too")
    known = parser.parse_args(argv)
    from openpi_train.interop.deepspeed import translate_file

    print(translate_file(known.file, known.devices).report())
    return 0


def doctor(argv: Sequence[str]) -> int:
    """`doctor [experiment]`: look at this machine, its peers and what an experiment needs; say what to do."""
    parser = argparse.ArgumentParser(
        prog="python -m openpi_train doctor",
        description="Look at everything that a run needs; a line per thing: ok, warn or fail, and what to do. The exit "
        "code is 2 where something failed. With `launch ... -- doctor` all processes of a run look together.",
        epilog="Any field of the experiment may be set as in training: doctor debug --checkpoint-base-dir DIR",
    )
    parser.add_argument("experiment", nargs="?", help="a name from `list`, or file.py:name")
    parser.add_argument(
        "--hosts", type=lambda text: text.split(","), default=[], metavar="A,B:PORT", help="also reach these"
    )
    parser.add_argument("--port", type=int, help="coordinator's port, which must be free with the next one (29500)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    if any(word in ("-h", "--help") for word in argv):
        print(_process_parser().format_help())
    process, rest = _process_flags(argv)
    known, rest = parser.parse_known_args(rest)
    if process.dry_run:
        parser.error("--dry-run: doctor trains nothing; leave it out")
    if rest and not known.experiment:
        parser.error(f"{rest[0]} is a field of an experiment: name the experiment first")
    experiment = parse_experiment(known.experiment, ["--exp-name", "doctor", *rest]) if known.experiment else None
    from openpi_train.tools.doctor import main

    run_guarded(
        lambda: main(
            experiment,
            process.world,
            devices_per_process=process.devices_per_process,
            hosts=known.hosts,
            port=known.port,
            as_text=not known.json,
        )
    )


def evaluate(argv: Sequence[str]) -> int:
    """`eval RUN|CHECKPOINT`: a trained policy on held-out episodes and in an environment: errors, successes, videos."""
    from openpi_train.tools.evaluate_flags import evaluate

    return evaluate(argv, _process_parser(), _process_flags)


def report(argv: Sequence[str]) -> int:
    """`report RUN`: one HTML file about a run: curves, time, memory, data, evaluations with videos."""
    from openpi_train.tools.evaluate_flags import report

    return report(argv)


def plan(argv: Sequence[str]) -> int:
    """`plan <experiment>`: memory, traffic and speed on devices that are not here, per strategy; what to take."""
    parser = argparse.ArgumentParser(
        prog="python -m openpi_train plan",
        description="What an experiment would need and how fast it would be on other devices, for every strategy and "
        "rematerialisation policy, with all that is assumed. Nothing is allocated. Exit code 2: nothing fits.",
        epilog="Any field of the experiment may be set as in training: plan debug --devices 8 --device-kind h100 "
        "--batch-size 64. A strategy that is given is the only one.",
        allow_abbrev=False,
    )
    parser.add_argument("experiment", help="a name from `list`, or file.py:name")
    parser.add_argument("--devices", type=_count, required=True, metavar="N", help="devices of the run, over all hosts")
    parser.add_argument(
        "--device-kind", required=True, metavar="KIND", help="h200, h100, a100, a100-40gb, rtx4090, ..."
    )
    parser.add_argument(
        "--hosts", type=_count, default=1, metavar="N", help="hosts, with equally many devices each (1)"
    )
    parser.add_argument("--device-gib", type=float, metavar="GIB", help="memory of a device (default: the kind's)")
    parser.add_argument("--network-gb-s", type=float, default=50.0, help="GB/s out of one host (50: one 400 Gb/s port)")
    parser.add_argument("--efficiency", type=float, default=0.5, help="share of the peak FLOP/s while computing (0.5)")
    parser.add_argument("--no-compile", action="store_true", help="do without the compiler's own account of the memory")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    known, rest = parser.parse_known_args(argv)
    experiment = parse_experiment(known.experiment, ["--exp-name", "plan", *rest])
    from openpi_train.tools.plan import main

    return main(
        experiment,
        num_devices=known.devices,
        device_kind=known.device_kind,
        num_hosts=known.hosts,
        device_gib=known.device_gib,
        network_gb_s=known.network_gb_s,
        efficiency=known.efficiency,
        with_compiler=not known.no_compile,
        as_text=not known.json,
    )


def serve(argv: Sequence[str]) -> int:
    """`serve <run>`: a trained policy for robots, over openpi's websocket protocol."""
    from openpi_train.serve.flags import main

    return main(argv)


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "list": list_experiments,
    "launch": launch,
    "stats": stats,
    "data": data,
    "convert": convert,
    "doctor": doctor,
    "plan": plan,
    "serve": serve,
    "eval": evaluate,
    "report": report,
}


def _usage() -> str:
    lines = [f"  {name:<8} {(verb.__doc__ or '').split(': ', 1)[-1].splitlines()[0]}" for name, verb in VERBS.items()]
    return USAGE_TEXT.format(verbs="\n".join(lines))
