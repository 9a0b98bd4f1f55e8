"""The decoder of language models: equal to Gemma's where it is one, packed or not, with a cache or without."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from openpi_train.nn.attention import attend
from openpi_train.nn.decoder import Decoder
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.gemma import Gemma
from openpi_train.nn.gemma_sizes import GemmaConfig
from openpi_train.nn.lora import AdapterConfig, merge_lora
from openpi_train.nn.rotary_frequencies import RotaryFrequencies
from openpi_train.parallel.params import merge_module, module_params
from openpi_train.runtime.exits import UsageError

NUMBERS = np.random.default_rng(0)
LLAMA = DecoderSizes(vocab_size=50, width=16, depth=3, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=6)
GEMMA = dataclasses.replace(LLAMA, activation="gelu", norms_from_one=True, scaled_embeddings=True)
# Everything that any of the families has: layers of two kinds with frequencies of their own, caps, norms, biases.
EVERYTHING = dataclasses.replace(
    GEMMA,
    post_norms=True,
    biases=True,
    query_key_norms=True,
    query_divisor=9.0,
    attention_cap=2.0,
    score_cap=3.0,
    window=4,
    sliding_layers=(0, 2),
    rope_base=1e3,
    rope_factor=8.0,
    sliding_rope_base=100.0,
    tied=False,
)
SIZES = {"llama": LLAMA, "everything": EVERYTHING}


def build(sizes, *, remat="none", dtype=jnp.float32, **adapter):
    """A graph, and parameters by path of which none has a special value."""
    made = Decoder(sizes, AdapterConfig(**adapter), dtype=dtype, remat=remat, rngs=nnx.Rngs(0))
    random = np.random.default_rng(1)
    params = {
        path: leaf + jnp.asarray(0.2 * random.normal(size=leaf.shape), jnp.float32)
        for path, leaf in module_params(made).items()
    }
    return nnx.split(made)[0], params


def tokens_of(*shape):
    return jnp.asarray(np.random.default_rng(2).integers(0, 50, shape), jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def run(graph, params, *inputs):
    return merge_module(graph, params)(*inputs)


@pytest.mark.slow
def test_gemma_in_it_equals_the_policies_gemma():
    """To rounding: both compute the same sums, with weights that lie otherwise and angles from other roundings."""
    graph, params = build(GEMMA)
    config = GemmaConfig(**{name: getattr(GEMMA, name) for name in ("width", "depth", "mlp_dim", "head_dim")},
                         num_heads=4, num_kv_heads=2)  # fmt: skip
    theirs = Gemma({"one": config}, GEMMA.vocab_size, {}, dtype=jnp.float32, remat="none", rngs=nnx.Rngs(0))
    names = {
        "token_embedding": "token_embedding",
        "final_norm/scale": "final_norm/one/scale",
        "layers/attention_norm/scale": "layers/experts/one/attention_norm/scale",
        "layers/mlp_norm/scale": "layers/experts/one/mlp_norm/scale",
        "layers/attention/query/weight": "layers/experts/one/query/weight",
        "layers/attention/key_value/weight": "layers/experts/one/key_value/weight",
        "layers/attention/output/weight": "layers/experts/one/output/weight",
        "layers/mlp/gate_up/weight": "layers/experts/one/mlp/gate_up/weight",
        "layers/mlp/down/weight": "layers/experts/one/mlp/down/weight",
    }
    swapped = {names[path]: leaf for path, leaf in params.items()}
    for name, axes in (("query", (-3, -2)), ("key_value", (-3, -2))):
        path = f"layers/experts/one/{name}/weight"
        swapped[path] = jnp.swapaxes(swapped[path], *axes)
    tokens = tokens_of(2, 9)
    gemma = nnx.split(theirs)[0]

    @jax.jit
    def expected(params):
        model = merge_module(gemma, params)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((9, 9), bool)), (2, 9, 9))
        places = jnp.broadcast_to(jnp.arange(9), (2, 9))
        return model({"one": model.embed(tokens)}, places, mask)["one"]

    assert set(swapped) == set(module_params(theirs))
    np.testing.assert_allclose(run(graph, params, tokens), expected(swapped), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.slow
def test_texts_packed_into_a_row_give_what_each_gives_alone_and_padding_is_not_seen(sizes):
    graph, params = build(sizes)
    lengths = (7, 5, 3)
    tokens = tokens_of(1, 18)
    segments = jnp.asarray([np.repeat([1, 2, 3, 0], [*lengths, 3])], jnp.int32)
    positions = jnp.asarray([np.concatenate([np.arange(n) for n in (*lengths, 3)])], jnp.int32)
    packed = run(graph, params, tokens, positions, segments)
    start = 0
    for length in lengths:
        part = slice(start, start := start + length)
        alone = run(graph, params, tokens[:, part])
        np.testing.assert_allclose(packed[:, part], alone, rtol=2e-5, atol=2e-5)
    other = run(graph, params, tokens.at[:, :7].add(1).at[:, -3:].add(1), positions, segments)
    np.testing.assert_array_equal(packed[:, 7:15], other[:, 7:15])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.slow
def test_with_a_cache_it_gives_what_it_gives_without_for_texts_of_any_length(sizes, dtype):
    graph, params = build(sizes, dtype=jnp.dtype(dtype))
    lengths, new = np.array([6, 4]), 7
    tokens = tokens_of(2, 6 + new)
    whole = [run(graph, params, tokens[row : row + 1, : n + new])[0, -new - 1 :] for row, n in enumerate(lengths)]

    @jax.jit
    def cached(params):
        model = merge_module(graph, params)
        is_token = jnp.arange(6) < lengths[:, None]
        x, cache = model.prefill(jnp.where(is_token, tokens[:, :6], 0), jnp.asarray(lengths))
        first = jnp.take_along_axis(x, jnp.asarray(lengths - 1)[:, None, None], axis=1)
        places = jnp.asarray(lengths)[:, None] + jnp.arange(new)  # each row's own
        following = jnp.take_along_axis(tokens, places, axis=1)

        def step(cache, index):
            x, cache = model.extend(jax.lax.dynamic_slice_in_dim(following, index, 1, 1), cache)
            return cache, x[:, 0]

        # One by one but for the last two, which come together.
        cache, one_by_one = jax.lax.scan(step, cache.grown(new), jnp.arange(new - 2))
        last, cache = model.extend(following[:, -2:], cache)
        return jnp.concatenate([first, one_by_one.swapaxes(0, 1), last], axis=1), cache.length

    found, length = cached(params)
    np.testing.assert_array_equal(length, lengths + new)
    # bfloat16 rounds at 2**-8; products of one token and of many are summed in another order.
    tolerance = 3e-5 if dtype == "float32" else 0.06
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(jnp.stack(whole), np.float32), rtol=tolerance, atol=tolerance
    )


@pytest.mark.slow
def test_a_loop_writes_the_cache_where_it_lies():
    """The compiled loop of single tokens allocates no second cache."""
    graph, params = build(dataclasses.replace(LLAMA, depth=2))
    tokens, slots = tokens_of(4, 3), 4096

    def loop(params, cache):
        def step(_, carry):
            token, cache = carry
            x, cache = merge_module(graph, params).extend(token, cache)
            return jnp.argmax(x, axis=-1).astype(jnp.int32), cache

        return jax.lax.fori_loop(0, 10, step, (tokens[:, :1], cache))

    cache = jax.eval_shape(
        lambda p: merge_module(graph, p)
        .prefill(tokens, jnp.full(4, 3))[1]
        .grown(slots), params
    )  # fmt: skip
    compiled = jax.jit(loop, donate_argnums=1).lower(params, cache).compile()
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert compiled.memory_analysis().temp_size_in_bytes < held


@pytest.mark.parametrize("remat", ["products", "dots", "attention", "full"])
@pytest.mark.slow
def test_recomputing_changes_no_gradient_of_layers_of_two_kinds(remat):
    tokens = tokens_of(2, 8)

    def gradient(remat):
        graph, params = build(EVERYTHING, remat=remat)
        return jax.jit(jax.grad(lambda params: jnp.sum(run(graph, params, tokens) ** 2)))(params)

    expected, found = gradient("none"), gradient(remat)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), expected, found)


@pytest.mark.slow
def test_a_sliding_layer_sees_its_window_and_no_farther():
    sizes = dataclasses.replace(LLAMA, depth=1, window=4, sliding_layers=(0,))
    graph, params = build(sizes)
    tokens = tokens_of(1, 9)
    before = run(graph, params, tokens)
    for changed, first_same in ((2, 6), (3, 7)):
        after = run(graph, params, tokens.at[0, changed].add(1))
        differs = np.abs(np.asarray(after - before)).max(axis=-1)[0] > 1e-6
        np.testing.assert_array_equal(np.flatnonzero(differs), np.arange(changed, first_same))


@pytest.mark.slow
def test_low_rank_factors_start_as_nothing_and_fold_into_the_weights():
    plain = Decoder(EVERYTHING, AdapterConfig(), dtype=jnp.float32, remat="none", rngs=nnx.Rngs(0))
    low = Decoder(EVERYTHING, AdapterConfig(rank=2, alpha=3.0), dtype=jnp.float32, remat="none", rngs=nnx.Rngs(0))
    tokens, base = tokens_of(2, 7), module_params(plain)
    fresh = {**module_params(low), **base}
    assert sum(path.endswith("lora_b") for path in fresh) == 5
    np.testing.assert_array_equal(run(nnx.split(low)[0], fresh, tokens), run(nnx.split(plain)[0], base, tokens))
    factors = {
        path: jnp.asarray(NUMBERS.normal(size=leaf.shape), jnp.float32) * 0.3 if "lora" in path else leaf
        for path, leaf in fresh.items()
    }
    merged = merge_lora(factors, lambda _: 1.5, lambda _: None)
    found, expected = run(nnx.split(low)[0], factors, tokens), run(nnx.split(plain)[0], merged, tokens)
    assert np.abs(np.asarray(found - run(nnx.split(plain)[0], base, tokens))).max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_llama_3s_frequencies_keep_the_fast_waves_and_stretch_the_slow_ones():
    plain = RotaryFrequencies(base=5e5).of_head(64)
    scaled = RotaryFrequencies(base=5e5, factor=8.0, original_length=8192).of_head(64)
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_array_equal(scaled[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    between = (turns > 1) & (turns < 4)
    assert between.any() and np.all((scaled < plain)[between] & (scaled > plain / 8)[between])


def test_products_are_scaled_and_capped_before_the_mask():
    query, key, value = (jnp.asarray(NUMBERS.normal(size=(1, 3, 1, 4)) * 3, jnp.float32) for _ in range(3))
    mask = jnp.tril(jnp.ones((1, 3, 3), bool))
    products = 2.0 * np.tanh(np.einsum("tc,sc->ts", query[0, :, 0], key[0, :, 0]) * 0.7 / 2.0)
    weights = np.where(mask[0], np.exp(products), 0)
    expected = weights / weights.sum(-1, keepdims=True) @ np.asarray(value[0, :, 0])
    found = attend(query, key, value, mask, scale=0.7, cap=2.0)[0, :, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_cudnn_is_refused_where_products_are_capped(monkeypatch):
    monkeypatch.setattr("openpi_train.nn.attention.uses_cudnn", lambda *_: True)
    x = jnp.zeros((1, 2, 1, 8))
    with pytest.raises(UsageError, match=r"cudnn cannot cap.*auto or xla"):
        attend(x, x, x, jnp.ones((1, 2, 2), bool), "cudnn", cap=2.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_heads": 3}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"head_dim": 5}, "head_dim 5 must be even"),
        ({"depth": 0}, "depth 0 must be at least 1"),
        ({"window": 4}, "window and sliding_layers go together"),
        ({"window": 4, "sliding_layers": (3,)}, r"sliding_layers \[3\] are none of the 3 layers"),
        ({"window": 0, "sliding_layers": (0,)}, "window 0 must be at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_named(changes, says):
    assert not LLAMA.check() and not EVERYTHING.check()
    (problem,) = dataclasses.replace(LLAMA, **changes).check()
    assert re.search(says, problem)
