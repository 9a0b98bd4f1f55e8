"""The parts of a report, from a run's directory to HTML. Read next: `report.py`, which joins them."""

import html
import io
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from openpi_train.data.core.files import read_json, read_json_lines
from openpi_train.data.robot.opened import OpenedDatasets
from openpi_train.data.robot.tokens import open_tokenizer
from openpi_train.envs.video import picture_of, side_by_side
from openpi_train.evaluation.text_evaluations import SAMPLES
from openpi_train.experiment import Experiment
from openpi_train.former_names import present_metrics
from openpi_train.json_object import JsonObject
from openpi_train.planning.gpu.run_account import RECORD
from openpi_train.planning.gpu.step_account import GpuAccount, PartBound
from openpi_train.policy.experiment_json import experiment_from_json
from openpi_train.rl.rollout_samples import ROLLOUTS
from openpi_train.runtime.exits import RunError
from openpi_train.runtime.waiting import duration
from openpi_train.tools import figures
from openpi_train.tools.evaluate_text import RESULTS
from openpi_train.tools.page import figure, folded, media, note, table, text
from openpi_train.tools.page import figures as beside
from openpi_train.tools.run_files import Missing, RunFiles
from openpi_train.training.goodput import PARTS

_GIB = 2**30
_ROWS = 4  # of the sample batch
_NOTABLE_PART = 0.01  # share of a step's bound below which a part of the model is left out
# Prompts and completions of each that are shown at once; further prompts are folded.
_SHOWN, _COMPLETIONS = 4, 4
_MOST_CHARACTERS = 4000
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
            "val/action_mse_mean_baseline": "best constant",
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


def curves(runs: Sequence[RunFiles]) -> str:
    """Every curve of one run, or of several in one figure."""
    parts = []
    for title, unit, logarithmic, metrics in (*_CURVES, *_success_of_rollouts(runs), *_own_curves(runs)):
        series = {
            (label if len(runs) == 1 else f"{run.name}: {label}"): points
            for run in runs
            for name, label in metrics.items()
            if (points := run.series(name))[0]
        }
        if series:
            parts.append(figure(figures.lines(series, unit=unit, logarithmic=logarithmic), title))
    successes = {run.name if len(runs) > 1 else "all tasks": run for run in runs if run.series("success/all")[0]}
    if successes:
        bands = {
            name: (*run.series("success/all_low"), run.series("success/all_high")[1]) for name, run in successes.items()
        }
        series = {name: run.series("success/all") for name, run in successes.items()}
        picture = figures.lines(series, unit="share of episodes", bands=bands, limits=(0.0, 1.0))
        parts.append(figure(picture, "Success in the environment, with a 95 % interval"))
    if not parts:
        raise Missing("metrics.jsonl has no line yet: the first comes after --log-interval steps.")
    return beside(parts)


def _success_of_rollouts(runs: Sequence[RunFiles]) -> list[tuple[str, str, bool, dict[str, str]]]:
    """One figure with a curve per task, and one of all."""
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


def time_split(run: RunFiles) -> str:
    """Where the loop's time goes."""
    names = ("device", "acting", "data", "host", "evaluation", "checkpoint")
    series = {name: points for name in names if (points := run.series(f"time/{name}_share"))[0]}
    if "device" not in series:
        raise Missing("no line of metrics.jsonl has the shares of the time yet.")
    steps = series["device"][0]
    picture = figures.shares(steps, {name: values for name, (_, values) in series.items()})
    rows = []
    for metric, label, unit in (
        ("time/step_s", "step", "s"),
        ("data/wait_s", "of it, waiting for data", "s"),
        ("mfu", "FLOPs of the model / peak (mfu)", "share"),
        ("time/evaluation_s", "last evaluation", "s"),
        ("time/checkpoint_stall_s", "held up by the last save", "s"),
    ):
        rows.append([label, run.last(metric), unit])
    parts = [figure(picture, "Where the time goes"), table(["", "last", "unit"], rows)]
    if run.account is not None:
        spent_s = run.account
        total = max(sum(spent_s.values()), 1e-9)
        spent = [[what, duration(spent_s[part]), f"{spent_s[part] / total:.1%}"] for part, what in PARTS.items()]
        parts.append(table(["all starts of the run", duration(total), f"goodput {run.goodput:.1%}"], spent))
    return beside(parts)


def memory(run: RunFiles) -> str:
    """The forecast of plan.json against the memory of the compiled program."""
    plan = run.json("plan.json")
    forecast, compiled = plan["bytes_per_device"], plan.get("compiled_bytes_per_device")
    parts = ("params", "frozen", "optimizer", "ema", "grads", "compute_copy", "activations", "micro_grads", "layer")
    shown = {name: forecast[name] / _GIB for name in parts if forecast.get(name)}
    content = [figure(figures.bars(shown, unit="GiB per device"), "What the plan forecasts")]
    available = plan["available_bytes_per_device"] / _GIB
    if compiled is None:
        content.append(note("The step has not been compiled yet: there is no account of it to compare with."))
    else:
        pairs = {
            "state": (forecast["state"], compiled["state"]),
            "its own (gradients, activations)": (
                forecast["total"] - forecast["state"],
                compiled["temporaries"] + compiled["batch"],
            ),
            "together": (forecast["total"], compiled["total"]),
        }
        rows = [[name, a / _GIB, b / _GIB, f"{b / a:.2f}" if a else "–"] for name, (a, b) in pairs.items()]
        content.append(table(["GiB per device", "forecast", "compiled", "ratio"], rows))
    words = (
        f"Strategy {plan['strategy']}, rematerialisation {plan['remat']}; {available:.1f} GiB of a device are there."
    )
    return note(words) + beside(content)


def gpu_step(run: RunFiles) -> str:
    """The account of the compiled step (`planning/gpu/step_account.py`): its bound by part of the model and phase."""
    found = GpuAccount.from_json(run.json(RECORD))

    def figures_of(one: PartBound) -> list[Any]:
        return [1e3 * one.bound_s, one.flops / 1e12, one.moved_bytes / 1e9, one.kernels]

    phases = [[one.phase, *figures_of(one)] for one in found.phases()]
    notable = [one for one in found.by_part() if one.bound_s >= _NOTABLE_PART * found.bound_s]
    parts = [[one.part, *figures_of(one)] for one in notable]
    taken = run.last("time/step_s")
    words = (
        f"No step takes less than {1e3 * found.bound_s:.1f} ms by the compiled program, {1e3 * found.matmul_s:.1f} ms "
        f"of it products; the schedule then waits {1e3 * found.exposed_s:.1f} ms for transfers."
    )
    if taken is not None:
        words += f" The last one took {1e3 * taken:.1f} ms."
    columns = ["ms", "TFLOP", "GB moved", "kernels"]
    return note(words) + beside([table(["phase", *columns], phases), table(["part", *columns], parts)])


def norm_stats(run: RunFiles, like: Experiment | None) -> str:
    """Norm statistics per dimension; `like` has the run's own classes."""
    parts = []
    names = _dim_names(run, like)
    for asset, stats in run.norm_stats().items():
        for kind, entry in stats.items():
            columns = [key for key in ("mean", "std", "q01", "q99", "min", "max") if entry.get(key) is not None]
            dims = names.get((asset, kind), [])
            rows = [
                [dims[dim] if dim < len(dims) else f"{kind} {dim}", *(float(entry[key][dim]) for key in columns)]
                for dim in range(len(entry["mean"]))
            ]
            parts.append(f"<h3>{asset}, {kind}</h3>" + table(["dimension", *columns], rows))
    return "".join(parts)


def _dim_names(run: RunFiles, like: Experiment | None) -> dict[tuple[str, str], Sequence[str]]:
    """The robots' names of dims, if the experiment can be read here."""
    try:
        datasets = experiment_from_json(run.experiment, like).demonstrations.datasets
    except RunError:
        return {}
    kinds: dict[str, Callable[[Any], Sequence[str]]] = {
        "state": lambda robot: robot.state_names,
        "actions": lambda robot: robot.action_names,
    }
    return {(one.asset, kind): names(one.robot) for one in datasets for kind, names in kinds.items()}


def sample_batch(run: RunFiles, like: Experiment | None) -> str:
    """The first training rows of the run. Raises DataError if the data are not available here."""
    experiment = experiment_from_json(run.experiment, like)
    data = experiment.open_data()
    if not isinstance(data, OpenedDatasets):
        raise Missing("no sample batch: only rows of robots' data are shown here.")
    config = experiment.demonstrations
    rows = data.train.batch(np.arange(min(_ROWS, data.train.num_samples)))[0]
    tokenizer = open_tokenizer(experiment.policy, config.tokenizer, offline=config.offline)
    cameras = [name for name in rows if name.startswith("image/")]
    parts = []
    for index, place in enumerate(data.train.describe(np.arange(len(rows["state"])))):
        shown = []
        if cameras:
            pictures = [picture_of(rows[name][index]) for name in cameras]
            shown.append(
                figure(_png(side_by_side(pictures)), ", ".join(n.removeprefix("image/") for n in cameras), ".png")
            )
        chunk, own = rows["actions"][index], rows["dim_mask"][index]
        steps = np.flatnonzero(rows["action_mask"][index])
        lines = {str(dim): (steps.tolist(), chunk[steps, dim].tolist()) for dim in np.flatnonzero(own)}
        drawn = figures.lines(lines, unit="normalised", x_label="control step of the chunk")
        shown.append(figure(drawn, "action chunk, by dimension"))
        tokens = rows["prompt_tokens"][index][rows["prompt_mask"][index]]
        said = tokenizer.decode(tokens.tolist()) if len(tokens) else "(this model reads no text)"
        state = np.array2string(np.ravel(rows["state"][index]), precision=2, suppress_small=True, max_line_width=200)
        parts.append(f"<h3>{text(place)}</h3>{note(f'prompt: {said}')}{note(f'state: {state}')}{beside(shown)}")
    lead = "The first training rows: resized, normalised and tokenised, before random changes to images."
    return note(lead) + "".join(parts)


def _png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG")
    return file.getvalue()


def evaluations(run: RunFiles) -> str:
    """Open loop and closed loop of the last evaluated step, and success rates of the others; of texts their scores."""
    if run.experiment.get("data", {}).get("__class__") == "TextData":
        return _of_texts(run)
    folders = run.evaluations
    if not folders:
        raise Missing(
            "no evaluation: an experiment with eval.closed_loop.env writes one while it trains, and "
            f"`python -m openpi_train eval {run.path}` one afterwards."
        )
    parts = []
    newest = folders[-1]
    inside = RunFiles(newest)
    for title, part in (("Closed loop", _closed_loop), ("Open loop", _open_loop)):
        try:
            content = part(inside)
        except Missing as reason:
            content = note(str(reason))
        parts.append(f"<h3>{title}, step {newest.name}</h3>{content}")
    rows = []
    for folder in folders[:-1]:
        try:
            found = RunFiles(folder).json("closed_loop.json")["overall"]
        except Missing:
            continue
        rows.append([int(folder.name), f"{found['successes']}/{found['trials']}", _share(found)])
    if rows:
        parts.append("<h3>Closed loop, earlier steps</h3>" + table(["step", "episodes", "success"], rows))
    return "".join(parts)


def own_rollouts(run: RunFiles) -> str:
    """Rollouts of the first and the last iteration of which some were kept to look at."""
    files = [*run.path.glob(f"rollouts/*/{ROLLOUTS}"), *run.path.glob("attempts/*/attempts.jsonl")]  # the former name
    files.sort(key=lambda file: int(file.parent.name))
    if not files:
        raise Missing("no rollouts are kept yet: a run keeps some with --rl.num-shown N.")
    return "".join(map(_rollouts, dict.fromkeys((files[0], files[-1]))))


def _rollouts(file: Path) -> str:
    folder, lines = file.parent, [present_metrics(line) for _, line in read_json_lines(file)]
    rows = [[line["prompt_id"], line["reward"], line["units"], "yes" if line["is_cut"] else "no"] for line in lines]
    parts = [table(["prompt", "reward", "units", "ended by a limit"], rows)]
    films = [(folder / line["video"], line["what"]) for line in lines if line["video"]]
    parts += [beside([media(path, what) for path, what in films if path.is_file()])] if films else []
    parts += [_block(f"prompt {line['prompt_id']}", line["what"]) for line in lines if not line["video"]]
    return f"<h3>Iteration {text(int(folder.name))}</h3>" + "".join(parts)


def _closed_loop(folder: RunFiles) -> str:
    found = folder.json("closed_loop.json", "`eval` was not asked for it")
    rows = [
        [name, f"{one['successes']}/{one['trials']}", _share(one), one["mean_steps"]]
        for name, one in {**found["tasks"], "all tasks": found["overall"]}.items()
    ]
    content = table(["task", "episodes", "success (95 % interval)", "control steps until then"], rows)
    videos = [folder.path / name for name in found.get("videos", [])]
    shown = [media(path, path.stem.replace("_", " ")) for path in videos if path.is_file()]
    return content + (beside(shown) if shown else note("There are no videos."))


def _share(found: Any) -> str:
    return f"{found['rate']:.0%} ({found['low']:.0%} – {found['high']:.0%})"


def _open_loop(folder: RunFiles) -> str:
    found = folder.json("open_loop.json", "`eval` was not asked for it")
    rows = [[name, one["mean_absolute"], one["rms"], one["rms_of_mean"]] for name, one in found["dims"].items()]
    head = ["action", "mean absolute error", "root mean square", "of the best constant"]
    episodes = (
        f"{len(found['episodes'])} held-out episodes, {found['control_steps']} control steps, in the robot's units."
    )
    plots = [folder.path / name for name in found.get("plots", [])]
    shown = [media(path, f"held-out episode {path.stem.rpartition('_')[2]}") for path in plots if path.is_file()]
    return note(episodes) + table(head, rows) + beside(shown)


def environment(run: RunFiles) -> str:
    """Hardware and software of the run, and the command to repeat it."""
    starts = run.json("environment.json")["starts"]
    last = starts[-1]
    git = last.get("git") or {}
    commit = git.get("commit", "unknown") + (" with changes" if git.get("modified") else "")
    rows = [
        ["started", ", ".join(start["started_at"] for start in starts)],
        ["host", last["host"]],
        ["processes", last["process_count"]],
        ["devices", f"{last['devices']['count']} x {last['devices']['kind']}"],
        ["commit", commit],
        ["versions", ", ".join(f"{name} {version}" for name, version in last["versions"].items())],
    ]
    command = shlex.join(["python", "-m", "openpi_train", *starts[0]["argv"][1:]])
    place = f"cd {shlex.quote(starts[0]['directory'])}" + (f"  # commit {git['commit']}" if git else "")
    variables = "\n".join(f"{name}={value}" for name, value in last["variables"].items())
    return (
        table(["", ""], [[name, str(value)] for name, value in rows])
        + f"<h3>To run it again</h3><pre>{html.escape(place)}\n{html.escape(command)}</pre>"
        + folded("Environment variables", f"<pre>{html.escape(variables) or 'none'}</pre>")
        + folded("The whole experiment", f"<pre>{html.escape(json.dumps(run.experiment, indent=1))}</pre>")
    )


def _of_texts(run: RunFiles) -> str:
    """What `eval` measured, by step; then samples of the first and the last evaluation that has some."""
    parts = [_measured_texts(run)]
    folders = [folder for folder in run.evaluations if (folder / SAMPLES).is_file()]
    for folder in dict.fromkeys(folders[:1] + folders[-1:]):
        parts.append(f"<h3>Samples, step {text(int(folder.name))}</h3>{_samples(folder / SAMPLES)}")
    if not any(parts):
        raise Missing(
            "no samples and no evaluation: a run writes samples with --eval.num-prompts N, and "
            f"`python -m openpi_train eval {run.path}` evaluates it afterwards."
        )
    return "".join(parts)


def _measured_texts(run: RunFiles) -> str:
    found = {folder.name: read_json(folder / RESULTS) for folder in run.evaluations if (folder / RESULTS).is_file()}
    names = list(dict.fromkeys(name for one in found.values() for name in one["values"]))
    if not found:
        return ""
    rows = [[int(step), *(one["values"].get(name) for name in names)] for step, one in found.items()]
    return "<h3>Measured by `eval`</h3>" + table(["step", *names], rows)


def _samples(path: Path) -> str:
    lines = [line for _, line in read_json_lines(path)]
    shown = "".join(map(_prompt, lines[:_SHOWN]))
    more = lines[_SHOWN:]
    return shown + (folded(f"{len(more)} more prompts", "".join(map(_prompt, more))) if more else "")


def _prompt(line: JsonObject) -> str:
    """A prompt with its reference and completions."""
    completions: Sequence[Mapping[str, Any]] = line["completions"]
    parts = [note(line["place"]), _block("prompt", line["prompt"]), _block("reference", line["reference"])]
    for one in completions[:_COMPLETIONS]:
        scores = ", ".join(f"{name} {value:.3g}" for name, value in one["scores"].items())
        ended = "ended" if one["finish_reason"] == "stop" else "cut off"
        parts.append(_block(f"completion: {scores or 'not scored'}; {one['tokens']} tokens, {ended}", one["text"]))
    if len(completions) > _COMPLETIONS:
        parts.append(note(f"{len(completions) - _COMPLETIONS} more completions are in {SAMPLES}."))
    return "".join(parts)


def _block(title: str, content: str) -> str:
    cut = content if len(content) <= _MOST_CHARACTERS else f"{content[:_MOST_CHARACTERS]} …"
    return f"{note(title)}<pre>{html.escape(cut)}</pre>"
