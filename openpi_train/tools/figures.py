"""The SVG figure of `eval`, by matplotlib (the extra `report`): predicted against recorded chunks."""

import importlib.util
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from openpi_train.runtime.exits import UsageError
from openpi_train.tools.open_loop import Predicted

_COLOURS = ("#1f5fa8", "#c8501e")
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.edgecolor": "#888888",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "svg.hashsalt": "openpi_train",
    "svg.fonttype": "path",
}


def require_figures() -> None:
    """Raise UsageError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("figures need matplotlib: pip install 'openpi_train[report]'")


def chunks(predicted: Predicted, names: Sequence[str], control_hz: float) -> str:
    """Every action dim of an episode over time: recorded, and each predicted chunk."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(3.3 * columns, 1.7 * rows + 0.4), layout="constrained")
        grid = np.atleast_1d(figure.subplots(rows, columns, sharex=True, squeeze=False)).ravel()
        times = np.arange(len(predicted.recorded)) / control_hz
        for dim, (axes, name) in enumerate(zip(grid, names, strict=False)):
            axes.plot(times, predicted.recorded[:, dim], color="#999999", label="recorded")
            for number, (step, chunk) in enumerate(predicted.chunks.items()):
                label = "predicted, chunk by chunk" if number == 0 else None
                place = (step + np.arange(len(chunk))) / control_hz
                axes.plot(place, chunk[:, dim], color=_COLOURS[number % 2], label=label)
            axes.set_title(name)
        for axes in grid[len(names) :]:
            axes.set_visible(False)
        for axes in grid[max(len(names) - columns, 0) : len(names)]:
            axes.set_xlabel("s")
            axes.tick_params(labelbottom=True)
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        return file.getvalue()
