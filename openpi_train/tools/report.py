"""The `report` verb: write one HTML file about one or several runs, from their directories.

Nothing is trained, and runs may still be running. A part that cannot be made says why.
Read next: `report_verdict.py`, `report_curves.py`, `report_parts.py`, `page.py`.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence

from openpi_train import registry
from openpi_train.data.core.files import write_text
from openpi_train.runtime.exits import RunError
from openpi_train.tools import report_parts
from openpi_train.tools.list_runs import difference, state_of
from openpi_train.tools.page import Block, DataTable, Heading, Note, page
from openpi_train.tools.report_curves import curves
from openpi_train.tools.report_verdict import verdicts
from openpi_train.tools.requests import ReportRequest
from openpi_train.tools.run_files import Missing, RunFiles

logger = logging.getLogger(__name__)


def main(request: ReportRequest) -> int:
    """Write the report and print its path. Raises UsageError if a path is not a run."""
    runs = [RunFiles.at(path) for path in request.runs]
    target = request.out or runs[0].path / "report.html"
    write_text(target, html_of(runs, with_batches=request.batches, experiment=request.experiment))
    print(f"wrote {target} ({target.stat().st_size / 1e6:.1f} MB)")
    return 0


def html_of(runs: Sequence[RunFiles], *, with_batches: bool, experiment: str | None = None) -> str:
    """The page. `experiment` names one whose own classes the runs use."""
    like = None if experiment is None else registry.load(experiment)
    sections = {
        "Verdict": _made(lambda: _verdicts(runs)),
        "Command": [block for run in runs for block in _titled(runs, run, report_parts.command)],
        **({"Results": _made(lambda: [_results(runs)])} if len(runs) > 1 else {}),
        "Curves": _made(lambda: curves(runs)),
        **({"Settings that differ": _made(lambda: [_settings(runs)])} if len(runs) > 1 else {}),
    }
    parts: dict[str, Callable[[RunFiles], list[Block]]] = {
        "Evaluation": report_parts.evaluations,
        **({"Own rollouts": report_parts.own_rollouts} if any(run.learns_from_rollouts for run in runs) else {}),
        "Time": report_parts.time_split,
        "Memory": report_parts.memory,
        **({"Bound of a step": report_parts.gpu_step} if any(run.has_gpu_step for run in runs) else {}),
        "Norm statistics": lambda run: report_parts.norm_stats(run, like),
        **({"Sample batch": lambda run: report_parts.sample_batch(run, like)} if with_batches else {}),
        "Environment": report_parts.environment,
    }
    for name, part in parts.items():
        sections[name] = [block for run in runs for block in _titled(runs, run, part)]
    title = " · ".join(run.name for run in runs)
    return page(title, sections, f"Written {time.strftime('%Y-%m-%d %H:%M %Z')} by python -m openpi_train report.")


def _titled(runs: Sequence[RunFiles], run: RunFiles, part: Callable[[RunFiles], list[Block]]) -> list[Block]:
    """A part of one of the runs, below the run's name if there are several."""
    return [*([Heading(run.name)] if len(runs) > 1 else []), *_made(lambda: part(run))]


def _made(part: Callable[[], list[Block]]) -> list[Block]:
    try:
        return part()
    except (Missing, RunError) as reason:
        return [Note(str(reason), "missing")]
    except (KeyError, IndexError, TypeError, ValueError, OSError) as error:  # files of another version, or torn
        logger.warning("a part of the report cannot be made (%s: %s)", type(error).__name__, error)
        logger.debug("raised here", exc_info=error)
        what = f"This part cannot be made of what the run has written ({type(error).__name__}: {error})."
        return [Note(what, "missing")]


def _verdicts(runs: Sequence[RunFiles]) -> list[Block]:
    return [block for run in runs for block in _titled(runs, run, lambda one: [*verdicts(one)])]


def _results(runs: Sequence[RunFiles]) -> Block:
    """What came of the runs, a column each."""
    results = [
        ("state", state_of),
        ("step", lambda run: run.step),
        ("loss", lambda run: run.last("loss")),
        ("held-out loss", lambda run: run.last("val/loss")),
        ("held-out loss, average (EMA)", lambda run: run.last("val/loss_ema")),
        ("action error", lambda run: run.last("val/action_mse")),
        ("action error, average (EMA)", lambda run: run.last("val/action_mse_ema")),
        ("success [share of episodes]", lambda run: run.last("success/all")),
        ("reward", lambda run: run.last("rl/reward")),
        ("samples/s", lambda run: run.last("samples_per_s")),
        ("goodput [share of the time]", lambda run: run.goodput),
    ]
    rows = [[name, *(value(run) for run in runs)] for name, value in results]
    shown = [row for row in rows if any(value is not None for value in row[1:])]
    return DataTable(["", *(run.name for run in runs)], shown)


def _settings(runs: Sequence[RunFiles]) -> Block:
    """The settings, software and devices in which any of the runs differs from the first."""
    found = [difference(runs[0], run) for run in runs[1:]]
    settings = []
    for kind in ("settings", "environment"):
        for name in dict.fromkeys(name for one in found for name in one[kind]):
            first = next(one[kind][name][0] for one in found if name in one[kind])
            values = [first, *(one[kind].get(name, (None, first))[1] for one in found)]
            settings.append([name, *(value if isinstance(value, str) else json.dumps(value) for value in values)])
    head = ["", *(run.name for run in runs)]
    return DataTable(head, settings) if settings else Note("The runs do not differ in their settings.")
