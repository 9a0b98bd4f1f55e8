"""Which evaluation of a run is the best: the one with the lowest held-out loss.

Read next: `training/run.py`, `step_dirs.py`.
"""

import dataclasses
import math
from collections.abc import Sequence

from openpi_train.json_object import JsonObject


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """The step whose validation metric is the lowest so far."""

    step: int
    value: float


def held_out_loss(evaluation: JsonObject) -> float:
    """The loss used to compare evaluations: that of the averaged weights if the run keeps an average."""
    return evaluation.get("val/loss_ema", evaluation["val/loss"])


def lowest_loss(evaluations: Sequence[JsonObject]) -> Best | None:
    """The step with the lowest finite held-out loss, the first of equal ones; None if there is none.

    Unlike the best checkpoint it may be a step that was not saved.
    """
    found = [Best(step=line["step"], value=held_out_loss(line)) for line in evaluations if "val/loss" in line]
    return min((one for one in found if math.isfinite(one.value)), key=lambda one: one.value, default=None)
