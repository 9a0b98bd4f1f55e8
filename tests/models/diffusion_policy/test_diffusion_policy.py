"""The diffusion policy as a model: what it takes, what it gives, what is refused, and how both objectives train it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from openpi_train.data.robot.transforms import ExactDims, NumberPrompt
from openpi_train.keys import row_keys
from openpi_train.models.diffusion_policy.diffusion_policy import (
    DiffusionPolicyConfig,
    MlpSizes,
    TransformerSizes,
    UnetSizes,
)
from openpi_train.nn.augment import RandomCrop
from openpi_train.objectives.diffusion import Diffusion
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.parallel.params import merge_module, module_params
from openpi_train.planning.flops import product_flops
from openpi_train.planning.jaxprs import bodies
from openpi_train.sampling.flow import FlowSampler
from openpi_train.types import ActionBatch, Observation

ROWS = 4
CONFIG = DiffusionPolicyConfig(
    action_dim=3,
    state_dim=2,
    cameras=("front", "wrist"),
    image_height=10,
    image_width=12,
    encoder_widths=(16,),
    unet=UnetSizes(widths=(16,)),
    diffusion_step_embed_dim=8,
    n_obs_steps=2,
    n_action_steps=4,
    share_encoder=True,
)
CROP = RandomCrop(height=8, width=8)


def rows(seed=0):
    rng = np.random.default_rng(seed)
    images = {slot: jnp.asarray(rng.integers(0, 256, (ROWS, 2, 10, 12, 3)), jnp.uint8) for slot in CONFIG.cameras}
    return ActionBatch(
        observation=Observation(
            images=images,
            image_masks={slot: jnp.ones(ROWS, bool) for slot in CONFIG.cameras},
            state=jnp.asarray(rng.normal(size=(ROWS, 2, 2)), jnp.float32),
            prompt_tokens=jnp.zeros((ROWS, 0), jnp.int32),
            prompt_mask=jnp.zeros((ROWS, 0), bool),
        ),
        actions=jnp.asarray(rng.uniform(-1, 1, (ROWS, 8, 3)), jnp.float32),
        action_mask=jnp.asarray(np.arange(8) < [[8], [8], [5], [0]]),
        dim_mask=jnp.ones((ROWS, 3), bool),
        row=jnp.arange(ROWS, dtype=jnp.int32),
    )


@pytest.fixture(scope="module")
def model():
    return CONFIG.build(nnx.Rngs(0))


def test_rows_are_what_the_config_says():
    spec = CONFIG.rows.batch_spec(ROWS, CONFIG.cameras)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), spec) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), rows()
    )
    window = CONFIG.rows.window
    assert (window.history, window.first_action, window.pad_before, window.pad_after) == (2, -1, 1, 3)
    with pytest.raises(ValueError, match=r"cameras front, wrist, .*--model\.cameras front"):
        CONFIG.rows.batch_spec(ROWS, ["front"])


def test_dims_are_never_padded():
    exact, row = ExactDims(3, 2), {"actions": np.zeros((8, 3)), "state": np.zeros((2, 2))}
    assert exact(row)["dim_mask"].all()
    with pytest.raises(ValueError, match=r"4 action dims, .* 3 .*--model\.action-dim 4"):
        exact(row | {"actions": np.zeros((8, 4))})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unet": UnetSizes(widths=(16, 16, 16)), "action_horizon": 10}, "action_horizon 10 must be a multiple of 4"),
        ({"n_action_steps": 8}, "so that 7 can be executed, not n_action_steps 8"),
        ({"encoder_widths": (20,)}, "must be multiples of 16"),
        ({"transformer": TransformerSizes(width=10)}, "width 10 is not a multiple of twice its 4 heads"),
        ({"instructions": ("lift", "push", "lift")}, "instructions name one twice: lift, push, lift"),
        ({"remat": "dots"}, "remat dots: .* for less memory give --model.dtype bfloat16 or a larger --grad-accum"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.slow
def test_a_shared_encoder_is_one_and_an_absent_camera_counts_for_nothing(model):
    observation = rows().observation
    context = jax.jit(lambda observation: model.context(observation))
    features = context(observation)
    assert features.shape == (ROWS, 2, 2 * 16 + 2) and list(model.encoders) == ["shared"]
    images = dict(observation.images, wrist=observation.images["front"])
    same = context(dataclasses.replace(observation, images=images))
    np.testing.assert_array_equal(same[..., :16], same[..., 16:32])
    masks = dict(observation.image_masks, wrist=jnp.zeros(ROWS, bool))
    absent = context(dataclasses.replace(observation, image_masks=masks))
    assert not absent[..., 16:32].any() and (absent[..., :16] == features[..., :16]).all()
    own = nnx.eval_shape(lambda: dataclasses.replace(CONFIG, share_encoder=False).build(nnx.Rngs(0)))
    assert sorted(own.encoders) == ["front", "wrist"]


@pytest.mark.parametrize(
    "objective",
    [pytest.param(Diffusion(augmentation=CROP, num_draws=2), marks=pytest.mark.slow), FlowMatching(augmentation=CROP)],
    ids=lambda o: type(o).__name__,
)
def test_shares_add_up_filler_counts_for_nothing_and_evaluation_repeats_itself(model, objective):
    batch = rows()
    norms, keys = objective.norms(batch), row_keys(0, 1, batch.row)
    real_rows = 3 * 8 * 3 if isinstance(objective, Diffusion) else (8 + 8 + 5) * 3
    assert norms["elements"] == real_rows * objective.draws_per_row

    def loss(batch, keys, train):
        return objective.loss(model, batch, norms, keys, train=train)[0]

    run = jax.jit(loss, static_argnames="train")
    halves = [jax.tree.map(lambda leaf, part=part: leaf[part], (batch, keys)) for part in (slice(0, 2), slice(2, 4))]
    assert sum(run(*half, train=True) for half in halves) == pytest.approx(
        float(run(batch, keys, train=True)), rel=1e-5
    )
    filled = dataclasses.replace(batch, actions=batch.actions.at[3].set(7.0))
    assert run(filled, keys, train=True) == run(batch, keys, train=True)
    assert run(batch, keys, train=False) == run(batch, keys, train=False) != run(batch, keys, train=True)


@pytest.mark.slow
def test_crops_are_anywhere_in_training_by_the_row_alone_and_in_the_centre_else():
    height, width = 10, 12
    place = jnp.arange(height)[:, None, None] * 100 + jnp.arange(width)[None, :, None]
    images = {"front": jnp.broadcast_to(place, (200, 2, height, width, 3)).astype(jnp.float32)}
    keys = row_keys(0, 0, jnp.arange(200))
    found = CROP.augment(images, keys)["front"]
    assert found.shape == (200, 2, 8, 8, 3)
    np.testing.assert_array_equal(found[:, 0], found[:, 1])  # all steps of a history alike
    corners = np.asarray(found[:, 0, 0, 0, 0])
    assert set(corners) == {100 * top + left for top in range(3) for left in range(5)}
    np.testing.assert_array_equal(np.diff(found[:, 0, 0, :, 0], axis=-1), 1)
    half = CROP.augment({"front": images["front"][:100]}, keys[100:])["front"]
    np.testing.assert_array_equal(half, found[100:])
    np.testing.assert_array_equal(CROP.fixed(images)["front"][0, 0, 0, 0], [102.0] * 3)
    # torchvision's center_crop (0.28.0), of rows that are 0, 1, ... 8 pixels more than the crop has.
    higher = [jnp.broadcast_to(jnp.arange(8.0 + room)[None, :, None, None], (1, 8 + room, 12, 3)) for room in range(9)]
    centred = [int(CROP.fixed({"front": image})["front"][0, 0, 0, 0]) for image in higher]
    assert centred == [0, 0, 1, 2, 2, 2, 3, 4, 4]
    with pytest.raises(ValueError, match="10 x 12 pixels are smaller than the crop of 11 x 8"):
        dataclasses.replace(CROP, height=11).fixed(images)


@pytest.mark.slow
def test_sampling_follows_the_row_keys_and_ends_within_the_limits(model):
    batch, objective = rows(), Diffusion(augmentation=CROP)
    keys = row_keys(0, 0, batch.row)
    noise = jax.random.normal(jax.random.key(1), batch.actions.shape)
    sample = jax.jit(
        lambda observation, noise, keys: objective.action_sampler.sample(model, observation, noise, keys, 5)
    )
    found = sample(batch.observation, noise, keys)
    assert found.shape == batch.actions.shape and float(jnp.abs(found).max()) <= 1 + 1e-6
    other = sample(batch.observation, noise, keys.at[0].set(keys[1]))
    assert (other[1:] == found[1:]).all() and (other[0] != found[0]).any()


def test_the_transformer_denoises_too():
    config = dataclasses.replace(
        CONFIG, denoiser="transformer", transformer=TransformerSizes(width=16, depth=1, num_heads=2)
    )
    shapes = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))

    def run(model, batch):
        return model.velocity(batch.observation, batch.actions[:, None], jnp.full((ROWS, 1), 0.5))

    assert jax.eval_shape(run, shapes, rows()).shape == (ROWS, 1, 8, 3)


def of_type(dtype, **changes):
    """The tiny policy in this type: its loss of given noise as a function of parameters, and their shapes."""
    config = dataclasses.replace(CONFIG, dtype=dtype, **changes)
    abstract = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))
    batch, objective = rows(), Diffusion()
    noise = jax.random.normal(jax.random.key(1), batch.actions[:, None].shape)

    def loss(params):
        module = merge_module(nnx.split(abstract)[0], params)
        return objective.loss_at(module, batch, objective.norms(batch), noise, jnp.full((ROWS, 1), 40))[0]

    return loss, module_params(abstract)


DENOISERS = [
    {},
    {"pooling": "spatial_softmax"},
    {"denoiser": "transformer", "transformer": TransformerSizes(width=16, depth=1, num_heads=2)},
    {"denoiser": "mlp", "mlp": MlpSizes(width=16, depth=1)},
]


def operations(jaxpr):
    """Name and types of all operations, with those in loops and calls."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, [str(getattr(var.aval, "dtype", "")) for var in equation.invars]
        for body in bodies(equation):
            yield from operations(body)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [*(("bfloat16", changes) for changes in DENOISERS), ("float16", {})],
    ids=["unet", "keypoints", "transformer", "mlp", "float16"],
)
def test_products_compute_in_the_type_that_is_given_and_norms_in_float32(dtype, changes):
    loss, params = of_type(dtype, **changes)
    assert {leaf.dtype for leaf in params.values()} == {jnp.dtype("float32")}
    found = list(operations(jax.make_jaxpr(loss)(params).jaxpr))
    products = [types[:2] for name, types in found if name in ("dot_general", "conv_general_dilated")]
    wide = [types for types in products if types == ["float32", "float32"]]
    assert all(types in ([dtype, dtype], ["float32", "float32"]) for types in products)
    # The last layer; two of the UNet's diffusion step; the transformer's first layer and three of its condition; of
    # each camera's keypoints two sums and a layer.
    named = changes.get("denoiser", changes.get("pooling", "unet"))
    assert len(wide) == {"unet": 3, "transformer": 5, "mlp": 1, "spatial_softmax": 3 + 2 * 3}[named]
    narrow = {name for name, types in found if dtype in types}
    assert not narrow & {"rsqrt", "reduce_sum", "exp"}  # of norms, of means, of softmaxes
    assert jax.eval_shape(loss, params).dtype == jnp.float32


@pytest.mark.slow
def test_the_chunk_in_bfloat16_is_that_in_float32_to_the_rounding_of_its_products():
    """Each product rounds two inputs and an output, and the norm and activation after it round once each, all by at
    most 2^-9 of a value; norms keep errors from growing. On the longest way there are 5 convolutions of the encoder and
    9 of the UNet, whose last layer is float32: together at most 14 * 5 * 2^-9 = 0.14, if no errors cancel.
    """
    params = module_params(CONFIG.build(nnx.Rngs(0)))
    batch = rows()

    def chunk(dtype):
        config = dataclasses.replace(CONFIG, dtype=dtype)
        graph = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))[0]

        def run(params):
            module = merge_module(graph, params)
            return module.denoise(module.context(batch.observation), batch.actions[:, None], jnp.full((ROWS, 1), 40.0))

        return np.asarray(jax.jit(run)(params), np.float64)

    narrow, wide = chunk("bfloat16"), chunk("float32")
    error = np.linalg.norm(narrow - wide) / np.linalg.norm(wide)
    assert 2**-9 < error < 14 * 5 * 2**-9


STATES = DiffusionPolicyConfig(
    action_dim=3,
    state_dim=2,
    n_obs_steps=1,
    cameras=(),
    instructions=("lift", "push", "turn"),
    denoiser="mlp",
    mlp=MlpSizes(width=16, depth=2),
    diffusion_step_embed_dim=8,
)


def test_a_policy_from_states_alone_tells_instructions_apart():
    model, spec = STATES.build(nnx.Rngs(0)), STATES.rows.batch_spec(ROWS, ())
    assert not model.encoders and STATES.rows.text_limit == 1 and CONFIG.rows.text_limit is None
    number, *rest = [step for step in STATES.rows.transforms(None) if isinstance(step, NumberPrompt)]
    row = number({"prompt": "turn", "state": np.zeros(2)})
    assert not rest and "prompt" not in row
    assert (row["prompt_tokens"].tolist(), row["prompt_tokens"].dtype) == ([2], np.int32) and row["prompt_mask"].all()
    assert (spec.observation.prompt_tokens.shape, spec.observation.prompt_tokens.dtype) == ((ROWS, 1), jnp.int32)
    state = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, 2)), jnp.float32)
    tokens = jnp.array([[0], [1], [2], [2]], jnp.int32)
    observation = Observation(
        images={}, image_masks={}, state=state, prompt_tokens=tokens, prompt_mask=jnp.ones((ROWS, 1), bool)
    )
    np.testing.assert_array_equal(model.context(observation)[:, 0], np.hstack([np.eye(3)[[0, 1, 2, 2]], state]))
    for unknown in ({"prompt": "lit"}, {}):
        with pytest.raises(ValueError, match=r"does not know the instruction .*; it knows 'lift', 'push', 'turn': set"):
            number(unknown)


class Told(nnx.Module):
    """In place of a denoiser: says which diffusion step it was told, as a share of a hundred."""

    def __call__(self, noisy, step, condition, added):
        del condition, added
        return jnp.broadcast_to(step[:, None, None] / 100, noisy.shape)


def test_flow_time_is_the_diffusion_step_and_sampling_goes_from_one_to_zero():
    config = dataclasses.replace(STATES, instructions=())
    model = config.build(nnx.Rngs(0))
    model.denoiser = Told()
    observation = dataclasses.replace(rows().observation, images={}, state=jnp.zeros((ROWS, 2)))
    noise, time = rows().actions, jnp.linspace(0.0, 1.0, ROWS)[:, None]
    found = model.velocity(observation, noise[:, None], time)
    np.testing.assert_allclose(found[:, 0], np.broadcast_to(time[..., None], noise.shape), rtol=1e-6)
    # The Euler sum of dx/dt = t from 1 to 0, which takes each step's beginning.
    for num_steps in (1, 4):
        found = FlowSampler().sample(model, observation, noise, None, num_steps)
        np.testing.assert_allclose(found, noise - (num_steps + 1) / (2 * num_steps), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_mlp_is_what_its_parameters_say():
    """Against the same sums in numpy."""
    model = STATES.build(nnx.Rngs(0)).denoiser
    rng = np.random.default_rng(1)
    noisy, step, condition = rng.normal(size=(2, 8, 3)), np.array([0.0, 50.0]), rng.normal(size=(2, 1, 5))
    angles = step[:, None] * np.geomspace(1, 1e-4, 4)
    linear = lambda part, x: x @ np.asarray(part.kernel[...], np.float64) + np.asarray(part.bias[...])  # noqa: E731
    mish = lambda x: x * np.tanh(np.log1p(np.exp(x)))  # noqa: E731
    x = linear(model.inputs, np.hstack([noisy.reshape(2, -1), np.sin(angles), np.cos(angles), condition[:, 0]]))
    for layer in model.layers:
        normed = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        x = x + linear(layer.linear, mish(normed * layer.norm.scale[...] + layer.norm.bias[...]))
    found = model(*(jnp.asarray(value, jnp.float32) for value in (noisy, step, condition)))
    np.testing.assert_allclose(found, linear(model.outputs, mish(x)).reshape(2, 8, 3), atol=1e-5)
    products = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)) if leaf.ndim == 2)
    traced = jax.make_jaxpr(model)(*(jnp.asarray(value, jnp.float32) for value in (noisy, step, condition)))
    assert product_flops(traced.jaxpr) == 2 * 2 * products  # of two rows


def test_a_critic_says_0_at_first_and_sends_no_gradient_back():
    """Its values are those of an MLP of the condition; a policy without one has no parameter more."""
    plain, config = CONFIG, dataclasses.replace(CONFIG, critic=True)
    assert config.base.model == plain and plain.base is None
    module = config.build(nnx.Rngs(0))
    graph, params, before = nnx.graphdef(module), module_params(module), module_params(plain.build(nnx.Rngs(0)))
    added = {path for path in params if path.startswith("value_head/")}
    assert set(params) - set(before) == added and len(added) == 6
    seen = rows().observation
    assert (merge_module(graph, params).value(seen) == np.zeros(ROWS)).all()
    drawn = np.random.default_rng(0).normal(size=(256, 1)).astype(np.float32)
    params = {**params, "value_head/layer_out/kernel": jnp.asarray(drawn)}
    x = np.asarray(merge_module(graph, params).context(seen), np.float64).reshape(ROWS, -1)
    for name in ("layer_in", "layer_mid", "layer_out"):
        x = x @ np.asarray(params[f"value_head/{name}/kernel"]) + np.asarray(params[f"value_head/{name}/bias"])
        x = x if name == "layer_out" else x / (1 + np.exp(-x))
    np.testing.assert_allclose(merge_module(graph, params).value(seen), x[:, 0], rtol=1e-4, atol=1e-5)
    gradient = jax.grad(lambda params: merge_module(graph, params).value(seen).sum())(params)
    assert {path for path, leaf in gradient.items() if np.asarray(leaf).any()} == added


@pytest.mark.slow
@pytest.mark.parametrize("denoiser", ["unet", "transformer", "mlp"])
def test_what_a_draw_is_told_adds_a_vector_that_begins_at_0(denoiser):
    """What is told nothing has the velocity of a policy without an indicator, with the same other parameters."""
    plain = dataclasses.replace(CONFIG, denoiser=denoiser)
    config = dataclasses.replace(plain, indicator=True)
    assert config.base.model == plain
    module = config.build(nnx.Rngs(0))
    graph, params, of_plain = nnx.graphdef(module), module_params(module), nnx.graphdef(plain.build(nnx.Rngs(0)))
    shape = params["indicator"].shape
    assert not np.asarray(params["indicator"]).any() and shape[0] == 2
    begun = {**params, "indicator": jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)}
    batch = rows()
    noisy = jnp.repeat(batch.actions[:, None], 3, axis=1)
    time, told = jnp.full((ROWS, 3), 0.5), jnp.tile(jnp.arange(3), (ROWS, 1))
    old = {path: leaf for path, leaf in params.items() if path != "indicator"}
    expected = merge_module(of_plain, old).velocity(batch.observation, noisy, time)
    found = {name: merge_module(graph, of).velocity(batch.observation, noisy, time, told)
             for name, of in {"at first": params, "later": begun}.items()}  # fmt: skip
    np.testing.assert_allclose(found["at first"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["later"][:, 0], expected[:, 0], rtol=1e-5, atol=1e-6)
    assert min(np.abs(found["later"][:, one] - expected[:, 0]).max() for one in (1, 2)) > 1e-4
    assert np.abs(found["later"][:, 1] - found["later"][:, 2]).max() > 1e-4


def test_a_head_for_returns_learns_what_the_condition_is_from():
    """Its logits are those of an MLP of the condition, and unlike a critic's gradient theirs reaches the encoders."""
    plain, config = CONFIG, dataclasses.replace(CONFIG, return_bins=5)
    assert config.base.model == plain
    module = config.build(nnx.Rngs(0))
    graph, params = nnx.graphdef(module), module_params(module)
    seen = rows().observation
    assert (merge_module(graph, params).return_logits(seen) == np.zeros((ROWS, 5))).all()
    drawn = np.random.default_rng(0).normal(size=(256, 5)).astype(np.float32)
    params = {**params, "return_head/layer_out/kernel": jnp.asarray(drawn)}
    x = np.asarray(merge_module(graph, params).context(seen), np.float64).reshape(ROWS, -1)
    for name in ("layer_in", "layer_mid", "layer_out"):
        x = x @ np.asarray(params[f"return_head/{name}/kernel"]) + np.asarray(params[f"return_head/{name}/bias"])
        x = x if name == "layer_out" else x / (1 + np.exp(-x))
    np.testing.assert_allclose(merge_module(graph, params).return_logits(seen), x, rtol=1e-4, atol=1e-4)
    gradient = jax.grad(lambda params: merge_module(graph, params).return_logits(seen)[:, 0].sum())(params)
    parts = {path.partition("/")[0] for path, leaf in gradient.items() if np.asarray(leaf).any()}
    assert parts == {"return_head", "encoders"}
