"""What a run with fixed parameters does without: their gradients, moments, averages, and the work for them."""

import dataclasses

import jax.numpy as jnp
import pytest
from openpi_train_configs.bridge import pi0_bridge_traj
from openpi_train_configs.debug import debug

from openpi_train.planning.memory import predict
from openpi_train.sharding.mesh import planned_mesh
from openpi_train.sharding.strategy import Plan
from openpi_train.training import prepare


def executed_flops(freeze):
    model = dataclasses.replace(debug.model, remat="none")
    experiment = dataclasses.replace(debug, model=model, freeze=freeze, batch_size=1)
    (cost,) = prepare.policy_costs(experiment, counted=True)
    return cost.flops_per_row


@pytest.mark.slow
def test_no_work_is_done_for_gradients_of_fixed_weights():
    """A weight's gradient is one product more for each of forward's."""
    all_train, backbone_fixed = executed_flops(None), executed_flops("backbone")
    model, cameras = debug.model, len(debug.data.cameras)
    prefix, suffix = model.num_tokens(cameras)
    language, action = model.experts.values()
    image = model.siglip.flops(model.image_size, language.width)
    layers = prefix * language.flops_per_token() * (language.depth - 1) / language.depth  # of the last, keys and values
    assert all_train - backbone_fixed == pytest.approx(layers + image, rel=0.1)
    assert backbone_fixed >= model.flops_per_row(cameras) + 2 * suffix * action.flops_per_token()
    tower = model.siglip
    pixels = 2 * tower.num_tokens(model.image_size) * 3 * tower.patch_size**2 * tower.width  # have no gradient anyway
    assert all_train - executed_flops("vision") == 2 * image - pixels


def test_fixed_parameters_are_bfloat16_without_moments_or_average():
    layout = prepare.whole_layout(
        dataclasses.replace(pi0_bridge_traj, freeze="backbone"), Plan(mesh=planned_mesh(1, 1), strategy="replicated")
    )
    shapes = layout.shapes
    assert set(shapes.ema) == set(shapes.params) and not set(shapes.params) & set(shapes.frozen)
    assert {leaf.dtype for leaf in shapes.frozen.values()} == {jnp.dtype(jnp.bfloat16)}
    trained = sum(leaf.size for leaf in shapes.params.values())
    fixed = sum(leaf.size for leaf in shapes.frozen.values())
    assert trained == pytest.approx(315e6, rel=0.02)  # the action expert and the heads
    memory = predict(layout, Plan(mesh=planned_mesh(1, 1), strategy="replicated"), 0, 0)
    assert memory.total == pytest.approx(trained * 22 + fixed * 2, rel=0.01)
