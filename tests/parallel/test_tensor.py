"""Heads and wide layers shared out over a tensor group: the same loss and parameters, and what is held and sent."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest
import toy
from openpi_train_configs.debug import debug
from trainers import make_trainer

from openpi_train.interop.openpi import parameter_shapes
from openpi_train.models.paligemma import PaliGemmaFlowConfig
from openpi_train.models.pi0 import Pi0Config
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.optim import SGD, Adafactor, AdamW, LRSchedule, Muon
from openpi_train.parallel.mesh import FSDP, TENSOR, make_mesh, planned_mesh
from openpi_train.parallel.params import ParamUse
from openpi_train.parallel.strategy import Plan, ShardingConfig
from openpi_train.planning.memory import bytes_per_device, predict
from openpi_train.planning.traffic import as_asked, collectives, formula_bytes, tensor_bytes
from openpi_train.training.init import create_state, lay_out
from openpi_train.training.prepare import policy_costs, whole_layout
from openpi_train.types import action_batch, flatten_rows

pytestmark = pytest.mark.slow

ROWS, CAMERAS = 16, ("base_0_rgb",)
SIZES = {"depth": 2, "mlp_dim": 32, "num_heads": 4, "head_dim": 8}
PI0 = Pi0Config(
    paligemma_variant="dummy",
    action_expert_variant="dummy",
    language=GemmaOverrides(width=16, num_kv_heads=1, **SIZES),
    action_expert=GemmaOverrides(width=12, num_kv_heads=1, **SIZES),
    siglip=SiglipConfig(width=16, depth=2, mlp_dim=32, num_heads=4, patch_size=8),
    image_size=16,
    vocab_size=40,
    action_dim=5,
    action_horizon=3,
    max_token_len=4,
    dtype="float32",
)


def heads(num_kv_heads: int, **changes) -> Pi0Config:
    """`PI0` with so many key heads."""
    experts = {
        name: dataclasses.replace(getattr(PI0, name), num_kv_heads=num_kv_heads, **changes)
        for name in ("language", "action_expert")
    }
    return dataclasses.replace(PI0, **experts)


LORA = {"lora_attention_rank": 2, "lora_mlp_rank": 3}
CONFIGS = {
    "pi0": PI0,
    "pi05, two key heads": dataclasses.replace(heads(2), pi05=True),
    "low rank, a key head for each": heads(4, **LORA),
    "paligemma": PaliGemmaFlowConfig(
        paligemma_variant="dummy",
        head_variant="dummy",
        language=PI0.language,
        head=dataclasses.replace(PI0.action_expert, num_kv_heads=2, depth=3),
        **{name: getattr(PI0, name) for name in ("siglip", "image_size", "vocab_size", "action_dim", "action_horizon")},
        max_token_len=4,
        dtype="float32",
    ),
}


def prepare(config, strategy="replicated", fsdp=1, tensor=1, accum=1, num_devices=8):
    """Trainer and state layout."""
    mesh = make_mesh(fsdp, jax.devices()[:num_devices], tensor)
    plan = Plan(mesh=mesh, strategy=strategy, min_shard_mib=0)
    schedule = LRSchedule(warmup_steps=1, peak_lr=1e-3, decay_steps=20, decay_lr=1e-4)
    # The gradient of a key's bias is zero but for rounding: an eps above it, or Adam would make steps of that.
    return make_trainer(config, plan, AdamW(eps=1e-4), schedule, accum=accum)


def first_state(config, trainer, layout):
    """The state before the first step."""
    return create_state(layout, config, trainer.optimizer, config.param_rules.frozen, True, 7)


def batch(config, seed: int):
    """Random rows."""
    generator = np.random.default_rng(seed)

    def fill(name, leaf):
        if name == "row":
            return np.arange(ROWS, dtype=leaf.dtype)
        if leaf.dtype == bool:
            return np.ones(leaf.shape, bool)
        if np.issubdtype(leaf.dtype, np.integer):
            return generator.integers(0, 40, leaf.shape, leaf.dtype)
        return generator.normal(size=leaf.shape).astype(leaf.dtype)

    spec = flatten_rows(config.rows.batch_spec(ROWS, CAMERAS))
    return action_batch({name: fill(name, leaf) for name, leaf in spec.items()})


def run(config, trainer, layout, state, steps: int = 3):
    """Loss, gradient norm and parameter norm of each step, and the last state."""
    history = []
    with jax.set_mesh(trainer.plan.real_mesh):
        state = jax.device_put(state, layout.shardings)
        step = trainer.compile_step(layout.shardings, state, config.rows.batch_spec(ROWS, CAMERAS))
        for index in range(steps):
            state, metrics = step(state, jax.device_put(batch(config, index), trainer.plan.batch))
            history.append([float(metrics[name]) for name in ("loss", "grad_norm", "param_norm")])
    return history, state


ALONE: dict = {}


def alone(name: str):
    """The first state on the host, and what one device makes of it."""
    if name not in ALONE:
        config = CONFIGS[name]
        trainer, layout = prepare(config, num_devices=1)
        first = jax.device_get(first_state(config, trainer, layout))
        ALONE[name] = first, *run(config, trainer, layout, first)
    return ALONE[name]


@pytest.mark.parametrize(
    ("name", "strategy", "fsdp", "tensor", "accum"),
    [
        ("pi0", "replicated", 1, 4, 4),
        ("pi05, two key heads", "zero3", 2, 4, 4),
        ("low rank, a key head for each", "zero2", 2, 4, 1),
        ("paligemma", "hsdp", 2, 2, 1),
    ],
)
@pytest.mark.slow
def test_losses_and_parameters_are_those_of_one_device(name, strategy, fsdp, tensor, accum):
    first, expected_history, expected = alone(name)
    history, state = run(CONFIGS[name], *prepare(CONFIGS[name], strategy, fsdp, tensor, accum), first)
    np.testing.assert_allclose(history, expected_history, rtol=3e-6)
    for path, leaf in expected.params.items():
        np.testing.assert_allclose(state.params[path], leaf, rtol=1e-5, atol=2e-6, err_msg=path)
        # What a tensor group has in common is the same on all of its devices, bit for bit.
        pieces = {}
        for piece in state.params[path].addressable_shards:
            pieces.setdefault(str(piece.index), []).append(np.asarray(piece.data))
        assert all((one == same[0]).all() for same in pieces.values() for one in same), path


@pytest.mark.parametrize(("strategy", "fsdp"), [("zero1", 4), ("zero3", 4)])
def test_unrolled_layers_of_tensor_groups_are_traced(strategy, fsdp):
    """A layer's gradients vary over a group's devices, and those of its norms do not."""
    trainer, layout = prepare(CONFIGS["pi0"], strategy, fsdp, tensor=2)
    trainer = dataclasses.replace(trainer, use=ParamUse(unrolled=True))
    with jax.set_mesh(trainer.plan.real_mesh):
        spec = CONFIGS["pi0"].rows.batch_spec(ROWS, CAMERAS)
        traced = trainer.jitted_step(layout.shardings).trace(layout.abstract(), spec)
    assert "optimization_barrier" in str(traced.jaxpr)


def test_first_values_do_not_depend_on_the_layout():
    state = jax.device_get(first_state(PI0, *prepare(PI0, "zero3", 2, 4)))
    jax.tree.map(np.testing.assert_array_equal, state, alone("pi0")[0])


WIDE = dataclasses.replace(
    PI0,
    language=dataclasses.replace(PI0.language, width=64, mlp_dim=128, depth=6),
    action_expert=dataclasses.replace(PI0.action_expert, width=32, mlp_dim=64, depth=6),
    siglip=dataclasses.replace(PI0.siglip, width=32, mlp_dim=64, depth=6),
    dtype="bfloat16",
)


@pytest.mark.parametrize(("strategy", "fsdp", "tensor", "accum"), [("zero3", 2, 2, 4), ("replicated", 1, 4, 1)])
@pytest.mark.slow
def test_a_step_sends_no_more_than_the_formulas_and_a_device_holds_what_the_plan_says(strategy, fsdp, tensor, accum):
    trainer, layout = prepare(WIDE, strategy, fsdp, tensor, accum)
    spec = WIDE.rows.batch_spec(ROWS, CAMERAS)
    with jax.set_mesh(trainer.plan.real_mesh):
        traced = trainer.jitted_step(layout.shardings).trace(layout.abstract(), spec)
        step = traced.lower().compile()
    found = as_asked(collectives(step.as_text(), 8), traced.jaxpr)
    of_weights = formula_bytes(trainer.plan, layout.shapes.params, 2, accum)
    summed = costs_of_a_row(dataclasses.replace(WIDE, remat="none"), tensor).summed_bytes_per_row
    of_rows = tensor_bytes(trainer.plan, summed, ROWS * tensor / 8)
    sent = sum(one.sent_bytes for one in found)
    # The token table is not sent.
    assert 0.8 * (of_weights + of_rows) < sent < 1.05 * (of_weights + of_rows)
    rows = bytes_per_device(spec, trainer.plan.batch)
    planned = predict(layout, trainer.plan).state
    assert step.memory_analysis().argument_size_in_bytes == pytest.approx(planned + rows, rel=0.02)


def test_of_full_pi0_heads_and_wide_layers_are_cut_along_a_dim_that_fsdp_leaves_alone():
    plan = Plan(mesh=make_mesh(2, jax.devices()[:8], 4), strategy="zero3", min_shard_mib=0)
    config, cut = Pi0Config(), 0
    for path, shape in parameter_shapes(config).items():
        spec = plan.spec("state", jax.ShapeDtypeStruct(shape, np.float32), path)
        assert FSDP in spec or len(shape) < 3, path
        if TENSOR in spec:
            cut += math.prod(shape)
            part = config.siglip if path.startswith("image_encoder/") else config.experts[path.split("/")[3]]
            # What one product puts out the next takes in: both are cut along it.
            assert shape[spec.index(TENSOR)] == (part.mlp_dim if "/mlp/" in path else part.num_heads), path
    expected = 0
    for expert in config.experts.values():
        heads = 2 * expert.num_heads * expert.head_dim
        expected += expert.depth * expert.width * (heads + 3 * expert.mlp_dim)
    tower = config.siglip
    expected += tower.depth * (4 * tower.width**2 + 3 * tower.width + (2 * tower.width + 1) * tower.mlp_dim)
    assert cut == expected
    assert cut > 0.8 * 3.238e9


@pytest.mark.parametrize(
    "optimizer", [Adafactor(min_dim_size_to_factor=4), Muon(), SGD()], ids=lambda o: type(o).__name__
)
def test_what_an_optimizer_keeps_of_a_parameter_is_cut_like_it_where_it_has_its_shape(optimizer):
    trainer, _ = prepare(PI0, "zero3", 2, 4)
    layout = lay_out(PI0, optimizer.create(trainer.schedule), PI0.param_rules.frozen, False, trainer.plan)
    shapes, shardings = layout.shapes, layout.shardings
    for (keys, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(shapes.opt_state), jax.tree.leaves(shardings.opt_state), strict=True
    ):
        path = str(getattr(keys[-1], "key", ""))
        if path in shapes.params and leaf.shape == shapes.params[path].shape:
            assert sharding == shardings.params[path], path
        else:
            assert TENSOR not in sharding.spec, path


@pytest.mark.parametrize(
    ("tensor", "wrong"), [(3, "language.num_heads 8, language.mlp_dim 16384"), (16, "language.num_heads 8")]
)
def test_a_size_that_does_not_divide_is_told_with_what_does(tensor, wrong):
    (problem,) = Pi0Config().compute.check_tensor(tensor)
    assert re.search(f"--sharding.tensor-devices {tensor} .*{re.escape(wrong)}", problem)
    assert problem.endswith("allowed: 1, 2, 4, 8")
    assert toy.LinearConfig().compute.check_tensor(tensor)
    assert not toy.LinearConfig().compute.check_tensor(1) + Pi0Config().compute.check_tensor(8)


def costs_of_a_row(config, tensor):
    """What a row of the debug experiment costs with this model."""
    experiment = dataclasses.replace(debug, model=config, sharding=ShardingConfig(tensor_devices=tensor))
    assert experiment.data.cameras == CAMERAS
    (found,) = policy_costs(experiment, whole_layout(experiment, Plan(mesh=planned_mesh(1, 1), strategy="replicated")))
    return found


def test_what_a_device_holds_of_a_row_shrinks_by_its_share_and_full_rematerialisation_sends_more():
    full = [costs_of_a_row(dataclasses.replace(WIDE, remat="full"), tensor) for tensor in (1, 2, 4)]
    sizes = [one.activation_bytes_per_row for one in full]
    assert sizes[0] > sizes[1] > sizes[2] > sizes[0] / 4
    dots = costs_of_a_row(dataclasses.replace(WIDE, remat="dots"), 2)
    # bfloat16. Four sums in each layer, in the last one none of the 8 tokens of images and prompt; the 4 others are the
    # state and the actions. The gradients of one head's keys and values, those of all 12 tokens.
    language, action, tower, keys = 8 * 64, 4 * 32, 4 * 32, 12 * 8
    kept = 2 * (4 * (5 * language + 6 * action + 6 * tower) + 2 * 6 * keys)
    # What is computed again is summed again: attention of all layers but the last, of which nothing is.
    again = 2 * (5 * language + 5 * action + 6 * tower)
    assert [one.summed_bytes_per_row for one in (full[0], dots, full[1])] == [0, kept, kept + again]
