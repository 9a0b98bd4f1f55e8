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
# The share of a loss or a reward by which two of its values differ clearly: less is noise.
_CLEARLY = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningVerdict:
    """`has_learned`: None if the lines do not tell. `reasons`: a sentence for each measure that speaks against it, or,
    of a run that has learned, for it; else of each that hardly changed. `lowest_step`: the step of the lowest held-out
    loss, if the last is clearly above it.
    """

    has_learned: bool | None
    reasons: tuple[str, ...] = ()
    lowest_step: int | None = None

    @property
    def words(self) -> str:
        """One sentence."""
        if self.has_learned is None and self.reasons:
            return f"it cannot be said yet whether this run has learned: {'; '.join(self.reasons)}"
        if self.has_learned is None:
            return "too little was measured to say whether this run has learned"
        return f"this run has {'' if self.has_learned else 'not '}learned: {'; '.join(self.reasons)}"


def learning_verdict(lines: Sequence[JsonObject]) -> LearningVerdict:
    """The verdict from all lines of a run, by step.

    A run has not learned if a measure says so: its training loss did not fall (a run on own rollouts: its reward did
    not rise), from the first quarter of its lines to the last; the held-out loss is not below that of the weights that
    it began with; or its actions are not nearer to the recorded ones than their mean is. A loss or a reward that
    changed, but by 2 % or less, says nothing.
    """
    found = [_of_training(lines), _of_held_out_loss(lines), _of_actions(lines)]
    told = [one for one in found if one is not None]
    by_kind = {kind: tuple(sentence for is_good, sentence in told if is_good is kind) for kind in (False, True, None)}
    lowest = _lowest(_held_out_losses(lines))
    has_learned = next((kind for kind in (False, True) if by_kind[kind]), None)
    reasons = by_kind[has_learned]
    return LearningVerdict(has_learned=has_learned, reasons=reasons, lowest_step=lowest[0] if lowest else None)


def _of_training(lines: Sequence[JsonObject]) -> tuple[bool | None, str] | None:
    reward = [(line["step"], float(line["rl/reward"])) for line in lines if line.get("rl/reward") is not None]
    values = reward or [(line["step"], float(line["loss"])) for line in lines if line.get("loss") is not None]
    if len(values) < 2:
        return None
    quarter = max(len(values) // 4, 1)
    parts = values[:quarter], values[-quarter:]
    begin, end = (sum(value for _, value in part) / quarter for part in parts)
    gain = end - begin if reward else begin - end
    is_good = _judged(gain, begin)
    what, way = ("mean reward", "rose") if reward else ("training loss", "fell")
    # A run that goes on has longer quarters, so its first one has another mean than before.
    first, last = map(_steps, parts)
    how = {True: way, None: "hardly changed", False: f"never {way}"}[is_good]
    return is_good, f"the {what} {how}, from {begin:.4g} ({first}) to {end:.4g} ({last})"


def _judged(gain: float, begin: float) -> bool | None:
    """Whether a value became better, given by how much; None if it hardly changed."""
    if gain and abs(gain) <= _CLEARLY * abs(begin):
        return None
    return gain > 0  # false for NaN


def _steps(part: Sequence[tuple[int, float]]) -> str:
    first, last = part[0][0], part[-1][0]
    return f"step {first}" if first == last else f"steps {first}-{last}"


def _of_held_out_loss(lines: Sequence[JsonObject]) -> tuple[bool | None, str] | None:
    values = _held_out_losses(lines)
    if len(values) < 2 or values[0][0] != 0:  # the first is then not that of the start
        return None
    begin, end, lowest = values[0][1], values[-1][1], _lowest(values)
    where = "" if lowest is None or lowest[0] == 0 else f" (lowest: {lowest[1]:.4g} at step {lowest[0]})"
    is_good = _judged(begin - end, begin)
    if is_good is False:
        return False, f"the held-out loss is {end:.4g}, and was {begin:.4g} before the first step{where}"
    how = "fell" if is_good else "hardly changed,"
    return is_good, f"the held-out loss {how} from {begin:.4g} to {end:.4g}{where}"


def _held_out_losses(lines: Sequence[JsonObject]) -> list[tuple[int, float]]:
    """The evaluations' steps and losses."""
    return [(line["step"], _averaged(line, "val/loss")) for line in lines if "val/loss" in line]


def _lowest(values: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
    """The step and value of the lowest loss; None if the last is not clearly above it."""
    found = min((one for one in values if math.isfinite(one[1])), key=lambda one: one[1], default=None)
    if found is None or values[-1][1] <= found[1] + _CLEARLY * abs(found[1]):  # false for NaN
        return None
    return found


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
