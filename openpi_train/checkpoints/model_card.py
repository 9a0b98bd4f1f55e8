"""Model card of a checkpoint on the hub: the model, its training data, its results, and how to reproduce it."""

import json
import shlex
from collections.abc import Sequence

from openpi_train import families
from openpi_train.checkpoints.checkpoint_formats import named
from openpi_train.checkpoints.parity import num_values
from openpi_train.interop.stored_leaves import Stored
from openpi_train.json_object import JsonObject

_REPOSITORY = "openpi_train"


def model_card(
    stored: Stored,
    form: str,
    name: str,
    *,
    results: JsonObject | None = None,
    command: Sequence[str] | None = None,
) -> str:
    """The card's text (Markdown with a YAML header).

    Args:
        form: the format in which the checkpoint is pushed.
        name: the repository, USER/NAME.
        results: the run's `results.json`, if there is one.
        command: the command line that started the run, as words; None: made from the experiment's names.
    """
    experiment = stored.experiment or {}
    written = named(form)
    values = num_values(stored.params)
    types = ", ".join(sorted({str(leaf.dtype) for leaf in stored.params.values()}))
    parts = [
        _head(written.library, experiment),
        f"# {name.partition('/')[2]}\n\n{values:,} parameters ({types}), {form} format, written by {_REPOSITORY}.",
        _training(experiment, command),
        _data(experiment),
        _metrics(results),
        _norm_stats(stored.norm_stats),
        f"## Use\n\n    python -m {_REPOSITORY} {experiment.get('name', 'EXPERIMENT')} --exp-name finetuned "
        f"{written.start_flag} hub:{name}" + (f"\n    {written.loading.format(name=name)}" if written.loading else ""),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(library: str, experiment: JsonObject) -> str:
    model = (experiment.get("model") or {}).get("__class__", "")
    task = next((one.hub_tasks[model] for one in families.registered() if model in one.hub_tasks), "robotics")
    tags = [task, _REPOSITORY, *([experiment["name"]] if "name" in experiment else [])]
    listed = "\n".join(f"- {json.dumps(tag)}" for tag in tags)
    return f"---\nlibrary_name: {library}\npipeline_tag: {task}\ntags:\n{listed}\n---"


def _training(experiment: JsonObject, command: Sequence[str] | None) -> str:
    if not experiment:
        return ""
    words = command or ("python", "-m", _REPOSITORY, experiment["name"], "--exp-name", experiment["exp_name"])
    fields = ("num_train_steps", "batch_size", "seed", "ema_decay")
    rows = [(field, experiment[field]) for field in fields if field in experiment]
    text = json.dumps(experiment, indent=1, sort_keys=True)
    return (
        f"## Training\n\nExperiment `{experiment['name']}`, run `{experiment['exp_name']}`. To reproduce:\n\n"
        f"    {shlex.join(words)}\n\n{_table(('field', 'value'), rows)}\n\n"
        f"<details><summary>The whole experiment</summary>\n\n```json\n{text}\n```\n</details>"
    )


def _data(experiment: JsonObject) -> str:
    rows = []
    for dataset in experiment.get("data", {}).get("datasets", ()):
        source = dataset.get("source", dataset)  # texts have their path without a source
        rows.append((source.get("path", "-"), dataset.get("weight", 1.0), dataset.get("robot", {}).get("name", "-")))
    return f"## Data\n\n{_table(('dataset', 'weight', 'robot'), rows)}" if rows else ""


def _metrics(results: JsonObject | None) -> str:
    if not results:
        return ""
    metrics, rows = results.get("training_metrics", {}), []
    if evaluations := metrics.get("evaluations"):
        rows += [
            (f"{name} (step {evaluations[-1].get('step', '?')})", value) for name, value in evaluations[-1].items()
        ]
    rows += list(metrics.get("last", {}).items())
    numbers = [(name, f"{value:.5g}") for name, value in rows if isinstance(value, int | float) and name != "step"]
    where = results.get("distributed_info", {})
    on = f"On {where['devices']} x {where['device_kind']}, {where['strategy']}.\n\n" if "device_kind" in where else ""
    return f"## Results\n\n{on}{_table(('metric', 'value'), numbers)}" if numbers else ""


def _norm_stats(norm_stats: JsonObject) -> str:
    tables = []
    for asset_id, content in norm_stats.items():
        for array, entry in content.get("norm_stats", {}).items():
            names = [name for name in ("mean", "std", "q01", "q99") if entry.get(name) is not None]
            dims = zip(*(entry[name] for name in names), strict=True)
            rows = [(place, *(f"{value:.5g}" for value in values)) for place, values in enumerate(dims)]
            tables.append(f"`{asset_id}`, {array}:\n\n{_table(('dim', *names), rows)}")
    return "\n\n".join(["## Norm stats", *tables]) if tables else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)
