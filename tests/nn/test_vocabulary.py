"""Scores of given tokens without all scores at once: the values and gradients of the plain formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from openpi_train.nn.vocabulary import CHUNK_TOKENS, Head, log_probs, logits, remat_of, token_scores
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import ParamUse, use_params
from openpi_train.parallel.shard import Shard
from openpi_train.planning.flops import product_flops

NUMBERS = np.random.default_rng(0)
VOCABULARY, WIDTH, LENGTH = 40, 6, CHUNK_TOKENS + 11
X = jnp.asarray(NUMBERS.normal(size=(4, LENGTH, WIDTH)), jnp.float32)
TABLE = jnp.asarray(NUMBERS.normal(size=(VOCABULARY, WIDTH)), jnp.float32)
TOKENS = jnp.asarray(NUMBERS.integers(0, VOCABULARY, (4, LENGTH)), jnp.int32)
WEIGHTS = jnp.asarray(NUMBERS.normal(size=(4, 4, LENGTH)), jnp.float32)
HEADS = {"plain": Head(), "capped and cooled": Head(cap=3.0, temperature=0.7)}


def total(found):
    """A number that every part of the scores has a share in."""
    parts = jnp.stack([found.log_prob, jnp.square(found.normalizer), found.entropy, found.mean_log_prob])
    return (parts * WEIGHTS[:, : len(found.log_prob)]).sum()


def plain(x, table, tokens, head):
    """All scores at once: log-probability, normalizer, entropy and mean log-probability by their formulas."""
    products = x @ table.T
    scores = (products if head.cap is None else head.cap * jnp.tanh(products / head.cap)) / head.temperature
    said = jax.nn.log_softmax(scores, axis=-1)
    own = jnp.take_along_axis(said, tokens[..., None], axis=-1)[..., 0]
    parts = own, jax.nn.logsumexp(scores, axis=-1), -(jnp.exp(said) * said).sum(axis=-1), said.mean(axis=-1)
    return (jnp.stack([parts[0], jnp.square(parts[1]), *parts[2:]]) * WEIGHTS).sum(), parts


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.slow
def test_chunks_give_the_values_and_gradients_of_all_scores_at_once(head):
    def chunked(x, table):
        found = token_scores(x, table, TOKENS, head, with_entropy=True, with_mean=True)
        return total(found), found

    (value, found), gradients = jax.jit(jax.value_and_grad(chunked, (0, 1), has_aux=True))(X, TABLE)
    expected = jax.value_and_grad(lambda x, table: plain(x, table, TOKENS, head), (0, 1), has_aux=True)
    (wanted, parts), wanted_gradients = expected(X, TABLE)
    close(value, wanted)
    jax.tree.map(close, (found.log_prob, found.normalizer, found.entropy, found.mean_log_prob), parts)
    jax.tree.map(close, gradients, wanted_gradients)
    best = np.asarray(logits(X, TABLE, head)).argmax(axis=-1)
    np.testing.assert_array_equal(found.is_best, best == np.asarray(TOKENS))
    without = token_scores(X, TABLE, TOKENS, head)
    assert without.entropy is None and without.mean_log_prob is None
    if head == Head():
        jax.tree.map(np.testing.assert_array_equal, log_probs(X, TABLE, TOKENS), (without.log_prob, without.is_best))


def test_gradients_enter_products_in_the_models_type_and_are_summed_in_float32():
    x, table = X[:, :20].astype(jnp.bfloat16), TABLE
    weights = WEIGHTS[0, :, :20]

    def of_scores(scores):
        said = jax.nn.log_softmax(scores, axis=-1)
        return (jnp.take_along_axis(said, TOKENS[:, :20, None], axis=-1)[..., 0] * weights).sum()

    def loss(x, table):
        return (log_probs(x, table, TOKENS[:, :20])[0] * weights).sum()

    narrow = table.astype(jnp.bfloat16)
    scores = jnp.einsum("btd,vd->btv", x, narrow, preferred_element_type=jnp.float32)
    wide = jax.grad(of_scores)(scores)
    given = np.asarray(wide.astype(jnp.bfloat16), np.float32)
    of_x, of_table = jax.jit(jax.grad(loss, (0, 1)))(x, table)
    assert (of_x.dtype, of_table.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(of_table, np.einsum("btv,btd->vd", given, np.float32(x)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        np.float32(of_x), np.einsum("btv,vd->btd", given, np.float32(narrow)), rtol=2**-7, atol=1e-5
    )
    assert np.abs(np.einsum("btv,btd->vd", np.float32(wide) - given, np.float32(x))).max() > 1e-3


def test_a_table_that_is_fixed_costs_no_product():
    def loss(x, table):
        return log_probs(x, table, TOKENS[:, :20])[0].sum()

    def products(argnums):
        program = jax.make_jaxpr(jax.grad(loss, argnums))(X[:, :20], TABLE).jaxpr
        return product_flops(program, recomputed=True) / (2 * 4 * 20 * VOCABULARY * WIDTH)

    assert (products(0), products((0, 1))) == (2, 3)


@pytest.mark.parametrize(("remat", "times"), [("none", 3), ("dots", 3), ("attention", 4), ("full", 4)])
def test_scores_are_kept_where_products_are_and_else_computed_again(remat, times):
    def loss(remat, x, table):
        found = token_scores(x, table, TOKENS, remat=remat, with_entropy=True)
        return (found.log_prob * WEIGHTS[0] + found.entropy * WEIGHTS[1]).sum()

    run, chunked = (jax.value_and_grad(functools.partial(loss, one), (0, 1)) for one in (remat, "full"))
    jax.tree.map(close, jax.jit(run)(X, TABLE), jax.jit(chunked)(X, TABLE))
    products = product_flops(jax.make_jaxpr(run)(X, TABLE).jaxpr) / (2 * X[..., 0].size * VOCABULARY * WIDTH)
    padded = -(-LENGTH // CHUNK_TOKENS) * CHUNK_TOKENS / LENGTH if times == 4 else 1
    assert products == pytest.approx(times * padded)


def test_scores_are_kept_only_where_gradients_are_taken():
    class Model(nnx.Module):
        def __init__(self):
            self.table = nnx.Param(TABLE)

    model = Model()
    assert [remat_of(model.table, remat) for remat in ("none", "dots", "full")] == ["full"] * 3
    use_params(model, ParamUse())
    assert [remat_of(model.table, remat) for remat in ("none", "dots", "full")] == ["none", "dots", "full"]


def test_the_backward_pass_keeps_no_scores():
    size = 50_000
    table = jax.ShapeDtypeStruct((size, WIDTH), jnp.float32)
    x, tokens = jnp.zeros((1, 8 * CHUNK_TOKENS, WIDTH)), jnp.zeros((1, 8 * CHUNK_TOKENS), jnp.int32)

    def loss(table):
        found = token_scores(x, table, tokens, with_entropy=True)
        return (found.log_prob + found.entropy).sum()

    compiled = jax.jit(jax.grad(loss)).lower(table).compile()
    # All scores are 51 MB. A chunk's are 6.4, of which the gradient takes a few.
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * CHUNK_TOKENS * size * 4


def test_the_backward_pass_begins_when_all_scores_are_there():
    def loss(table):
        found = token_scores(X, table, TOKENS)
        return found.log_prob.sum(), found.is_best

    program = jax.make_jaxpr(jax.grad(loss, has_aux=True))(TABLE).jaxpr
    [barrier] = (one for one in program.eqns if one.primitive.name == "optimization_barrier")
    waits = [var.aval.dtype for var in barrier.invars]
    assert waits.count(jnp.bool_) == 1, "what only a metric reads is not waited for"
    [forward, backward] = (one for one in program.eqns if one.primitive.name == "scan")
    order = [program.eqns.index(one) for one in (forward, barrier, backward)]
    assert order == sorted(order)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_table_cut_by_rows_gives_the_same_and_its_gradient(head):
    def chunked(part, x, tokens, weights):
        table = Shard(part, -2, "fsdp", jnp.float32)
        found = token_scores(x, table, tokens, head, with_entropy=True, with_mean=True)
        parts = jnp.stack([found.log_prob, jnp.square(found.normalizer), found.entropy, found.mean_log_prob])
        return (parts * weights.swapaxes(0, 1)).sum(), found

    mesh = make_mesh(4, jax.devices()[:4])
    run = jax.shard_map(
        jax.grad(chunked, has_aux=True), mesh=mesh, in_specs=(P("fsdp"),) * 4, out_specs=(P("fsdp"), P("fsdp"))
    )
    gradient, found = jax.jit(run)(TABLE, X, TOKENS, WEIGHTS.swapaxes(0, 1))
    expected = jax.value_and_grad(lambda table: plain(X, table, TOKENS, head), has_aux=True)
    (_, parts), wanted = expected(TABLE)
    jax.tree.map(close, (found.log_prob, found.normalizer, found.entropy, found.mean_log_prob), parts)
    close(gradient, wanted)
