"""Parity of a converted checkpoint with its source: compares outputs on fixed inputs, for each capability of a model.

Read next: `tools/convert_checkpoint.py`, which writes the result to `parity.json`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from openpi_train.interop.stored_leaves import Leaves, StoredLeaf, at_hand
from openpi_train.models.language.language_part import language_of
from openpi_train.models.model_config import ModelConfig, PolicyConfig
from openpi_train.parallel.params import merge_module
from openpi_train.types import Batch, Network

_ROWS, _TOKENS = 2, 16
_AT_ONCE = 1 << 20


def _velocity(model: Network, batch: Batch) -> jax.Array:
    times = jnp.linspace(0.1, 0.9, batch.actions.shape[0])[:, None]
    return model.velocity(batch.observation, batch.actions[:, None], times)


def _one_text(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions and segments of rows of one text each."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.ones_like(tokens)


def _reconstruction(model: Network, batch: Batch) -> jax.Array:
    noise = jnp.zeros((len(batch.actions), model.config.latent_dim))
    return model.reconstruct(batch.observation, batch.actions, batch.action_mask, noise)[0]


Probe = Callable[[Network, Batch], jax.Array]
# Probe for each capability (`ModelConfig.provides`): (the built module, inputs) -> outputs.
PROBES: Mapping[str, Probe] = {
    "velocity": _velocity,
    "reconstruction": _reconstruction,
    "logits": lambda model, batch: model.token_log_probs(batch.observation)[0],
    "rewards": lambda model, tokens: model.rewards(tokens, *_one_text(tokens), num_segments=1),
    "token_scores": lambda model, tokens: model.scores(model(tokens), jnp.roll(tokens, -1, axis=1)).log_prob,
}


def compare_outputs(
    source: tuple[ModelConfig, Leaves], result: tuple[ModelConfig, Leaves], cameras: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The difference of outputs for each capability that both models have, on two rows of fixed random inputs.

    Args:
        source, result: each a model and its parameters by our path, which are read to this host.
        cameras: a policy's camera slots with inputs.
    """
    model = source[0]
    batch = _fixed_batch(model, cameras)
    if batch is None:
        return {}
    found = {}
    for name, probe in PROBES.items():
        if name not in model.provides or name not in result[0].provides:
            continue
        before, after = (np.asarray(_outputs(probe, *one, batch), np.float64) for one in (source, result))
        found[name] = {
            "shape": list(before.shape),
            "largest_value": float(np.abs(before).max()),
            "largest_difference": float(np.abs(after - before).max()),
            "computed_in": np.dtype(model.compute.dtype).name,
        }
    return found


def compare_leaves(source: Leaves, result: Leaves, folder: Path | None = None) -> dict[str, Any]:
    """Number of leaves that are equal in every bit, and the largest difference among the others, with its name.

    Leaves are read in pieces; `folder` is for temporary files of leaves that can only be read as a whole.
    """
    largest, at, equal = 0.0, None, 0
    common = [name for name in source if name in result]
    for name in common:
        same, apart = source[name].dtype == result[name].dtype, 0.0
        with at_hand(source[name], folder) as near:
            for where, piece in result[name].pieces():
                for before, after in _together(near.read(where), piece):
                    if before.dtype != after.dtype or before.tobytes() != after.tobytes():
                        found = np.abs(after.astype(np.float64) - before.astype(np.float64)).max()
                        same, apart = False, float(np.maximum(apart, found))  # NaN stays
        equal += same
        if not same and (not math.isfinite(apart) or apart >= largest):
            largest, at = apart, name
    return {"leaves": len(common), "bit_equal": equal, "largest_difference": largest, "at": at}


def _together(before: np.ndarray, after: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both arrays in the same parts, small enough to be also held in float64."""
    before, after = before.reshape(-1), after.reshape(-1)
    for begin in range(0, before.size, _AT_ONCE):
        yield before[begin : begin + _AT_ONCE], after[begin : begin + _AT_ONCE]


def num_values(leaves: Mapping[str, StoredLeaf]) -> int:
    """Total number of values in all leaves."""
    return sum(math.prod(leaf.shape) for leaf in leaves.values())


def _outputs(
    probe: Callable[[Network, Batch], jax.Array], model: ModelConfig, params: Leaves, batch: Batch
) -> jax.Array:
    model = model.with_compute(attention="auto")  # which every device has
    graphdef = nnx.split(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))[0]
    arrays = {path: jnp.asarray(leaf.whole(), jnp.float32) for path, leaf in params.items()}
    return jax.jit(lambda arrays, batch: probe(merge_module(graphdef, arrays), batch))(arrays, batch)


def _fixed_batch(model: ModelConfig, cameras: Sequence[str]) -> Batch:
    """The inputs of a model's probes; None for a kind of model that has none."""
    random = np.random.default_rng(0)
    if (language := language_of(model)) is not None:
        return jnp.asarray(random.integers(0, language.sizes.vocab_size, (_ROWS, _TOKENS)), jnp.int32)
    if not isinstance(model, PolicyConfig):
        return None
    vocab_size = model.vocab_size

    def fill(spec: jax.ShapeDtypeStruct) -> jax.Array:
        if spec.dtype == jnp.bool_:
            return jnp.ones(spec.shape, bool)
        if jnp.issubdtype(spec.dtype, jnp.integer):
            most = 256 if spec.dtype == jnp.uint8 else vocab_size
            return jnp.asarray(random.integers(0, most, spec.shape), spec.dtype)
        return jnp.asarray(random.normal(size=spec.shape), spec.dtype)

    return jax.tree.map(fill, model.rows.batch_spec(_ROWS, cameras))
