"""The cost of one row on a device, from the traced gradient of a micro-batch. Read next: `live_bytes.py`, `flops.py`.

`training/prepare.py` traces it, for every rematerialisation policy that a run may choose.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from openpi_train.experiment import Experiment
from openpi_train.parallel.mesh import TENSOR
from openpi_train.planning.flops import product_flops, rewritten_bytes
from openpi_train.planning.forecast import ActivationMoment, RematCost
from openpi_train.planning.live_bytes import Compiler, Moment, moments
from openpi_train.planning.traffic import summed_bytes
from openpi_train.runtime.device_kinds import product_rate

# Rows of the traced micro-batch. Arrays whose sizes are multiples of this prime are per row, others are not.
ROWS = 8191


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedGradient:
    """Loss and gradient of `ROWS` rows on one device, or one tensor group: the run's own, under one policy.

    `experiment` has that policy; `jaxpr` is the traced program, whose first results are the gradients of `trained`.
    Its inputs of these numbers are the parameters that stay `fixed`, and the trained matrices that devices which shard
    them gather all `at_once`.
    """

    experiment: Experiment
    jaxpr: Any
    trained: Sequence[str] = ()
    fixed: Mapping[int, str] = dataclasses.field(default_factory=dict)
    at_once: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def groups(self) -> list[Mapping[int, str]]:
        """The parameters of which it matters when they are read: fixed ones one by one, those at once together."""
        return [*({number: path} for number, path in self.fixed.items()), *([self.at_once] if self.at_once else [])]


# Counts the bytes that a device needs at once for each row of a micro-batch, without parameters and gradients: the
# estimates below, or a compiler. The moment with most bytes comes first; its outputs are the gradients, its groups of
# inputs those of parameters.
ActivationBytes = Callable[[TracedGradient], Sequence[Moment]]


def live_activation_bytes(gradient: TracedGradient) -> Sequence[Moment]:
    """Bytes per row of the arrays of the traced program that are alive at once."""
    return moments(gradient.jaxpr, bytes_per_row, len(gradient.trained), [[*group] for group in gradient.groups])


def gpu_activation_bytes(gradient: TracedGradient, *, sends: bool = False) -> Sequence[Moment]:
    """The same for GPUs, which `sends`: send gradients to each other."""
    compiler = Compiler(fuses_norms=True, puts_off=sends)
    groups = [[*group] for group in gradient.groups]
    return moments(gradient.jaxpr, bytes_per_row, len(gradient.trained), groups, compiler=compiler)


def cost(
    remat: str | None, gradient: TracedGradient, activation_bytes: ActivationBytes = live_activation_bytes
) -> RematCost:
    """The cost of a row under the policy of this name."""
    found = [
        ActivationMoment(
            bytes_per_row=max(moment.num_bytes, 1.0),
            later=frozenset(gradient.trained[number] for number in moment.later),
            unread=frozenset(path for number in moment.unread for path in gradient.groups[number].values()),
            begun_layers=moment.begun_layers,
        )
        for moment in activation_bytes(gradient)
    ]
    return RematCost(
        remat=remat,
        flops_per_row=product_flops(gradient.jaxpr) / ROWS,
        model_flops_per_row=product_flops(gradient.jaxpr, recomputed=False) / ROWS,
        activation_bytes_per_row=found[0].bytes_per_row,
        moments=found,
        summed_bytes_per_row=summed_bytes(gradient.jaxpr, TENSOR, bytes_per_row),
        rewritten_bytes_per_row=rewritten_bytes(gradient.jaxpr, bytes_per_row),
        batch_bytes_per_row=sum(bytes_per_row(var.aval) for var in gradient.jaxpr.invars),
        product_rate=product_rate(np.dtype(gradient.experiment.model.compute_dtype).itemsize),
    )


def bytes_per_row(aval: Any) -> float:
    """Bytes per row of an array of this shape and type; 0 if its size does not depend on the rows."""
    size = getattr(aval, "size", 0)
    return 0.0 if size % ROWS else size // ROWS * aval.dtype.itemsize
