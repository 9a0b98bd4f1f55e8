"""`data check`: a table of what is suspicious in datasets, before anyone trains on them.

Read next: `data/check/fault_kinds.py` (robots' demonstrations), `data/check/text_kinds.py` (texts),
docs/howto/check_data.md.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from openpi_train.data.check.examined import ExaminedData
from openpi_train.data.check.fault_kinds import examine
from openpi_train.data.check.record_flags import SpecialTokens
from openpi_train.data.check.record_measures import ExaminedTexts
from openpi_train.data.check.text_kinds import examine_texts
from openpi_train.data.core import cache_folders, findings
from openpi_train.data.core.dataset_flags import numbered
from openpi_train.data.core.findings import Finding
from openpi_train.data.core.hub import SCHEME
from openpi_train.data.core.source import Source, SourceConfig
from openpi_train.data.formats.detection import source_at
from openpi_train.data.formats.lerobot.lerobot_layout import is_lerobot
from openpi_train.data.formats.lerobot.lerobot_metadata import require
from openpi_train.data.formats.parquet.parquet_scan import FIRST
from openpi_train.data.formats.repack import is_repacked
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.formats.rlds.schema import INFO_FILE
from openpi_train.data.formats.sidecar import IndexedConfig, digest
from openpi_train.data.formats.zarr.store import is_zarr
from openpi_train.data.robot.config import DataConfig
from openpi_train.data.robot.examination import examine as examine_together
from openpi_train.data.text import arithmetic
from openpi_train.data.text.opened_texts import OpenedText
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.data.text.text_files import ENDINGS, find_files, names_a_path
from openpi_train.data.tokenizers.text_tokenizer import load_text_tokenizer
from openpi_train.robots.robot import Robot
from openpi_train.runtime.exits import RunError, UsageError
from openpi_train.tools.stats import as_text

if TYPE_CHECKING:
    from openpi_train.experiment import Experiment

logger = logging.getLogger(__name__)

# Kinds of a dataset that cannot be opened with its robot.
_REFUSED = ("refused", "robot does not fit", "missing cameras")
# Columns that say that a parquet file holds control steps; also all that begin with "observation".
_OF_ROBOTS = {FIRST, "action", "actions", "state"}
# Files in which people keep data, and which are not read.
_TABLES = (".csv", ".tsv", ".txt", ".xls", ".xlsx", ".pkl", ".npz", ".npy", ".h5", ".hdf5", ".bag", ".mcap")
# Narrower tables cannot be read.
_NARROWEST, _USUAL_WIDTH = 100, 120


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedDataset:
    """The findings in one dataset, and its size in words.

    `failure` is an error of ours that ended its check; the findings are then incomplete.
    """

    name: str
    size: str = ""
    findings: Sequence[Finding] = ()
    failure: Exception | None = None

    @property
    def has_faults(self) -> bool:
        """Whether a finding is more than a note."""
        return any(not finding.is_note for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """All of it but the failure."""
        return {"name": self.name, "size": self.size, "findings": [finding.as_json() for finding in self.findings]}


def check_experiment(experiment: "Experiment", *, num_frames: int) -> list[CheckedDataset]:
    """The findings in every dataset of an experiment. Raises UsageError if it has none."""
    data = experiment.data
    if isinstance(data, TextData):
        checked = [_checked(one.name, functools.partial(_texts_of, data, one)) for one in data.datasets]
        return [*checked, _checked(f"{experiment.name}, as opened", lambda: _opened_texts(experiment))]
    if not isinstance(data, DataConfig):
        raise UsageError(f"{experiment.name}: there is nothing to check; its data are {type(data).__name__}")
    checked = []
    for number, dataset in enumerate(data.datasets):
        robots = functools.partial(_robots, robot=dataset.robot, num_frames=num_frames, number=number)
        check = functools.partial(robots, dataset.asset, dataset.source, held_out=dataset.validation)
        checked.append(_checked(dataset.asset, check))
        if dataset.validation is not None:
            name = f"{dataset.asset}, held out"
            checked.append(_checked(name, functools.partial(robots, name, dataset.validation)))
    if not any(finding.kind in _REFUSED for dataset in checked for finding in dataset.findings):
        together = _checked(f"{experiment.name}, as opened", functools.partial(_examined, experiment))
        checked += [together] if together.findings or together.failure else []
    return checked


def check_path(
    path: str, *, split: str | None, columns: Mapping[str, str], held_out: str | None, num_frames: int
) -> list[CheckedDataset]:
    """The findings in the dataset at a path: demonstrations of any format, or a file or folder of texts.

    Args: `split` is None for RLDS's `train`, and all files of texts; `columns`, for texts, are the files' column for
    each of the type; `held_out` is the split or path that is held out.
    """
    name = Path(path).expanduser().resolve().name
    if columns or holds_texts(path):
        return [_checked(name, lambda: _texts(name, path, split, columns, held_out, columns_flag="--columns"))]

    def demonstrations() -> CheckedDataset:
        source = _demonstrations_at(path)
        if isinstance(source, Rlds):
            source = dataclasses.replace(source, split=split or "train")
        elif split is not None:
            raise UsageError(f"{path} is a {type(source).__name__} dataset, which has no splits: leave out --split")
        others = None
        if held_out is not None:
            is_split = isinstance(source, Rlds) and not names_a_path(held_out)
            others = dataclasses.replace(source, split=held_out) if is_split else source_at(held_out)
        return _robots(name, source, held_out=others, robot=None, num_frames=num_frames)

    return [_checked(name, demonstrations)]


def _demonstrations_at(path: str) -> SourceConfig:
    """The source config for a path. Raises FileNotFoundError, naming also the files of texts, if nothing is there."""
    try:
        return source_at(path)
    except FileNotFoundError as error:
        root = Path(path).expanduser()
        texts = f"Texts are read from files of {', '.join(ENDINGS)} with columns of Text data (docs/howto/text_data.md)"
        files = [root] if root.is_file() else sorted(root.rglob("*")) if root.is_dir() else []
        other = next((file for file in files if file.suffix.lower() in _TABLES), None)
        if other is None:
            raise FileNotFoundError(
                f"{error} {texts}." if str(error).endswith(".") else f"{error}. {texts}."
            ) from error
        raise FileNotFoundError(f"{other} is of no format that is read. {texts}. {_conversion(other)}") from error


def _conversion(file: Path) -> str:
    """What to do with a file of another format."""
    robots = "Demonstrations are read as RLDS, LeRobot, a zarr replay buffer or parquet (docs/howto/data.md)"
    kind = file.suffix.lower()
    if kind in (".csv", ".tsv", ".xls", ".xlsx"):
        read = "read_excel" if kind.startswith(".xls") else "read_csv"
        how = f"pandas.{read}({file.name!r}{', sep=chr(9)' if kind == '.tsv' else ''})"
        return (
            f"Write this table as parquet with pandas, {how}.to_parquet('{file.stem}.parquet'), and give its columns: "
            f"data check {file.stem}.parquet --columns prompt=COLUMN completion=COLUMN. {robots}"
        )
    if kind == ".txt":
        return 'Write plain text as JSON lines, one {"text": "..."} for each document'
    return f"{robots}: write it with the library that recorded it, or with zarr or pandas"


def holds_texts(path: str) -> bool:
    """Whether a path holds texts rather than demonstrations; parquet files are told by their columns."""
    root = Path(path).expanduser()
    if path.startswith(SCHEME):
        return True
    if is_lerobot(root) or is_zarr(root) or is_repacked(root) or not root.exists():
        return False
    try:
        files = find_files(path)
    except FileNotFoundError:
        return False
    if not files[0].path.name.endswith(".parquet"):
        of_rlds = ("*.tfrecord*", INFO_FILE)  # whose shards may all be missing
        return root.is_file() or not any(path for pattern in of_rlds for path in root.rglob(pattern))
    names = require("pyarrow.parquet").read_schema(files[0].path).names
    return not any(name in _OF_ROBOTS or name.startswith("observation") for name in names)


def as_tables(checked: Sequence[CheckedDataset]) -> str:
    """All findings as text, a table for each dataset that has some.

    It is as wide as the terminal, or as $COLUMNS says, but at least 100 characters; 120 where there is no terminal.
    """
    width = max(_NARROWEST, shutil.get_terminal_size((_USUAL_WIDTH, 0)).columns)
    parts = []
    for dataset in checked:
        size = f" ({dataset.size})" if dataset.size else ""
        if not dataset.findings:
            parts.append(f"{dataset.name}{size}: nothing found\n")
            continue
        table = Table(title=f"{dataset.name}{size}", title_justify="left", show_lines=True)
        for header in ("what", "how many", "where", "in training", "what to do"):
            table.add_column(header, overflow="fold")
        for one in dataset.findings:
            of = "" if one.total is None else f" of {one.total}"
            kind = f"note, {one.kind}" if one.is_note else one.kind
            what = f"{kind}: {one.what}" if one.what else kind
            table.add_row(what, f"{one.count}{of} {one.unit}", one.where, one.training, one.remedy)
        parts.append(as_text(table, width))
    return "\n".join(parts)


def as_json(checked: Sequence[CheckedDataset]) -> str:
    """All findings as JSON."""
    return json.dumps({"datasets": [dataset.as_json() for dataset in checked]}, indent=1, ensure_ascii=False)


def _checked(name: str, check: Callable[[], CheckedDataset]) -> CheckedDataset:
    """The result of a check, or what ended it: that of one dataset does not end those of others."""
    try:
        with findings.not_reported():
            return check()
    except UsageError:
        raise
    except (ValueError, OSError, RunError) as error:
        refused = Finding(
            kind="refused",
            count=1,
            unit="dataset",
            what=str(error),
            training="opening ends with this error",
            remedy="As the error says",
        )
        return CheckedDataset(name=name, findings=[refused])
    except Exception as error:
        logger.exception("the check of %s ended by an unexpected error", name)
        return CheckedDataset(name=name, size="not checked to the end", failure=error)


def _robots(
    name: str,
    config: SourceConfig,
    *,
    robot: Robot | None,
    num_frames: int,
    held_out: SourceConfig | None = None,
    number: int = 0,
) -> CheckedDataset:
    """The findings in a dataset, which is the experiment's of this number; of a path alone, `--dataset` makes it 0."""
    if cache_folders.dataset_name(config.location) is not None:
        from openpi_train.data.make import embedded  # jax, and the environment

        embedded.write_missing(config.location)
    source, damaged = _opened(config)
    others = None if held_out is None else held_out.skipping_bad_records().open()
    with _kept(getattr(config, "cache_dir", None), name, source.fingerprint) as kept:
        data = ExaminedData(name=name, source=source, held_out=others, robot=robot, num_frames=num_frames, kept=kept)
        found = [dataclasses.replace(one, remedy=numbered(one.remedy, number)) for one in examine(data)]
    size = f"{source.num_episodes} episodes, {source.num_steps} control steps"
    return CheckedDataset(name=name, size=size, findings=[*damaged, *found])


def _opened(config: SourceConfig) -> tuple[Source, list[Finding]]:
    """The dataset without its damaged episodes, and the finding of these."""
    source = config.skipping_bad_records().open()
    if not source.num_dropped:
        return source, []
    where = ""
    if isinstance(config, IndexedConfig) and not is_repacked(config.path):
        sidecar = config.sidecar()
        where = sidecar.dropped(sidecar.open().manifest)[0][1]
    damaged = Finding(
        kind="damaged episodes",
        count=source.num_dropped,
        total=source.num_dropped + source.num_episodes,
        unit="episodes",
        where=where,
        training="opening ends with an error, or leaves them out (--data.on-bad-record skip)",
        remedy="Fetch files that were downloaded again; of your own recordings, copy them again from where they were "
        "recorded, or record these episodes again",
    )
    return source, [damaged]


def _texts_of(data: TextData, dataset: TextDataset) -> CheckedDataset:
    arithmetic.write_missing(dataset.path)
    return _texts(
        dataset.name,
        dataset.path,
        dataset.split,
        dataset.columns_by_type,
        dataset.validation,
        special=_special_tokens(data),
        cache_dir=data.cache_dir,
        offline=data.offline,
    )


def _special_tokens(data: TextData) -> SpecialTokens:
    """Those of published models and of the tokenizer; what is wrong with that is told where the texts are opened."""
    try:
        return SpecialTokens(load_text_tokenizer(data.tokenizer, offline=data.offline).special_texts)
    except (ValueError, OSError, RunError):
        return SpecialTokens()


def _texts(
    name: str,
    path: str,
    split: str | None,
    columns: Mapping[str, str],
    held_out: str | None,
    *,
    columns_flag: str = "--data.datasets.N.columns",
    special: SpecialTokens | None = None,
    cache_dir: str | None = None,
    offline: bool = False,
) -> CheckedDataset:
    training = find_files(path, split, offline=offline)
    others = []
    if held_out is not None:
        where = (held_out, None) if names_a_path(held_out) else (path, held_out)
        others = find_files(*where, offline=offline)
    with _kept(cache_dir, name, json.dumps([str(file.path) for file in (*training, *others)])) as kept:
        data = ExaminedTexts(
            name=name,
            files=training,
            held_out=others,
            columns=columns,
            columns_flag=columns_flag,
            special=special or SpecialTokens(),
            kept=kept,
        )
        found = examine_texts(data)
        return CheckedDataset(name=name, size=f"{len(data.measures)} records", findings=found)


def _examined(experiment: "Experiment") -> CheckedDataset:
    """What only shows where all datasets are looked at together, or with the model."""
    examine_together(experiment.demonstrations, experiment.policy.rows.window)
    experiment.demonstrations.check_dims(experiment.policy)
    return CheckedDataset(name=f"{experiment.name}, as opened")


def _opened_texts(experiment: "Experiment") -> CheckedDataset:
    """What encoding the texts with the experiment's tokenizer and template tells."""
    opened = experiment.open_data()
    assert isinstance(opened, OpenedText)
    told = {
        (member.name, finding): None
        for rows in (opened.train, opened.validation)
        for member in (rows.members if rows is not None else ())
        for finding in member.store.findings
    }
    size = f"{opened.num_samples} texts for training"
    return CheckedDataset(name=f"{experiment.name}, as opened", size=size, findings=[finding for _, finding in told])


@contextlib.contextmanager
def _kept(cache_dir: str | None, name: str, identity: str) -> Iterator[Path]:
    """The folder in which an interrupted check keeps what it has done; it is removed when the check is done."""
    folder = cache_folders.indexes(cache_dir) / f"check-{name}-{digest(identity)}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
