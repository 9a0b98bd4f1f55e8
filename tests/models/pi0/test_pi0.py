"""pi0 beyond the golden numbers: published names, absent cameras, shared prefixes, LoRA, counts."""

import dataclasses
import functools
import json

import flops_by_hand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pi0_case import LORA, SIZES, SLOTS, TINY, built, draw_shapes, draws, graph_of, observation, product_flops

from openpi_train.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from openpi_train.interop.openpi import parameter_shapes
from openpi_train.models.pi0 import Pi0Config
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.parallel.params import merge_module
from openpi_train.sampling.flow import FlowSampler
from openpi_train.types import ActionBatch, flatten_rows

WITH_LORA = Pi0Config(paligemma_variant="gemma_2b_lora", action_expert_variant="gemma_300m_lora")


@functools.cache
def compiled_velocity(config):
    """The compiled velocity of (parameters, observation, noisy actions, times), one for all tests of this config."""
    graph = graph_of(config)
    return jax.jit(lambda params, *inputs: merge_module(graph, params).velocity(*inputs))


@pytest.fixture(scope="module", params=[False, True], ids=["pi0", "pi05"])
def tiny(request):
    """(config, graph, params, compiled velocity)."""
    config = dataclasses.replace(TINY, pi05=request.param)
    return config, *built(config), compiled_velocity(config)


@pytest.mark.parametrize(
    ("file", "config"),
    [
        ("pi0", Pi0Config()),
        ("pi05", Pi0Config(pi05=True)),
        ("pi0_lora", WITH_LORA),
    ],
)
def test_full_size_names_shapes_and_trainable_count_equal_openpi(golden, file, config):
    path = golden / f"param_shapes_{file}.json"
    if not path.is_file():
        pytest.skip(f"no {path}")
    expected = json.loads(path.read_text())
    shapes = parameter_shapes(config)
    assert {config.param_rules.public_name(path): list(shape) for path, shape in shapes.items()} == {
        name: entry["shape"] for name, entry in expected["params"].items()
    }
    assert sum(np.prod(shape, dtype=int) for shape in shapes.values()) == expected["total_params"]
    trainable = [np.prod(shape, dtype=int) for path, shape in shapes.items() if not config.param_rules.frozen(path)]
    assert sum(trainable) == expected["trainable_params"]


@pytest.mark.slow
def test_what_a_draw_is_told_adds_a_vector_that_begins_at_0():
    """One row of each told value in one pass, as guidance has it, against a pass of its own."""
    plain, config = TINY, dataclasses.replace(TINY, indicator=True)
    assert config.base.model == plain and plain.base is None
    assert set(parameter_shapes(config)) - set(parameter_shapes(plain)) == {"indicator"}
    _, params = built(config)
    velocity, without = compiled_velocity(config), compiled_velocity(plain)
    noisy, time = (jnp.repeat(one, 3, axis=1) for one in draws(config, 1))
    told = jnp.tile(jnp.arange(3), (2, 1))
    found = velocity(params, observation(config), noisy, time, told)
    old = {path: leaf for path, leaf in params.items() if path != "indicator"}
    # Sums of other lengths: the last bits.
    np.testing.assert_allclose(found[:, :1], without(old, observation(config), noisy[:, :1], time[:, :1]), atol=1e-5)
    assert np.abs(np.asarray(found[:, 1:] - found[:, :1])).min(axis=(2, 3)).max() > 1e-3
    assert np.abs(np.asarray(found[:, 1] - found[:, 2])).max() > 1e-3
    begun = {**params, "indicator": jnp.zeros_like(params["indicator"])}
    fresh = velocity(begun, observation(config), noisy, time, told)
    np.testing.assert_allclose(fresh[:, 1:], np.repeat(fresh[:, :1], 2, axis=1), atol=1e-5)


@pytest.mark.slow
def test_an_absent_camera_gives_what_a_masked_one_gives(tiny):
    config, _, params, velocity = tiny
    seen = observation(config)
    absent = "left_wrist_0_rgb"
    masked = dataclasses.replace(seen, image_masks=seen.image_masks | {absent: jnp.zeros(2, bool)})
    without = observation(config, slots=[slot for slot in SLOTS if slot != absent])
    noisy, time = draws(config, 1)
    expected = velocity(params, masked, noisy, time)
    # The sums of attention run over fewer zeros: float32 rounding.
    np.testing.assert_allclose(velocity(params, without, noisy, time), expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(velocity(params, seen, noisy, time), expected, atol=1e-3)


@pytest.mark.slow
def test_padding_that_no_prompt_needs_changes_nothing(tiny):
    config, _, params, velocity = tiny
    short = observation(config)
    tokens = jnp.pad(short.prompt_tokens, ((0, 0), (0, 10)), constant_values=7)
    padded = dataclasses.replace(short, prompt_tokens=tokens, prompt_mask=jnp.pad(short.prompt_mask, ((0, 0), (0, 10))))
    inputs = draws(config, 2)
    # The sums of attention run over fewer zeros: float32 rounding.
    np.testing.assert_allclose(
        velocity(params, short, *inputs), velocity(params, padded, *inputs), rtol=1e-4, atol=1e-5
    )


def test_rows_are_as_long_as_the_longest_prompt_of_the_run():
    tokenizer = load_tokenizer("bytes")
    texts = [("pick up the cube", 3), ("x", 7)]
    # begin, 16 letters, newline; rounded up to a multiple of 8
    assert Pi0Config().rows.text_length(tokenizer, texts) == 24
    assert Pi0Config().rows.batch_spec(2, [], 24).observation.prompt_tokens.shape == (2, 24)
    assert Pi0Config(max_token_len=20).rows.text_length(tokenizer, texts) == 20
    # "Task: x, State:" and 4 for each of 7 numbers, ";\nAction: ", the beginning: 54; the other text 53.
    assert Pi0Config(pi05=True).rows.text_length(tokenizer, texts) == 56
    for config, prompt, state in ((Pi0Config(), "pick up the cube", 3), (Pi0Config(pi05=True), "x", 7)):
        length = config.rows.text_length(tokenizer, texts)
        tokenize = config.rows.transforms(tokenizer, length)[1]
        row = tokenize({"prompt": prompt, "state": np.ones(state, np.float32)})
        whole = config.rows.transforms(tokenizer)[1].tokenizer.prompt(
            prompt, config.prompt_limit, np.ones(state) if config.pi05 else None
        )
        assert row["prompt_tokens"].shape == row["prompt_mask"].shape == (length,)
        assert row["prompt_tokens"].tolist() == whole[0][:length].tolist()
        assert row["prompt_mask"].sum() == whole[1].sum()
    with pytest.raises(ValueError, match=r"a much longer prompt.* has 4. tokens.* more than 24"):
        Pi0Config().rows.transforms(tokenizer, 24)[1]({"prompt": "a much longer prompt than any of the run"})


@pytest.mark.slow
def test_draws_that_share_a_prefix_give_what_each_gives_alone(tiny):
    config, _, params, velocity = tiny
    seen = observation(config)
    noisy, time = draws(config, 3)
    together = velocity(params, seen, noisy, time)
    for draw in range(3):
        alone = velocity(params, seen, noisy[:, draw : draw + 1], time[:, draw : draw + 1])
        np.testing.assert_allclose(together[:, draw : draw + 1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_float_images_and_uint8_images_are_the_same(tiny):
    config, _, params, velocity = tiny
    seen = observation(config)
    floats = {slot: image.astype(jnp.float32) / 255 * 2 - 1 for slot, image in seen.images.items()}
    inputs = draws(config, 1)
    np.testing.assert_allclose(
        velocity(params, dataclasses.replace(seen, images=floats), *inputs),
        velocity(params, seen, *inputs),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.slow
def test_sampling_with_a_cache_equals_euler_steps_of_the_velocity(tiny):
    config, graph, params, velocity = tiny
    seen = observation(config)
    noise = draws(config, 1)[0][:, 0]
    sample = jax.jit(lambda params: FlowSampler().sample(merge_module(graph, params), seen, noise, None, 3))
    # Time is summed in float32, as the sampler does: its shortest period turns one bit of it into 1e-4 of an angle.
    actions, time, step = noise, np.float32(1.0), np.float32(-1 / 3)
    for _ in range(3):
        actions = actions + step * velocity(params, seen, actions[:, None], jnp.full((2, 1), time))[:, 0]
        time += step
    np.testing.assert_allclose(sample(params), actions, rtol=1e-4, atol=1e-5)


def loss_of(config, whole=False):
    """The mean squared velocity as a function of parameters, observation and inputs; `whole`: of the whole sequence."""
    graph = graph_of(config)

    def loss(params, seen, inputs):
        model = merge_module(graph, params)
        if not whole:
            return jnp.mean(model.velocity(seen, *inputs) ** 2)
        return jnp.mean(model.read_out(model.outputs(seen, *inputs)["action"], inputs[0].shape) ** 2)

    return loss


@functools.cache
def compiled_gradient(config, whole=False):
    """The compiled `loss_of` and its gradient, one for all tests of this config."""
    return jax.jit(jax.value_and_grad(loss_of(config, whole)))


def assert_same_gradients(found, expected):
    for path, gradient in expected.items():
        # The absolute part is for the tower's key bias: softmax does not see it, its gradient is rounding.
        scale = max(float(jnp.abs(gradient).max()), 1e-2)
        np.testing.assert_allclose(found[path], gradient, rtol=1e-3, atol=1e-5 * scale, err_msg=path)


# pi0.5's layers are scanned as pi0's are.
@pytest.mark.parametrize(("pi05", "remat"), [(False, "dots"), (False, "attention"), (False, "full"), (True, "full")])
@pytest.mark.slow
def test_recomputing_activations_changes_no_gradient(pi05, remat):
    config = dataclasses.replace(TINY, pi05=pi05)
    params, seen, inputs = built(config)[1], observation(config), draws(config, 1)
    kept = compiled_gradient(config)(params, seen, inputs)
    again = compiled_gradient(dataclasses.replace(config, remat=remat))(params, seen, inputs)
    np.testing.assert_allclose(again[0], kept[0], rtol=1e-6)
    assert_same_gradients(again[1], kept[1])


# Of the language expert's last layer, only the keys and values reach the actions.
DEAD = ("query/", "output/", "mlp/", "mlp_norm/")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.slow
def test_leaving_out_the_last_layers_prefix_changes_no_gradient(depth):
    sizes = SIZES | {"depth": depth}
    config = dataclasses.replace(
        TINY,
        language=GemmaOverrides(width=16, **sizes, **LORA),
        action_expert=GemmaOverrides(width=12, **sizes),
        remat="full",
    )
    params, seen, inputs = built(config)[1], observation(config), draws(config, 2)
    short = compiled_gradient(config)(params, seen, inputs)
    whole = compiled_gradient(config, whole=True)(params, seen, inputs)
    np.testing.assert_allclose(short[0], whole[0], rtol=1e-6)
    assert_same_gradients(short[1], whole[1])
    for path, gradient in short[1].items():
        name = path.removeprefix("transformer/layers/experts/language/")
        if name != path:
            # (jnp.any of what is exactly 0 is False.)
            assert bool(jnp.any(gradient[-1])) != name.startswith(DEAD), path
            assert jnp.any(gradient[:-1]) or depth == 1, path


@pytest.mark.slow
def test_every_form_of_gemma_can_leave_out_its_last_layers_prefix():
    sizes = SIZES | {"num_kv_heads": 4}  # one weight for query, key and value
    config = dataclasses.replace(
        TINY, language=GemmaOverrides(width=16, **sizes), action_expert=GemmaOverrides(width=12, **sizes)
    )
    params, seen, inputs = built(config)[1], observation(config), draws(config, 1)
    (_, short), (_, whole) = (compiled_gradient(config, whole)(params, seen, inputs) for whole in (False, True))
    assert_same_gradients(short, whole)
    fused = short["transformer/layers/experts/language/query_key_value/weight"]
    assert not jnp.any(fused[-1, 0]) and jnp.any(fused[-1, 1]) and jnp.any(fused[-1, 2])


@pytest.mark.slow
def test_each_policy_recomputes_less_and_keeps_more_than_the_one_before():
    config, levels = dataclasses.replace(Pi0Config(), vocab_size=16), ("full", "attention", "dots", "none")
    batch, inputs = config.rows.batch_spec(1, SLOTS), draw_shapes(config)
    shapes = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in parameter_shapes(config).items()}
    flops, kept_bytes = [], []
    for remat in levels:
        changed = dataclasses.replace(config, remat=remat)

        loss = loss_of(changed)
        flops.append(product_flops(jax.make_jaxpr(jax.grad(loss))(shapes, batch.observation, inputs).jaxpr))
        residuals = jax.eval_shape(
            lambda params, *rest, loss=loss: jax.vjp(lambda params: loss(params, *rest), params)[1],
            *(shapes, batch.observation, inputs),
        )
        kept_bytes.append(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals)))
    forward = flops_by_hand.pi0(config, 3)
    assert flops == sorted(flops, reverse=True) and kept_bytes == sorted(kept_bytes)
    # Nothing is computed twice: each product has two gradients, but those of the inputs (images, state, time).
    assert 2.98 * forward < flops[-1] < 3 * forward
    # Whole layers, but for the last product of each; the last layer is not recomputed.
    assert 3.2 * forward < flops[0] < 4 * forward


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.slow
def test_merged_lora_computes_the_same(rslora):
    config = dataclasses.replace(
        TINY,
        language=GemmaOverrides(width=16, **SIZES, **LORA, lora_rslora=rslora),
        action_expert=GemmaOverrides(width=12, **SIZES, **LORA),
    )
    params = built(config)[1]
    merged = config.param_rules.merge_lora(params)
    plain = config.without_lora()
    assert {path: value.shape for path, value in merged.items()} == parameter_shapes(plain)
    seen, inputs = observation(config), draws(config, 1)
    expected = compiled_velocity(config)(params, seen, *inputs)
    result = compiled_velocity(plain)(merged, seen, *inputs)
    # Equal in exact arithmetic; two orders of multiplication round differently in float32.
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4 * float(jnp.abs(expected).max()))


@pytest.mark.slow
def test_every_query_head_with_its_own_key_uses_openpis_fused_projection():
    sizes = SIZES | {"num_kv_heads": 4}
    config = dataclasses.replace(
        TINY, language=GemmaOverrides(width=16, **sizes), action_expert=GemmaOverrides(width=12, **sizes)
    )
    names = {config.param_rules.public_name(path): shape for path, shape in parameter_shapes(config).items()}
    assert names["PaliGemma/llm/layers/attn/qkv_einsum/w"] == (2, 3, 4, 16, 8)
    params = built(config)[1]
    assert np.isfinite(compiled_velocity(config)(params, observation(config), *draws(config, 1))).all()


@pytest.mark.parametrize(("cameras", "num_draws"), [(3, 1), (1, 4)])
@pytest.mark.parametrize("config", [Pi0Config(), Pi0Config(pi05=True), WITH_LORA], ids=["pi0", "pi05", "lora"])
def test_flops_of_the_traced_program_are_those_counted_by_hand(config, cameras, num_draws):
    config = dataclasses.replace(config, remat="none")
    module = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))
    graph, state = nnx.split(module)
    batch = config.rows.batch_spec(1, SLOTS[:cameras])
    noisy, time = draw_shapes(config, num_draws)

    def velocity(state, observation, noisy, time):
        return nnx.merge(graph, state).velocity(observation, noisy, time)

    traced = jax.make_jaxpr(velocity)(state, batch.observation, noisy, time)
    expected = flops_by_hand.pi0(config, cameras, num_draws)
    np.testing.assert_allclose(product_flops(traced.jaxpr), expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("config", "cameras", "expected"), [(Pi0Config(), 3, 4.04), (Pi0Config(), 2, 2.75), (Pi0Config(pi05=True), 3, 4.69)]
)
def test_flops_are_those_counted_from_openpis_own_modules(config, cameras, expected):
    # Those counts hold elementwise work too (about 0.1 %) and are rounded to 0.01.
    flops = flops_by_hand.pi0_with_the_last_prefix(config, cameras, 1)
    np.testing.assert_allclose(flops / 1e12, expected, rtol=2e-3)


@pytest.mark.parametrize(("config", "state"), [(Pi0Config(), 1), (Pi0Config(pi05=True), 0)], ids=["pi0", "pi05"])
def test_tokens_that_are_seen_are_those_of_present_images_prompts_states_and_actions(config, state):
    seen = observation(config)
    masks = jnp.array([[True, True], [True, False], [False, False]])
    seen = dataclasses.replace(seen, image_masks=dict(zip(SLOTS, masks, strict=True)))
    batch = ActionBatch(
        observation=seen,
        actions=jnp.zeros((2, 50, 32)),
        action_mask=jnp.zeros((2, 50), bool),
        dim_mask=jnp.zeros((2, 32), bool),
        row=jnp.arange(2),
    )
    assert config.num_tokens_seen(batch, draws=3) == 3 * 256 + (4 + 6) + 2 * (state + 3 * 50)


def test_batch_spec_has_only_the_given_cameras():
    spec = Pi0Config(pi05=True).rows.batch_spec(4, ["base_0_rgb"])
    assert {slot: (image.shape, image.dtype) for slot, image in spec.observation.images.items()} == {
        "base_0_rgb": ((4, 224, 224, 3), jnp.uint8)
    }
    assert spec.observation.prompt_tokens.shape == (4, 200)
    assert spec.actions.shape == (4, 50, 32)


def test_transforms_make_rows_of_the_batch_spec(golden):
    model = golden / "tiny_spm.model"
    if not model.is_file():
        pytest.skip(f"no {model}")
    tokenizer = Tokenizer(model.read_bytes())
    base = dataclasses.replace(TINY, max_token_len=40)
    for config in (base, dataclasses.replace(base, pi05=True)):
        row = {
            "image/base_0_rgb": np.zeros((20, 30, 3), np.uint8),
            "image_mask/base_0_rgb": np.True_,
            "state": np.zeros(3, np.float32),
            "actions": np.ones((config.action_horizon, 2), np.float32),
            "action_mask": np.ones(config.action_horizon, bool),
            "prompt": "pick it up",
            "row": np.int32(0),
        }
        for transform in config.rows.transforms(tokenizer):
            row = transform(row)
        spec = flatten_rows(config.rows.batch_spec(1, ["base_0_rgb"]))
        assert {name: (np.shape(value), np.asarray(value).dtype) for name, value in row.items()} == {
            name: (leaf.shape[1:], leaf.dtype) for name, leaf in spec.items()
        }
        assert row["dim_mask"].tolist() == [True, True, False, False, False]


def test_defaults_that_depend_on_the_kind_follow_a_change_of_it():
    kinds = Pi0Config(), dataclasses.replace(Pi0Config(), pi05=True)
    said = [(kind.rows.text_limit, kind.state_in_prompt, kind.rows.normalization) for kind in kinds]
    assert said == [(48, False, "z_score"), (200, True, "quantile")]


def test_an_unknown_variant_is_answered_with_the_closest():
    with pytest.raises(ValueError, match=r"gemma_2b_lra.*closest: gemma_2b_lora"):
        Pi0Config(paligemma_variant="gemma_2b_lra")


def test_sizes_that_do_not_fit_are_all_named_at_once():
    with pytest.raises(ValueError, match=r"siglip\.patch_size 14.*depth is 18 in `language`, 4 in `action`"):
        Pi0Config(image_size=100, action_expert_variant="dummy")


@pytest.mark.slow
def test_a_head_for_returns_reads_what_a_critic_does_and_teaches_it(tiny):
    """With the critic's weights it says the same; its gradient reaches the language model and the images."""
    plain, *_ = tiny
    config = dataclasses.replace(plain, critic=True, return_bins=1)
    assert config.base.model == plain
    graph, params = built(config)
    critic = {path: leaf for path, leaf in params.items() if path.startswith("value_head/")}
    params = {**params, **{path.replace("value_head/", "return_head/"): leaf for path, leaf in critic.items()}}
    seen = observation(config)

    def said(params):
        module = merge_module(graph, params)
        return module.value(seen), module.return_logits(seen)

    value, logits = jax.jit(said)(params)
    np.testing.assert_array_equal(logits[:, 0], value)
    gradient = jax.jit(jax.grad(lambda params: said(params)[1].sum()))(params)
    parts = {path.partition("/")[0] for path, leaf in gradient.items() if np.asarray(leaf).any()}
    assert {"image_encoder", "transformer", "return_head"} <= parts and "value_head" not in parts


@pytest.mark.slow
def test_a_critic_reads_what_the_prefix_says_and_the_state(tiny):
    """Nothing of what is masked; 0 at first; and the policy has no gradient of it."""
    plain, *_ = tiny
    config = dataclasses.replace(plain, critic=True)
    assert config.base.model == plain
    added = set(parameter_shapes(config)) - set(parameter_shapes(plain))
    assert {path.partition("/")[0] for path in added} == {"value_head"}
    graph, params = built(config)
    value = jax.jit(lambda params, seen: merge_module(graph, params).value(seen))
    seen = observation(config)
    params = {**params, "value_head/layer_out/kernel": jnp.zeros((256, 1)), "value_head/layer_out/bias": jnp.zeros(1)}
    assert (np.asarray(value(params, seen)) == 0).all()
    drawn = np.random.default_rng(0).normal(size=(256, 1)).astype(np.float32)
    params = {**params, "value_head/layer_out/kernel": jnp.asarray(drawn)}
    found = np.asarray(value(params, seen))
    masked = dataclasses.replace(seen, image_masks=seen.image_masks | {SLOTS[1]: jnp.zeros(2, bool)})
    noise = jnp.asarray(np.random.default_rng(1).integers(0, 256, seen.images[SLOTS[1]].shape), jnp.uint8)
    others = dataclasses.replace(masked, images=masked.images | {SLOTS[1]: noise})
    np.testing.assert_allclose(value(params, masked), value(params, others), rtol=1e-4, atol=1e-5)
    without = observation(config, slots=[slot for slot in SLOTS if slot != SLOTS[1]])
    np.testing.assert_allclose(value(params, masked), value(params, without), rtol=1e-3, atol=1e-4)
    assert np.abs(found - np.asarray(value(params, masked))).max() > 1e-4
    moved = dataclasses.replace(seen, state=seen.state + 1)
    assert np.abs(found - np.asarray(value(params, moved))).max() > 1e-3
    gradient = jax.grad(lambda params: value(params, seen).sum())(params)
    assert {path for path, leaf in gradient.items() if np.asarray(leaf).any()} == added
