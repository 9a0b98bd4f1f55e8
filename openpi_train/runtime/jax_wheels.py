"""Whether the wheels are installed that jax needs for the platform that the environment asks for.

Called before jax is imported, whose own errors are tracebacks. Read next: `../cli.py`, `../tools/check_host.py` (what
`doctor` says of the wheels).
"""

import importlib.metadata
from collections.abc import Callable, Mapping

from openpi_train.runtime.exits import UsageError

VARIABLES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
# By platform: the distributions of which one must be there, and how to install them.
_CUDA = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_ROCM = ("jax-rocm7-plugin", "jax-rocm60-plugin")
_HOW_CUDA = "pip install 'openpi_train[cuda13]' (NVIDIA driver 580 or later) or 'openpi_train[cuda12]' (525 or later)"
_NEEDED = {
    "cuda": (_CUDA, _HOW_CUDA),
    "gpu": ((*_CUDA, *_ROCM), _HOW_CUDA),
    "rocm": (_ROCM, "see docs.jax.dev/en/latest/installation.html"),
    "tpu": (("libtpu",), "pip install 'openpi_train[tpu]'"),
}


def installed(name: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check(environ: Mapping[str, str], version: Callable[[str], str | None] = installed) -> None:
    """Raise UsageError, with what to install, if the environment asks for a platform whose wheels are not there.

    Or are of another release than jaxlib: jax ignores them.
    """
    for variable in VARIABLES:
        for platform in environ.get(variable, "").lower().split(","):
            if platform.strip() in _NEEDED:
                _check(f"{variable}={environ[variable]}", variable, platform.strip(), version)


def _check(given: str, variable: str, platform: str, version: Callable[[str], str | None]) -> None:
    names, how = _NEEDED[platform]
    found = {name: is_at for name in names if (is_at := version(name)) is not None}
    if not found:
        raise UsageError(
            f"{given} asks for {platform}, for which jax has no wheel here: {how}; or unset {variable}, and jax uses "
            "what is there"
        )
    jaxlib = version("jaxlib")
    if platform != "tpu" and jaxlib not in found.values():
        name, other = next(iter(found.items()))
        extra = name.split("-")[1]
        raise UsageError(
            f"{given}: {name} {other} is of another release than jaxlib {jaxlib}, and jax ignores it: "
            f"pip install 'jax[{extra}]=={jaxlib}'"
        )
