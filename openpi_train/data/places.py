"""Where the project keeps what it makes for itself: `$OPENPI_TRAIN_HOME`, by default `~/.cache/openpi_train`."""

import os
from pathlib import Path


def home() -> Path:
    """The project's own folder: the datasets that it writes, and the indexes of others."""
    return Path(os.environ.get("OPENPI_TRAIN_HOME") or "~/.cache/openpi_train").expanduser()


def datasets() -> Path:
    """Where `data prepare` writes, and where the experiments look for it."""
    return home() / "datasets"


def dataset_name(path: str | Path) -> str | None:
    """The name of the dataset in `datasets()` that a path lies in; None for all other paths."""
    inner = Path(path).expanduser()
    return inner.relative_to(datasets()).parts[0] if datasets() in inner.parents else None


def how_to_write(missing: str | Path) -> str:
    """What writes a missing file of such a dataset, as a sentence; empty for all other paths."""
    name = dataset_name(missing)
    if name is None:
        return ""
    return f" `python -m openpi_train data prepare --name {name}` writes it (docs/data.md has the flags of each)."


def indexes(given: str | None = None) -> Path:
    """Where the indexes of datasets are kept: in a source's `cache_dir`, if one is given."""
    return Path(given).expanduser() if given else home() / "index"
