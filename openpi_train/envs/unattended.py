"""Simulators where nobody sits: without a display, and without answers to questions."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator


def choose_renderer() -> None:
    """Let MuJoCo, which chooses at its first import, render by EGL where there is no display and no MUJOCO_GL."""
    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


@contextlib.contextmanager
def answering(answer: str) -> Iterator[None]:
    """Whoever asks on the terminal reads this answer. What is printed meanwhile goes to stderr."""
    kept, sys.stdin = sys.stdin, io.StringIO(f"{answer}\n" * 9)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdin = kept
