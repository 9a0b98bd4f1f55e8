"""The check of cuDNN's attention, with forms of attention that are right and wrong in its place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_train.nn import attention_check
from openpi_train.nn.attention import Heads, all_seen, attend, cudnn_problem
from openpi_train.nn.attention_check import distances, flash_problem, formula, results

# SigLIP's, Gemma's, Llama's and SmolVLA's kinds, with fewer heads.
HEADS = [Heads(2, 2, 72), Heads(4, 1, 256), Heads(4, 2, 64), Heads(3, 1, 64)]


def with_gradient_times(factor):
    one = jax.custom_vjp(lambda x: x)
    one.defvjp(lambda x: (x, None), lambda _, gradient: (factor * gradient,))
    return one


def by_mask(change):
    def form(query, key, value, mask):
        return attend(query, key, value, change(all_seen(query, key) if mask is None else mask), "xla")

    return form


WRONG = {
    "scale": lambda q, k, v, mask: formula(2 * q, k, v, mask),
    "mask": by_mask(jnp.ones_like),
    "last-key": by_mask(lambda mask: mask.at[:, :, -8:].set(False)),
    "heads": lambda q, k, v, mask: formula(q, jnp.roll(k, 1, axis=2), jnp.roll(v, 1, axis=2), mask),
    "gradient-of-keys": lambda q, k, v, mask: formula(q, with_gradient_times(0.5)(k), v, mask),
    "nan-in-a-gradient": lambda q, k, v, mask: formula(q, with_gradient_times(jnp.nan)(k), v, mask),
    "nan": lambda q, k, v, mask: formula(q, k, v, mask).at[1, 100].set(jnp.nan),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rounding_passes_with_room(dtype):
    assert flash_problem(HEADS, dtype, formula) is None
    exact, rounded = (results(formula, HEADS[0], one, masked=True) for one in (jnp.float32, dtype))
    assert 0 < max(distances(rounded, exact)) < 0.3 * attention_check.TOLERANCE


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name):
    problem = flash_problem([Heads(4, 2, 64)], jnp.bfloat16, WRONG[name])
    assert problem is not None and problem.startswith("for 4 heads of 64 outputs and gradients are off by ")


def test_all_heads_are_looked_at_with_a_mask_and_without():
    seen = []

    def form(query, key, value, mask):
        seen.append((query.shape[2:], key.shape[2], mask is not None))
        return formula(query, key, value, mask)

    assert flash_problem(HEADS[:2], jnp.bfloat16, form) is None
    assert seen == [((2, 72), 2, True), ((2, 72), 2, False), ((4, 256), 1, True), ((4, 256), 1, False)]


def test_what_a_library_says_is_the_problem():
    def form(*_):
        raise RuntimeError("no engine for this\nand more")

    assert flash_problem(HEADS, jnp.bfloat16, form) == "no engine for this"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about devices without cuDNN")
def test_where_there_is_no_cudnn_that_is_the_problem():
    # "cuDNN is not detected", or with jax's CUDA plugin that its kernels are not for this platform.
    assert flash_problem(HEADS, jnp.bfloat16)


def test_padding_reads_nothing_that_counts():
    out, *_ = results(formula, HEADS[0], jnp.float32, masked=True)
    assert not out[0, :3].any() and np.abs(out[0, 3:]).min(axis=(1, 2)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [Heads(16, 16, 72), Heads(8, 1, 256), Heads(32, 8, 64), Heads(28, 4, 128)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_cudnn_s_is_right_on_this_gpu(heads, dtype):
    if problem := cudnn_problem(heads.width, dtype, jax.local_devices()[0]):
        pytest.skip(f"cuDNN: {problem}")
    assert flash_problem([heads], dtype) is None
