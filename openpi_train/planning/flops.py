"""Count the FLOPs of a traced program, and what it writes again. Read next: `training/program.py`, the caller."""

import math

from jax.extend.core import Jaxpr, JaxprEqn

from openpi_train.parallel.remat import INPUT
from openpi_train.planning.jaxprs import SizeOf, array_of, bodies, devices, turns

# jax's name for the part of a backward pass that `jax.checkpoint` adds (jax 0.10.2: `ad_checkpoint.py`).
_RECOMPUTED = "rematted_computation"
# jax's names of cuDNN's attention (jax 0.10.2: `cudnn/fused_attention_stablehlo.py`), and how many products "b n t s"
# times the width of a head it computes: the backward pass four, and once more that of queries and keys.
_ATTENTION = {"dot_product_attention_fwd_wrapper": (2, 2), "dot_product_attention_bwd_wrapper": (4, 5)}


def product_flops(jaxpr: Jaxpr, *, recomputed: bool = True) -> float:
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
            shape = array_of(equation.invars[0]).shape
            total += 2 * array_of(equation.outvars[0]).size * math.prod(shape[dim] for dim in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            total += _convolution_flops(equation)
        elif equation.primitive.name in _ATTENTION:
            total += 2 * _ATTENTION[equation.primitive.name][recomputed] * _weights_times_width(equation)
        for body in bodies(equation):
            total += turns(equation) * devices(equation) * product_flops(body, recomputed=recomputed)
    return total


def rewritten_bytes(jaxpr: Jaxpr, size_of: SizeOf) -> float:
    """Bytes, by `size_of`, of the inputs of products with weights that the backward pass computes, and so writes,
    again: it takes them from no product, so that no FLOPs say so."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.params.get("name") == INPUT and _RECOMPUTED in str(equation.source_info.name_stack):
            total += sum(size_of(var.aval) for var in equation.outvars)
        total += turns(equation) * sum(rewritten_bytes(body, size_of) for body in bodies(equation))
    return total


def _weights_times_width(equation: JaxprEqn) -> float:
    """The size of all queries "b t n c" times the number of keys."""
    query, key = (array_of(var).shape for var in equation.invars[:2])
    return math.prod(query) * key[1]


def _convolution_flops(equation: JaxprEqn) -> float:
    """FLOPs of one convolution: each output needs as many products as the kernel has weights for it, without the zeros
    between the values of a dilated input (the gradient of a stride).
    """
    kernel, params = array_of(equation.invars[1]).shape, equation.params
    weights = math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
    return 2 * array_of(equation.outvars[0]).size * weights / math.prod(params["lhs_dilation"])
