"""A state from start weights: what they hold is read, only what they lack is drawn."""

import jax
import numpy as np
import pytest
import strategies
import toy

from openpi_train.interop.stored import in_memory
from openpi_train.training import init
from openpi_train.training.init import create_state


def test_a_state_from_weights_draws_only_what_they_lack():
    config = toy.StackedConfig(depth=2)
    trainer, layout = strategies.prepare(config, "zero3", 4, 1, jax.devices()[:4])

    def create(weights):
        with jax.set_mesh(trainer.plan.real_mesh):
            return create_state(layout, config, trainer.optimizer, config.frozen, True, 7, weights)

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


def test_nothing_is_drawn_where_all_is_read(monkeypatch):
    config = toy.StackedConfig(depth=2)
    trainer, layout = strategies.prepare(config, "replicated", 1, 1, jax.devices()[:1])
    weights = {path: in_memory(np.ones(leaf.shape, np.float32)) for path, leaf in layout.shapes.params.items()}
    monkeypatch.setattr(init, "initial_state", lambda *_: pytest.fail("fresh values are drawn"))
    with jax.set_mesh(trainer.plan.real_mesh):
        state = create_state(layout, config, trainer.optimizer, config.frozen, True, 7, weights)
    assert all((np.asarray(leaf) == 1).all() for leaf in state.params.values())
