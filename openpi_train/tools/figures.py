"""SVG figures by matplotlib (the extra `report`): lines over steps, and predicted against recorded chunks."""

import importlib.util
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from openpi_train.runtime.exits import UsageError
from openpi_train.tools.open_loop import Predicted

Points = tuple[Sequence[float], Sequence[float]]

_WORTH_A_LOGARITHM = 10.0  # below this ratio a linear axis has the better ticks
_COLOURS = ("#1f5fa8", "#c8501e", "#2c8a4b", "#8a4fa3", "#a3832c", "#4a4a4a", "#3aa6b9", "#d4779b")
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


def lines(
    series: Mapping[str, Points],
    *,
    unit: str,
    x_label: str = "step",
    logarithmic: bool = False,
    bands: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]] | None = None,
    limits: tuple[float, float] | None = None,
) -> str:
    """Named lines over steps; `bands` are (x, low, high) behind the line of the same name."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        figure = _figure(5.4, 2.6)
        axes = figure.subplots()
        for number, (name, (x, y)) in enumerate(series.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            # Series with few points get markers.
            axes.plot(x, y, label=name, color=colour, marker="o" if len(x) < 20 else None, markersize=3)
            if bands and name in bands:
                place, low, high = bands[name]
                axes.fill_between(place, low, high, color=colour, alpha=0.15, linewidth=0)
        values = [value for _, y in series.values() for value in y]
        if logarithmic and min(values) > 0 and max(values) > _WORTH_A_LOGARITHM * min(values):
            axes.set_yscale("log")
        axes.xaxis.get_major_locator().set_params(integer=True)
        if limits is not None:
            axes.set_ylim(*limits)
        axes.set_xlabel(x_label)
        axes.set_ylabel(unit)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return _svg(figure)


def shares(names: Sequence[object], parts: Mapping[str, Sequence[float]], *, x_label: str = "step") -> str:
    """Stacked areas: the share of each part at every step."""
    import matplotlib as mpl

    with mpl.rc_context({**_STYLE, "axes.grid": False}):
        figure = _figure(5.4, 2.4)
        axes = figure.subplots()
        axes.stackplot(names, list(parts.values()), labels=list(parts), colors=_COLOURS, step="pre", linewidth=0)
        axes.set_ylim(0, 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel(x_label)
        axes.set_ylabel("share of the time")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
        return _svg(figure)


def chunks(predicted: Predicted, names: Sequence[str], control_hz: float) -> str:
    """Every action dim of an episode over time: recorded, and each predicted chunk."""
    import matplotlib as mpl

    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    with mpl.rc_context(_STYLE):
        figure = _figure(3.3 * columns, 1.7 * rows + 0.4)
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
        return _svg(figure)


def bars(values: Mapping[str, float], *, unit: str) -> str:
    """One bar per value, labelled with its number."""
    import matplotlib as mpl

    with mpl.rc_context({**_STYLE, "axes.grid": False}):
        figure = _figure(5.4, 0.5 + 0.28 * len(values))
        axes = figure.subplots()
        drawn = axes.barh(list(values), list(values.values()), 0.7, color=_COLOURS[0])
        axes.bar_label(drawn, fmt=" {:.3g}")
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        return _svg(figure)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Any) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()
