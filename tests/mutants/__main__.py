"""`python -m tests.mutants [NAME ...]`: make each mistake of the list in a copy of the tree, and run its tests.

Ends with 1 where a mistake survives or the list does not fit the tree. Before that, all named tests run once without
any mistake: one that fails or is skipped here could not notice anything. `--since COMMIT` makes small mistakes in what
has changed since then in place of the list's, and lists those that nobody notices: they are to be read, and end with 0.
Read next: `catalogue.py`, `generated.py`.
"""

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import catalogue, generated
from .catalogue import ROOT, Mutation
from .generated import SmallMistake

TIMEOUT_S = 600
# One failure is enough for a small mistake, and slow tests are too slow for dozens of them.
SMALL_OPTIONS, SMALL_TIMEOUT_S = ("-x", "-m", "not slow"), 120
CAUGHT, SURVIVED, BROKEN = "caught", "survived", "broken"


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a mutation; `detail` says more where it was not caught by a failing test."""

    mutation: Mutation | SmallMistake
    outcome: str
    seconds: float
    detail: str = ""


class Copy:
    """A copy of the tracked files in which mistakes are made and taken back."""

    def __init__(self, directory: Path):
        self.directory = directory
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout.decode()
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, directory / name, follow_symlinks=False)
        # The installed package's name of `configs/`: else the checkout's own would be imported.
        (directory / "openpi_train_configs").symlink_to("configs")
        self._edits = 0
        self._environment = os.environ | {
            "PYTHONPATH": f"{directory}{os.pathsep}{directory / 'tests'}",
            "MUTANTS_OUTCOMES": str(directory / "outcomes.json"),
            # Plugins of installed packages, which take a second to import; the tests use none.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "JAX_PLATFORMS": "cpu",
            # One compilation cache for all: most of a program does not change.
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
            "OPENPI_TRAIN_GOLDEN": os.environ.get("OPENPI_TRAIN_GOLDEN", str(ROOT.parent / "shared" / "golden")),
            "OPENPI_TRAIN_DATA": os.environ.get("OPENPI_TRAIN_DATA", str(ROOT.parent / "shared" / "data")),
        }
        self._worker = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py"))],
            cwd=directory,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def write(self, file: str, text: str) -> None:
        """Write a file with a time of its own: Python compares time and size with those of its compiled form."""
        path = self.directory / file
        path.write_text(text, encoding="utf-8")
        self._edits += 1
        os.utime(path, (self._edits, self._edits))

    def run(
        self, tests: Sequence[str], timeout_s: float, options: Sequence[str] = ()
    ) -> tuple[dict[str, str] | None, str]:
        """Outcomes of these tests by name, None where time ran out; and the end of what pytest printed."""
        outcomes = Path(self._environment["MUTANTS_OUTCOMES"])
        outcomes.unlink(missing_ok=True)
        assert self._worker.stdin and self._worker.stdout
        self._worker.stdin.write(json.dumps({"tests": [*options, *tests], "timeout_s": timeout_s}) + "\n")
        self._worker.stdin.flush()
        answer = json.loads(self._worker.stdout.readline())
        if not answer["ended"]:
            return None, answer["printed"]
        return (json.loads(outcomes.read_text()) if outcomes.exists() else {}), answer["printed"]

    def close(self) -> None:
        """End the worker."""
        assert self._worker.stdin
        self._worker.stdin.close()
        self._worker.wait()


def of_test(outcomes: dict[str, str], test: str) -> list[str]:
    """Outcomes of a test with all its parameters, or of all tests in a file."""
    return [outcome for name, outcome in outcomes.items() if name == test or name.startswith((f"{test}[", f"{test}::"))]


def attempt(copy: Copy, mutation: Mutation | SmallMistake) -> Result:
    """Make the mistake, run its tests, take it back. All tests of one of the list must fail, of a small one any."""
    if not mutation.tests:
        return Result(mutation, SURVIVED, 0.0, "no quick test mirrors the file or imports it")
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    started = time.monotonic()
    copy.write(mutation.file, mutation.applied(source))
    listed = isinstance(mutation, Mutation)
    try:
        outcomes, printed = copy.run(mutation.tests, *((TIMEOUT_S,) if listed else (SMALL_TIMEOUT_S, SMALL_OPTIONS)))
    finally:
        copy.write(mutation.file, source)
    seconds = time.monotonic() - started
    if not listed and not outcomes:
        return Result(mutation, CAUGHT, seconds, "its tests cannot be run, or do not end")
    if outcomes is None:
        return Result(mutation, BROKEN, seconds, f"its tests did not end within {TIMEOUT_S} s; name some that fail")
    if not outcomes:
        return Result(mutation, BROKEN, seconds, f"no test could be run: {printed}")
    passed = [test for test in mutation.tests if "failed" not in of_test(outcomes, test)]
    if passed and (listed or len(passed) == len(mutation.tests)):
        return Result(mutation, SURVIVED, seconds, f"passed: {', '.join(passed)}")
    return Result(mutation, CAUGHT, seconds)


class Copies:
    """Copies of the tree that are worked in at the same time, each by one thread."""

    def __init__(self, scratch: Path, count: int):
        self._all = [Copy(scratch / str(number) / "main") for number in range(count)]
        self._free: queue.Queue[Copy] = queue.Queue()
        for copy in self._all:
            self._free.put(copy)

    def map(self, function: Callable[[Copy, Any], Any], values: Iterable[Any]) -> Iterator[Any]:
        """What the function gives for each value and a free copy, in the order in which they end."""

        def call(value: Any) -> Any:
            copy = self._free.get()
            try:
                return function(copy, value)
            finally:
                self._free.put(copy)

        with concurrent.futures.ThreadPoolExecutor(len(self._all)) as threads:
            for future in concurrent.futures.as_completed([threads.submit(call, value) for value in values]):
                yield future.result()

    def close(self) -> None:
        """End the workers."""
        for copy in self._all:
            copy.close()


def check_without_mistakes(copies: Copies, mutations: Sequence[Mutation]) -> list[str]:
    """What is wrong with the named tests as they stand: one line each."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    by_file = {test.partition("::")[0]: [] for test in tests}
    for test in tests:
        by_file[test.partition("::")[0]].append(test)

    def problems(copy: Copy, tests: list[str]) -> list[str]:
        outcomes, printed = copy.run(tests, TIMEOUT_S)
        if not outcomes:
            return [f"{tests[0]} and others could not be run without a mistake: {printed or 'time ran out'}"]
        found = {test: set(of_test(outcomes, test)) for test in tests}
        return [
            f"{test}: {', '.join(sorted(seen)) or 'not found'} without any mistake"
            for test, seen in found.items()
            if "failed" in seen or "passed" not in seen
        ]

    return [problem for found in copies.map(problems, by_file.values()) for problem in found]


def with_quick_tests(copies: Copies, mistakes: Sequence[SmallMistake]) -> list[SmallMistake]:
    """The mistakes, each with those of its test files that have a quick test and pass without a mistake."""

    def passes(copy: Copy, file: str) -> tuple[str, bool]:
        outcomes, _ = copy.run([file], SMALL_TIMEOUT_S, SMALL_OPTIONS)
        return file, bool(outcomes) and set(outcomes.values()) <= {"passed", "skipped"}

    files = {file for mistake in mistakes for file in mistake.tests}
    good = {file for file, does in copies.map(passes, sorted(files)) if does}
    return [dataclasses.replace(one, tests=tuple(file for file in one.tests if file in good)) for one in mistakes]


def try_all(copies: Copies, mutations: Sequence[Mutation | SmallMistake]) -> list[Result]:
    """What came of each mutation, told as it comes."""
    results = []
    for result in copies.map(attempt, mutations):
        results.append(result)
        print(f"{result.outcome:<9} {result.seconds:6.1f} s  {result.mutation.name}  {result.detail}", flush=True)
    return sorted(results, key=lambda result: result.mutation.name)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="patterns of names of the list (all)")
    parser.add_argument("--since", metavar="COMMIT", help="small mistakes in what has changed since then")
    parser.add_argument("--most", type=int, default=60, help="so many of them, drawn evenly (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (%(default)s)")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2)), help="tried at the same time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a mistake first")
    given = parser.parse_args()
    try:
        chosen = generated.since(given.since, given.most, given.seed) if given.since else _listed(given.names)
    except catalogue.CatalogueError as error:
        print(f"the list of mutations does not fit the tree:\n{error}", file=sys.stderr)
        return 1
    if not chosen:
        print("nothing of the product has changed" if given.since else "no mutation is of that name", file=sys.stderr)
        return 0 if given.since else 1
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants_") as scratch:
        copies = Copies(Path(scratch), given.processes)
        try:
            if given.since:
                chosen = with_quick_tests(copies, chosen)
            elif not given.no_baseline and (wrong := check_without_mistakes(copies, chosen)):
                print("tests that could not notice a mistake:", *wrong, sep="\n", file=sys.stderr)
                return 1
            results = try_all(copies, chosen)
        finally:
            copies.close()
    caught = sum(result.outcome == CAUGHT for result in results)
    print(f"{caught} of {len(results)} caught, in {time.monotonic() - started:.0f} s")
    if given.json:
        rows = [dataclasses.asdict(result) for result in results]
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if given.since or caught == len(results) else 1


def _listed(names: Sequence[str]) -> list[Mutation]:
    mutations = catalogue.read()
    catalogue.check(mutations)
    return [one for one in mutations if not names or any(fnmatch.fnmatch(one.name, name) for name in names)]


if __name__ == "__main__":
    sys.exit(main())
