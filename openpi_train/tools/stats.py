"""The `stats` verb: compute a run's norm stats anew and show them, a table per array with a line per dimension.

Read next: `data/norm_stats.py` for the computation, `data/normalize.py` for what counts as degenerate.
"""

import io
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from openpi_train.data.config import DataConfig
from openpi_train.data.norm_stats import compute_norm_stats, store_norm_stats
from openpi_train.data.normalize import NormStats
from openpi_train.data.opened import assets, open_windows
from openpi_train.data.windows import WindowShape

_COLUMNS = ("mean", "std", "q01", "q99", "low", "high")


def stats_table(config: DataConfig, *, shape: WindowShape, assets_dir: str | Path | None = None) -> str:
    """The norm stats of every dataset of a run as text: name, mean, std, q01, q99, min, max and a flag per dim.

    Args: `shape` is the model's window, over whose action chunks actions count. With `assets_dir` (of the run's
    experiment) the stats are also written there, where training finds them.
    """
    windows = open_windows(config, shape)
    parts = []
    for asset, members in assets(config, windows).items():
        group, weights = [window for window, _ in members], [dataset.weight for _, dataset in members]
        stats, notes = compute_norm_stats(group, weights, config.max_norm_stats_samples)
        if assets_dir is not None:
            folder = Path(assets_dir) / asset
            store_norm_stats(stats, notes, group, weights, folder, max_samples=config.max_norm_stats_samples)
            parts.append(f"written to {folder}")
        robot = group[0].robot
        samples = sum(len(window) for window in group)
        for name, dims in (("state", robot.state_names), ("actions", robot.action_names)):
            title = f"{asset}: {name}, {samples} samples, horizon {shape.horizon}"
            parts.append(_table(title, dims, stats[name], notes[name]))
    return "\n".join(parts)


def _table(title: str, dims: tuple[str, ...], stats: NormStats, notes: dict[str, str]) -> str:
    table = Table(title=title, title_justify="left")
    table.add_column("dim")
    for column in ("mean", "std", "q01", "q99", "min", "max"):
        table.add_column(column, justify="right")
    table.add_column("flag")
    for number, dim in enumerate(dims):
        values = [getattr(stats, column) for column in _COLUMNS]
        cells = [f"{np.nan if value is None else value[number]:.4g}" for value in values]
        table.add_row(dim, *cells, notes.get(dim, ""))
    return as_text(table)


def as_text(table: Table) -> str:
    """A table without colours, as wide as its content needs."""
    console = Console(file=io.StringIO(), width=160, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
