"""FLOPs of a traced program, so that nobody has to trust a formula. Read next: `training/program.py`, which asks."""

import math
from typing import Any

from openpi_train.planning.jaxprs import bodies, devices, turns

# What jax calls the part of a backward pass that `jax.checkpoint` adds to it (jax 0.10.2: `ad_checkpoint.py`).
_RECOMPUTED = "rematted_computation"


def product_flops(jaxpr: Any, *, recomputed: bool = True) -> float:
    """Two per multiply-add of every matrix product and convolution (those with padding included), in loops as often as
    they run, on all devices together.

    With recomputation, or without: the model's own work, forward and backward.
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
    """Of one convolution: each output is made of as many products as its kernel has weights for it, less the zeros that
    a dilated input has between its numbers (the gradient of a stride).
    """
    kernel, params = equation.invars[1].aval.shape, equation.params
    weights = math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
    return 2 * equation.outvars[0].aval.size * weights / math.prod(params["lhs_dilation"])
