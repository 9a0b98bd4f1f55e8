"""Memory that a device needs to generate texts, beside the state. Read next: `generation/generator.py`."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from openpi_train.generation.generation_size import GenerationSize, dtype_held
from openpi_train.generation.generator import lengths
from openpi_train.models.language.language import LanguageConfig
from openpi_train.parallel.mesh import planned_mesh
from openpi_train.parallel.params import ParamLeaves, Params, merge_module, module_params
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.estimate import peak_bytes
from openpi_train.planning.memory import bytes_per_device

# Of every row's logits: the model's, those with the settings applied, and their log-probabilities, in float32.
_LOGITS = 3


@functools.cache
def generation_bytes(size: GenerationSize, tensor_devices: int = 1) -> int:
    """Bytes on one device while it generates as much as `size`, in addition to a run's state.

    A copy of the parameters in the compute dtype and the cache of keys and values are there all the time. Beside them
    is one of two programs: one reads as many prompts as there are rows, and one makes tokens, for which layers and the
    cache's used slots are copied.
    """
    language, sizes = dataclasses.replace(size.language, remat="none"), size.language.sizes
    params, held = _held(size, tensor_devices)
    of_slot, is_split = _slot_bytes(size, tensor_devices), sizes.num_kv_heads % tensor_devices == 0
    used = [0, *lengths(size.length)[:-1]][-1]  # all of it is written in place
    layers = sum(count for path, count in held.items() if path.startswith("layers/"))
    decoding = layers + of_slot * used + 4 * _LOGITS * size.rows * sizes.vocab_size
    reading = _reading_bytes(language, params, size) // (tensor_devices if is_split else 1)
    return int(sum(held.values()) + of_slot * size.length + max(decoding, reading))


def token_step_bytes(size: GenerationSize, num_slots: float, tensor_devices: int = 1) -> float:
    """Bytes that a device reads to make one token of each row: its parameters, and so many slots of the cache."""
    return sum(_held(size, tensor_devices)[1].values()) + num_slots * _slot_bytes(size, tensor_devices)


def token_flops(size: GenerationSize) -> float:
    """FLOPs of one token of one row: two for each parameter that multiplies; attention is left out."""
    params, sizes = _held(size, 1)[0], size.language.sizes
    looked_up = 0 if sizes.tied else sizes.vocab_size * sizes.width
    return 2.0 * (sum(leaf.size for leaf in params.values()) - looked_up)


@functools.cache
def _held(size: GenerationSize, tensor_devices: int) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """The parameters in the types in which they are held, and the bytes of each on one device."""
    language = dataclasses.replace(size.language, remat="none")
    dtype = jnp.dtype(language.compute.dtype)
    plan = Plan(mesh=planned_mesh(1, tensor_devices, tensor_devices), strategy="replicated")
    params = {
        path: jax.ShapeDtypeStruct(leaf.shape, dtype_held(path, leaf, dtype))
        for path, leaf in jax.eval_shape(lambda: module_params(language.build(nnx.Rngs(0)))).items()
    }
    held = {
        path: bytes_per_device(leaf, jax.sharding.NamedSharding(plan.mesh, plan.spec("copy", leaf, path)))
        for path, leaf in params.items()
    }
    return params, held


def _slot_bytes(size: GenerationSize, tensor_devices: int) -> int:
    """Bytes on one device of one slot of the cache: keys and values of a token of every row."""
    sizes, itemsize = size.language.sizes, jnp.dtype(size.language.compute.dtype).itemsize
    whole = 2 * sizes.depth * size.rows * sizes.num_kv_heads * sizes.head_dim * itemsize
    return whole // (tensor_devices if sizes.num_kv_heads % tensor_devices == 0 else 1)


def _reading_bytes(language: LanguageConfig, params: ParamLeaves, size: GenerationSize) -> int:
    """Bytes of the arrays that are alive at once while all rows' prompts are read by one device."""
    graphdef = nnx.split(nnx.eval_shape(lambda: language.build(nnx.Rngs(0))))[0]

    def read(params: Params, tokens: jax.Array, length: jax.Array) -> jax.Array:
        decoder: Any = merge_module(graphdef, params)
        return decoder.prefill(tokens, length)[1]

    tokens, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((size.rows, size.length), (size.rows,)))
    jaxpr = jax.make_jaxpr(read)(params, tokens, length).jaxpr
    return int(peak_bytes(jaxpr, lambda aval: getattr(aval, "size", 0) * getattr(aval.dtype, "itemsize", 0)))
