"""The checker behind the suite's run-time type checks: beartype, with int accepted where float is asked (PEP 484)."""

from collections.abc import Callable

from beartype import BeartypeConf, beartype

_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable) -> Callable:
    """The function with checks; one within another function as it is: it would be wrapped anew at every call."""
    return function if "<locals>" in function.__qualname__ else _checked(function)
