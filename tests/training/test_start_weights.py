"""A state from start weights: what they hold is read, only what they lack is drawn."""

import jax
import ml_dtypes
import numpy as np
import pytest
import strategies
import toy

from openpi_train.interop.stored_leaves import in_memory
from openpi_train.training import init
from openpi_train.training.init import create_state


@pytest.mark.slow
def test_a_state_from_weights_draws_only_what_they_lack():
    config = toy.StackedConfig(depth=2)
    trainer, layout = strategies.prepare(config, "zero3", 4, 1, jax.devices()[:4])

    def create(weights):
        with jax.set_mesh(trainer.plan.real_mesh):
            return create_state(layout, config, trainer.optimizer, config.param_rules.frozen, True, 7, weights)

    fresh = create(None)
    kept = "token_embedding"
    weights = {path: in_memory(np.asarray(leaf) + 1) for path, leaf in fresh.params.items() if path != kept}
    state = create(weights)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == layout.shardings
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    for tree in (state.params, state.ema):
        for path, leaf in tree.items():
            np.testing.assert_array_equal(leaf, fresh.params[path] + (0 if path == kept else 1))
    for one, other in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(fresh.opt_state), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="start weights: other has shape"):
        create({"other": in_memory(np.zeros(3))})


def test_weights_of_another_type_are_cast_to_the_states():
    """Trained parameters are float32, frozen ones bfloat16 (as openpi keeps them), whatever the checkpoint has."""
    config = toy.LinearConfig(low_rank=True)
    trainer, layout = strategies.prepare(config, "replicated", 1, 1, jax.devices()[:1])
    shapes = {**layout.shapes.params, **layout.shapes.frozen}
    weights = {
        "adapter_lora": in_memory(np.full(shapes["adapter_lora"].shape, 1.5, ml_dtypes.bfloat16)),
        "kernel": in_memory(np.full(shapes["kernel"].shape, 1 / 3, np.float32)),
    }
    with jax.set_mesh(trainer.plan.real_mesh):
        state = create_state(layout, config, trainer.optimizer, config.param_rules.frozen, True, 7, weights)
    assert {path: leaf.dtype for path, leaf in state.params.items()} == {"adapter_lora": np.float32}
    assert {leaf.dtype for leaf in state.frozen.values()} == {np.dtype(ml_dtypes.bfloat16)}
    np.testing.assert_array_equal(state.params["adapter_lora"], 1.5)
    np.testing.assert_array_equal(state.frozen["kernel"].astype(np.float32), 171 / 512)  # 1/3 with bfloat16's 8 bits


def test_nothing_is_drawn_where_all_is_read(monkeypatch):
    config = toy.StackedConfig(depth=2)
    trainer, layout = strategies.prepare(config, "replicated", 1, 1, jax.devices()[:1])
    weights = {path: in_memory(np.ones(leaf.shape, np.float32)) for path, leaf in layout.shapes.params.items()}
    monkeypatch.setattr(init, "initial_state", lambda *_: pytest.fail("fresh values are drawn"))
    with jax.set_mesh(trainer.plan.real_mesh):
        state = create_state(layout, config, trainer.optimizer, config.param_rules.frozen, True, 7, weights)
    assert all((np.asarray(leaf) == 1).all() for leaf in state.params.values())
