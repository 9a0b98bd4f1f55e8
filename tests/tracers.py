"""Traced arrays that say in few words what they do not have, as those of jax 0.12 do: less time in tests that trace.

Each draw of a model's `nnx.Rngs` asks two traced arrays for their `sharding`, and flax goes on when they have none.
Until jax 0.11 the error then names the operations that an array comes from: all that have been traced so far are
looked through and printed, at each of hundreds of draws.
"""

from typing import Any, NoReturn

from jax.core import Tracer

_NONE = "a traced array has no 'sharding': it is an attribute of concrete ones"


def say_little() -> None:
    """From now on, let no traced array look for where it comes from when it is asked for its `sharding`."""
    asked: Any = Tracer.sharding
    if "_origin_msg" in asked.fget.__code__.co_names:
        setattr(Tracer, "sharding", property(_refuse))  # noqa: B010 (a property, which pyright guards)


def _refuse(_: Tracer) -> NoReturn:
    raise AttributeError(_NONE)
