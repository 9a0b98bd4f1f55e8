"""Results of a benchmark: tables of medians with their spread, and the conditions of the measurement.

Read next: `__main__.py`, which prints both.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Load average per core above which other programs disturb the measurement.
_BUSY_LOAD_PER_CORE = 0.75


@dataclasses.dataclass(frozen=True)
class Spread:
    """Repeated measurements of one quantity: shown as their median (lowest to highest)."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)

    def map(self, function) -> "Spread":
        """The same measurements in another unit."""
        return Spread(tuple(map(function, self.samples)))

    def over(self, other: "Spread") -> "Spread":
        """Pairwise ratios to the samples of `other`."""
        return Spread(tuple(one / two for one, two in zip(self.samples, other.samples, strict=True)))

    def __str__(self) -> str:
        if len(self.samples) == 1:
            return number(self.median)
        return f"{number(self.median)} ({number(min(self.samples))} to {number(max(self.samples))})"


Cell = str | int | float | Spread | None


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells below `columns`, with the ratio that matters in the last one. `notes` are printed below the table.

    `failure` says which requirement is not met; the program then exits with code 1.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    failure: str = ""

    def markdown(self) -> str:
        """The table as it is printed and as the docs record it."""
        texts = [list(self.columns), *([_text(cell) for cell in row] for row in self.rows)]
        widths = [max(len(line[column]) for line in texts) for column in range(len(self.columns))]
        lines = [
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in texts
        ]
        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        return "\n".join([f"### {self.title}", "", lines[0], rule, *lines[1:], "", *self.notes, ""])

    def as_json(self) -> dict[str, Any]:
        """Title, notes and one dictionary per row; repeated measurements are lists of samples."""
        rows = [dict(zip(self.columns, map(_plain, row), strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}


def number(value: float) -> str:
    """Format with three significant digits, without an exponent if that is short."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e9 else f"{value:.3g}"


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return number(cell) if isinstance(cell, int | float) else str(cell)


def _plain(cell: Cell) -> Any:
    return list(cell.samples) if isinstance(cell, Spread) else cell


def provenance(argv: Iterable[str]) -> dict[str, str]:
    """Date, hardware, versions and commit of the measurement. Initialises jax's devices."""
    import jax

    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    dirty = "" if not _git("status", "--porcelain") else " + uncommitted changes"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax", "orbax-checkpoint")]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "cpu": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores",
        "load": f"{os.getloadavg()[0]:.2f} before the start",
        "versions": f"Python {platform.python_version()}, {', '.join(versions)}",
        "commit": commit + dirty,
        "command": shlex.join(["python", "-m", "benchmarks", *argv]),
    }


def busy() -> str | None:
    """A warning if other programs use this machine, else None."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= _BUSY_LOAD_PER_CORE * cores:
        return None
    return f"load average {load:.2f} on {cores} cores: other programs are running, so do not record these numbers"


def write_json(path: Path, facts: Mapping[str, str], tables: Iterable[Table]) -> None:
    """Write provenance and all samples, for comparing runs."""
    content = {"provenance": dict(facts), "tables": [table.as_json() for table in tables]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_record(path: Path, facts: Mapping[str, str], tables: Iterable[Table]) -> None:
    """Write a result as the docs show it (`benchmarks/results/`): its source on top, then the tables."""
    hardware = facts["cpu"] if facts["devices"].endswith("x cpu") else facts["devices"]
    source = {"date": facts["date"][:10], "commit": facts["commit"], "command": facts["command"], "hardware": hardware}
    top = "".join(f"{name}: {json.dumps(value)}\n" for name, value in source.items())
    body = "\n".join(table.markdown().replace("### ", "# ", 1) for table in tables)
    path.write_text(f"---\n{top}---\n\n{body}\n(load {facts['load']}, {facts['versions']})\n")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(*words: str) -> str:
    """The output of git in the checkout; empty if there is none."""
    try:
        result = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"git cannot be asked for the commit: {error}", file=sys.stderr)
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
