"""pi0 and pi0.5 against openpi: every intermediate, loss, gradient, sampled action and training step it recorded.

Float32 tolerances are those of the golden README. In bfloat16 two compilers cannot agree element by element: openpi's
operations, run unchanged on jax 0.5.3 (which made the numbers, bit for bit) and on 0.10.2, agree to 0.7 % one-bit flips
after one layer, and after four layers differ in 70 % of the elements, by 0.05 in v_t. So bfloat16 is held to three
other things: the loss to 1e-2; tokens that pass through few layers are mostly equal to the bit (they are not where a
cast stands in another place); and what remains is less than openpi's own rounding noise, its distance from float32.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_case import GOLDEN, flow_cases, load_case, read_meta, read_npz

from openpi_train.interop.openpi import parameter_shapes
from openpi_train.optim import AdamW, LRSchedule

pytestmark = pytest.mark.usefixtures("golden")

CASES = flow_cases()
TRAINED = [name for name in CASES if "train" in read_meta()["cases"][name]]
FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}


def draw(case):
    """Noisy actions "b 1 h a", the velocity that is wanted "b h a", time "b 1"."""
    time = jnp.asarray(case.io["in/time"])[:, None]
    noise, actions = jnp.asarray(case.io["in/noise"]), jnp.asarray(case.io["in/actions"])
    t = time[:, :, None]
    return (t * noise + (1 - t) * actions)[:, None], noise - actions, time


def loss_and_velocity(case, params, observation):
    noisy, wanted, time = draw(case)
    velocity = case.model(params).velocity(observation, noisy, time)[:, 0]
    per_element = jnp.mean(jnp.square(velocity - wanted), axis=-1)
    return per_element.mean(), {"v_t": velocity, "loss_per_element": per_element, "loss": per_element.mean()}


def intermediates(case, params):
    """What the golden file calls `out/...`, by the module's own methods."""
    model, (noisy, wanted, time) = case.model(params), draw(case)
    prefix, prefix_mask = model.embed_prefix(case.observation)
    suffix, conditions = model.embed_suffix(case.observation.state, noisy, time)
    mask, positions = model.layout(prefix_mask, num_draws=1)
    outputs = model.outputs(case.observation, noisy, time)
    adaptive = {"adarms_cond": conditions["action"][:, 0]} if conditions else {}
    return adaptive | {
        "prefix_tokens": prefix,
        "prefix_mask": prefix_mask,
        "suffix_tokens": suffix,
        "attn_mask": mask,
        "positions": positions,
        "x_t": noisy[:, 0],
        "u_t": wanted,
        "prefix_out": outputs["language"],
        "suffix_out": outputs["action"],
    }


# `make quick` compares each kind of policy once.
QUICK = ("pi0_f32", "pi05_f32")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def run(request):
    """(case, the compiled forward and backward pass, outputs by golden name, gradients by openpi's names)."""
    case = load_case(request.param)
    step = jax.jit(jax.value_and_grad(lambda params, seen: loss_and_velocity(case, params, seen), has_aux=True))
    (_, out), gradients = step(case.params, case.observation)
    out |= jax.jit(lambda params: intermediates(case, params))(case.params)
    out = {name: np.asarray(value) for name, value in out.items()}
    gradients = {case.config.public_name(path): np.asarray(value) for path, value in gradients.items()}
    return case, step, out, gradients


def root_mean_square(values):
    return float(np.sqrt(np.mean(np.square(np.asarray(values, np.float64)))))


def assert_like_openpi(case, name, ours):
    """Equal in float32; in bfloat16 no further from openpi's value than rounding took that from float32."""
    expected = case.io[f"out/{name}"]
    ours = np.asarray(ours, np.float32)
    if not case.bfloat16:
        np.testing.assert_allclose(ours, expected, **FLOAT32, err_msg=name)
        return
    twin = case.float32_twin()
    if twin is None:
        np.testing.assert_allclose(ours, expected, atol=3e-2, err_msg=name)
        return
    noise = root_mean_square(expected - load_case(twin).io[f"out/{name}"])
    assert root_mean_square(ours - expected) < min(noise, 3e-2), name


def test_masks_positions_and_types_equal_openpi(run):
    case, _, out, _ = run
    for name in ("prefix_mask", "attn_mask", "positions"):
        np.testing.assert_array_equal(out[name], case.io[f"out/{name}"])
    np.testing.assert_allclose(out["x_t"], case.io["out/x_t"], atol=1e-6)
    # We have no `ar_mask`s (they are in `attn_mask`) and no mask of the suffix (all of it counts).
    expected = {name: dtype for name, dtype in case.meta["dtypes"].items() if name in out}
    assert {name: str(out[name].dtype) for name in expected} == expected


def test_embedded_tokens_equal_openpi(run):
    case, _, out, _ = run
    # The suffix is embedded in float32 in both types.
    np.testing.assert_allclose(out["suffix_tokens"], case.io["out/suffix_tokens"], **FLOAT32)
    if "adarms_cond" in case.io:
        np.testing.assert_allclose(out["adarms_cond"], case.io["out/adarms_cond"], **FLOAT32)
    if case.bfloat16:
        equal = out["prefix_tokens"].astype(np.float32) == case.io["out/prefix_tokens"]
        # 95 % measured; 32 % with one cast misplaced (layer norm with parameters rounded to bfloat16).
        assert equal.mean() > 0.8
    else:
        np.testing.assert_allclose(out["prefix_tokens"], case.io["out/prefix_tokens"], **FLOAT32)


def test_outputs_and_loss_equal_openpi(run):
    case, _, out, _ = run
    if not case.bfloat16:
        counts = case.io["out/prefix_mask"]
        np.testing.assert_allclose(out["prefix_out"][counts], case.io["out/prefix_out"][counts], **FLOAT32)
    for name in ("suffix_out", "v_t", "loss_per_element"):
        assert_like_openpi(case, name, out[name])
    np.testing.assert_allclose(out["loss"], case.meta["loss"], rtol=1e-2 if case.bfloat16 else 1e-4)


def test_gradients_equal_openpi(run):
    case, _, _, gradients = run
    norms = {name: np.linalg.norm(value.astype(np.float64)) for name, value in gradients.items()}
    expected = case.meta["grad_norm_per_param"]
    assert norms.keys() == expected.keys()
    total = case.meta["grad_global_norm_all_params"]
    rtol = 1e-2 if case.bfloat16 else 1e-3
    np.testing.assert_allclose(np.sqrt(sum(norm**2 for norm in norms.values())), total, rtol=rtol)
    if case.bfloat16:
        return
    for name, norm in norms.items():
        # The absolute part is for the tower's key bias: softmax does not see it, its gradient is rounding.
        np.testing.assert_allclose(norm, expected[name], rtol=1e-3, atol=1e-7 * total, err_msg=name)
    for name in (key.removeprefix("grad/") for key in case.io if key.startswith("grad/")):
        wanted = case.io[f"grad/{name}"]
        assert np.linalg.norm(gradients[name] - wanted) < 1e-3 * np.linalg.norm(wanted), name


def test_masked_inputs_do_not_change_the_velocity_at_all(run):
    case, step, out, _ = run
    seen = case.observation
    images = {
        slot: jnp.where(seen.image_masks[slot][:, None, None, None], image, 255 - image)
        for slot, image in seen.images.items()
    }
    tokens = jnp.where(seen.prompt_mask, seen.prompt_tokens, seen.prompt_tokens + 1)
    state = seen.state
    if not any(case.meta["mean_abs_change_of_v_t_per_sample_when_changed"]["state"]):
        state = state + 1
    changed = type(seen)(
        images=images, image_masks=seen.image_masks, state=state, prompt_tokens=tokens, prompt_mask=seen.prompt_mask
    )
    (_, other), _ = step(case.params, changed)
    np.testing.assert_array_equal(other["v_t"], out["v_t"])


def test_sampled_actions_equal_openpi(run):
    case, noise = run[0], jnp.asarray(run[0].io["in/noise"])
    names = [name.removeprefix("out/") for name in case.io if name.startswith("out/sample_actions_")]
    assert names
    for name in names:
        num_steps = int(name.rpartition("_")[2])
        sample = jax.jit(lambda params, n=num_steps: case.model(params).sample_actions(case.observation, noise, n))
        assert_like_openpi(case, name, sample(case.params))


def test_frozen_parameters_equal_openpis_freeze_filters(golden):
    cases = [load_case(name) for name in CASES if "freeze_filters" in load_case(name).meta]
    if not cases:
        pytest.skip(f"no case in {golden} lists freeze filters")
    for case in cases:
        lora = {"language": case.config.language, "action_expert": case.config.action_expert}
        none = {"lora_attention_rank": 0, "lora_mlp_rank": 0}
        for variants, expected in case.meta["freeze_filters"].items():
            with_lora = dict(zip(lora, ("_lora" in part for part in variants.split("+")), strict=True))
            changes = {
                name: sizes if with_lora[name] else type(sizes)(**{**vars(sizes), **none})
                for name, sizes in lora.items()
            }
            config = type(case.config)(**{**vars(case.config), **changes})
            frozen = {config.public_name(path): config.frozen(path) for path in parameter_shapes(config)}
            assert sorted(name for name, fixed in frozen.items() if fixed) == sorted(expected["frozen"]), variants
            assert sorted(name for name, fixed in frozen.items() if not fixed) == sorted(expected["trainable"]), (
                variants
            )


def train(case):
    """openpi's train step with optax: infos per step, then all parameters and their average afterwards."""
    plan = case.meta["train"]
    schedule = LRSchedule(**plan["lr_schedule"])
    optimizer = AdamW().create(schedule.create())
    frozen = {path: value.astype(jnp.bfloat16) for path, value in case.params.items() if case.config.frozen(path)}
    params = {path: value for path, value in case.params.items() if path not in frozen}

    def is_kernel(path, value):
        return value.ndim > 1 and not re.fullmatch(
            r".*/(bias|scale|pos_embedding|input_embedding)", case.config.public_name(path)
        )

    @jax.jit
    def step(params, average, optimizer_state):
        def loss(params):
            return loss_and_velocity(case, {**params, **frozen}, case.observation)[0]

        value, gradients = jax.value_and_grad(loss)(params)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        params = optax.apply_updates(params, updates)
        decay = plan["ema_decay"] or 0.0
        average = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, average, params)
        kernels = [leaf for path, leaf in {**params, **frozen}.items() if is_kernel(path, leaf)]
        norms = {"grad_norm": optax.tree.norm(gradients), "param_norm": optax.tree.norm(kernels)}
        return params, average, optimizer_state, {"loss": value, **norms}

    average, optimizer_state, infos = params, optimizer.init(params), []
    for _ in range(plan["steps"]):
        params, average, optimizer_state, info = step(params, average, optimizer_state)
        infos.append({name: float(value) for name, value in info.items()})
    return infos, params, average, frozen


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_training_steps_equal_openpi(name):
    case = load_case(name)
    infos, params, average, frozen = train(case)
    assert sorted(map(case.config.public_name, frozen)) == sorted(case.meta["train"]["frozen_params"])
    for ours, expected in zip(infos, case.meta["train"]["info_per_step"], strict=True):
        np.testing.assert_allclose(ours["loss"], expected["loss"], rtol=1e-4)
        np.testing.assert_allclose(ours["grad_norm"], expected["grad_norm"], rtol=1e-3)
        np.testing.assert_allclose(ours["param_norm"], expected["param_norm"], rtol=1e-4)
    paths = {case.config.public_name(path): path for path in params}
    recorded = read_npz(GOLDEN / case.meta["train"]["file"])
    for key, expected in recorded.items():
        _, tree, public = key.split("/", 2)
        ours = np.asarray({"params": params, "ema": average}[tree][paths[public]])
        start = np.asarray(case.params[paths[public]])
        # Of how far training moved the parameter: Adam's first steps are signs, so tiny gradients may flip a few.
        assert np.linalg.norm(ours - expected) < 1e-2 * np.linalg.norm(expected - start), key
