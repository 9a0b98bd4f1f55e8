"""Test whether the installed jaxlib accepts a value of XLA_FLAGS, in a separate process, with cached results.

An unknown flag ends the process uncatchably (`parse_flags_from_env.cc: Unknown flag in XLA_FLAGS`), and
flags change between releases. A test costs the start of a process; the results of a release are kept in the
user's cache folder. A GPU plugin has jaxlib's release, so it knows the same flags. Read next: `xla.py`.
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
    """Why the installed jaxlib rejects `flags` ("--a=1 --b=2"), "" if it accepts them, None if unknown.

    Args: `cache` is the folder of cached results; the user's by default.
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
    """The project's folder in the user's cache; everything in it can be recreated."""
    home = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "openpi_train")


def _ask(flags: str, version: str) -> str | None:
    """Start jax on the CPU with `flags` in a new process and return the result; None if there is none."""
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
    with suppress(OSError, ValueError):  # absent or damaged: test again
        known = json.loads(path.read_text())
        if isinstance(known, dict):
            return known
    return {}


def _write(path: Path, known: Mapping[str, str]) -> None:
    """Write the file atomically; if the cache cannot be written, the next start only tests again."""
    temporary = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(known, indent=1))
        os.replace(temporary, path)
