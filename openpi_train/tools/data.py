"""The `data` verb: make datasets (`make_data.py`), build an `index`, `check`, `inspect`, `repack` for slow storage,
`merge`, `convert`, `fit-fast` a tokenizer, say the `advantages` of steps.

Each is a class: its fields are the flags, `run` executes it. Read next: `make_data.py`, `check_data.py`,
`inspect_data.py`, `data/formats/repack.py`, `data/formats/zarr/merge.py`, `data/make/convert.py`, `fit_fast.py`,
`label_advantages.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg

from openpi_train.command_line import Own, Request, parse, parse_known
from openpi_train.fields import at_least
from openpi_train.runtime import logs
from openpi_train.runtime.exits import DATA, DONE, DataError, reported_as
from openpi_train.tools.make_data import Collect, DataRequest, Prepare, Sample, say_what_is_in
from openpi_train.tools.requests import ExperimentName

if TYPE_CHECKING:
    from openpi_train.data.core.source import Source
    from openpi_train.experiment import Experiment

_ABOUT = "Make, inspect and convert datasets."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading(DataRequest):
    """A command that reads a dataset."""

    # <data_dir>/<name>[/<version>] of RLDS; the folder of a LeRobot dataset or a zarr store.
    path: Annotated[str, Positional, arg(metavar="PATH")]
    # Of RLDS a split, or several as "train+val".
    split: str = "train"
    # What to do on a damaged record: stop, or leave its episode out.
    on_bad_record: Literal["error", "skip"] = "error"

    def open(self) -> "Source":
        """Open the dataset. Raises ValueError for a split if its format has none."""
        from openpi_train.data.formats.detection import source_at
        from openpi_train.data.formats.rlds import Rlds

        source = source_at(self.path)
        if isinstance(source, Rlds):
            source = dataclasses.replace(source, split=self.split)
        elif self.split != "train":
            raise ValueError(
                f"{self.path} is a {type(source).__name__} dataset, which has no splits: leave out --split {self.split}"
            )
        return dataclasses.replace(source, on_bad_record=self.on_bad_record).open()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index(Reading):
    """Index a dataset now rather than at the first run."""

    def run(self, experiment: "Experiment | None") -> None:
        source = self.open()
        print(
            f"{self.path}, {self.split}: {source.num_episodes} episodes, {source.num_steps} control steps, "
            f"{source.num_dropped} bad records left out; cameras {', '.join(source.cameras)}; "
            f"columns {', '.join(source.columns)}; {len(source.prompts)} instructions"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(DataRequest):
    """Look for faults in datasets before anyone trains on them: a table of all that is suspicious.

    Reads columns and texts as a whole, and some pictures. An interrupted check goes on where it was. Exit code 0 if
    nothing is found, else 3. The kinds: docs/howto/check_data.md.
    """

    # An experiment whose datasets are checked as its robots read them, or a dataset: RLDS, LeRobot, zarr, parquet; a
    # file or folder of texts, or hub:USER/NAME.
    path: Annotated[str, Positional, arg(metavar="EXPERIMENT|PATH")]
    # Of RLDS a split (train), or several as "train+val"; of texts, files with this word (all).
    split: str | None = None
    # Of texts, the columns to read, as TYPE=COLUMN (prompt=question completion=answer).
    columns: tuple[str, ...] = ()
    # The split, of RLDS or texts, or the path that is held out, and compared with the others.
    held_out: str | None = None
    # Pictures of each camera to look at.
    frames: int = at_least(8, 200)
    # Print the findings as JSON.
    json: bool = False

    @property
    def of_experiment(self) -> str | None:
        """`path`, unless that is a file or a folder."""
        return _experiment_at(self.path)

    def check(self) -> list[str]:
        """A sentence for each pair that is none, and for flags of texts beside an experiment."""
        problems = [f"--columns {pair}: needed is TYPE=COLUMN" for pair in self.columns if "=" not in pair]
        if self.of_experiment is not None and (self.split or self.columns or self.held_out):
            problems.append(
                f"--split, --columns and --held-out are for a path; {self.path} is taken for an experiment, whose "
                "datasets have them as fields (--data.datasets.0...)"
            )
        return problems

    def run(self, experiment: "Experiment | None") -> int:
        from openpi_train.tools import check_data

        if experiment is None:
            columns = {first: second for first, _, second in (pair.partition("=") for pair in self.columns)}
            checked = check_data.check_path(
                self.path, split=self.split, columns=columns, held_out=self.held_out, num_frames=self.frames
            )
        else:
            checked = check_data.check_experiment(experiment, num_frames=self.frames)
        print(check_data.as_json(checked) if self.json else check_data.as_tables(checked), end="\n" * self.json)
        if failures := [dataset.failure for dataset in checked if dataset.failure is not None]:
            raise failures[0]
        return DATA if any(dataset.has_faults for dataset in checked) else DONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect(Reading):
    """Show what a dataset contains, and what is wrong with it."""

    # A dataset, or an experiment whose datasets are inspected.
    path: Annotated[str, Positional, arg(metavar="PATH|EXPERIMENT")]
    # Folder for the text and a contact sheet of frames.
    out: Path | None = None

    @property
    def of_experiment(self) -> str | None:
        """`path`, unless that is a folder."""
        return _experiment_at(self.path)

    def run(self, experiment: "Experiment | None") -> None:
        from openpi_train.tools.inspect_data import inspect

        if experiment is None:
            print(inspect(Path(self.path).expanduser().resolve().name, self.open(), out=self.out), end="")
            return
        for dataset in experiment.demonstrations.datasets:
            print(inspect(dataset.asset, dataset.source.open(), dataset.robot, out=self.out), end="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repack(Reading):
    """Copy a dataset of pictures into step-level records for slow storage."""

    # Directory to make.
    out: Annotated[Path, Positional, arg(metavar="OUT")]

    def run(self, experiment: "Experiment | None") -> None:
        from openpi_train.data.formats.repack import repack

        print(
            f"wrote {repack(self.open(), self.out, split=self.split)}; "
            f"train from it with --data.datasets.0.source.path {self.out}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merge(DataRequest):
    """Merge zarr replay buffers into one that keeps their tasks."""

    # Stores; the task of one is its name up to - or .
    stores: Annotated[tuple[str, ...], Positional, arg(metavar="[TASK=]PATH")]
    # The store to make; a begun one is continued.
    out: Path
    # A task's instruction.
    prompt: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TASK=TEXT")] = ()
    # Rows of a chunk; None: as in the first store.
    chunk_rows: int | None = at_least(1, None)

    def check(self) -> list[str]:
        """Sentences for prompts of no task, and where there is no store."""
        wrong = [text for text in self.prompt if "=" not in text]
        problems = [f"--prompt {text!r} has no task before a =; give TASK=TEXT" for text in wrong]
        return problems if self.stores else [*problems, "PATH is missing: name the stores to merge"]

    def run(self, experiment: "Experiment | None") -> None:
        from openpi_train.data.formats.zarr.merge import StoreToMerge, merge

        prompts = {task: prompt for task, _, prompt in (text.partition("=") for text in self.prompt)}
        merge([StoreToMerge.parse(text) for text in self.stores], self.out, prompts=prompts, chunk_rows=self.chunk_rows)
        say_what_is_in(self.out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recordings(Request):
    """Options for RoboTwin's HDF5 recordings, which become zarr."""

    # Pictures to keep.
    cameras: tuple[str, ...] = ("head_camera",)
    # The task's name; None: the folder's.
    task: str | None = None
    # The task's instruction; None: its name in words.
    prompt: str | None = None
    # Rows of a chunk.
    chunk_rows: int = at_least(1, 100)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert(Reading):
    """Convert a dataset to another format."""

    # <data_dir>/<name>[/<version>] of RLDS; the folder of a LeRobot dataset, a zarr store or RoboTwin's recordings.
    path: Annotated[str, Positional, arg(metavar="PATH")]
    # The dataset to make; a begun one is continued.
    target: Annotated[Path, Positional, arg(metavar="TARGET")]
    # Its format; None: zarr where its name ends in .zarr.
    to: Literal["lerobot", "lerobot-2.1", "rlds", "zarr", "steps"] | None = None
    # How pictures are stored; None: av1, for rlds as stored, or png.
    pictures: Literal["av1", "h264", "png", "jpeg", "as-stored"] | None = None
    # Control steps per second, if the dataset does not record them.
    control_hz: float | None = None
    # Columns to leave out.
    leave_out: tuple[str, ...] = ()
    # Of RoboTwin's HDF5 recordings, to zarr.
    robotwin: OmitArgPrefixes[Recordings] = dataclasses.field(default_factory=Recordings)

    def run(self, experiment: "Experiment | None") -> None:
        from openpi_train.data.formats.zarr.robotwin_recordings import is_recording
        from openpi_train.data.make.convert import convert

        form = self.to or ("zarr" if self.target.suffix == ".zarr" else None)
        if form is None:
            raise ValueError(
                f"the format of {self.target} is not clear: give --to lerobot, lerobot-2.1, rlds, zarr or steps"
            )
        if is_recording(Path(self.path)):
            self._run_on_recordings(form)
            return
        account = convert(
            self.open(), self.target, form, control_hz=self.control_hz, pictures=self.pictures, leave_out=self.leave_out
        )
        print(f"wrote {self.target} ({form}), read back:\n{account.text()}\ntrain from it with --dataset {self.target}")

    def _run_on_recordings(self, form: str) -> None:
        from openpi_train.data.formats.zarr.robotwin_recordings import convert

        if form != "zarr":
            raise ValueError(f"{self.path} holds RoboTwin's recordings: convert them to zarr first, and that to {form}")
        given = self.robotwin
        task = given.task or Path(self.path).resolve().name
        prompt = given.prompt or task.replace("_", " ")
        places = Path(self.path), self.target
        convert(*places, cameras=given.cameras, task=task, prompt=prompt, chunk_rows=given.chunk_rows)
        say_what_is_in(self.target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitFast(DataRequest):
    """Fit a FAST tokenizer to an experiment's action chunks.

    Any field of the experiment may be set as in training: --data.datasets.0.source.path DIR
    """

    # A name from `list`, or file.py:name.
    experiment: ExperimentName
    # Directory to make; None: where the experiment looks for it.
    out: Path | None = None
    # Vocabulary size.
    vocab_size: int = 1024
    # Quantisation steps per unit of a coefficient.
    scale: float = 10.0
    # Maximum number of chunks, spread evenly over the dataset.
    max_chunks: int = 50_000

    @property
    def of_experiment(self) -> str | None:
        """The experiment."""
        return self.experiment

    def run(self, experiment: "Experiment | None") -> None:
        from openpi_train.tools.fit_fast import fit

        assert experiment is not None, "it is for one"
        looked_for = experiment.policy.chunk_processor
        out = self.out or Path(looked_for).expanduser()
        if not self.out and not out.is_absolute():
            raise ValueError(f"the experiment's --model.fast-tokenizer is {looked_for or 'not there'}: give --out DIR")
        print(fit(experiment, out, vocab_size=self.vocab_size, scale=self.scale, max_chunks=self.max_chunks))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advantages(DataRequest):
    """Say which steps of stored episodes were better than a value function expects (RECAP).

    Writes a parquet file for each dataset of the value function's run: value, advantage, and whether it is better. The
    datasets are not changed. A policy reads a file with --data.datasets.N.advantages FILE.
    """

    # The run of a value function, such as checkpoints/fetch_reach_value/x, or a checkpoint of it.
    run_of_values: Annotated[Path, Positional, arg(name="run", metavar="RUN")]
    # Folder for the files.
    out: Path
    # Control steps whose rewards are counted before the next value; None: all until the episode's end.
    lookahead: int | None = at_least(1, 50)
    # Share of each task's steps that are better.
    share: float = 0.4
    # A boolean feature that is true at steps that are always better, such as is_intervention.
    always: str | None = None
    # Observations at a time.
    batch_size: int = at_least(1, 64)

    def check(self) -> list[str]:
        """A sentence for a share that is none."""
        return [] if 0 < self.share < 1 else [f"--share {self.share} must be between 0 and 1"]

    def run(self, experiment: "Experiment | None") -> None:
        from openpi_train.tools.label_advantages import judge

        given = {name: getattr(self, name) for name in ("lookahead", "share", "always", "batch_size")}
        for judged in judge(self.run_of_values, self.out, **given):
            print("\n".join(judged.lines()))


# tyro makes a subcommand of each.
AnyDataRequest = Sample | Prepare | Collect | Index | Check | Inspect | Repack | Merge | Convert | FitFast | Advantages


def main(argv: Sequence[str], parse_experiment: Callable[[str, Sequence[str]], Any]) -> int:
    """Run `data <what> ...`; `parse_experiment` gives an experiment by name and flags. Raises DataError with advice."""
    (request,), rest = parse_known(tuple[Own[AnyDataRequest]], argv, "data", _ABOUT)
    name, experiment = request.of_experiment, None
    if name is not None:
        experiment = parse_experiment(name, ["--exp-name", "data", *rest])
    elif rest:
        parse(tuple[Own[AnyDataRequest]], argv, "data", _ABOUT)  # says what is wrong with them
    logs.configure(0)
    with reported_as(DataError):
        return request.run(experiment) or DONE


def _experiment_at(path: str) -> str | None:
    """The name of an experiment; None if it is a path."""
    is_path = ".py" not in path and ("/" in path or Path(path).expanduser().exists())
    return None if is_path else path
