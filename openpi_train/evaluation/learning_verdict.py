"""Whether a run has learned, in words, from the lines of its `metrics.jsonl`. Read next: `action_error.py`.

Pure functions: the end of a run and its report say the same.
"""

import dataclasses
import math
from collections.abc import Sequence

from openpi_train.evaluation.action_error import BASELINE
from openpi_train.evaluation.baseline import against_mean_action
from openpi_train.json_object import JsonObject

# Of older runs: the error of the mean of the evaluated actions themselves.
FORMER_BASELINE = "val/action_mse_mean_baseline"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningVerdict:
    """`has_learned`: None if the lines do not tell. `reasons`: a sentence for each measure that speaks against it, or,
    of a run that has learned, for it."""

    has_learned: bool | None
    reasons: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """One sentence."""
        if self.has_learned is None:
            return "too little was measured to say whether this run has learned"
        return f"this run has {'' if self.has_learned else 'not '}learned: {'; '.join(self.reasons)}"


def learning_verdict(lines: Sequence[JsonObject]) -> LearningVerdict:
    """The verdict from all lines of a run, by step.

    A run has not learned if a measure says so: its training loss did not fall (a run on own rollouts: its reward did
    not rise), from the first quarter of its lines to the last; the held-out loss is not below that of the weights that
    it began with; or its actions are not nearer to the recorded ones than their mean is.
    """
    found = [_of_training(lines), _of_held_out_loss(lines), _of_actions(lines)]
    told = [one for one in found if one is not None]
    against = tuple(sentence for is_good, sentence in told if not is_good)
    if not told or against:
        return LearningVerdict(has_learned=False if told else None, reasons=against)
    return LearningVerdict(has_learned=True, reasons=tuple(sentence for _, sentence in told))


def _of_training(lines: Sequence[JsonObject]) -> tuple[bool, str] | None:
    reward = [float(line["rl/reward"]) for line in lines if line.get("rl/reward") is not None]
    values = reward or [float(line["loss"]) for line in lines if line.get("loss") is not None]
    if len(values) < 2:
        return None
    quarter = max(len(values) // 4, 1)
    begin, end = (sum(part) / quarter for part in (values[:quarter], values[-quarter:]))
    is_good = end > begin if reward else end < begin  # false for NaN
    what, way = ("mean reward", "rose") if reward else ("training loss", "fell")
    return is_good, f"the {what} {way if is_good else f'never {way}'}, from {begin:.4g} at first to {end:.4g} at last"


def _of_held_out_loss(lines: Sequence[JsonObject]) -> tuple[bool, str] | None:
    values = [(line["step"], _averaged(line, "val/loss")) for line in lines if "val/loss" in line]
    if len(values) < 2 or values[0][0] != 0:  # the first is then not that of the start
        return None
    begin, end = values[0][1], values[-1][1]
    if end < begin:
        return True, f"the held-out loss fell from {begin:.4g} to {end:.4g}"
    step, least = min(values, key=lambda one: (math.isnan(one[1]), one[1]))
    lowest = f" (it was lowest at step {step}: {least:.4g})" if least < begin else ""
    return False, f"the held-out loss is {end:.4g}, and was {begin:.4g} before the first step{lowest}"


def _of_actions(lines: Sequence[JsonObject]) -> tuple[bool, str] | None:
    """The newest action error beside that of the mean action: of the training data, or, of older runs, of the evaluated
    actions."""
    for name in (BASELINE, FORMER_BASELINE):
        if measured := [line for line in lines if "val/action_mse" in line and name in line]:
            error, constant = _averaged(measured[-1], "val/action_mse"), float(measured[-1][name])
            if name == FORMER_BASELINE:
                than = "below" if error < constant else "not below"
                mean = f"that of the mean of the evaluated actions, {constant:.4g}"
                return error < constant, f"the action error, {error:.4g}, is {than} {mean}"
            error, constant = (math.sqrt(max(one, 0.0)) for one in (error, constant))  # as `eval` compares
            found = against_mean_action(error, constant)
            words = (
                f"the action error on held-out data, {error:.4g} (root mean square), is {found.text} ({constant:.4g})"
            )
            return None if found.has_learned is None else (found.has_learned, words)
    return None


def _averaged(line: JsonObject, name: str) -> float:
    """The value of the averaged weights if the run keeps an average, which is what is saved and served."""
    return float(line.get(f"{name}_ema", line[name]))
