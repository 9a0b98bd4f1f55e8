"""What became of a run, in sentences on top of its report: whether it ended, and whether it has learned.

Read next: `report.py`; `evaluation/baseline.py` for the comparison with the mean action.
"""

import math
import shlex

from openpi_train.evaluation.action_error import BASELINE
from openpi_train.evaluation.baseline import against_mean_action
from openpi_train.tools.list_runs import state_of
from openpi_train.tools.page import Verdict
from openpi_train.tools.run_files import RunFiles

_NOTABLE_FALL = 0.01  # of a loss, as a share of the first
_LAST_ERROR = " E process "  # in a line of a log


def verdicts(run: RunFiles) -> list[Verdict]:
    """A sentence on the run's state, and one on each thing that says whether it has learned."""
    return [_state(run), *_not_finite(run), *_action_error(run), *_success(run), *_loss(run)]


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


def _action_error(run: RunFiles) -> list[Verdict]:
    names = ("val/action_mse_ema", "val/action_mse")
    error = next((value for name in names if (value := run.newest(name)) is not None), None)
    if error is None:
        return []
    baseline, former = run.last(BASELINE), run.last("val/action_mse_mean_baseline")
    if baseline is not None:
        found = against_mean_action(error, baseline)
        words = f"Learned: {found.text}" if found.has_learned else found.text[0].upper() + found.text[1:]
        numbers = f"action error on held-out data {error:.4g}, of the mean action {baseline:.4g}"
        return [Verdict(f"{words} ({numbers}).", found.has_learned)]
    if former is None:
        return []
    words = "below" if error < former else "not below"
    numbers = (
        f"Action error on held-out data {error:.4g}, {words} that of the mean of the evaluated actions, {former:.4g}."
    )
    return [Verdict(numbers, error < former)]


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


def _loss(run: RunFiles) -> list[Verdict]:
    for name, what in (("val/loss_ema", "Held-out loss"), ("val/loss", "Held-out loss"), ("loss", "Training loss")):
        values = run.series(name)[1]
        if len(values) > 1 and run.experiment.get("rl") is None:
            has_fallen = values[-1] < values[0] - _NOTABLE_FALL * abs(values[0])
            words = f"{what} {values[-1]:.4g}, {values[0]:.4g} at first"
            return [Verdict(f"{words}." if has_fallen else f"{words}: it has not fallen.", has_fallen)]
    return []
