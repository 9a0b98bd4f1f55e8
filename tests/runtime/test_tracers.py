"""What a traced array says when it is asked for its `sharding`."""

import jax
import jax.numpy as jnp
import pytest

from openpi_train.runtime import tracers


def test_a_traced_array_has_no_sharding_and_does_not_look_for_where_it_comes_from(monkeypatch):
    tracers.say_little()
    asked = []

    @jax.make_jaxpr
    def trace(values):
        monkeypatch.setattr(type(values), "_origin_msg", lambda _: pytest.fail("it looks through all operations"))
        for traced in (values, values + 1, jax.grad(jnp.sum)(values)):
            asked.append(getattr(traced, "sharding", None))
            with pytest.raises(AttributeError, match="sharding"):
                _ = traced.sharding
        return values

    trace(jnp.ones(2))
    assert asked == [None] * 3


def test_what_is_asked_for_by_mistake_is_still_told_with_where_it_comes_from():
    tracers.say_little()
    with pytest.raises(jax.errors.TracerBoolConversionError, match="depends on the value of the argument values"):
        jax.jit(lambda values: bool(values.sum()))(jnp.ones(2))
