"""Whether a converted checkpoint computes what its source does: a probe per capability of a model, on fixed inputs.

Read next: `tools/convert.py`, which writes what is found into `parity.json`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from openpi_train.interop.stored import Leaves, StoredLeaf
from openpi_train.models.base import ModelConfig
from openpi_train.nn.params import merge_module

_ROWS = 2


def _velocity(model: Any, batch: Any) -> jax.Array:
    times = jnp.linspace(0.1, 0.9, batch.actions.shape[0])[:, None]
    return model.velocity(batch.observation, batch.actions[:, None], times)


# What is asked of a model that provides a capability (`ModelConfig.provides`): the built module, a batch -> outputs.
PROBES: Mapping[str, Callable[[Any, Any], jax.Array]] = {
    "velocity": _velocity,
    "logits": lambda model, batch: model.token_log_probs(batch.observation)[0],
}


def compare_outputs(
    source: tuple[ModelConfig, Leaves], result: tuple[ModelConfig, Leaves], cameras: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """By capability that both models have: how far the outputs are apart, on two rows of fixed random inputs.

    Args:
        source, result: each a model and its parameters by our path, which are read onto this host.
        cameras: the slots that are filled.
    """
    model = source[0]
    batch = _fixed_batch(model, cameras)
    found = {}
    for name, probe in PROBES.items():
        if name not in model.provides or name not in result[0].provides:
            continue
        before, after = (np.asarray(_outputs(probe, *one, batch), np.float64) for one in (source, result))
        found[name] = {
            "shape": list(before.shape),
            "largest_value": float(np.abs(before).max()),
            "largest_difference": float(np.abs(after - before).max()),
            "computed_in": np.dtype(model.compute_dtype).name,
        }
    return found


def compare_leaves(source: Leaves, result: Leaves) -> dict[str, Any]:
    """How many leaves of a name have the same bits, and the largest difference among the others, with its name."""
    largest, at, equal = 0.0, None, 0
    common = [name for name in source if name in result]
    for name in common:
        before, after = source[name].whole(), result[name].whole()
        if before.dtype == after.dtype and before.tobytes() == after.tobytes():
            equal += 1
            continue
        apart = float(np.abs(after.astype(np.float64) - before.astype(np.float64)).max(initial=0.0))
        if not math.isfinite(apart) or apart >= largest:
            largest, at = apart, name
    return {"leaves": len(common), "bit_equal": equal, "largest_difference": largest, "at": at}


def num_values(leaves: Mapping[str, StoredLeaf]) -> int:
    """Numbers in all leaves."""
    return sum(math.prod(leaf.shape) for leaf in leaves.values())


def _outputs(probe: Callable[[Any, Any], jax.Array], model: ModelConfig, params: Leaves, batch: Any) -> jax.Array:
    graphdef = nnx.split(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))[0]
    arrays = {path: jnp.asarray(leaf.whole(), jnp.float32) for path, leaf in params.items()}
    return jax.jit(lambda arrays, batch: probe(merge_module(graphdef, arrays), batch))(arrays, batch)


def _fixed_batch(model: ModelConfig, cameras: Sequence[str]) -> Any:
    random = np.random.default_rng(0)

    def fill(spec: jax.ShapeDtypeStruct) -> jax.Array:
        if spec.dtype == jnp.bool_:
            return jnp.ones(spec.shape, bool)
        if jnp.issubdtype(spec.dtype, jnp.integer):
            most = 256 if spec.dtype == jnp.uint8 else model.vocab_size
            return jnp.asarray(random.integers(0, most, spec.shape), spec.dtype)
        return jnp.asarray(random.normal(size=spec.shape), spec.dtype)

    return jax.tree.map(fill, model.batch_spec(_ROWS, cameras))
