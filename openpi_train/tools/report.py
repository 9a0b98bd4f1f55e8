"""The `report` verb: write one HTML file about one or several runs, from their directories.

Nothing is trained, and runs may still be running. A part that cannot be made says why.
Read next: `report_parts.py`, `page.py`.
"""

import logging
import time
from collections.abc import Callable, Sequence

from openpi_train import registry
from openpi_train.data.core.files import write_text
from openpi_train.runtime.exits import RunError
from openpi_train.tools import figures, report_parts
from openpi_train.tools.page import missing, page, table
from openpi_train.tools.requests import ReportRequest
from openpi_train.tools.run_files import Missing, RunFiles

logger = logging.getLogger(__name__)


def main(request: ReportRequest) -> int:
    """Write the report and print its path. Raises UsageError if a path is not a run."""
    figures.require_figures()
    runs = [RunFiles.at(path) for path in request.runs]
    target = request.out or runs[0].path / "report.html"
    write_text(target, html_of(runs, with_batches=request.batches, experiment=request.experiment))
    print(f"wrote {target} ({target.stat().st_size / 1e6:.1f} MB)")
    return 0


def html_of(runs: Sequence[RunFiles], *, with_batches: bool, experiment: str | None = None) -> str:
    """The page. `experiment` names one whose own classes the runs use."""
    like = None if experiment is None else registry.load(experiment)
    parts: dict[str, Callable[[RunFiles], str]] = {
        "Evaluation": report_parts.evaluations,
        **({"Own rollouts": report_parts.own_rollouts} if any(run.learns_from_rollouts for run in runs) else {}),
        "Time": report_parts.time_split,
        "Memory": report_parts.memory,
        **({"Bound of a step": report_parts.gpu_step} if any(run.has_gpu_step for run in runs) else {}),
        "Norm statistics": lambda run: report_parts.norm_stats(run, like),
        **({"Sample batch": lambda run: report_parts.sample_batch(run, like)} if with_batches else {}),
        "Environment": report_parts.environment,
    }
    sections = {"Summary": _made(lambda: _summary(runs)), "Curves": _made(lambda: report_parts.curves(runs))}
    for run in runs:
        for name, part in parts.items():
            title = name if len(runs) == 1 else f"{name}: {run.name}"
            sections[title] = _made(lambda part=part, run=run: part(run))
    title = " · ".join(run.name for run in runs)
    return page(title, sections, f"Written {time.strftime('%Y-%m-%d %H:%M %Z')} by python -m openpi_train report.")


def _made(part: Callable[[], str]) -> str:
    try:
        return part()
    except (Missing, RunError) as reason:
        return missing(str(reason))
    except (KeyError, IndexError, TypeError, ValueError, OSError) as error:  # files of another version, or torn
        logger.warning("a part of the report cannot be made (%s: %s)", type(error).__name__, error)
        logger.debug("raised here", exc_info=error)
        return missing(f"This part cannot be made of what the run has written ({type(error).__name__}: {error}).")


def _summary(runs: Sequence[RunFiles]) -> str:
    """A table with one line per run."""
    rows = []
    for run in runs:
        success = run.last("success/all")
        errors = [run.last(name) for name in ("val/action_mse_ema", "val/action_mse")]
        rows.append(
            {
                "run": run.name,
                "step": f"{run.step} of {run.experiment.get('num_train_steps')}",
                "state": "ended" if run.is_finished else "going on, or interrupted",
                "loss": run.last("loss"),
                "held-out loss": run.last("val/loss"),
                "EMA": run.last("val/loss_ema"),
                "action error": next((error for error in errors if error is not None), None),
                "best constant": run.last("val/action_mse_mean_baseline"),
                "success": None if success is None else f"{success:.0%}",
                "samples/s": run.last("samples_per_s"),
            }
        )
    return table(list(rows[0]), [list(row.values()) for row in rows])
