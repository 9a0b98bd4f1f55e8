"""The `stats` verb: recompute a run's norm stats and print them, a table per array with a line per dimension.

Read next: `data/robot/norm_stats.py` for the computation, `data/robot/normalize.py` for degenerate dims.
"""

import io
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from openpi_train.data.robot.config import DataConfig
from openpi_train.data.robot.norm_stats import assets
from openpi_train.data.robot.normalize import NormStats
from openpi_train.data.robot.opened import open_windows
from openpi_train.data.robot.windows import WindowShape

# Titles of columns, and the norm stats in them.
_COLUMNS = {"mean": "mean", "std": "std", "q01": "q01", "q99": "q99", "min": "low", "max": "high"}


def stats_table(config: DataConfig, *, shape: WindowShape, assets_dir: str | Path | None = None) -> str:
    """The norm stats of every dataset of a run as text: name, mean, std, q01, q99, min, max and a flag per dim.

    Args: `shape` is the model's window, over whose action chunks actions count. With `assets_dir` (of the run's
    experiment) the stats are also written there, where training finds them.
    """
    windows = open_windows(config, shape)
    parts = []
    for asset in assets(config, windows, assets_dir or ""):
        stats, notes = computed = asset.compute()
        if assets_dir is not None:
            asset.store(computed)
            parts.append(f"written to {asset.folder}")
        samples = sum(map(len, asset.windows))
        for name, dims in asset.dims.items():
            title = f"{asset.name}: {name}, {samples} samples, horizon {shape.horizon}"
            parts.append(_table(title, dims, stats[name], notes[name]))
        parts += [finding.line() for finding in asset.spikes(stats)]
    return "\n".join(parts)


def _table(title: str, dims: tuple[str, ...], stats: NormStats, notes: dict[str, str]) -> str:
    table = Table(title=title, title_justify="left")
    table.add_column("dim")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    table.add_column("flag")
    for number, dim in enumerate(dims):
        values = [getattr(stats, column) for column in _COLUMNS.values()]
        cells = [f"{np.nan if value is None else value[number]:.4g}" for value in values]
        table.add_row(dim, *cells, notes.get(dim, ""))
    return as_text(table)


def as_text(table: Table, width: int = 160) -> str:
    """A table without colours, as wide as its content, at most `width` characters."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
