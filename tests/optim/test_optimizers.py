"""Optimizers layer by layer against numpy, their decay masks, and moments in bfloat16."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from openpi_train import registry
from openpi_train.nn.params import module_params
from openpi_train.optim import OPTIMIZERS, SGD, Adafactor, AdamW, Lion, LRSchedule, Muon

SHAPES = {
    "layers/weight": (3, 6, 4),
    "layers/query": (3, 2, 6, 4),
    "layers/attention/query/kernel": (3, 6, 2, 4),
    "layers/bias": (3, 4),
    "layers/norm/scale": (3, 6),
    "kernel": (5, 4),
    "embedding": (7, 4),
    "bias": (4,),
}
RATE = 1e-2
NUM_STEPS = 3


def random(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {path: jnp.asarray(scale * rng.normal(size=shape), jnp.float32) for path, shape in SHAPES.items()}


def trained(optimizer, params, grads):
    """Parameters after one update per gradient, and the last state."""
    rule = optimizer.create(LRSchedule(kind="constant", warmup_steps=0, peak_lr=RATE).create())
    state = rule.init(params)
    step = jax.jit(rule.update)
    for gradient in grads:
        updates, state = step(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


GRADS = [random(seed, scale=0.1 * (1 + seed)) for seed in range(NUM_STEPS)]
NO_CLIP = 1e9


# The oracles: one parameter of one layer, float64.


def adafactor_numpy(param, grads, *, factor_from, decay=0.0, clip=1.0):
    """Shazeer & Stern 2018, algorithms 4 and 5, with optax's epsilons; factored over the two largest dims."""
    param = param.astype(np.float64)
    small, large = (sorted(np.argsort(param.shape, kind="stable")[-2:], key=lambda dim: param.shape[dim])
                    if param.ndim > 1 else (0, 0))  # fmt: skip
    factored = param.ndim > 1 and param.shape[small] >= factor_from
    row = column = whole = 0.0
    for step, grad in enumerate(grads):
        square = grad.astype(np.float64) ** 2 + 1e-30
        keep = 1 - (step + 1.0) ** -0.8
        if factored:
            row = keep * row + (1 - keep) * square.mean(large, keepdims=True)
            column = keep * column + (1 - keep) * square.mean(small, keepdims=True)
            moment = row * column / row.mean(small, keepdims=True)
        else:
            moment = whole = keep * whole + (1 - keep) * square
        update = grad / np.sqrt(moment)
        update /= max(1.0, np.sqrt((update**2).mean()) / clip)
        size = max(np.sqrt((param**2).mean()), 1e-3)
        param = param - RATE * size * update - RATE * decay * param
    return param


def orthogonal_numpy(matrix, steps=5):
    """Jordan 2024: Newton-Schulz iterations with his coefficients."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def muon_numpy(param, grads, *, rms, decay=0.0, beta=0.95):
    """Momentum with Nesterov's step and Adam's bias correction (as optax), orthogonalised, of Liu et al.'s size."""
    param, moment = param.astype(np.float64), 0.0
    for step, grad in enumerate(np.asarray(grads, np.float64)):
        moment = beta * moment + (1 - beta) * grad
        ahead = beta * moment / (1 - beta ** (step + 2)) + (1 - beta) * grad / (1 - beta ** (step + 1))
        size = np.sqrt(max(param.shape)) * rms
        param = param - RATE * (size * orthogonal_numpy(ahead) + decay * param)
    return param


def lion_numpy(param, grads, *, b1=0.9, b2=0.99, decay=0.0):
    """Chen et al. 2023, algorithm 2."""
    param, moment = param.astype(np.float64), 0.0
    for grad in np.asarray(grads, np.float64):
        param = param - RATE * (np.sign(b1 * moment + (1 - b1) * grad) + decay * param)
        moment = b2 * moment + (1 - b2) * grad
    return param


def layers(path):
    """Indices that pick a layer's own array; one empty one where the parameter is not stacked."""
    return [(layer,) for layer in range(SHAPES[path][0])] if path.startswith("layers/") else [()]


def each_layer(params, path, index):
    return np.asarray(params[path])[index], [np.asarray(grads[path])[index] for grads in GRADS]


def test_adafactor_treats_every_layer_as_a_parameter_of_its_own():
    # Factored from 3 on: optax itself would factor the stacks of three over their layers too.
    optimizer = Adafactor(min_dim_size_to_factor=3, weight_decay=0.1, clip_gradient_norm=NO_CLIP, decay_mask="weight")
    start = random(9)
    result, state = trained(optimizer, start, GRADS)
    for path in SHAPES:
        for index in layers(path):
            want = adafactor_numpy(*each_layer(start, path, index), factor_from=3, decay=0.1 * ("weight" in path))
            np.testing.assert_allclose(np.asarray(result[path])[index], want, rtol=2e-5, atol=1e-6, err_msg=path)
    sizes = {leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim}
    assert {(3, 4), (3, 6), (3, 2, 4), (3, 2, 6)} <= sizes  # rows and columns per layer, and per head
    assert not {(3, 6, 4), (3, 2, 6, 4)} & sizes


def test_muon_orthogonalises_every_matrix_by_itself():
    optimizer = Muon(clip_gradient_norm=NO_CLIP, weight_decay=0.1, decay_mask="kernel|weight")
    start = random(9)
    result, _ = trained(optimizer, start, GRADS)
    heads_between = "layers/attention/query/kernel"
    matrices = {"layers/weight": layers("layers/weight"), "kernel": [()]}
    matrices["layers/query"] = list(itertools.product(range(3), range(2)))
    matrices[heads_between] = [(layer, slice(None), head) for layer in range(3) for head in range(2)]
    for path, indices in matrices.items():
        for index in indices:
            decay = 0.1 if re.search(optimizer.decay_mask, path) else 0.0
            want = muon_numpy(*each_layer(start, path, index), rms=0.2, decay=decay)
            # Newton-Schulz multiplies rounding by up to 3.4 per iteration.
            np.testing.assert_allclose(np.asarray(result[path])[index], want, rtol=1e-4, atol=2e-5, err_msg=path)
    rest = {path: start[path] for path in SHAPES if path not in matrices}
    assert set(rest) == {"layers/bias", "layers/norm/scale", "embedding", "bias"}
    adam = optax.nadamw(RATE, b1=0.9, b2=0.95, weight_decay=0.0)
    state = adam.init(rest)
    for grads in GRADS:
        updates, state = adam.update({path: grads[path] for path in rest}, state, rest)
        rest = optax.apply_updates(rest, updates)
    for path, want in rest.items():
        np.testing.assert_allclose(result[path], want, rtol=1e-5, atol=1e-7, err_msg=path)


def test_lion_equals_its_algorithm():
    start = random(9)
    result, _ = trained(Lion(weight_decay=0.1, decay_mask="weight", clip_gradient_norm=NO_CLIP), start, GRADS)
    for path in SHAPES:
        want = lion_numpy(np.asarray(start[path]), [grads[path] for grads in GRADS], decay=0.1 * ("weight" in path))
        np.testing.assert_allclose(result[path], want, rtol=1e-5, atol=1e-6, err_msg=path)


def test_sgd_adds_decay_to_the_gradient():
    start = random(9)
    optimizer = SGD(weight_decay=0.1, decay_mask="weight", momentum=0, clip_gradient_norm=NO_CLIP)
    result, _ = trained(optimizer, start, GRADS[:1])
    for path in SHAPES:
        want = start[path] - RATE * (GRADS[0][path] + 0.1 * ("weight" in path) * start[path])
        np.testing.assert_allclose(result[path], want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_clips_by_the_norm_of_all_gradients(name):
    """A gradient, ten times it and ten times the bound: only the ratio counts."""
    optimizer = OPTIMIZERS[name]()
    start, grads = random(9), [GRADS[0]]
    norm = float(optax.tree.norm(grads[0]))
    larger = [jax.tree.map(lambda grad: 10 * grad, grads[0])]
    cut, _ = trained(dataclasses.replace(optimizer, clip_gradient_norm=norm / 2), start, grads)
    also, _ = trained(dataclasses.replace(optimizer, clip_gradient_norm=norm / 2), start, larger)
    for path in SHAPES:
        np.testing.assert_allclose(cut[path], also[path], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_updates_are_counted(name, num_steps):
    """As `training/step.py: num_updates` does."""
    _, state = trained(OPTIMIZERS[name](), random(9), GRADS[:num_steps])
    counts = [count for _, count in optax.tree.get_all_with_path(state, "count")]
    assert counts
    assert all(count.shape == () and int(count) == num_steps for count in counts)


HALF = [AdamW(weight_decay=0.1), Lion(), SGD(), Muon()]


@pytest.mark.parametrize("optimizer", HALF, ids=lambda optimizer: type(optimizer).__name__)
def test_moments_in_bfloat16_are_the_float32_ones_rounded(optimizer):
    half = dataclasses.replace(optimizer, moment_dtype="bfloat16")
    start = random(9)
    full_params, full = trained(optimizer, start, GRADS[:1])
    params, state = trained(half, start, GRADS[:1])
    for path in SHAPES:  # the first update comes from moments of zero, which are exact; two programs, so to rounding
        np.testing.assert_allclose(params[path], full_params[path], rtol=1e-6, atol=1e-7)
    leaves, whole = jax.tree.leaves(state), jax.tree.leaves(full)
    moments = [leaf for leaf in leaves if leaf.dtype == jnp.bfloat16]
    assert len(moments) == len([leaf for leaf in whole if leaf.shape in SHAPES.values()])
    for ours, exact in zip(leaves, whole, strict=True):
        np.testing.assert_array_equal(ours, exact.astype(ours.dtype))
    # Later updates differ by the rounding, 2**-9 of a moment: by far less than the update itself.
    far, _ = trained(half, start, GRADS)
    exact, _ = trained(optimizer, start, GRADS)
    for path in SHAPES:
        moved = float(jnp.abs(exact[path] - start[path]).max())
        assert float(jnp.abs(far[path] - exact[path]).max()) < (1.0 if optimizer == Lion() else 0.1) * moved


def test_a_moment_that_bfloat16_would_freeze_is_refused():
    (problem,) = AdamW(b2=0.999, moment_dtype="bfloat16").check()
    assert problem.startswith("--optimizer.b2 0.999: a moment in bfloat16")
    assert "at most 0.996" in problem
    # It does freeze: at 0.999, and not at 0.996, a moment without new gradients would stay where it is.
    for b2, stuck in [(0.999, True), (0.996, False)]:
        moments = jnp.linspace(1, 2, 129, dtype=jnp.bfloat16)[:-1]  # every bfloat16 of one binade
        later = (b2 * moments.astype(jnp.float32)).astype(jnp.bfloat16)
        assert bool((later == moments).any()) == stuck
    assert "--optimizer.moment-dtype" in Adafactor(moment_dtype="bfloat16").check()[0]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (AdamW(b1=1.0), r"--optimizer.b1 1.0 must lie in \[0, 1\)"),
        (AdamW(clip_gradient_norm=0.0), "--optimizer.clip-gradient-norm 0.0 must be above 0"),
        (Lion(weight_decay=-1.0), "--optimizer.weight-decay -1.0 must be at least 0"),
        (Muon(adam_mask="("), r"--optimizer.adam-mask '\(' is no regular expression"),
        (SGD(decay_mask="("), r"--optimizer.decay-mask '\(' is no regular expression"),
        (Muon(ns_steps=0), "--optimizer.ns-steps 0 must be at least 1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_is_refused_with_its_flag(optimizer, message):
    (problem,) = optimizer.check()
    assert re.search(message, problem), problem


@pytest.mark.parametrize("name", ["pi0_bridge_traj_lora", "pi05_bridge"])
def test_matrices_of_the_full_models(name):
    """Stacks are those below `layers`; Muon gets each matrix with its inputs and outputs, AdamW tables and vectors."""
    model = registry.load(name).model
    params = module_params(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))
    matrices = Muon().matrices(params)
    language, tower = model.experts["language"], model.siglip
    assert {leaf.shape[0] for path, leaf in params.items() if "/layers/" in path} == {language.depth, tower.depth}

    def sizes(path):
        dims = matrices[path]
        return None if dims is None else (params[path].shape[dims.reduction_axis], params[path].shape[dims.output_axis])

    experts = "transformer/layers/experts/language"
    assert sizes(f"{experts}/query/weight") == (language.width, language.head_dim)
    assert sizes(f"{experts}/output/weight") == (language.head_dim, language.width)
    assert sizes(f"{experts}/mlp/gate_up/weight") == (language.width, language.mlp_dim)
    head_width = tower.width // tower.num_heads
    for part in ("query", "key", "value"):
        assert sizes(f"image_encoder/layers/attention/{part}/kernel") == (tower.width, head_width)
    assert sizes("image_encoder/layers/attention/out/kernel") == (head_width, tower.width)
    for path in params:
        by_adam = path.endswith(("/bias", "/scale")) or "embedding" in path or "_proj/" in path
        assert (matrices[path] is None) == by_adam, path
