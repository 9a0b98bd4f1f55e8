"""Training goes on from a checkpoint's whole state, openpi's or ours, read in parts."""

import jax
import numpy as np
import pytest
import strategies
import toy

from openpi_train.checkpoints.checkpoint_formats import open_checkpoint
from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.interop import native_format, openpi
from openpi_train.interop.openpi import state_leaves
from openpi_train.interop.stored_leaves import Stored, in_memory
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.training.init import create_state, read_state

CONFIG = toy.StackedConfig(depth=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(layout, a state with every leaf of another value, its checkpoint in openpi's form)."""
    trainer, layout = strategies.prepare(CONFIG, "zero3", 4, 1, jax.devices()[:4])
    with jax.set_mesh(trainer.plan.real_mesh):
        state = create_state(layout, CONFIG, trainer.optimizer, CONFIG.param_rules.frozen, True, 7)
    random = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: np.asarray(random.uniform(1, 9, leaf.shape), leaf.dtype), state)
    adam, schedule = state.opt_state[1][0], state.opt_state[1][2]
    leaves = {"step": state.step, "opt_state/1/0/count": adam.count, "opt_state/1/2/count": schedule.count}
    leaves |= {f"opt_state/1/0/mu/{path}": leaf for path, leaf in adam.mu.items()}
    leaves |= {f"opt_state/1/0/nu/{path}": leaf for path, leaf in adam.nu.items()}
    leaves |= {f"params/{path}": leaf for path, leaf in state.params.items()}
    stored = Stored(
        where="memory",
        format="openpi",
        params={path: in_memory(leaf) for path, leaf in state.ema.items()},
        train_state={name: in_memory(leaf) for name, leaf in leaves.items()},
    )
    directory = tmp_path_factory.mktemp("state") / "5"
    openpi.write(directory, stored)
    return layout, state, directory


def load(directory):
    leaves = CheckpointWeightLoader(params_path=str(directory), continue_training=True).load_state(CONFIG)
    assert leaves is not None
    return leaves


@pytest.mark.slow
def test_every_leaf_of_the_state_is_where_it_was(saved, tmp_path):
    layout, state, directory = saved
    native_format.write(tmp_path / "ours", open_checkpoint(directory, CONFIG), CONFIG)
    for place in (directory, tmp_path / "ours"):
        again = read_state(layout, load(place), where=str(place))
        assert jax.tree.map(lambda leaf: leaf.sharding, again) == layout.shardings
        for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_state_of_another_kind_is_refused(saved):
    layout, _, directory = saved
    leaves = load(directory)
    without_average = {name: leaf for name, leaf in leaves.items() if not name.startswith("ema/")}
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint \(9\)[\s\S]*--ema-decay"):
        read_state(layout, without_average, where="HERE")


def test_it_takes_a_checkpoint_with_a_state(saved):
    _, _, directory = saved
    with pytest.raises(CheckpointError, match="has no train_state"):
        load(directory / "params")
    with pytest.raises(UsageError, match=r"needs --weight-loader\.params-path"):
        CheckpointWeightLoader(continue_training=True).load_state(CONFIG)
    assert CheckpointWeightLoader(params_path=str(directory)).load_state(CONFIG) is None
    names = openpi.parameter_names(CONFIG)
    assert state_leaves(open_checkpoint(directory), names).keys() == load(directory).keys()
