"""What a run with fixed parameters does without: their gradients, moments, averages, and the work for them."""

import dataclasses

import flops_by_hand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from openpi_train_configs.debug import debug
from openpi_train_configs.pi0_bridge import pi0_bridge_traj
from pi0_case import TINY, built, draws, observation

from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.parallel.mesh import planned_mesh
from openpi_train.parallel.params import merge_module
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.jaxprs import bodies
from openpi_train.planning.memory import predict
from openpi_train.training import prepare
from openpi_train.training.init import trained_graph

ONE = Plan(mesh=planned_mesh(1, 1), strategy="replicated")
MODEL = dataclasses.replace(debug.model, remat="none")
CAMERAS = len(debug.data.cameras)


def cost(freeze):
    """What a row of the debug experiment costs, and the graph of its module as it is trained."""
    experiment = dataclasses.replace(debug, model=MODEL, freeze=freeze)
    state = prepare.whole_layout(experiment, ONE)
    (found,) = prepare.policy_costs(experiment, state)
    return found, state.graphdef


@pytest.mark.slow
def test_no_work_is_done_for_gradients_of_fixed_weights():
    """Backward there is one product for a weight's gradient and one for its input's, for each of forward's."""
    whole, graph = cost(None)
    tower, language = MODEL.siglip, MODEL.experts["language"]
    image = flops_by_hand.tower(tower, MODEL.image_size, language.width)
    pixels = 2 * tower.num_tokens(MODEL.image_size) * 3 * tower.patch_size**2 * tower.width  # have no gradient anyway
    fixed, same_graph = cost("vision")
    assert same_graph == graph  # the tower's gradients are asked for by nobody
    assert whole.flops_per_row - fixed.flops_per_row == 2 * image - pixels
    assert fixed.activation_bytes_per_row < whole.activation_bytes_per_row


@pytest.mark.slow
def test_under_a_fixed_backbone_the_prefix_goes_forward_alone():
    whole, _ = cost(None)
    fixed, _ = cost("backbone")
    language, prefix = MODEL.experts["language"], flops_by_hand.prefix_tokens(MODEL, CAMERAS)
    attention = flops_by_hand.attention(language, prefix, prefix)
    forward = CAMERAS * flops_by_hand.tower(MODEL.siglip, MODEL.image_size, language.width)
    forward += prefix * flops_by_hand.token(language) + language.depth * attention
    # The last layer makes keys and values alone.
    forward -= prefix * flops_by_hand.all_but_keys_and_values(language) + attention
    trained = 3 * (flops_by_hand.pi0(MODEL, CAMERAS, fixed_prefix=True) - forward)
    # Noise, time and state have no gradient.
    assert fixed.flops_per_row == pytest.approx(forward + trained, rel=2e-3)
    assert fixed.flops_per_row < 0.5 * whole.flops_per_row
    assert fixed.activation_bytes_per_row < 0.4 * whole.activation_bytes_per_row


@pytest.mark.slow
def test_a_fixed_backbone_gives_the_loss_and_the_gradients_that_one_with_a_backward_pass_does():
    graph, params = built(TINY)
    trained = frozenset(p for p in params if "/action/" in p or not p.startswith(("image_encoder", "transformer")))
    alone = trained_graph(TINY, trained)
    assert alone != graph == trained_graph(TINY, frozenset(params))
    inputs = observation(TINY), *draws(TINY, 2)

    def loss(graph):
        def function(free, fixed):
            return jnp.square(merge_module(graph, {**free, **fixed}).velocity(*inputs)).mean()

        free, fixed = ({path: params[path] for path in params if (path in trained) is one} for one in (True, False))
        return jax.jit(jax.value_and_grad(function))(free, fixed)

    (expected, wanted), (found, grads) = loss(graph), loss(alone)
    # The sums of attention run over fewer zeros: float32 rounding.
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert set(grads) == set(wanted) == trained
    for path, grad in grads.items():
        np.testing.assert_allclose(grad, wanted[path], rtol=1e-4, atol=1e-5 * np.abs(wanted[path]).max(), err_msg=path)


@pytest.mark.slow
def test_a_fixed_stack_is_read_where_it_is_and_not_copied_without_its_last_layer():
    ranks = GemmaOverrides(lora_attention_rank=2, lora_mlp_rank=2)
    model = dataclasses.replace(MODEL, dtype="bfloat16", language=ranks, action_expert=ranks)
    experiment = dataclasses.replace(debug, model=model)
    state = prepare.whole_layout(experiment, ONE)
    trainer = prepare.make_trainer(experiment, state, ONE)
    program = jax.make_jaxpr(trainer.step)(state.abstract(), experiment.batch_spec(2)).jaxpr
    depth = model.experts["language"].depth
    cut = {(depth - 1, *leaf.shape[1:]) for leaf in state.shapes.frozen.values() if leaf.ndim > 2}
    copied = {shape for shape in sliced(program) if shape[:1] == (depth - 1,)}
    assert cut and copied and not cut & copied  # the factors, which are trained, are cut


def sliced(jaxpr):
    """The shapes that slices have, in the whole program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "slice":
            yield equation.outvars[0].aval.shape
        for body in bodies(equation):
            yield from sliced(body)


def test_fixed_parameters_are_bfloat16_without_moments_or_average():
    layout = prepare.whole_layout(dataclasses.replace(pi0_bridge_traj, freeze="backbone"), ONE)
    shapes = layout.shapes
    assert set(shapes.ema) == set(shapes.params) and not set(shapes.params) & set(shapes.frozen)
    assert {leaf.dtype for leaf in shapes.frozen.values()} == {jnp.dtype(jnp.bfloat16)}
    trained = sum(leaf.size for leaf in shapes.params.values())
    fixed = sum(leaf.size for leaf in shapes.frozen.values())
    assert trained == pytest.approx(315e6, rel=0.02)  # the action expert and the heads
    memory = predict(layout, ONE)
    assert memory.total == pytest.approx(trained * 22 + fixed * 2, rel=0.01)
