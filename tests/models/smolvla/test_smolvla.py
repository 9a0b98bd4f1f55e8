"""SmolVLA as a model: rows, what is refused, what stays fixed, and how velocities treat cameras, padding and draws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import smolvla_case
from flax import nnx
from trainers import make_trainer

from openpi_train.models.smolvla.smolvla_network import encoded_time
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import module_params
from openpi_train.parallel.strategy import Plan

# The smallest: one group of layers.
SMALL = smolvla_case.config(num_vlm_layers=2, siglip=dataclasses.replace(smolvla_case.config().siglip, depth=1))
OBJECTIVE = FlowMatching(mask_action_dims=True, augment=False)


def shapes(config) -> dict:
    return module_params(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))


def test_rows_are_what_the_config_says():
    batch = smolvla_case.batch()
    spec = SMALL.rows.batch_spec(len(batch.row), sorted(batch.observation.images))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), spec) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), batch
    )
    assert (SMALL.rows.window.history, SMALL.rows.window.horizon, SMALL.rows.normalization) == (1, 5, "z_score")
    # Five present images of four tokens, 8 + 3 + 5 words, and for each row a state and five actions.
    assert SMALL.num_tokens_seen(batch) == 5 * 4 + 16 + 3 * 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_vlm_layers": 3}, "num_vlm_layers 3 is not a multiple of self_attn_every_n_layers 2"),
        ({"pixel_shuffle": 3}, r"the 4 patches of a row .* are not a multiple of pixel_shuffle 3"),
        ({"expert_width_multiplier": 0.47}, "must be even, and at least 2: it is 15"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"action_horizon": 0}, "action_horizon 0 must be at least 1"),
        ({"image_size": 18}, "image_size 18 is not a multiple of siglip.patch_size 4"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_what_trains_is_what_lerobot_trains():
    def trained(**changes) -> set[str]:
        config = dataclasses.replace(SMALL, **changes)
        return {path.split("/")[0] for path in shapes(config) if not config.param_rules.frozen(path)}

    expert = {"expert", "expert_norm", "action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out"}
    assert trained() == expert | {"state_proj"}
    assert trained(train_state_proj=False) == expert
    assert trained(train_expert_only=False) == expert | {"state_proj", "connector", "language"}
    all_of_it = {"train_expert_only": False, "freeze_vision_encoder": False}
    assert trained(**all_of_it) == expert | {"state_proj", "connector", "language", "image_encoder"}
    config = dataclasses.replace(SMALL, **all_of_it)
    assert {path for path in shapes(config) if config.param_rules.frozen(path)} == {
        "language/head",
        "language/final_norm/scale",
    }


def test_velocities_depend_on_what_counts_alone():
    batch, noise = smolvla_case.batch(), jnp.asarray(smolvla_case.RECORDED.arrays["in/noise"])
    graphdef, params = nnx.split(SMALL.build(nnx.Rngs(0)))
    seen, draws = batch.observation, jnp.stack([noise, 2 * noise[::-1]], axis=1)
    times = jnp.array([[0.1, 0.9], [0.5, 0.2], [0.7, 0.3]])

    @jax.jit
    def velocity(seen, draws, times):
        model = nnx.merge(graphdef, params)
        return model.velocity(seen, draws, times), model.velocity(model.context(seen), draws, times)

    found, by_context = velocity(seen, draws, times)
    np.testing.assert_allclose(found, by_context, rtol=1e-5, atol=1e-6)
    # Pictures of an absent camera, and tokens of padding.
    hidden = dataclasses.replace(
        seen,
        images={**seen.images, "camera2": seen.images["camera2"].at[1].set(7)},
        prompt_tokens=jnp.where(seen.prompt_mask, seen.prompt_tokens, 9),
    )
    np.testing.assert_array_equal(velocity(hidden, draws, times)[0], found)
    # Of two draws either may change alone.
    for changed, same in ((0, 1), (1, 0)):
        turned, _ = velocity(seen, draws.at[:, changed].add(1.0), times)
        np.testing.assert_array_equal(turned[:, same], found[:, same])
        assert (turned[:, changed] != found[:, changed]).any(axis=(1, 2)).all()
    # An action does not see those after it, but all that count see state and prompt.
    later, _ = velocity(seen, draws.at[:, :, 3].add(1.0), times)
    np.testing.assert_array_equal(later[:, :, :3], found[:, :, :3])
    assert (later[:, :, 4] != found[:, :, 4]).any(axis=(1, 2)).all()
    for change in ({"state": seen.state + 1}, {"prompt_tokens": seen.prompt_tokens.at[:, 0].set(9)}):
        other, _ = velocity(dataclasses.replace(seen, **change), draws, times)
        assert (other != found).any(axis=(2, 3)).all()


def test_the_encoding_of_times_is_that_of_float64():
    times = np.random.default_rng(0).uniform(size=(50, 2)).astype(np.float32)
    frequency = 1 / (4e-3 * 1000 ** np.linspace(0, 1, 36))
    angle = 2 * np.pi * times[..., None].astype(np.float64) * frequency
    wanted = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)
    # Angles below 2 pi are off by up to half of their last bit, 2.4e-7, and so are two products and a sum.
    np.testing.assert_allclose(encoded_time(jnp.asarray(times), 72), wanted, atol=1e-6)


@pytest.mark.parametrize("train_expert_only", [True, False])
def test_the_step_is_traced_with_layers_gathered_one_by_one(train_expert_only):
    """zero3 with accumulation, all recomputed, in bfloat16: a parameter that is read otherwise than planned raises."""
    config = dataclasses.replace(SMALL, remat="full", dtype="bfloat16", train_expert_only=train_expert_only)
    plan = Plan(mesh=make_mesh(2, jax.devices()[:2]), strategy="zero3", min_shard_mib=0)
    trainer, layout = make_trainer(config, plan, AdamW(), LRSchedule(), objective=OBJECTIVE, accum=2, ema=None)
    with jax.set_mesh(plan.real_mesh):
        traced = trainer.traced_step(layout.shardings, layout.abstract(), config.rows.batch_spec(4, ("top",)))
    assert {"loss", "grad_norm"} <= traced.out_info[1].keys()
