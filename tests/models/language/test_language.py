"""Language models train as all models do: under every strategy, with adapters, in every type, over tensor groups."""

import dataclasses
import re
from typing import ClassVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float, Int
from trainers import make_trainer

from openpi_train.interop.openpi import parameter_names, parameter_shapes
from openpi_train.models.language import LanguageConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.lora import AdapterConfig
from openpi_train.objectives.objective import Objective
from openpi_train.optim import AdamW, LossScaling, LRSchedule
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.mesh import FSDP, TENSOR, make_mesh
from openpi_train.parallel.params import Gathering, merge_module, module_params, param_kinds
from openpi_train.parallel.remat import Remat
from openpi_train.parallel.strategy import Plan
from openpi_train.training.init import create_state
from openpi_train.types import pytree

ROWS, LENGTH = 8, 40
SIZES = DecoderSizes(
    vocab_size=40,
    width=16,
    depth=2,
    mlp_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    biases=True,
    query_key_norms=True,
    post_norms=True,
    window=5,
    sliding_layers=(0,),
    sliding_rope_base=100.0,
    score_cap=5.0,
    tied=False,
)
MODEL = LanguageConfig(sizes=SIZES, dtype="float32", remat="full")


@pytree
class Texts:
    """Texts in rows, and how much each token counts as a target."""

    tokens: Int[Array, "b t"]
    positions: Int[Array, "b t"]
    segments: Int[Array, "b t"]
    weights: Float[Array, "b t"]
    row: Int[Array, " b"]


class NextTokenOfText(Objective):
    """The mean cross entropy of the tokens that count, with a share of entropy and normalizer."""

    needs: ClassVar[frozenset[str]] = frozenset({"token_scores"})

    def norms(self, batch):
        return {"tokens": batch.weights[:, 1:].sum()}

    def loss(self, model, batch, norms, keys, train=True):
        x = model(batch.tokens, batch.positions, batch.segments)
        found = model.scores(x[:, :-1], batch.tokens[:, 1:], with_entropy=True)
        terms = -found.log_prob - 0.01 * found.entropy + 1e-3 * jnp.square(found.normalizer)
        loss = (terms * batch.weights[:, 1:]).sum() / norms["tokens"]
        return loss, {"loss": loss}


def texts(seed):
    """Rows of two texts and padding, of other lengths in every row."""
    random = np.random.default_rng(seed)
    first = random.integers(8, 20, (ROWS, 1))
    second = first + random.integers(4, 18, (ROWS, 1))
    place = np.arange(LENGTH)
    segments = np.where(place < first, 1, np.where(place < second, 2, 0))
    positions = np.where(place < first, place, place - first)
    weights = (segments > 0) & (positions > 2)
    return Texts(
        tokens=random.integers(0, 40, (ROWS, LENGTH)).astype(np.int32),
        positions=positions.astype(np.int32),
        segments=segments.astype(np.int32),
        weights=weights.astype(np.float32),
        row=np.arange(ROWS, dtype=np.int32),
    )


def train(model, strategy="replicated", fsdp=1, tensor=1, devices=1, accum=1, offload="none", scaling=None):
    """Loss and gradient norm of three steps, the last state, and the shardings."""
    mesh = make_mesh(fsdp, jax.devices()[:devices], tensor)
    plan = Plan(mesh=mesh, strategy=strategy, min_shard_mib=0, offload=offload)
    schedule = LRSchedule(warmup_steps=1, peak_lr=1e-2, decay_steps=20, decay_lr=1e-3)
    objective = NextTokenOfText()
    # The gradient of a key's bias is zero but for rounding: an eps above it, or Adam would make steps of that.
    trainer, layout = make_trainer(
        model, plan, AdamW(eps=1e-4), schedule, objective=objective, accum=accum, scaling=scaling
    )
    history = []
    with jax.set_mesh(plan.real_mesh):
        state = create_state(layout, model, trainer.optimizer, model.param_rules.frozen, True, 7)
        step = trainer.compile_step(
            layout.shardings, state, jax.eval_shape(lambda: jax.tree.map(jnp.asarray, texts(0)))
        )
        for seed in range(3):
            state, metrics = step(state, jax.device_put(texts(seed), plan.batch))
            history.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    assert float(metrics["tokens"]) == (texts(2).segments > 0).sum()
    return history, state, layout


@pytest.fixture(scope="module")
def alone():
    return train(MODEL)


CASES = {
    "zero1": {"strategy": "zero1", "fsdp": 4},
    "zero2": {"strategy": "zero2", "fsdp": 4, "accum": 2},
    "zero3": {"strategy": "zero3", "fsdp": 4, "accum": 2},
    "hsdp": {"strategy": "hsdp", "fsdp": 2},
    "tensor groups": {"strategy": "zero3", "fsdp": 2, "tensor": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_strategy_trains_as_one_device_does(alone, case):
    history, state, layout = train(MODEL, devices=4, **CASES[case])
    np.testing.assert_allclose(history, alone[0], rtol=2e-5)
    for path, leaf in state.params.items():
        np.testing.assert_allclose(leaf, alone[1].params[path], rtol=1e-3, atol=2e-5, err_msg=path)
    cut = {
        axis: {path for path, sharding in layout.shardings.params.items() if axis in sharding.spec}
        for axis in (FSDP, TENSOR)
    }
    of_layers = {"layers/attention/key_value/weight", "layers/attention/output/weight", "layers/mlp/down/weight"}
    assert {"token_embedding", "head"} | of_layers <= cut[FSDP]
    assert of_layers <= cut[TENSOR] if "tensor" in CASES[case] else not cut[TENSOR]


@pytest.mark.slow
def test_offload_changes_no_bit(alone):
    history, _, _ = train(MODEL, offload="optimizer+ema")
    assert history == alone[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_trains_in_sixteen_bits(alone, dtype):
    model = dataclasses.replace(MODEL, dtype=dtype)
    assert model.compute.needs_loss_scale == (dtype == "float16")
    history, state, _ = train(model, "zero3", fsdp=4, devices=4, scaling=LossScaling() if dtype == "float16" else None)
    np.testing.assert_allclose(np.array(history)[:, 0], np.array(alone[0])[:, 0], rtol=2e-2)
    assert all(leaf.dtype == jnp.float32 for leaf in state.params.values())


@pytest.mark.slow
def test_with_an_adapter_only_its_factors_train_and_it_folds_into_the_weights():
    model = dataclasses.replace(MODEL, adapter=AdapterConfig(rank=2, alpha=4.0))
    _, state, _ = train(model)
    assert set(state.params) == {path for path in parameter_shapes(model) if path.endswith(("lora_a", "lora_b"))}
    assert len(state.params) == 10
    graphs = [nnx.split(nnx.eval_shape(lambda m=m: m.build(nnx.Rngs(0))))[0] for m in (model, model.without_lora())]
    params = {path: leaf.astype(jnp.float32) for path, leaf in {**state.frozen, **state.params}.items()}
    merged, tokens = model.param_rules.merge_lora(params), jnp.asarray(texts(0).tokens)
    apart, folded = (
        merge_module(graph, leaves)(tokens) for graph, leaves in zip(graphs, (params, merged), strict=True)
    )
    assert set(merged) == set(parameter_shapes(model.without_lora()))
    np.testing.assert_allclose(apart, folded, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("fsdp", "tensor"), [(4, 1), (2, 2)])
def test_texts_are_continued_on_many_devices_as_on_one(fsdp, tensor):
    def scores(graph, params, batch):
        model = merge_module(graph, params)
        tokens = batch.tokens[:, :12]
        x, cache = model.prefill(tokens[:, :8], jnp.full(len(tokens), 8))

        def step(cache, column):
            x, cache = model.extend(column[:, None], cache)
            return cache, model.logits(x)[:, 0]

        _, later = jax.lax.scan(step, cache.grown(4), tokens[:, 8:].T)
        return jnp.concatenate([model.logits(x), later.swapaxes(0, 1)], axis=1)

    mesh = make_mesh(fsdp, jax.devices()[:4], tensor)
    plan = Plan(mesh=mesh, strategy="zero3", min_shard_mib=0)
    module = MODEL.build(nnx.Rngs(0))
    graph, params = nnx.split(module)[0], module_params(module)
    batch = jax.tree.map(jnp.asarray, texts(0))
    expected = jax.jit(lambda params: scores(graph, params, batch))(params)
    many = Devices(plan, MODEL.compute.dtype, graph)
    with jax.set_mesh(mesh):
        run = jax.jit(
            lambda params, batch: many.rows(lambda params, batch, _: scores(graph, params, batch), params, batch, None),
            in_shardings=(plan.tree("state", params), plan.batch),
        )
        found = run(params, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_names_are_hugging_faces_and_each_parameter_has_its_own():
    names = parameter_names(dataclasses.replace(MODEL, adapter=AdapterConfig(rank=2)))
    assert names["layers/attention/key_value/weight"] == "model/layers/self_attn/k_proj+v_proj/weight"
    assert names["layers/attention/query/lora_a"] == "model/layers/self_attn/q_proj/lora_a"
    assert names["layers/mlp_norm/scale"] == "model/layers/pre_feedforward_layernorm/weight"
    plain = dataclasses.replace(MODEL, sizes=dataclasses.replace(SIZES, post_norms=False))
    assert parameter_names(plain)["layers/mlp_norm/scale"] == "model/layers/post_attention_layernorm/weight"


def test_all_layers_are_one_stack_that_is_gathered_layer_by_layer():
    module = nnx.eval_shape(lambda: MODEL.build(nnx.Rngs(0)))
    stacked = {path for path, kind in param_kinds(module).items() if kind.gathering is Gathering.BY_LAYER}
    assert stacked == {path for path in parameter_shapes(MODEL) if path.startswith("layers/")}


def test_groups_of_parameters_can_be_frozen_by_name():
    paths = set(parameter_shapes(MODEL))
    groups = {
        name: {path for path in paths if re.fullmatch(pattern, path)}
        for name, pattern in MODEL.param_rules.groups.items()
    }
    assert groups["embeddings"] == {"token_embedding", "head"}
    assert "layers/attention/query_norm/scale" in groups["norms"] and "final_norm/scale" in groups["norms"]
    assert set().union(*groups.values()) == paths


def test_what_cannot_be_is_named():
    with pytest.raises(ValueError, match=r"num_heads 3 is not a multiple.*adapter\.rank -1 must be at least 0"):
        dataclasses.replace(MODEL, sizes=dataclasses.replace(SIZES, num_heads=3), adapter=AdapterConfig(rank=-1))
    with pytest.raises(ValueError, match=r"neither adapter\.attention nor adapter\.mlp"):
        dataclasses.replace(MODEL, adapter=AdapterConfig(rank=1, attention=False, mlp=False))
    (problem,) = MODEL.compute.check_tensor(3)
    assert problem.startswith(
        "--sharding.tensor-devices 3 does not divide the model's sizes.num_heads 4, sizes.mlp_dim 32"
    )
    (problem,) = MODEL.check_objective("NextToken", frozenset({"logits"}))
    assert "which model LanguageConfig does not provide (it has: token_scores)" in problem
    assert set(dataclasses.replace(MODEL, remat="auto").compute.remat_choices) == set(get_args(Remat))
