"""Programs of other projects that are measured beside ours: their packages, and a process that answers requests.

Packages are installed once, into the user's cache, apart from this project's environment. Read next: `openpi_peer.py`,
`lerobot_feed.py`, `language_speed.py`.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class Unavailable(Exception):
    """The packages are not installed and cannot be downloaded."""


def installed(name: str, wanted: Sequence[str], timeout_s: float = 300) -> dict[str, str]:
    """Environment variables with which `python()` imports the `wanted` packages. Raises Unavailable.

    Args: `name` is that of their folder; it has the versions, since the folder is kept.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "openpi_train" / "peers"
    place = cache / f"{name}-py{sys.version_info.major}{sys.version_info.minor}"
    if not place.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=cache))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", draft]
        done = subprocess.run([*command, *wanted], capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            raise Unavailable(f"{name} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
        try:
            draft.rename(place)
        except OSError:  # another process was faster
            assert place.is_dir()
    return environment() | {"PYTHONPATH": str(place)}


def environment() -> dict[str, str]:
    """This process's environment variables without those that name this project's packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1"}


def python() -> str:
    """A Python of this version without this project's packages."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


class Peer:
    """A process that answers requests with its measurements. Its first answer is its packages' versions."""

    def __init__(self, process: subprocess.Popen, answers: Any):
        self._process, self._answers = process, answers
        self.versions = self._answer()

    def ask(self, what: str, **options: Any) -> dict[str, Any]:
        """Request a measurement, and wait for the result. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({what: options}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            code = self._process.wait(60)
            raise RuntimeError(f"the peer ended with code {code}; its own words stand above")
        return json.loads(line)


@contextlib.contextmanager
def started(program: Path, python: str, environ: Mapping[str, str]) -> Iterator[Peer]:
    """Start a program that reads requests as JSON lines and writes answers to the descriptor in its first argument."""
    read, write = os.pipe()
    command = [python, str(program), str(write)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=dict(environ), pass_fds=[write]) as process:
        os.close(write)
        with os.fdopen(read) as answers:
            try:
                yield Peer(process, answers)
            finally:
                process.kill()
