"""The `data` verb: `prepare` the embedded dataset, `collect` demonstrations, build an `index`, `inspect`, `repack` for
slow storage, `merge`, `convert`, `fit-fast` a tokenizer.

Read next: `data/embedded.py`, `collect.py`, `data/rlds/index.py`, `inspect_data.py`, `data/repack.py`,
`data/zarr/merge.py`, `data/convert.py`, `fit_fast.py`.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openpi_train.runtime import logs
from openpi_train.runtime.exits import DataError, reported_as

_PATH = "<data_dir>/<name>[/<version>] of RLDS; the folder of a LeRobot dataset or a zarr store"
# (name, flags) -> the experiment.
ParseExperiment = Callable[[str, Sequence[str]], Any]


def main(argv: Sequence[str], parse_experiment: ParseExperiment) -> int:
    """Run `data <what> ...`. Returns the exit code; raises DataError with advice."""
    parser = _parser()
    given, rest = parser.parse_known_args(argv)
    if "what" in given and _is_experiment(given.what):
        given.experiment = given.what
    if "experiment" in given:
        given.experiment = parse_experiment(given.experiment, ["--exp-name", "data", *rest])
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    logs.configure(0)
    with reported_as(DataError):
        given.run(given)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m openpi_train data", description="Make and look after datasets.")
    what = parser.add_subparsers(required=True, metavar="prepare|collect|index|inspect|repack|merge|convert|fit-fast")
    prepare = what.add_parser(
        "prepare",
        help="write an embedded tabletop dataset and its tokenizer",
        epilog="Without flags: what the experiments of this repository read under that name (docs/data.md). A run that "
        "misses such a dataset writes it by itself.",
    )
    prepare.add_argument("--directory", type=Path, help="datasets' folder (default: $OPENPI_TRAIN_HOME/datasets)")
    prepare.add_argument("--name", default="tabletop", help="of the dataset's own folder (%(default)s)")
    prepare.add_argument("--tasks", nargs="+", help="tasks to record, such as reach_red pick_yellow")
    prepare.add_argument("--episodes-per-task", type=int, help="training episodes")
    prepare.add_argument("--val-episodes-per-task", type=int, help="held-out episodes")
    prepare.add_argument("--image-size", type=int, help="pixels of a side")
    prepare.add_argument("--seed", type=int, help="of scenes and disturbances")
    prepare.set_defaults(run=_prepare)
    collect = what.add_parser("collect", help="demonstrations by an environment's scripted expert, as a zarr store")
    collect.add_argument("env", help="metaworld (needs the extra sim) or tabletop")
    collect.add_argument("--tasks", nargs="+", help="tasks by name, such as reach push (default: all)")
    collect.add_argument("--episodes-per-task", type=_at_least_1, default=20, help="successful episodes (%(default)s)")
    collect.add_argument("--image-size", type=_at_least_1, help="pixels of a side (metaworld: no pictures without)")
    collect.add_argument("--seed", type=int, default=0, help="of initial states and disturbances (%(default)s)")
    collect.add_argument("--workers", type=_at_least_1, default=1, help="processes, same files with any (%(default)s)")
    collect.set_defaults(run=_collect)
    index = what.add_parser("index", help="index a dataset now rather than at the first run")
    inspect = what.add_parser("inspect", help="what a dataset holds, and what is wrong with it")
    inspect.add_argument("what", metavar="path|experiment", help="a dataset, or an experiment whose datasets are meant")
    inspect.add_argument("--out", type=Path, help="folder for the text and a contact sheet of frames")
    inspect.set_defaults(run=_inspect)
    repack = what.add_parser("repack", help="copy a dataset of pictures into step-level records for slow storage")
    for form in (index, repack):
        form.add_argument("path", help=_PATH)
    for form in (index, inspect, repack):
        _add_reading(form)
    index.set_defaults(run=_index)
    repack.add_argument("out", type=Path, help="directory to make")
    repack.set_defaults(run=_repack)
    merge = what.add_parser("merge", help="join zarr replay buffers in one that keeps their tasks")
    merge.add_argument("stores", nargs="+", metavar="[TASK=]PATH", help="a store; its task is the name up to - or .")
    merge.add_argument("--prompt", action="append", default=[], metavar="TASK=TEXT", help="a task's instruction")
    merge.add_argument("--chunk-rows", type=_at_least_1, help="rows of a chunk (default: as in the first store)")
    merge.set_defaults(run=_merge)
    for form in (collect, merge):
        form.add_argument("--out", type=Path, required=True, help="the store to make; begun ones are continued")
    _add_convert(what.add_parser("convert", help="a dataset of any format into one of another"))
    fast = what.add_parser(
        "fit-fast",
        help="fit a FAST tokenizer to an experiment's action chunks",
        epilog="Any field of the experiment may be set as in training: --data.datasets.0.source.path DIR",
    )
    fast.add_argument("experiment", help="a name from `list`, or file.py:name")
    fast.add_argument("--out", type=Path, help="directory to make (default: where the experiment looks for it)")
    fast.add_argument("--vocab-size", type=int, default=1024, help="the most tokens (%(default)s)")
    fast.add_argument("--scale", type=float, default=10.0, help="steps of a coefficient in one unit (%(default)s)")
    fast.add_argument("--max-chunks", type=int, default=50_000, help="of larger datasets (%(default)s)")
    fast.set_defaults(run=_fit_fast)
    return parser


def _add_reading(form: argparse.ArgumentParser) -> None:
    form.add_argument("--split", default="train", help='of RLDS a split, or several as "train+val" (%(default)s)')
    form.add_argument(
        "--on-bad-record",
        choices=("error", "skip"),
        default="error",
        help="what a torn record does: end this, or have its episode left out (%(default)s)",
    )


def _add_convert(convert: argparse.ArgumentParser) -> None:
    convert.add_argument("path", help=_PATH)
    _add_reading(convert)
    convert.add_argument("target", type=Path, help="the dataset to make; begun ones are continued")
    forms = ("lerobot", "lerobot-2.1", "rlds", "zarr", "steps")
    convert.add_argument("--to", choices=forms, help="its format (default: zarr where its name ends in .zarr)")
    kinds = ("av1", "h264", "png", "jpeg", "as-stored")
    convert.add_argument(
        "--pictures", choices=kinds, help="how they are kept (default: av1; of rlds as they are, or png)"
    )
    convert.add_argument("--control-hz", type=float, help="control steps per second, where the dataset does not say")
    convert.add_argument("--leave-out", nargs="+", default=[], metavar="COLUMN", help="columns that are not kept")
    robotwin = convert.add_argument_group("of RoboTwin's HDF5 recordings, to zarr")
    robotwin.add_argument("--cameras", nargs="+", default=["head_camera"], help="pictures to keep (%(default)s)")
    robotwin.add_argument("--task", help="the task's name (default: the folder's)")
    robotwin.add_argument("--prompt", help="the task's instruction (default: its name in words)")
    robotwin.add_argument("--chunk-rows", type=_at_least_1, default=100, help="rows of a chunk (%(default)s)")
    convert.set_defaults(run=_convert)


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _prepare(given: argparse.Namespace) -> None:
    import jax

    from openpi_train.data.embedded import prepare

    # It simulates on the CPU; a GPU that is there would be taken whole for nothing.
    jax.config.update("jax_platforms", "cpu")
    fields = ("tasks", "episodes_per_task", "val_episodes_per_task", "image_size", "seed")
    changes = {name: value for name in fields if (value := getattr(given, name)) is not None}
    made = prepare(given.directory, name=given.name, **changes)
    print(f"{made.dataset}: {made.num_episodes} episodes, {made.num_steps} control steps; tokenizer {made.tokenizer}")


def _collect(given: argparse.Namespace) -> None:
    import jax

    from openpi_train.envs.named import environment
    from openpi_train.tools.collect import collect

    # As for `prepare`.
    jax.config.update("jax_platforms", "cpu")
    found = collect(
        environment(given.env, image_size=given.image_size),
        given.out,
        tasks=given.tasks,
        episodes_per_task=given.episodes_per_task,
        seed=given.seed,
        workers=given.workers,
    )
    for one in found:
        print(one.text())
    _say_what_is_in(given.out)


def _source(given: argparse.Namespace):
    from openpi_train.data.formats import source_at
    from openpi_train.data.rlds import Rlds

    source = source_at(given.path)
    if isinstance(source, Rlds):
        source = dataclasses.replace(source, split=given.split)
    elif given.split != "train":
        raise ValueError(
            f"{given.path} is a {type(source).__name__} dataset, which has no splits: leave out --split {given.split}"
        )
    return dataclasses.replace(source, on_bad_record=given.on_bad_record).open()


def _index(given: argparse.Namespace) -> None:
    source = _source(given)
    print(
        f"{given.path}, {given.split}: {source.num_episodes} episodes, {source.num_steps} control steps, "
        f"{source.num_dropped} bad records left out; cameras {', '.join(source.cameras)}; "
        f"columns {', '.join(source.columns)}; {len(source.prompts)} instructions"
    )


def _is_experiment(what: str) -> bool:
    """Whether a name or `file.py:name` is meant, and no folder."""
    return ".py" in what or not ("/" in what or Path(what).expanduser().exists())


def _inspect(given: argparse.Namespace) -> None:
    from openpi_train.tools.inspect_data import inspect

    if "experiment" not in given:
        given.path = given.what
        print(inspect(Path(given.what).expanduser().resolve().name, _source(given), out=given.out), end="")
        return
    for dataset in given.experiment.demonstrations.datasets:
        print(inspect(dataset.asset, dataset.source.open(), dataset.robot, out=given.out), end="")


def _repack(given: argparse.Namespace) -> None:
    from openpi_train.data.repack import repack

    print(
        f"wrote {repack(_source(given), given.out, split=given.split)}; "
        f"train from it with --data.datasets.0.source.path {given.out}"
    )


def _merge(given: argparse.Namespace) -> None:
    from openpi_train.data.zarr.merge import Part, merge

    prompts = dict(_named_text(text) for text in given.prompt)
    merge([Part.parse(text) for text in given.stores], given.out, prompts=prompts, chunk_rows=given.chunk_rows)
    _say_what_is_in(given.out)


def _convert(given: argparse.Namespace) -> None:
    from openpi_train.data.convert import convert
    from openpi_train.data.zarr.robotwin import is_recording

    form = given.to or ("zarr" if given.target.suffix == ".zarr" else None)
    if form is None:
        raise ValueError(f"which format is {given.target} to have? Give --to lerobot, lerobot-2.1, rlds, zarr or steps")
    if is_recording(Path(given.path)):
        _convert_recordings(given, form)
        return
    source = _source(given)
    options = {"control_hz": given.control_hz, "pictures": given.pictures, "leave_out": given.leave_out}
    account = convert(source, given.target, form, **options)
    print(f"wrote {given.target} ({form}), read back:\n{account.text()}\ntrain from it with --dataset {given.target}")


def _convert_recordings(given: argparse.Namespace, form: str) -> None:
    from openpi_train.data.zarr.robotwin import convert

    if form != "zarr":
        raise ValueError(f"{given.path} holds RoboTwin's recordings: convert them to zarr first, and that to {form}")
    task = given.task or Path(given.path).resolve().name
    prompt = given.prompt or task.replace("_", " ")
    places = Path(given.path), given.target
    convert(*places, cameras=given.cameras, task=task, prompt=prompt, chunk_rows=given.chunk_rows)
    _say_what_is_in(given.target)


def _named_text(text: str) -> tuple[str, str]:
    name, separator, prompt = text.partition("=")
    if not separator:
        raise ValueError(f"--prompt {text!r} has no task before a =; give TASK=TEXT")
    return name, prompt


def _say_what_is_in(out: Path) -> None:
    from openpi_train.data.zarr.layout import read_layout
    from openpi_train.data.zarr.store import Store

    layout = read_layout(Store(out))
    tasks = ", ".join(f"{name} ({prompt!r})" for name, prompt in layout.tasks)
    print(
        f"wrote {out}: {len(layout.episode_ends)} episodes, {layout.episode_ends[-1]} control steps, every block read "
        f"back; tasks {tasks}; train from it with --dataset {out}"
    )


def _fit_fast(given: argparse.Namespace) -> None:
    from openpi_train.tools.fit_fast import fit

    looked_for = getattr(given.experiment.model, "fast_tokenizer", "")
    out = given.out or Path(looked_for).expanduser()
    if not given.out and not out.is_absolute():
        raise ValueError(f"the experiment's --model.fast-tokenizer is {looked_for or 'not there'}: give --out DIR")
    fitted = fit(given.experiment, out, vocab_size=given.vocab_size, scale=given.scale, max_chunks=given.max_chunks)
    print(fitted.text())
