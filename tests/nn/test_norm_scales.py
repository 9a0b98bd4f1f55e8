"""Norms in bfloat16 multiply by their scales as they are: looped, unrolled, sharded and to generate.

The oracle is a decoder in float64 numpy, with the scales and with the scales rounded to bfloat16. Every scale lies just
below the middle between two bfloat16, so that rounding moves all of them the same way, by up to .4 %. How far along
the way from one oracle to the other a result lies is nearly free of the other roundings of bfloat16: they have no part
in that direction.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from openpi_train.generation.generator import GenerationRequest, Generator
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.nn.decoder import Decoder
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.lora import AdapterConfig
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import ParamUse, merge_module, module_params, use_params
from openpi_train.parallel.strategy import Plan

SIZES = DecoderSizes(
    vocab_size=64, width=32, depth=3, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8, query_key_norms=True
)
TOKENS = np.random.default_rng(2).integers(0, SIZES.vocab_size, (8, 24), np.int32)


@functools.cache
def made(dtype):
    """A graph, and parameters with scales of 1 to 1.5."""
    module = Decoder(SIZES, AdapterConfig(), dtype=dtype, remat="none", rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)

    def scales(shape):
        return jnp.asarray(1 + (rng.integers(0, 64, shape) + 0.49) / 128, jnp.float32)

    params = module_params(module)
    params |= {path: scales(leaf.shape) for path, leaf in params.items() if path.endswith("/scale")}
    params["token_embedding"] *= 30
    return nnx.split(module)[0], params


def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + SIZES.norm_eps) * scale


def rotated(heads):
    half = SIZES.head_dim // 2
    angles = np.arange(heads.shape[1])[:, None] * SIZES.rope_base ** (-np.arange(half) / half)
    sine, cosine = np.sin(angles)[:, None], np.cos(angles)[:, None]
    first, second = heads[..., :half], heads[..., half:]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def oracle(tokens, rounds):
    """Log-probabilities of the next token after each, float64."""
    p = {path: np.asarray(leaf, np.float64) for path, leaf in made(jnp.bfloat16)[1].items()}
    if rounds:
        p |= {path: one.astype(ml_dtypes.bfloat16).astype(np.float64) for path, one in p.items() if "scale" in path}
    x = p["token_embedding"][tokens]
    causal = np.tril(np.ones((tokens.shape[1],) * 2, bool))
    for layer in range(SIZES.depth):
        q = {path.removeprefix("layers/"): one[layer] for path, one in p.items() if path.startswith("layers/")}
        seen = norm(x, q["attention_norm/scale"])
        query = norm(np.einsum("btd,dnc->btnc", seen, q["attention/query/weight"]), q["attention/query_norm/scale"])
        key, value = np.einsum("btd,edkc->ebtkc", seen, q["attention/key_value/weight"])
        key = norm(key, q["attention/key_norm/scale"])
        query, key = rotated(query), rotated(key)
        key, value = (np.repeat(one, SIZES.num_heads // SIZES.num_kv_heads, axis=2) for one in (key, value))
        logits = np.einsum("btnc,bsnc->bnts", query, key) / np.sqrt(SIZES.head_dim)
        weights = np.exp(np.where(causal, logits, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("bnts,bsnc->btnc", weights, value)
        x = x + np.einsum("btnc,ncd->btd", attended, q["attention/output/weight"])
        gate, up = np.einsum("btd,edm->ebtm", norm(x, q["mlp_norm/scale"]), q["mlp/gate_up/weight"])
        x = x + (gate / (1 + np.exp(-gate)) * up) @ q["mlp/down/weight"]
    logits = norm(x, p["final_norm/scale"]) @ p["token_embedding"].T
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@functools.cache
def oracles():
    return oracle(TOKENS, rounds=False), oracle(TOKENS, rounds=True)


def share_of_rounding(found, exact, rounded):
    """0 if the result is that of the exact scales, 1 of the rounded ones."""
    way = rounded - exact
    return float(((found - exact) * way).sum() / (way**2).sum())


def log_probs(decoder, tokens):
    return jax.nn.log_softmax(decoder.logits(decoder(tokens)))


def looped(graph, params):
    return jax.jit(lambda params, tokens: log_probs(merge_module(graph, params), tokens))(params, TOKENS)


def unrolled(graph, params):
    def run(params, tokens):
        decoder = merge_module(graph, params)
        use_params(decoder, ParamUse(unrolled=True))
        return log_probs(decoder, tokens)

    return jax.jit(run)(params, TOKENS)


def sharded(graph, params):
    plan = Plan(mesh=make_mesh(4, jax.devices()[:4], 1), strategy="zero3", min_shard_mib=0)
    devices = Devices(plan, jnp.bfloat16, graph)
    params = jax.device_put(params, plan.tree("state", params))

    def run(params, tokens):
        return devices.rows(
            lambda params, rows, _: log_probs(merge_module(graph, params), rows), params, jnp.asarray(tokens), None
        )

    with jax.set_mesh(plan.real_mesh):
        return jax.jit(run)(params, TOKENS)


WAYS = {"looped": looped, "unrolled": unrolled, "sharded": sharded}


def test_the_oracle_is_the_decoder_in_float32():
    np.testing.assert_allclose(looped(*made(jnp.float32)), oracles()[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_scales_are_not_rounded_in_bfloat16(way):
    found = np.asarray(WAYS[way](*made(jnp.bfloat16)), np.float64)
    assert abs(share_of_rounding(found, *oracles())) < 0.15


def test_scales_are_not_rounded_to_generate():
    graph, params = made(jnp.bfloat16)
    plan = Plan(mesh=make_mesh(1, jax.devices()[:1], 1), strategy="zero3", min_shard_mib=0)
    settings = SamplingSettings(temperature=1.0, max_new_tokens=40)
    generator = Generator(
        graph, params, Devices(plan, jnp.bfloat16, graph), num_rows=16, max_length=48, end_ids=(), chunk=40
    )
    requests = [GenerationRequest(id=n, prompt=[n], settings=settings, row=n) for n in range(16)]
    done = generator.complete(requests)
    tokens = np.array([[n, *one.tokens] for n, one in enumerate(done)])
    chosen = [np.take_along_axis(oracle(tokens[:, :-1], rounds), tokens[:, 1:, None], 2)[..., 0] for rounds in (0, 1)]
    found = np.array([one.log_probs for one in done])
    assert abs(share_of_rounding(found, *chosen)) < 0.15
    for path in [path for path in params if path.endswith("/scale")]:
        np.testing.assert_array_equal(generator._params[path], params[path], err_msg=path)
