"""The curves of a report: which metrics share a chart, and what each line is called. Read next: `page.py`."""

import math
from collections.abc import Sequence

from openpi_train.evaluation.action_error import BASELINE
from openpi_train.tools.page import Beside, Block, Chart, DataTable, Heading, Line
from openpi_train.tools.run_files import Missing, RunFiles

_WORTH_A_LOGARITHM = 10.0  # below this ratio a linear axis has the better ticks
# Title, unit, whether logarithmic, and metrics with what each line is called.
_CURVES: tuple[tuple[str, str, bool, dict[str, str]], ...] = (
    ("Training loss", "loss", True, {"loss": "training"}),
    ("Held-out loss", "loss", True, {"val/loss": "parameters", "val/loss_ema": "average (EMA)"}),
    (
        "Open-loop action error while training, normalised units",
        "mean squared error",
        False,
        {
            "val/action_mse": "held-out",
            "val/action_mse_ema": "held-out, EMA",
            "train/action_mse": "training rows",
            BASELINE: "mean action",
            "val/action_mse_mean_baseline": "mean of the evaluated actions",
        },
    ),
    ("Learning rate", "learning rate", False, {"learning_rate": "learning rate"}),
    ("Gradient norm, before clipping", "norm", True, {"grad_norm": "gradient"}),
    ("Speed", "samples/s", False, {"samples_per_s": "samples/s"}),
    ("Reward of own rollouts", "reward", False, {"rl/reward": "mean"}),
    ("Groups of own rollouts whose outcomes differ", "share", False, {"rl/groups_mixed": "groups"}),
    ("Length of own rollouts", "units", False, {f"rl/length_{name}": name for name in ("mean", "min", "max")}),
    ("Entropy of the policy", "nats", False, {"entropy": "entropy"}),
    ("Divergence of the policy", "nats", False, {"approx_kl": "from the acting policy", "kl": "from the reference"}),
    ("Divergence of a rollout from the reference, in the reward", "nats", False, {"rl/kl": "mean"}),
    ("Weight of that divergence", "weight", False, {"rl/kl_weight": "weight"}),
    ("Values by the critic", "value", False, {"value": "said", "return": "came"}),
    ("Squared error of the critic", "value squared", True, {"value_loss": "critic"}),
    ("Units whose ratio is clipped", "share", False, {"clip_fraction": "clipped"}),
    ("Speed of acting", "units/s", False, {"rl/units_per_s": "units/s"}),
)
_SUCCESS = "rl/success"
_EVALUATED = "success/all"


def curves(runs: Sequence[RunFiles]) -> list[Block]:
    """Every curve of one run, or of several in one chart; what was measured once is in a table."""
    charts: list[Block] = []
    once: list[list[object]] = []
    for title, unit, logarithmic, metrics in (*_CURVES, *_success_of_rollouts(runs), *_own_curves(runs)):
        lines = _lines(runs, metrics)
        if any(len(line.x) > 1 for line in lines):
            charts.append(Chart(title, unit, lines, is_logarithmic=logarithmic and _spread(lines)))
        else:
            once += [[title, line.label, int(line.x[0]), line.y[0]] for line in lines]
    if successes := _successes(runs):
        title = "Success in the environment, with a 95 % interval"
        charts.insert(min(2, len(charts)), Chart(title, "share of episodes", successes, limits=(0.0, 1.0)))
    if not charts and not once:
        raise Missing("metrics.jsonl has no line yet: the first comes after --log-interval steps.")
    table = [Heading("Measured once"), DataTable(["", "", "step", "value"], once)] if once else []
    return [Beside(charts), *table] if charts else table


def _lines(runs: Sequence[RunFiles], metrics: dict[str, str]) -> list[Line]:
    """A line per run and metric: of several runs each has a colour, and each metric a dash."""
    several, found = len(runs) > 1, []
    for place, run in enumerate(runs):
        for number, (name, label) in enumerate(metrics.items()):
            x, y = run.series(name)
            if x:
                style = (place, number) if several else (number, 0)
                found.append(Line(f"{run.name}: {label}" if several else label, x, y, *style))
    return found


def _spread(lines: Sequence[Line]) -> bool:
    values = [value for line in lines for value in line.y if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) > _WORTH_A_LOGARITHM * min(values)


def _successes(runs: Sequence[RunFiles]) -> list[Line]:
    found = []
    for place, run in enumerate(runs):
        x, y = run.series(_EVALUATED)
        low, high = (run.series(f"{_EVALUATED}_{end}")[1] for end in ("low", "high"))
        if x:
            band = (low, high) if len(low) == len(high) == len(x) else None
            found.append(Line(run.name if len(runs) > 1 else "all tasks", x, y, place, band=band))
    return found


def _success_of_rollouts(runs: Sequence[RunFiles]) -> list[tuple[str, str, bool, dict[str, str]]]:
    """One chart with a curve per task, and one of all."""
    names = sorted({name for run in runs for line in run.metrics for name in line if name.startswith(f"{_SUCCESS}/")})
    labels = {_SUCCESS: "all rollouts", **{name: name.removeprefix(f"{_SUCCESS}/") for name in names}}
    return [("Success of own rollouts, which are made with noise", "share", False, labels)]


def _own_curves(runs: Sequence[RunFiles]) -> list[tuple[str, str, bool, dict[str, str]]]:
    """Curves of the experiments' own measures (`evaluation/measure.py: Evaluations`), one per name."""
    known = {name for _, _, _, metrics in _CURVES for name in metrics}
    names = {name for run in runs for line in run.metrics for name in line if name.startswith("val/")} - known
    plain = sorted({name.removesuffix("_ema") for name in names})
    return [
        (name.removeprefix("val/"), "", False, {name: "parameters", f"{name}_ema": "average (EMA)"}) for name in plain
    ]
