"""Versions of the packages that affect what a run computes. Read next: `session.py`, which compares processes."""

import functools
import importlib.metadata
import platform

_PACKAGES = ("openpi_train", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain")


@functools.cache
def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect the result."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
