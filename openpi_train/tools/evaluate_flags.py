"""The command lines of `eval` and `report`, apart from what they do: `--help` must not wait for jax."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from openpi_train.runtime.exits import run_guarded


def evaluate(
    argv: Sequence[str], process_parser: argparse.ArgumentParser, process_flags: Callable[[Sequence[str]], Any]
) -> NoReturn:
    """Run `eval`; the last two tell which process this is, and are `cli.py`'s."""
    if any(word in ("-h", "--help") for word in argv):
        print(process_parser.format_help())
    process, rest = process_flags(argv)
    parser = _eval_parser()
    given = vars(parser.parse_args(rest))
    if process.dry_run:
        parser.error("--dry-run: eval trains nothing; leave it out")
    from openpi_train.tools.evaluate import Request, main

    run_guarded(lambda: main(Request(**given), process.world, process.devices_per_process))


def report(argv: Sequence[str]) -> int:
    """Run `report`."""
    given = _report_parser().parse_args(argv)
    from openpi_train.tools.report import main

    return main(given.runs, given.out, with_batches=given.batches, experiment=given.experiment)


def _eval_parser() -> argparse.ArgumentParser:
    """The flags of `eval`, by the names of `evaluate.Request`."""
    parser = argparse.ArgumentParser(
        prog="python -m openpi_train eval",
        description="Evaluate a trained policy: open loop on the recorded episodes that were held out, and closed loop "
        "in an environment. Tables are printed; JSON, plots and videos go to eval/<step> in the run's directory. With "
        "`launch local --processes N -- eval ...` the episodes are shared out, and every result is the same.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="a run's directory (its newest checkpoint), a step's, or another checkpoint")
    parser.add_argument("--experiment", metavar="NAME", help="whose checkpoint it is, where it does not say so itself")
    parser.add_argument("--dataset", metavar="N", help="which dataset's robot acts: a number or asset id")
    parser.add_argument("--env", metavar="NAME", help="the environment to act in (the experiment's own, if it has one)")
    parser.add_argument("--episodes", type=_number, metavar="N", help="episodes per task there; 0: no closed loop")
    parser.add_argument("--held-out", type=_number, default=20, metavar="N", help="recorded episodes; 0: no open loop")
    parser.add_argument("--execute", type=_positive, metavar="N", help="actions of a chunk that are carried out (half)")
    parser.add_argument("--ensemble", type=float, metavar="M", help="temporal ensembling with weights exp(-M i) (0.01)")
    parser.add_argument(
        "--real-time-delay", type=_number, metavar="N", help="real-time chunking: a chunk takes N control steps"
    )
    parser.add_argument("--max-steps", type=_positive, metavar="N", help="control steps before an episode has failed")
    parser.add_argument("--videos", type=_number, metavar="N", help="videos of the first N episodes (4)")
    parser.add_argument("--seed", type=int, help="of initial states and of the policy's noise there")
    parser.add_argument(
        "--batch-size", type=_positive, default=16, metavar="N", help="episodes at a time per process (16)"
    )
    parser.add_argument("--num-sample-steps", type=_positive, metavar="N", help="denoising steps (the run's own)")
    parser.add_argument("--no-average", dest="average", action="store_false", help="the parameters, not their average")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the results go")
    return parser


def _report_parser() -> argparse.ArgumentParser:
    """The flags of `report`."""
    parser = argparse.ArgumentParser(
        prog="python -m openpi_train report",
        description="Write one HTML file about a run, or about several to compare: curves, time, memory against the "
        "plan, norm stats, batches, evaluations with videos, environment. It needs no other file and no network. Runs "
        "that are still going may be reported, too.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the file (report.html in the first run's directory)")
    parser.add_argument("--experiment", metavar="NAME", help="the runs' own, where it uses classes of yours")
    parser.add_argument("--no-batches", dest="batches", action="store_false", help="leave out the data's sample batch")
    return parser


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)
