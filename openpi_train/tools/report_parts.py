"""The parts of a report, from a run's directory to blocks of the page. Read next: `report.py`, which joins them."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core.files import read_json, read_json_lines
from openpi_train.data.robot.opened import OpenedDatasets
from openpi_train.data.robot.tokens import open_tokenizer
from openpi_train.envs.video import picture_of, side_by_side
from openpi_train.evaluation.baseline import against_mean_action
from openpi_train.evaluation.text_evaluations import SAMPLES
from openpi_train.experiment import Experiment
from openpi_train.former_names import present_metrics
from openpi_train.json_object import JsonObject
from openpi_train.planning.gpu.run_account import RECORD
from openpi_train.planning.gpu.step_account import GpuAccount, PartBound
from openpi_train.policy.experiment_json import experiment_of_run
from openpi_train.rl.rollout_samples import ROLLOUTS
from openpi_train.runtime.exits import RunError
from openpi_train.runtime.waiting import duration
from openpi_train.tools import open_loop
from openpi_train.tools.evaluate_text import RESULTS
from openpi_train.tools.page import (
    Bar,
    Beside,
    Block,
    Chart,
    DataTable,
    Folded,
    Heading,
    Line,
    Media,
    Note,
    Preformatted,
    Verdict,
)
from openpi_train.tools.run_files import Missing, RunFiles
from openpi_train.training.goodput import PARTS

_GIB = 2**30
_ROWS = 4  # of the sample batch
_NOTABLE_PART = 0.01  # share of a step's bound below which a part of the model is left out
# Prompts and completions of each that are shown at once; further prompts are folded.
_SHOWN, _COMPLETIONS = 4, 4
_MOST_CHARACTERS = 4000


def time_split(run: RunFiles) -> list[Block]:
    """Where the loop's time goes."""
    names = ("device", "acting", "data", "host", "evaluation", "checkpoint")
    lines = [
        Line(name, *points, colour=number)
        for number, name in enumerate(names)
        if (points := run.series(f"time/{name}_share"))[0]
    ]
    if not lines or lines[0].label != "device":
        raise Missing("no line of metrics.jsonl has the shares of the time yet.")
    rows = []
    for metric, label, unit in (
        ("time/step_s", "step", "s"),
        ("data/wait_s", "of it, waiting for data", "s"),
        ("mfu", "FLOPs of the model / peak (mfu)", "share"),
        ("time/evaluation_s", "last evaluation", "s"),
        ("time/checkpoint_stall_s", "held up by the last save", "s"),
    ):
        rows.append([label, run.last(metric), unit])
    chart = Chart("Where the time of an interval goes", "share", lines, limits=(0.0, 1.0))
    parts: list[Block] = [*([chart] if len(lines[0].x) > 1 else []), DataTable(["", "last", "unit"], rows)]
    if run.account is not None:
        spent_s = run.account
        total = max(sum(spent_s.values()), 1e-9)
        spent = [
            [what, duration(spent_s[part]), Bar(spent_s[part], spent_s[part] / total)] for part, what in PARTS.items()
        ]
        parts.append(DataTable(["all starts of the run", duration(total), f"s (goodput {run.goodput:.1%})"], spent))
    return [Beside(parts)]


def memory(run: RunFiles) -> list[Block]:
    """The forecast of plan.json against the memory of the compiled program."""
    plan = run.json("plan.json")
    forecast, compiled = plan["bytes_per_device"], plan.get("compiled_bytes_per_device")
    parts = ("params", "frozen", "optimizer", "ema", "grads", "compute_copy", "activations", "micro_grads", "layer")
    shown = {name: forecast[name] / _GIB for name in parts if forecast.get(name)}
    most = max(shown.values(), default=1.0)
    rows = [[name, Bar(value, value / most)] for name, value in shown.items()]
    content: list[Block] = [DataTable(["forecast of the plan", "GiB per device"], rows)]
    available = plan["available_bytes_per_device"] / _GIB
    if compiled is None:
        content.append(Note("The step has not been compiled yet: there is no account of it to compare with."))
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
        content.append(DataTable(["GiB per device", "forecast", "compiled", "ratio"], rows))
    words = (
        f"Strategy {plan['strategy']}, rematerialisation {plan['remat']}; {available:.1f} GiB of a device are there."
    )
    return [Note(words), Beside(content)]


def gpu_step(run: RunFiles) -> list[Block]:
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
    return [Note(words), Beside([DataTable(["phase", *columns], phases), DataTable(["part", *columns], parts)])]


def norm_stats(run: RunFiles, like: Experiment | None) -> list[Block]:
    """Norm statistics per dimension; `like` has the run's own classes."""
    parts: list[Block] = []
    names = _dim_names(run, like)
    for asset, stats in run.norm_stats().items():
        for kind, entry in stats.items():
            columns = [key for key in ("mean", "std", "q01", "q99", "min", "max") if entry.get(key) is not None]
            dims = names.get((asset, kind), [])
            rows = [
                [dims[dim] if dim < len(dims) else f"{kind} {dim}", *(float(entry[key][dim]) for key in columns)]
                for dim in range(len(entry["mean"]))
            ]
            parts += [Heading(f"{asset}, {kind}"), DataTable(["dimension", *columns], rows)]
    return parts


def _dim_names(run: RunFiles, like: Experiment | None) -> dict[tuple[str, str], Sequence[str]]:
    """The robots' names of dims, if the experiment can be read here."""
    try:
        datasets = experiment_of_run(run.experiment, run.path, like).demonstrations.datasets
    except RunError:
        return {}
    kinds: dict[str, Callable[[Any], Sequence[str]]] = {
        "state": lambda robot: robot.state_names,
        "actions": lambda robot: robot.action_names,
    }
    return {(one.asset, kind): names(one.robot) for one in datasets for kind, names in kinds.items()}


def sample_batch(run: RunFiles, like: Experiment | None) -> list[Block]:
    """The first training rows of the run. Raises DataError if the data are not available here."""
    experiment = experiment_of_run(run.experiment, run.path, like)
    data = experiment.open_data()
    if not isinstance(data, OpenedDatasets):
        raise Missing("no sample batch: only rows of robots' data are shown here.")
    config = experiment.demonstrations
    rows = data.train.batch(np.arange(min(_ROWS, data.train.num_samples)))[0]
    tokenizer = open_tokenizer(experiment.policy, config.tokenizer, offline=config.offline)
    cameras = [name for name in rows if name.startswith("image/")]
    lead = "The first training rows: resized, normalised and tokenised, before random changes to images."
    parts: list[Block] = [Note(lead)]
    for index, place in enumerate(data.train.describe(np.arange(len(rows["state"])))):
        shown: list[Block] = []
        if cameras:
            pictures = [picture_of(rows[name][index]) for name in cameras]
            names = ", ".join(name.removeprefix("image/") for name in cameras)
            shown.append(Media.of_pixels(side_by_side(pictures), names))
        chunk, own = rows["actions"][index], rows["dim_mask"][index]
        steps = np.flatnonzero(rows["action_mask"][index])
        lines = [
            Line(str(dim), steps.tolist(), chunk[steps, dim].tolist(), number)
            for number, dim in enumerate(np.flatnonzero(own).tolist())
        ]
        shown.append(Chart("Action chunk, by dimension", "normalised", lines, x_label="control step of the chunk"))
        tokens = rows["prompt_tokens"][index][rows["prompt_mask"][index]]
        said = tokenizer.decode(tokens.tolist()) if len(tokens) else "(this model reads no text)"
        state = np.array2string(np.ravel(rows["state"][index]), precision=2, suppress_small=True, max_line_width=200)
        parts += [Heading(place), Note(f"prompt: {said}"), Note(f"state: {state}"), Beside(shown)]
    return parts


def evaluations(run: RunFiles) -> list[Block]:
    """Open loop and closed loop of the last evaluated step, and success rates of the others; of texts their scores."""
    if run.experiment.get("data", {}).get("__class__") == "TextData":
        return _of_texts(run)
    folders = run.evaluations
    if not folders:
        raise Missing(
            "no evaluation: an experiment with eval.closed_loop.env writes one while it trains, and "
            f"`python -m openpi_train eval {run.path}` one afterwards."
        )
    parts: list[Block] = []
    newest = folders[-1]
    inside = RunFiles(newest)
    for title, part in (("Closed loop", _closed_loop), ("Open loop", _open_loop)):
        try:
            content = part(inside)
        except Missing as reason:
            content = [Note(str(reason))]
        parts += [Heading(f"{title}, step {newest.name}"), *content]
    rows = []
    for folder in folders[:-1]:
        try:
            found = RunFiles(folder).json("closed_loop.json")["overall"]
        except Missing:
            continue
        rows.append([int(folder.name), f"{found['successes']}/{found['trials']}", _share(found)])
    if rows:
        parts += [Heading("Closed loop, earlier steps"), DataTable(["step", "episodes", "success"], rows)]
    return parts


def own_rollouts(run: RunFiles) -> list[Block]:
    """Rollouts of the first and the last iteration of which some were kept to look at."""
    files = [*run.path.glob(f"rollouts/*/{ROLLOUTS}"), *run.path.glob("attempts/*/attempts.jsonl")]  # the former name
    files.sort(key=lambda file: int(file.parent.name))
    if not files:
        raise Missing("no rollouts are kept yet: a run keeps some with --rl.num-shown N.")
    return [block for file in dict.fromkeys((files[0], files[-1])) for block in _rollouts(file)]


def _rollouts(file: Path) -> list[Block]:
    folder, lines = file.parent, [present_metrics(line) for _, line in read_json_lines(file)]
    rows = [
        [line["prompt_id"], line["reward"], line.get("tokens", line.get("units")), "yes" if line["is_cut"] else "no"]
        for line in lines
    ]
    table = DataTable(["prompt", "reward", "units", "ended by a limit"], rows)
    films = [(folder / line["video"], line["what"]) for line in lines if line.get("video")]
    shown = [Media.of_file(path, what) for path, what in films if path.is_file()]
    texts = [block for line in lines if not line.get("video") for block in _rollout(line)]
    return [Heading(f"Iteration {int(folder.name)}"), table, *([Beside(shown)] if shown else []), *texts]


def _rollout(line: JsonObject) -> list[Block]:
    """A rollout in words: of texts prompt, completion and what else its line has."""
    title = f"prompt {line['prompt_id']}"
    if "completion" not in line:  # of a robot, or of a version that had one text
        return [_text(title, line["what"])]
    rewards = "".join(f", {name} {value}" for name, value in line.get("rewards", {}).items())
    columns = line.get("columns") or ({"reference": line["reference"]} if "reference" in line else {})
    more = [_text("columns", json.dumps(columns, ensure_ascii=False))] if columns else []
    return [
        _text(title, line["prompt"]),
        _text(f"completion: reward {line['reward']:.4g}{rewards}", line["completion"]),
        *more,
    ]


def _closed_loop(folder: RunFiles) -> list[Block]:
    found = folder.json("closed_loop.json", "`eval` was not asked for it")
    rows = [
        [name, f"{one['successes']}/{one['trials']}", _share(one), one["mean_steps"]]
        for name, one in {**found["tasks"], "all tasks": found["overall"]}.items()
    ]
    table = DataTable(["task", "episodes", "success (95 % interval)", "control steps until then"], rows)
    videos = [folder.path / name for name in found.get("videos", [])]
    shown = [Media.of_file(path, path.stem.replace("_", " ")) for path in videos if path.is_file()]
    return [table, Beside(shown) if shown else Note("There are no videos.")]


def _share(found: Any) -> str:
    return f"{found['rate']:.0%} ({found['low']:.0%} – {found['high']:.0%})"


def _open_loop(folder: RunFiles) -> list[Block]:
    found = folder.json("open_loop.json", "`eval` was not asked for it")
    constant, title = "rms_of_mean_action", "of the mean action of the training data"
    if "overall" not in found:  # of a version that compared with the mean of what was evaluated
        constant, title = "rms_of_mean", "of the mean of the evaluated actions"
    rows = [[name, one["mean_absolute"], one["rms"], one.get(constant)] for name, one in found["dims"].items()]
    head = ["action, in the robot's units", "mean absolute error", "root mean square", title]
    episodes = f"{open_loop.counted(found, found.get('settings', {}))}."
    verdict: list[Block] = []
    if "overall" in found:
        whole = found["overall"]
        rows.append(["all, in standard deviations of the training data", None, whole["rms"], whole[constant]])
        compared = against_mean_action(whole["rms"], whole[constant])
        verdict.append(Verdict(f"In open loop the policy is {compared.text}.", compared.has_learned))
    plots = [folder.path / name for name in found.get("plots", [])]
    shown = [Media.of_file(path, f"episode {path.stem.rpartition('_')[2]}") for path in plots if path.is_file()]
    return [Note(episodes), *verdict, DataTable(head, rows), Beside(shown)]


def command(run: RunFiles) -> list[Block]:
    """The commands of the run's starts, where each was typed and on what commit; none twice in a row."""
    lines: list[str] = []
    here = ""
    for start in run.json("environment.json")["starts"]:
        git = start.get("git") or {}
        place = f"cd {shlex.quote(start['directory'])}" + (f"  # commit {git['commit']}" if git else "")
        words = shlex.join(["python", "-m", "openpi_train", *start["argv"][1:]])
        if place != here:
            lines.append(place)
            here = place
        if words != lines[-1]:
            lines.append(words)
    return [Preformatted("\n".join(lines))]


def environment(run: RunFiles) -> list[Block]:
    """Hardware and software of the run, and its whole configuration."""
    starts = run.json("environment.json")["starts"]
    last = starts[-1]
    git = last.get("git") or {}
    rows = [
        ["started", ", ".join(start["started_at"] for start in starts)],
        ["host", last["host"]],
        ["processes", str(last["process_count"])],
        ["devices", f"{last['devices']['count']} x {last['devices']['kind']}"],
        ["commit", git.get("commit", "unknown") + (" with changes" if git.get("modified") else "")],
        ["versions", ", ".join(f"{name} {version}" for name, version in last["versions"].items())],
    ]
    variables = "\n".join(f"{name}={value}" for name, value in last["variables"].items())
    return [
        DataTable(["", ""], rows),
        Folded("Environment variables", [Preformatted(variables or "none")]),
        Folded("The whole experiment", [Preformatted(json.dumps(run.experiment, indent=1))]),
    ]


def _of_texts(run: RunFiles) -> list[Block]:
    """What `eval` measured, by step; then samples of the first and the last evaluation that has some."""
    parts = _measured_texts(run)
    folders = [folder for folder in run.evaluations if (folder / SAMPLES).is_file()]
    for folder in dict.fromkeys(folders[:1] + folders[-1:]):
        parts += [Heading(f"Samples, step {int(folder.name)}"), *_samples(folder / SAMPLES)]
    if not parts:
        raise Missing(
            "no samples and no evaluation: a run writes samples with --eval.num-prompts N, and "
            f"`python -m openpi_train eval {run.path}` evaluates it afterwards."
        )
    return parts


def _measured_texts(run: RunFiles) -> list[Block]:
    found = {folder.name: read_json(folder / RESULTS) for folder in run.evaluations if (folder / RESULTS).is_file()}
    names = list(dict.fromkeys(name for one in found.values() for name in one["values"]))
    rows = [[int(step), *(one["values"].get(name) for name in names)] for step, one in found.items()]
    return [Heading("Measured by `eval`"), DataTable(["step", *names], rows)] if found else []


def _samples(path: Path) -> list[Block]:
    lines = [line for _, line in read_json_lines(path)]
    shown = [block for line in lines[:_SHOWN] for block in _prompt(line)]
    more = [block for line in lines[_SHOWN:] for block in _prompt(line)]
    return [*shown, *([Folded(f"{len(lines) - _SHOWN} more prompts", more)] if more else [])]


def _prompt(line: JsonObject) -> list[Block]:
    """A prompt with its reference and completions."""
    completions: Sequence[Mapping[str, Any]] = line["completions"]
    parts: list[Block] = [Note(line["place"]), _text("prompt", line["prompt"])]
    if line["reference"]:
        parts.append(_text("reference", line["reference"]))
    for one in completions[:_COMPLETIONS]:
        scores = ", ".join(f"{name} {value:.3g}" for name, value in one["scores"].items())
        ended = "ended" if one["finish_reason"] == "stop" else "cut off"
        parts.append(_text(f"completion: {scores or 'not scored'}; {one['tokens']} tokens, {ended}", one["text"]))
    if len(completions) > _COMPLETIONS:
        parts.append(Note(f"{len(completions) - _COMPLETIONS} more completions are in {SAMPLES}."))
    return parts


def _text(title: str, content: str) -> Preformatted:
    return Preformatted(content if len(content) <= _MOST_CHARACTERS else f"{content[:_MOST_CHARACTERS]} …", title)
