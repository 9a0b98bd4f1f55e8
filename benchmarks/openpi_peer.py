"""openpi's unmodified client from the package index, in a separate environment: created once, kept in the cache.

The client needs numpy below 2, and typing_extensions, which it does not declare. Read next: `serving_client.py`, which
uses it.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

_WANTED = ("openpi-client==0.1.2", "typing_extensions")


class Unavailable(Exception):
    """The client is not installed and cannot be downloaded."""


def environment() -> dict[str, str]:
    """Environment variables with which `python()` can import the client. Raises Unavailable."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "openpi_train" / "peers"
    place = cache / f"openpi-client-0.1.2-py{sys.version_info.major}{sys.version_info.minor}"
    if not place.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=cache))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", draft]
        done = subprocess.run([*command, *_WANTED], capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise Unavailable(f"openpi-client cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
        try:
            draft.rename(place)
        except OSError:  # another process was faster
            assert place.is_dir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "PYTHONPATH": str(place), "PYTHONNOUSERSITE": "1"}


def python() -> str:
    """A Python of this version without this project's packages."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
