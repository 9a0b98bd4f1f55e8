"""What became of a run, in sentences on top of its report: whether it ended, and whether it has learned.

Read next: `report.py`; `evaluation/learning_verdict.py`, by which the end of the run goes, too.
"""

import math
import shlex

from openpi_train.checkpoints.step_dirs import best_of
from openpi_train.evaluation.learning_verdict import learning_verdict
from openpi_train.tools.list_runs import state_of
from openpi_train.tools.page import Verdict
from openpi_train.tools.run_files import RunFiles

_LAST_ERROR = " E process "  # in a line of a log


def verdicts(run: RunFiles) -> list[Verdict]:
    """A sentence on the run's state, and one on each thing that says whether it has learned."""
    return [_state(run), *_not_finite(run), *_learning(run), *_success(run)]


def _state(run: RunFiles) -> Verdict:
    total = run.experiment.get("num_train_steps", "?")
    place = f"at step {run.step} of {total}"
    go_on = f"python -m openpi_train resume {shlex.quote(str(run.path))} continues it."
    match state_of(run):
        case "running":
            return Verdict(f"Still running, {place}.")
        case "ended":
            return Verdict(f"Ended {place}.")
        case "stopped":
            return Verdict(f"Stopped on request {place}; {go_on}")
    error = _last_error(run)
    return Verdict(f"Interrupted {place}: it was killed, or failed{error}. {go_on}", False)


def _last_error(run: RunFiles) -> str:
    """The last error in the log of process 0, after a colon."""
    try:
        lines = (run.path / "logs" / "process_0.log").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = [line for line in lines if _LAST_ERROR in line]
    return f" ({found[-1].partition(_LAST_ERROR)[2].partition(': ')[2]})" if found else ""


def _not_finite(run: RunFiles) -> list[Verdict]:
    found = []
    wrong = [line["step"] for line in run.metrics if _is_not_finite(line.get("loss"))]
    if wrong:
        found.append(Verdict(f"The loss is not a number at {len(wrong)} logged steps, first at {wrong[0]}.", False))
    if skipped := run.last("skipped_steps"):
        found.append(Verdict(f"{skipped:g} updates were skipped because of NaN, infinity or the loss scale.", False))
    return found


def _is_not_finite(value: object) -> bool:
    """NaN and the infinities are strings in metrics.jsonl."""
    return isinstance(value, str) or (isinstance(value, float) and not math.isfinite(value))


def _learning(run: RunFiles) -> list[Verdict]:
    found = learning_verdict(run.metrics)
    told = []
    if found.has_learned is not None:
        told.append(Verdict(f"{found.words[0].upper()}{found.words[1:]}.", found.has_learned))
    if found.lowest_step is not None:
        told.append(Verdict(_of_lowest(run, found.lowest_step)))
    return told


def _of_lowest(run: RunFiles, step: int) -> str:
    """Where the weights of the lowest held-out loss are, which are clearly better than the last ones."""
    best = best_of(run.path)
    if best is not None and best.step < run.step:
        there = f"{shlex.quote(str(run.path / 'best'))} has the checkpoint of the lowest one that was saved, step"
        return f"The held-out loss was lowest at step {step}: {there} {best.step}."
    if step == 0:
        return "The held-out loss was lowest before the first step."
    return f"The held-out loss was lowest at step {step}, of which there is no checkpoint (--save-best)."


def _success(run: RunFiles) -> list[Verdict]:
    found = []
    for name, what in (("success/all", "episodes in the environment"), ("rl/success", "own rollouts")):
        values = run.series(name)[1]
        if len(values) == 1:
            found.append(Verdict(f"Success in {values[0]:.0%} of the {what}."))
        elif values:
            change = values[-1] - values[0]
            is_good = True if change > 0 else False if change < 0 or not values[-1] else None
            found.append(Verdict(f"Success in {values[-1]:.0%} of the {what}, {values[0]:.0%} at first.", is_good))
    return found
