"""Train robot policies on one device or many hosts, with one command. Start reading at `__main__.py`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openpi_train.policy.loading import load_policy

__all__ = ["load_policy"]


def __getattr__(name: str) -> Any:
    # Imported on first use: data workers and `--help` do not need jax.
    if name in __all__:
        from openpi_train.policy import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
