"""The PaliGemma policy with a flow head: what may not change a velocity, what trains, counts."""

import dataclasses
import json
import math

import flops_by_hand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pi0_case import LORA, SIZES, SLOTS, built, draw_shapes, draws, observation

from openpi_train.interop.openpi import parameter_shapes
from openpi_train.keys import row_keys
from openpi_train.models.paligemma import PaliGemmaFlowConfig
from openpi_train.models.pi0 import Pi0Config, pi0_network
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import merge_module
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.flops import product_flops
from openpi_train.planning.memory import predict
from openpi_train.runtime.device_kinds import GIB
from openpi_train.sampling.flow import FlowSampler
from openpi_train.training.init import lay_out
from openpi_train.types import ActionBatch

FULL = PaliGemmaFlowConfig()
TINY = PaliGemmaFlowConfig(
    paligemma_variant="dummy",
    language=GemmaOverrides(width=16, **SIZES),
    head_variant="dummy",
    head=GemmaOverrides(width=12, **SIZES | {"depth": 3, "num_kv_heads": 1}),
    siglip=SiglipConfig(width=8, depth=2, mlp_dim=16, num_heads=2, patch_size=8),
    image_size=16,
    vocab_size=40,
    action_dim=5,
    action_horizon=4,
    max_token_len=6,
    dtype="float32",
    remat="none",
)
HEAD = "head/"


@pytest.fixture(scope="module")
def tiny():
    """(graph, params, compiled velocity)."""
    graph, params = built(TINY)
    return graph, params, jax.jit(lambda params, *inputs: merge_module(graph, params).velocity(*inputs))


@pytest.mark.slow
def test_an_absent_camera_gives_what_a_masked_one_gives(tiny):
    _, params, velocity = tiny
    seen, inputs, absent = observation(TINY), draws(TINY, 1), "left_wrist_0_rgb"
    masked = dataclasses.replace(seen, image_masks=seen.image_masks | {absent: jnp.zeros(2, bool)})
    without = observation(TINY, slots=[slot for slot in SLOTS if slot != absent])
    expected = velocity(params, masked, *inputs)
    # The sums of attention run over fewer zeros: float32 rounding.
    np.testing.assert_allclose(velocity(params, without, *inputs), expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(velocity(params, seen, *inputs), expected, atol=1e-3)


def test_images_prompt_state_actions_and_time_reach_the_velocity_and_padding_does_not(tiny):
    _, params, velocity = tiny
    seen, (noisy, time) = observation(TINY), draws(TINY, 1)
    before = velocity(params, seen, noisy, time)
    tokens = seen.prompt_tokens
    changes = {
        "image": dataclasses.replace(seen, images=seen.images | {SLOTS[0]: 255 - seen.images[SLOTS[0]]}),
        "prompt": dataclasses.replace(seen, prompt_tokens=tokens.at[:, 1].set((tokens[:, 1] + 1) % TINY.vocab_size)),
        "state": dataclasses.replace(seen, state=seen.state + 1),
    }
    for name, changed in changes.items():
        assert np.abs(velocity(params, changed, noisy, time) - before).max() > 1e-3, name
    assert np.abs(velocity(params, seen, noisy, time * 0.9) - before).max() > 1e-3
    assert np.abs(velocity(params, seen, noisy.at[:, :, -1].add(1.0), time) - before)[:, :, 0].max() > 1e-3
    padding = jnp.where(seen.prompt_mask, tokens, (tokens + 1) % TINY.vocab_size)
    padded = velocity(params, dataclasses.replace(seen, prompt_tokens=padding), noisy, time)
    np.testing.assert_array_equal(padded, before)


@pytest.mark.slow
def test_draws_that_share_a_context_give_what_each_gives_alone(tiny):
    _, params, velocity = tiny
    seen, (noisy, time) = observation(TINY), draws(TINY, 3)
    together = velocity(params, seen, noisy, time)
    for draw in range(3):
        alone = velocity(params, seen, noisy[:, draw : draw + 1], time[:, draw : draw + 1])
        np.testing.assert_allclose(together[:, draw : draw + 1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_sampling_equals_euler_steps_of_the_velocity(tiny):
    graph, params, velocity = tiny
    seen, noise = observation(TINY), draws(TINY, 1)[0][:, 0]
    sample = jax.jit(lambda params: FlowSampler().sample(merge_module(graph, params), seen, noise, None, 3))
    # Time is summed in float32, as the sampler does: its shortest period turns one bit of it into 1e-4 of an angle.
    actions, time, step = noise, np.float32(1.0), np.float32(-1 / 3)
    for _ in range(3):
        actions = actions + step * velocity(params, seen, actions[:, None], jnp.full((2, 1), time))[:, 0]
        time += step
    np.testing.assert_allclose(sample(params), actions, rtol=1e-4, atol=1e-5)


def test_what_the_head_reads_are_rotated_keys_and_values_of_normed_activations_and_state(tiny):
    graph, params, _ = tiny
    generator, valid = np.random.default_rng(2), np.array([[True, False, True, True], [True, True, True, False]])
    activations, state = generator.normal(size=(2, 4, 16)), generator.normal(size=(2, TINY.action_dim))
    (keys, values), counts = jax.jit(lambda params, *inputs: merge_module(graph, params).head.read(*inputs))(
        params, *map(jnp.asarray, (activations.astype(np.float32), valid, state.astype(np.float32)))
    )
    own = {path.removeprefix(HEAD): np.asarray(leaf, np.float64) for path, leaf in params.items()}
    # In double precision, by the definitions: root mean square norm (Zhang & Sennrich 2019), rotation (Su et al. 2021).
    normed = activations / np.sqrt(np.mean(activations**2, axis=-1, keepdims=True) + 1e-6)
    normed *= 1 + own["context_norm/scale"]
    token = state @ own["state_proj/kernel"] + own["state_proj/bias"]
    tokens = np.concatenate([normed, token[:, None]], axis=1)
    place = np.array([[0, 0, 1, 2, 3], [0, 1, 2, 2, 3]])  # what is masked takes up none
    weight = own["context/layers/key_value/weight"]  # layers 2 k d c
    plain, expected_values = np.einsum("bcd,lpkdh->plbckh", tokens, weight)
    turn = np.exp(1j * place[..., None, None] * 10_000.0 ** (-np.arange(4) / 4))
    turned = (plain[..., :4] + 1j * plain[..., 4:]) * turn
    expected_keys = np.concatenate([turned.real, turned.imag], axis=-1)
    counted = np.concatenate([valid, np.ones((2, 1), bool)], axis=1)
    np.testing.assert_array_equal(counts, counted)
    np.testing.assert_allclose(keys[:, counted], expected_keys[:, counted], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(values, expected_values, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_head_is_pi05s_action_expert_on_another_context(tiny):
    """Of the same weights, keys and values. openpi's numbers hold pi0.5 (`tests/golden`)."""
    graph, params, _ = tiny
    pi05 = Pi0Config(
        pi05=True,
        language=TINY.head,
        action_expert=TINY.head,
        paligemma_variant="dummy",
        action_expert_variant="dummy",
        **{name: getattr(TINY, name) for name in ("siglip", "image_size", "vocab_size", "max_token_len", "dtype")},
        action_dim=TINY.action_dim,
        action_horizon=TINY.action_horizon,
    )
    whole, others = built(pi05)
    own = {path.removeprefix(HEAD): leaf for path, leaf in params.items() if path.startswith(HEAD)}
    shared = {path: leaf for path, leaf in own.items() if path in others and others[path].shape == leaf.shape}
    assert {path for path in own if path not in shared} == {
        "context/layers/key_value/weight",
        "context_norm/scale",
        "state_proj/kernel",
        "state_proj/bias",
    }
    generator, valid = np.random.default_rng(2), jnp.array([[True, False, True, True], [True, True, True, False]])
    cache = tuple(jnp.asarray(generator.normal(size=(3, 2, 4, 1, 8)), jnp.float32) for _ in range(2))
    noisy, time = draws(TINY, 2)

    @jax.jit
    def both(own, others):
        head, expert = merge_module(graph, own).head, merge_module(whole, others)
        context = pi0_network.Context(cache=cache, visible=valid, state=observation(TINY).state)
        return head(noisy, time, cache, valid), expert.velocity(context, noisy, time)

    found, expected = both(params, {**others, **shared})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def abstract(config, cameras=2):
    """(loss of trained and frozen parameters, the shapes of what it takes), for one row."""
    graph = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))[0]
    seen = config.rows.batch_spec(1, SLOTS[:cameras]).observation
    shapes = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in parameter_shapes(config).items()}

    def loss(trained, frozen, *inputs):
        return jnp.mean(merge_module(graph, {**trained, **frozen}).velocity(*inputs) ** 2)

    return loss, shapes, (seen, *draw_shapes(config))


@pytest.mark.parametrize(("cameras", "num_draws"), [(3, 1), (1, 4)])
def test_flops_of_the_traced_program_are_those_counted_by_hand(cameras, num_draws):
    config = dataclasses.replace(FULL, remat="none")
    loss, shapes, (seen, _, _) = abstract(config, cameras)
    traced = jax.make_jaxpr(loss)(shapes, {}, seen, *draw_shapes(config, num_draws))
    expected = flops_by_hand.paligemma(config, cameras, num_draws)
    assert product_flops(traced.jaxpr) == pytest.approx(expected, rel=1e-9)


def test_a_frozen_backbone_has_no_backward_pass():
    config = dataclasses.replace(FULL, remat="none")
    loss, shapes, inputs = abstract(config)
    head = {path: shape for path, shape in shapes.items() if path.startswith(HEAD)}
    rest = {path: shape for path, shape in shapes.items() if path not in head}
    forward = flops_by_hand.paligemma(config, 2)
    flops = product_flops(jax.make_jaxpr(jax.grad(loss))(head, rest, *inputs).jaxpr)
    tower, prefix = flops_by_hand.tower(config.siglip, 224, 2048), flops_by_hand.prefix_tokens(config, 2)
    attention = 4 * prefix**2 * 8 * 256 * 18
    of_head = forward - 2 * tower - prefix * flops_by_hand.token(config.decoders["language"]) - attention
    # Each of the head's products has two gradients, but those that need none: of its inputs.
    assert 1.8 * of_head < flops - forward <= 2 * of_head
    assert of_head < 0.1 * forward


def test_the_backbones_names_and_shapes_are_the_published_ones(golden_file):
    # pi0-FAST's network is PaliGemma and nothing else.
    published = json.loads(golden_file("param_shapes_pi0_fast.json").read_text())["params"]
    shapes = parameter_shapes(FULL)
    found = {
        FULL.param_rules.public_name(path): list(shape) for path, shape in shapes.items() if not path.startswith(HEAD)
    }
    assert found == {name: entry["shape"] for name, entry in published.items()}
    sizes = {
        name: parameter_shapes(dataclasses.replace(FULL, image_size=size))["backbone/image_encoder/position_embedding"]
        for name, size in (("224", 224), ("448", 448), ("896", 896))
    }
    assert sizes == {"224": (1, 256, 1152), "448": (1, 1024, 1152), "896": (1, 4096, 1152)}


def test_low_rank_adapters_leave_factors_and_head_alone_trained():
    config = PaliGemmaFlowConfig(paligemma_variant="gemma_2b_lora")
    shapes = parameter_shapes(config)
    trained = {path for path in shapes if not config.param_rules.frozen(path)}
    factors = {path for path in shapes if path.endswith(("lora_a", "lora_b"))}
    assert factors and trained == factors | {path for path in shapes if path.startswith(HEAD)}
    count = sum(np.prod(shapes[path], dtype=int) for path in trained)
    assert count < 0.15 * sum(np.prod(shape, dtype=int) for shape in shapes.values())


@pytest.mark.slow
def test_merged_adapters_compute_the_same(tiny):
    config = dataclasses.replace(TINY, language=GemmaOverrides(width=16, **SIZES, **LORA))
    graph, params = built(config)
    merged = config.param_rules.merge_lora(params)
    assert {path: value.shape for path, value in merged.items()} == parameter_shapes(TINY)
    seen, inputs = observation(TINY), draws(TINY, 1)
    expected = jax.jit(lambda params: merge_module(graph, params).velocity(seen, *inputs))(params)
    result = tiny[2](merged, seen, *inputs)
    # Equal in exact arithmetic; two orders of multiplication round differently in float32.
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4 * float(jnp.abs(expected).max()))


def test_tokens_that_are_seen_are_those_of_present_images_prompts_states_and_actions():
    seen = observation(TINY)
    batch = ActionBatch(
        observation=dataclasses.replace(seen, image_masks=seen.image_masks | {SLOTS[0]: jnp.array([True, False])}),
        actions=jnp.zeros((2, 4, 5)),
        action_mask=jnp.zeros((2, 4), bool),
        dim_mask=jnp.zeros((2, 5), bool),
        row=jnp.arange(2),
    )
    assert TINY.num_tokens_seen(batch, draws=3) == 5 * 4 + (4 + 6) + 2 * (1 + 3 * 4)


def test_sizes_that_do_not_fit_are_all_named_at_once():
    with pytest.raises(ValueError, match=r"patch_size 14.*language: num_heads 5.*head has no start weights"):
        PaliGemmaFlowConfig(
            image_size=100, language=GemmaOverrides(num_heads=5, num_kv_heads=2), head_variant="gemma_300m_lora"
        )
    (problem,) = FULL.compute.check_tensor(3)
    assert (
        "language.num_heads 8, language.mlp_dim 16384, head.num_heads 8" in problem and "allowed: 1, 2, 4, 8" in problem
    )


@pytest.mark.slow
def test_the_held_out_loss_is_the_training_loss_on_held_out_rows(tiny):
    batch = TINY.rows.batch_spec(2, SLOTS)
    generator = np.random.default_rng(5)
    batch = dataclasses.replace(
        batch,
        observation=observation(TINY),
        actions=jnp.asarray(generator.normal(size=batch.actions.shape), jnp.float32),
        action_mask=jnp.asarray([[True] * 4, [True, True, False, False]]),
        dim_mask=jnp.ones((2, 5), bool),
        row=jnp.arange(2, dtype=jnp.int32),
    )
    objective, keys = FlowMatching(augment=False), row_keys(0, 3, batch.row)
    graph, params, _ = tiny

    @jax.jit
    def losses(params):
        model, norms = merge_module(graph, params), objective.norms(batch)
        return [objective.loss(model, batch, norms, keys, train=train)[0] for train in (True, False)]

    training, held_out = losses(params)
    assert training == held_out and training > 0


@pytest.mark.parametrize(
    ("config", "freeze", "state_gib", "together_gib"),
    [
        (FULL, None, 50.25, 69.1),
        (dataclasses.replace(FULL, paligemma_variant="gemma_2b_lora"), None, 10.78, 13.4),
        (FULL, "backbone/", 10.46, 13.0),
    ],
    ids=["full", "low rank", "head only"],
)
def test_what_is_frozen_has_no_gradient_no_moments_and_no_float32_copy(config, freeze, state_gib, together_gib):
    def is_frozen(path):
        return config.param_rules.frozen(path) or (freeze is not None and path.startswith(freeze))

    plan = Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated")
    average = not any(map(is_frozen, parameter_shapes(config)))
    layout = lay_out(config, AdamW().create(LRSchedule().create()), is_frozen, average, plan)
    trained = {path: leaf.shape for path, leaf in layout.shapes.params.items()}
    assert all(leaf.dtype == jnp.bfloat16 for leaf in layout.shapes.frozen.values())
    assert trained.keys() == {path for path in parameter_shapes(config) if not is_frozen(path)}
    count = sum(map(math.prod, trained.values()))
    moments = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(layout.shapes.opt_state))
    assert moments == pytest.approx(2 * count, rel=1e-6)
    memory = predict(layout, plan)
    assert memory.state / GIB == pytest.approx(state_gib, abs=0.01)
    assert memory.grads == 4 * count
    assert memory.total / GIB == pytest.approx(together_gib, abs=0.06)
