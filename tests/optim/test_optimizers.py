"""Optimizers against their formulas, with what is clipped and what decays; and moments in bfloat16."""

import dataclasses
import itertools
import re

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from openpi_train import registry
from openpi_train.optim import OPTIMIZERS, SGD, Adafactor, AdamW, Lion, LRSchedule, Muon, named_optimizer
from openpi_train.optim.optimizer_config import OptimizerConfig
from openpi_train.parallel.params import module_params

SHAPES = {
    "layers/weight": (3, 6, 4),
    "layers/query/weight": (3, 2, 6, 4),
    "layers/attention/query/kernel": (3, 6, 2, 4),
    "layers/bias": (3, 4),
    "layers/norm/scale": (3, 6),
    "layers/gain/weight": (3, 4),
    "kernel": (5, 4),
    "embedding": (7, 4),
    "bias": (4,),
    "tiny/weight": (4, 3),
    "tiny/bias": (4,),
}
# Its rates, by hand: a third, two thirds and all of the peak, then three tenths of the way down to a tenth.
SCHEDULE = LRSchedule(kind="linear", warmup_steps=2, peak_lr=1e-2, decay_steps=5, decay_lr=1e-3)
RATES = (1e-2 / 3, 2e-2 / 3, 1e-2, 7e-3)
DECAY, DECAYING = 0.1, "weight|embedding"


def random(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {path: jnp.asarray(scale * rng.normal(size=shape), jnp.float32) for path, shape in SHAPES.items()}


def gradients(seed, scale):
    """Some are so small that what is added to a divisor, 1e-8 by default, counts."""
    return {path: grad * (1e-8 if path.startswith("tiny/") else 1) for path, grad in random(seed, scale).items()}


def trained(optimizer, params, grads):
    """Parameters after one update per gradient, and the last state."""
    rule = optimizer.create(SCHEDULE.create())
    state = rule.init(params)
    step = jax.jit(rule.update)
    for gradient in grads:
        updates, state = step(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


# Norms of about 0.4, 65, 6 and 21. Only the first is below the default bound of 1: a rule that does not care how large
# its gradients are still cares how large they are beside each other.
GRADS = [gradients(seed, scale) for seed, scale in enumerate((0.02, 3.0, 0.3, 1.0))]
# A bias begins at 0: Adafactor's least parameter size.
START = random(9) | {"bias": jnp.zeros(4)}
DECAYED = {"weight_decay": DECAY, "decay_mask": DECAYING}
ADAM = {"b1": 0.9, "b2": 0.95, "nesterov": True}  # of Muon's vectors and tables

# An optimizer, and its formula by path; for Muon the formula of matrices, then that of the rest.
CASES = {
    "AdamW": (AdamW(**DECAYED), [(formulas.adam, {"b1": 0.9, "b2": 0.95})]),
    "AdamW-changed": (
        AdamW(b1=0.8, b2=0.99, eps=1e-3, clip_gradient_norm=5.0, **DECAYED),
        [(formulas.adam, {"b1": 0.8, "b2": 0.99, "eps": 1e-3})],
    ),
    # Factored from 3 on: optax itself would factor the stacks of three over their layers too.
    "Adafactor": (Adafactor(min_dim_size_to_factor=3, **DECAYED), [(formulas.adafactor, {"factor_from": 3})]),
    "Adafactor-changed": (
        Adafactor(
            decay_rate=0.5, multiply_by_parameter_scale=False, clipping_threshold=1.2, momentum=0.9,
            clip_gradient_norm=5.0, **DECAYED,
        ),
        [(formulas.adafactor, {"factor_from": 128, "exponent": 0.5, "relative": False, "threshold": 1.2,
                               "momentum": 0.9})],
    ),
    "Lion": (Lion(**DECAYED), [(formulas.lion, {"b1": 0.9, "b2": 0.99})]),
    "Lion-changed": (
        Lion(b1=0.7, b2=0.8, clip_gradient_norm=5.0, **DECAYED), [(formulas.lion, {"b1": 0.7, "b2": 0.8})],
    ),
    "SGD": (SGD(**DECAYED), [(formulas.sgd, {"momentum": 0.9})]),
    "SGD-changed": (
        SGD(momentum=0.5, nesterov=True, clip_gradient_norm=5.0, **DECAYED),
        [(formulas.sgd, {"momentum": 0.5, "nesterov": True})],
    ),
    "SGD-plain": (SGD(momentum=0.0, **DECAYED), [(formulas.sgd, {"momentum": 0.0})]),
    "Muon": (Muon(**DECAYED), [(formulas.muon, {}), (formulas.adam, ADAM)]),
    "Muon-changed": (
        Muon(beta=0.8, ns_steps=3, nesterov=False, consistent_rms=None, adam_b1=0.7, adam_b2=0.8,
             clip_gradient_norm=5.0, **DECAYED),
        [(formulas.muon, {"beta": 0.8, "num_iterations": 3, "nesterov": False, "rms": None}),
         (formulas.adam, {"b1": 0.7, "b2": 0.8})],
    ),
}  # fmt: skip

# What Muon takes for matrices: indices that pick each one.
MATRICES = {
    "layers/weight": [(layer,) for layer in range(3)],
    "layers/query/weight": list(itertools.product(range(3), range(2))),
    "layers/attention/query/kernel": [(layer, slice(None), head) for layer in range(3) for head in range(2)],
    "kernel": [()],
    "tiny/weight": [()],
}


def parts(path, optimizer):
    """Indices that pick what is a parameter of its own; an empty one is the whole."""
    if isinstance(optimizer, Muon) and path in MATRICES:
        return MATRICES[path]
    return [(layer,) for layer in range(SHAPES[path][0])] if path.startswith("layers/") else [()]


def by_formula(case, grads):
    """All parameters after one update per gradient, float64."""
    optimizer, formulas_of_case = CASES[case]
    found = {path: np.array(param, np.float64) for path, param in START.items()}
    for path, param in found.items():
        formula, options = formulas_of_case[0 if path in MATRICES else -1]
        decay = DECAY if "weight" in path or "embedding" in path else 0.0
        for index in parts(path, optimizer):
            param[index] = formula(
                param[index], [of_step[path][index] for of_step in grads], RATES, decay=decay, **options
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_optimizer_follows_its_formula_on_gradients_clipped_by_their_common_norm(case):
    """Every field, the decay mask, the rate of each step, and each layer and matrix by itself."""
    optimizer, _ = CASES[case]
    result, _ = trained(optimizer, START, GRADS)
    want = by_formula(case, formulas.clipped(GRADS, optimizer.clip_gradient_norm))
    # Newton-Schulz multiplies the rounding of its input, 6e-8, by up to 3.4 per iteration; then comes the rate.
    rtol, atol = (1e-5, 1e-6) if isinstance(optimizer, Muon) else (1e-6, 1e-7)
    for path in SHAPES:
        np.testing.assert_allclose(result[path], want[path], rtol=rtol, atol=atol, err_msg=path)
    # A dropped clip would be seen in every parameter of some size.
    without = by_formula(case, formulas.clipped(GRADS, np.inf))
    for path in MATRICES.keys() - {"tiny/weight"}:
        assert np.abs(without[path] - want[path]).max() > 20 * atol, path


def test_adafactor_keeps_a_row_and_a_column_of_every_layers_matrix():
    _, state = trained(Adafactor(min_dim_size_to_factor=3), START, GRADS[:1])
    sizes = {leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim}
    assert {(3, 4), (3, 6), (3, 2, 4), (3, 2, 6)} <= sizes  # rows and columns per layer, and per head
    assert not {(3, 6, 4), (3, 2, 6, 4)} & sizes


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mask", [None, "bias$"])
@pytest.mark.slow
def test_without_gradients_what_the_mask_names_shrinks_by_rate_times_decay_and_the_rest_stays(name, mask):
    optimizer = OPTIMIZERS[name](weight_decay=DECAY, decay_mask=mask)
    if name == "sgd":
        optimizer = dataclasses.replace(optimizer, momentum=0.0)  # its decay is a gradient, so it has momentum
    start = random(9)
    result, _ = trained(optimizer, start, [jax.tree.map(jnp.zeros_like, start)] * 3)
    left = np.prod([1 - rate * DECAY for rate in RATES[:3]])
    for path in SHAPES:
        decays = mask is None or path.endswith("bias")
        np.testing.assert_allclose(result[path], start[path] * (left if decays else 1), rtol=1e-6, err_msg=path)


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
@pytest.mark.slow
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
    for path in [path for path in SHAPES if not path.startswith("tiny/")]:
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
        (SGD(rate_mask="(", rate_factor=2.0), r"--optimizer.rate-mask '\(' is no regular expression"),
        (SGD(rate_factor=2.0), "give both, the parameters and the factor"),
        (SGD(rate_mask="a", rate_factor=0.0), "--optimizer.rate-factor 0.0 must be above 0"),
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_may_learn_at_a_rate_of_their_own(name):
    params = {"critic/a": jnp.ones((3, 4)), "policy/a": jnp.ones((3, 4))}
    grads = {path: jnp.linspace(-1.0, 1.0, 12).reshape(3, 4) for path in params}
    schedule = optax.constant_schedule(0.1)
    plain, own = (
        OPTIMIZERS[name](**settings).create(schedule) for settings in ({}, {"rate_mask": "critic/", "rate_factor": 3.0})
    )
    expected, _ = plain.update(grads, plain.init(params), params)
    found, _ = own.update(grads, own.init(params), params)
    np.testing.assert_allclose(found["critic/a"], 3 * expected["critic/a"], rtol=1e-6)
    np.testing.assert_array_equal(found["policy/a"], expected["policy/a"])


# Fields that all optimizers have but which are each rule's own: its usual decay differs by orders of magnitude.
OF_A_RULE = {"weight_decay"}


@pytest.mark.parametrize(("old", "new"), [*itertools.permutations(OPTIMIZERS, 2)])
def test_another_optimizer_keeps_every_setting_that_both_have(old, new):
    given = {
        "clip_gradient_norm": 0.25,
        "decay_mask": "weight",
        "rate_mask": "critic/",
        "rate_factor": 3.0,
        "moment_dtype": "bfloat16",
    }
    common = {field.name for field in dataclasses.fields(OptimizerConfig)}
    assert common == given.keys() | OF_A_RULE  # a field that is new here is kept or not, but on purpose
    like = OPTIMIZERS[old](**given, weight_decay=0.5)
    found = named_optimizer(new, like)
    assert type(found) is OPTIMIZERS[new]
    assert {name: getattr(found, name) for name in given} == given
    own = OPTIMIZERS[new]()
    others = [field.name for field in dataclasses.fields(own) if field.name not in given]
    assert {name: getattr(found, name) for name in others} == {name: getattr(own, name) for name in others}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_optimizer_keeps_everything(name):
    like = OPTIMIZERS[name](weight_decay=0.5, moment_dtype="bfloat16")
    assert named_optimizer(name, like) is like
    with pytest.raises(ValueError, match=f"unknown optimizer 'adam'; allowed: {', '.join(OPTIMIZERS)}"):
        named_optimizer("adam", like)
