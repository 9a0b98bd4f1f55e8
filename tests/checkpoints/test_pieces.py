"""Pieces of a state in host memory: copies through pinned memory, tried here as on a GPU."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_train.checkpoints import pieces


@pytest.fixture
def on_a_gpu(monkeypatch):
    """CPU devices whose arrays seem to lie in a GPU's memory."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(pieces, "_pinned_limit", lambda: 10_000)


def items():
    """Three arrays of 4,000 bytes."""
    return {"params": {name: jnp.arange(1000.0) + n for n, name in enumerate("abc")}}


def is_pinned(monkeypatch):
    """The names of the arrays that jax is asked to copy to pinned memory from now on."""
    asked, put = [], jax.device_put

    def looking(arrays, shardings):
        assert {sharding.memory_kind for sharding in shardings.values()} <= {"pinned_host"}
        asked.extend(arrays)
        return put(arrays, shardings)

    monkeypatch.setattr(jax, "device_put", looking)
    return asked


def test_a_state_on_a_gpu_is_copied_to_pinned_memory_as_far_as_there_is_room(on_a_gpu, monkeypatch):
    asked, state = is_pinned(monkeypatch), items()
    found = pieces.fetch(state)
    assert asked == ["params/a[0:1000]", "params/b[0:1000]"]
    assert list(found) == [*asked, "params/c[0:1000]"]
    jax.tree.map(lambda array: array.delete(), state)  # as the next step does
    for n, piece in enumerate(found.values()):
        assert isinstance(piece, np.ndarray)
        np.testing.assert_array_equal(piece, np.arange(1000.0) + n)


def test_what_lies_on_the_host_already_is_copied_and_not_viewed(on_a_gpu, monkeypatch):
    state = items()
    on_host = jax.device_put(state["params"]["a"], state["params"]["a"].sharding.with_memory_kind("pinned_host"))
    state["params"]["a"] = on_host
    asked = is_pinned(monkeypatch)
    found = pieces.fetch(state)
    assert "params/a[0:1000]" not in asked and "params/b[0:1000]" in asked
    assert found["params/a[0:1000]"].flags.owndata
    np.testing.assert_array_equal(found["params/a[0:1000]"], np.arange(1000.0))


def test_without_pinned_memory_the_state_is_copied_slowly_and_the_log_says_so(on_a_gpu, monkeypatch, caplog):
    def refuse(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no more")

    monkeypatch.setattr(jax, "device_put", refuse)
    with caplog.at_level(logging.WARNING):
        found = pieces.fetch(items())
    np.testing.assert_array_equal(found["params/b[0:1000]"], np.arange(1000.0) + 1)
    assert "slower copies" in caplog.text and "RESOURCE_EXHAUSTED" in caplog.text


def test_pinned_memory_is_at_most_a_quarter_of_what_is_available(monkeypatch):
    monkeypatch.setattr(pieces, "host_available_bytes", lambda: 40 * 2**30)
    assert pieces._pinned_limit.__wrapped__() == 10 * 2**30
    monkeypatch.setattr(pieces, "host_available_bytes", lambda: 2**40)
    assert pieces._pinned_limit.__wrapped__() == 48 * 2**30
