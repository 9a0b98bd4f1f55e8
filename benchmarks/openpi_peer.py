"""openpi's unmodified client from the package index, in a separate environment: created once, kept in the cache.

The client needs numpy below 2, which no Python after 3.12 has in wheels, and typing_extensions, which it does not
declare. Read next: `serving_client.py`, which uses it.
"""

import functools
import os
import shutil
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
    place = cache / f"openpi-client-0.1.2-{Path(python()).name}"
    if not place.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=cache))
        install = ["install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:", "--target", draft]
        command = [python(), "-m", "pip", *install, *_WANTED]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                raise Unavailable(f"openpi-client cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
            draft.rename(place)
        except OSError:  # another process was faster
            assert place.is_dir()
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "PYTHONPATH": str(place), "PYTHONNOUSERSITE": "1"}


@functools.cache
def python() -> str:
    """A Python that can have the client, without this project's packages. Raises Unavailable."""
    if sys.version_info < (3, 13):
        return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
    for version in ("3.12", "3.11"):
        # pyenv shows a version only to who asks for it.
        command, ask = [f"python{version}", "-c", "import sys; print(sys.executable)"], {"PYENV_VERSION": version}
        try:
            done = subprocess.run(command, env={**os.environ, **ask}, capture_output=True, text=True, timeout=60)
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            return done.stdout.strip()
    raise Unavailable("openpi-client needs numpy below 2, and so Python 3.12 or 3.11, which are not here")
