"""Count the FLOPs of a traced program. Read next: `training/program.py`, the caller."""

import math
from typing import Any

from openpi_train.planning.jaxprs import bodies, devices, turns

# jax's name for the part of a backward pass that `jax.checkpoint` adds (jax 0.10.2: `ad_checkpoint.py`).
_RECOMPUTED = "rematted_computation"


def product_flops(jaxpr: Any, *, recomputed: bool = True) -> float:
    """FLOPs over all devices: two per multiply-add of every matrix product and convolution (including padding), times
    the number of iterations in loops.

    With recomputation, or without it: only the model's forward and backward pass.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        if not recomputed and _RECOMPUTED in str(equation.source_info.name_stack):
            continue
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(shape[dim] for dim in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            total += _convolution_flops(equation)
        for body in bodies(equation):
            total += turns(equation) * devices(equation) * product_flops(body, recomputed=recomputed)
    return total


def _convolution_flops(equation: Any) -> float:
    """FLOPs of one convolution: each output needs as many products as the kernel has weights for it, without the zeros
    between the values of a dilated input (the gradient of a stride).
    """
    kernel, params = equation.invars[1].aval.shape, equation.params
    weights = math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
    return 2 * equation.outvars[0].aval.size * weights / math.prod(params["lhs_dilation"])
