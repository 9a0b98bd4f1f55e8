"""Whether the installed jaxlib takes a value of XLA_FLAGS: asked in a process of its own, and remembered.

A flag that it does not know ends the process (`parse_flags_from_env.cc: Unknown flag in XLA_FLAGS`), uncatchably, and
flags come and go with releases. A question costs the start of a process; the answers of a release are kept in the
user's cache folder. A plugin for GPUs is of jaxlib's release, so it knows the same flags. Read next: `xla.py`.
"""

import importlib.metadata
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_TIMEOUT_S = 120.0
_ASK = "import jax; jax.devices()"


def rejected(flags: str, cache: Path | None = None) -> str | None:
    """Why the installed jaxlib does not take `flags` ("--a=1 --b=2"), "" where it does, None where it did not say.

    Args: `cache` is the folder of remembered answers; the user's by default.
    """
    version = importlib.metadata.version("jaxlib")
    path = (cache or Path(cache_dir(os.environ), "xla_flags")) / f"jaxlib-{version}.json"
    known = _read(path)
    if flags not in known:
        answer = _ask(flags, version)
        if answer is None:
            return None
        known = {**_read(path), flags: answer}
        _write(path, known)
    return known[flags]


def cache_dir(environ: Mapping[str, str]) -> str:
    """The project's folder in the user's cache, of which everything can be made again."""
    home = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "openpi_train")


def _ask(flags: str, version: str) -> str | None:
    """The answer of a process that starts jax on the processor with `flags`; None where it gave none."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "TPU_"))},
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == 0:
        return ""
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: *(.*)", done.stderr)
    if unknown:
        return f"jaxlib {version} does not know {unknown[1].strip()}"
    if "XLA_FLAGS" in done.stderr or "Flag parsing failed" in done.stderr:
        return f"jaxlib {version} cannot read {flags}"
    logger.debug("asking jaxlib about %s failed: %s", flags, done.stderr[-2000:])
    return None


def _read(path: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):  # absent, or torn: it is asked again
        known = json.loads(path.read_text())
        if isinstance(known, dict):
            return known
    return {}


def _write(path: Path, known: Mapping[str, str]) -> None:
    """Put the file in place whole; a cache that cannot be written costs the next start its question again, no more."""
    temporary = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(known, indent=1))
        os.replace(temporary, path)
