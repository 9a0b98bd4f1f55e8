"""Runs tests of a copy of the tree, each time in a fresh process that has the libraries imported already.

Started by `__main__.py` as a script, with the copy as working directory. A line of JSON on stdin is a job: `tests`, and
`timeout_s`. The answer on stdout is a line of JSON: `ended`, false where time ran out, and `printed`. What came of each
test lies in the file that `outcomes.py` writes. Importing jax and its like takes longer than most tests: a fork has it
done, and shares nothing else with the tests before it.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

LIBRARIES = (
    *("numpy", "scipy.fft", "jax", "jax.numpy", "flax.nnx", "optax", "orbax.checkpoint", "grain", "tensorstore"),
    *("pytest", "_pytest.pytester", "beartype", "jaxtyping", "tyro", "rich", "msgpack", "websockets.asyncio.server"),
    *("PIL.Image", "sentencepiece", "tokenizers", "google_crc32c", "prometheus_client"),
)
OPTIONS = ("-q", "--tb=line", "-p", "no:cacheprovider", "-p", "mutants.outcomes")
OUTPUT = Path("printed.txt")


def main() -> None:
    """Answer jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")  # what libraries print must not be taken for an answer
    os.dup2(2, 1)
    sys.path[:1] = [os.getcwd(), str(Path("tests").absolute())]
    for library in LIBRARIES:
        with contextlib.suppress(ImportError):  # an extra that is not installed: its tests say so
            importlib.import_module(library)
    for line in sys.stdin:
        job = json.loads(line)
        ended = run(job["tests"], job["timeout_s"])
        answers.write(json.dumps({"ended": ended, "printed": OUTPUT.read_text(errors="replace")[-4000:]}) + "\n")
        answers.flush()


def run(tests: list[str], timeout_s: float) -> bool:
    """Run the tests in a child; returns whether it ended in time. All that it started is killed then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax warns of forks; no device of it has been started here
        child = os.fork()
    if not child:
        os.setsid()
        output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        os._exit(pytest.main([*OPTIONS, *tests]))
    deadline, ended = time.monotonic() + timeout_s, False
    while not ended and time.monotonic() < deadline:
        ended = os.waitpid(child, os.WNOHANG)[0] == child
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    return ended


if __name__ == "__main__":
    main()
