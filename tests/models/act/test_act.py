"""ACT as a model: rows, what is refused, what stays fixed, and how its loss treats rows, cameras, keys and types."""

import dataclasses
import re

import act_case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from trainers import make_trainer

from openpi_train.keys import row_keys
from openpi_train.models.act import ActConfig
from openpi_train.models.act.act_network import sine_grid
from openpi_train.objectives.conditional_vae import ConditionalVae
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import merge_module, module_params
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.flops import product_flops

# Without dropout, and with images of one stage: compiled in a second.
SEEING = act_case.config(backbone_widths=(4,), n_decoder_layers=1, n_encoder_layers=1, dropout=0.0)
BLIND = dataclasses.replace(SEEING, cameras=(), dropout=0.5)
OBJECTIVE = ConditionalVae()


def blind_batch():
    batch = act_case.batch()
    return dataclasses.replace(batch, observation=dataclasses.replace(batch.observation, images={}, image_masks={}))


def compiled(config, function):
    """`function(model, ...)` of a model of this config with drawn parameters, jitted."""
    graphdef, params = nnx.split(config.build(nnx.Rngs(0)))
    return jax.jit(lambda *given: function(nnx.merge(graphdef, params), *given))


def test_rows_are_what_the_config_says():
    batch = act_case.batch()
    spec = SEEING.rows.batch_spec(len(batch.row), SEEING.cameras)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), spec) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), batch
    )
    assert (SEEING.rows.window.history, SEEING.rows.window.num_ahead, SEEING.rows.normalization) == (1, 6, "z_score")


def test_the_published_size_is_lerobots():
    """51,613,582 trained parameters, as LeRobot 0.6.1 counts with the same features; 19,200 numbers of batch norms."""
    config = ActConfig()
    sizes = {path: leaf.size for path, leaf in module_params(nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))).items()}
    fixed = {path for path in sizes if config.param_rules.frozen(path)}
    assert sum(sizes[path] for path in sizes.keys() - fixed) == 51_613_582
    assert sum(sizes[path] for path in fixed) == 19_200
    assert all("norm" in path and path.startswith("backbone/") for path in fixed)
    assert {config.param_rules.frozen_dtype(path) for path in fixed} == {jnp.float32}
    # --freeze vision is the whole backbone, in bfloat16 where nothing else is said.
    backbone = {path for path in sizes if re.fullmatch(config.param_rules.groups["vision"], path)}
    assert sum(sizes[path] for path in backbone) == 11_176_512 + 9_600
    assert config.param_rules.frozen_dtype("backbone/stem/kernel") == jnp.bfloat16


def test_a_random_backbone_of_the_published_size_is_told_where_its_weights_are():
    assert "picture backbone" in ActConfig().start_advice
    assert ActConfig().start_advice.endswith("--weight-loader.params-path resnet18-f37072fd.pth")
    assert ActConfig(backbone_widths=(8, 16)).start_advice == ActConfig(cameras=()).start_advice
    assert "resnet18" not in ActConfig(cameras=()).start_advice, "no file fits it"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_heads": 3}, "dim_model 16 must be a multiple of its 3 heads"),
        ({"dim_model": 18, "n_heads": 2}, "and of 4"),
        ({"dropout": 1.0}, r"dropout 1.0 must lie in \[0, 1\)"),
        ({"attention": "cudnn"}, "attention cudnn: ACT drops attention weights"),
        ({"image_std": (0.2, 0.0, 0.2)}, "must be above 0"),
        ({"latent_dim": 0}, "latent_dim 0 must be at least 1"),
        ({"backbone_widths": ()}, "backbone_widths"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SEEING, **change)


def test_a_negative_weight_is_refused():
    assert dataclasses.replace(OBJECTIVE, kl_weight=-1.0).check() == ["--objective.kl-weight -1.0 must be at least 0"]
    assert SEEING.check_objective("FlowMatching", frozenset({"velocity"}))


def test_shares_add_up_with_dropout_by_row_and_filler_counts_for_nothing():
    batch, keys = blind_batch(), row_keys(0, 1, jnp.arange(3))
    norms = OBJECTIVE.norms(batch)
    assert (norms["elements"], norms["rows"]) == ((6 + 4 + 1) * 3, 3)
    run = compiled(BLIND, lambda model, batch, keys: OBJECTIVE.loss(model, batch, norms, keys)[1])
    whole = run(batch, keys)
    np.testing.assert_allclose(whole["loss"], whole["l1"] + 10 * whole["kl"], rtol=1e-6)
    # Of rows of which only one is real, the others filler with other contents: the shares.
    parts = []
    for row in range(3):
        others = jnp.arange(3) != row
        alone = dataclasses.replace(
            batch,
            action_mask=jnp.where(others[:, None], False, batch.action_mask),
            actions=jnp.where(others[:, None, None], 7.0, batch.actions),
        )
        parts.append(run(alone, keys))
    for name, value in whole.items():
        np.testing.assert_allclose(sum(part[name] for part in parts), value, rtol=1e-5)
    # What a row drops goes with its key, not with its place.
    turned = run(jax.tree.map(lambda leaf: leaf[::-1], batch), keys[::-1])
    np.testing.assert_allclose(turned["loss"], whole["loss"], rtol=1e-6)
    assert abs(run(batch, keys[::-1])["l1"] - whole["l1"]) > 1e-3


def test_evaluation_draws_the_same_latents_and_drops_nothing(monkeypatch):
    calls = []
    monkeypatch.setattr(ConditionalVae, "loss_at", lambda self, *given: calls.append(given) or (jnp.zeros(()), {}))
    batch = blind_batch()
    model = nnx.eval_shape(lambda: BLIND.build(nnx.Rngs(0)))
    for train in (True, False):
        OBJECTIVE.loss(model, batch, {}, row_keys(0, 1, batch.row), train=train)
    np.testing.assert_array_equal(calls[0][3], calls[1][3])
    assert calls[0][4] is not None and calls[1][4] is None
    assert np.unique(calls[0][3]).size == 3 * BLIND.latent_dim


def test_an_absent_camera_counts_for_nothing_and_nothing_is_drawn_when_it_acts():
    batch = act_case.batch()
    run = compiled(SEEING, lambda model, seen, noise: OBJECTIVE.action_sampler.sample(model, seen, noise, None, 10))
    absent = dataclasses.replace(
        batch.observation, image_masks={**batch.observation.image_masks, "wrist": jnp.array([True, False, False])}
    )
    images = {**absent.images, "wrist": 255 - absent.images["wrist"]}
    found, changed = (run(seen, batch.actions) for seen in (absent, dataclasses.replace(absent, images=images)))
    np.testing.assert_array_equal(found[1:], changed[1:])
    assert (found[0] != changed[0]).any()
    np.testing.assert_array_equal(run(absent, batch.actions + 1), found)


def test_without_a_variational_encoder_there_is_no_divergence():
    config = dataclasses.replace(BLIND, use_vae=False, dropout=0.0)
    shapes = module_params(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))
    assert not [path for path in shapes if path.startswith("vae")]
    batch = blind_batch()

    def losses(params, batch):
        model = merge_module(nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))[0], params)
        return OBJECTIVE.loss(model, batch, OBJECTIVE.norms(batch), row_keys(0, 0, batch.row))[1]

    assert jax.eval_shape(losses, shapes, batch).keys() == {"loss", "l1"}


def test_the_step_is_traced_with_layers_gathered_one_by_one():
    """zero3 with accumulation, all recomputed, in bfloat16: a parameter that is read otherwise than planned raises."""
    config = dataclasses.replace(BLIND, remat="full", dtype="bfloat16", dropout=0.1)
    plan = Plan(mesh=make_mesh(2, jax.devices()[:2]), strategy="zero3", min_shard_mib=0)
    optimizer = AdamW(rate_mask="^decoder/", rate_factor=0.1)
    trainer, layout = make_trainer(config, plan, optimizer, LRSchedule(), objective=OBJECTIVE, accum=2, ema=None)
    with jax.set_mesh(plan.real_mesh):
        traced = trainer.traced_step(layout.shardings, layout.abstract(), config.rows.batch_spec(4, ()))
    metrics = traced.out_info[1]
    assert {"loss", "l1", "kl", "grad_norm"} <= metrics.keys()
    assert len(layout.shapes.params) == len(module_params(nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))))


def test_positions_of_the_cells_of_an_image_are_rows_then_columns():
    grid = sine_grid(2, 3, 8).reshape(2, 3, 8)
    np.testing.assert_array_equal(grid[:, 0, :4], grid[:, 2, :4])
    np.testing.assert_array_equal(grid[0, :, 4:], grid[1, :, 4:])
    # The last row and column are at 2 pi, at periods 1 and 100.
    np.testing.assert_allclose(grid[1, 2, [0, 1, 2, 3]], [0, 1, np.sin(0.02 * np.pi), np.cos(0.02 * np.pi)], atol=1e-5)
    np.testing.assert_allclose(grid[0, 0, [0, 4]], [np.sin(np.pi), np.sin(2 * np.pi / 3)], atol=1e-5)


def test_bfloat16_stays_near_float32_and_costs_are_those_of_the_traced_program():
    batch, noise, found = blind_batch(), jnp.zeros((3, 4)), {}
    graphdef, params = nnx.split(dataclasses.replace(BLIND, dropout=0.0).build(nnx.Rngs(0)))
    for dtype in ("bfloat16", "float32"):
        config = dataclasses.replace(BLIND, dropout=0.0, dtype=dtype)
        graphdef = nnx.split(nnx.eval_shape(lambda config=config: config.build(nnx.Rngs(0))))[0]

        def chunk(batch, graphdef=graphdef):
            model = nnx.merge(graphdef, params)
            return model.reconstruct(batch.observation, batch.actions, batch.action_mask, noise)[0]

        traced = jax.jit(chunk).trace(batch)
        assert product_flops(traced.jaxpr.jaxpr) == expected_flops(config, rows=3)
        found[dtype] = traced.lower().compile()(batch)
    assert found["bfloat16"].dtype == jnp.float32
    # Half of bfloat16's 8 bits survive some ten roundings.
    np.testing.assert_allclose(found["bfloat16"], found["float32"], atol=0.1)
    assert (found["bfloat16"] != found["float32"]).any()


def expected_flops(config: ActConfig, rows: int) -> float:
    """Multiplications and additions of products, counted by hand, of a policy without cameras."""
    d, h, hidden, z = config.dim_model, config.action_horizon, config.dim_feedforward, config.latent_dim

    def attention(queries: int, keys: int) -> int:
        return queries * d * d + 2 * keys * d * d + 2 * queries * keys * d + queries * d * d

    tokens = 2 + h
    vae = config.used_state_dim * d + h * config.action_dim * d + 2 * d * z
    vae += config.n_vae_encoder_layers * (attention(tokens, tokens) + 2 * tokens * d * hidden)
    encoder = z * d + config.used_state_dim * d + config.n_encoder_layers * (attention(2, 2) + 2 * 2 * d * hidden)
    decoder = config.n_decoder_layers * (attention(h, h) + attention(h, 2) + 2 * h * d * hidden)
    return 2 * rows * (vae + encoder + decoder + h * d * config.action_dim)
