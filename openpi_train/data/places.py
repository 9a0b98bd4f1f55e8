"""Where the project keeps what it makes for itself: `$OPENPI_TRAIN_HOME`, by default `~/.cache/openpi_train`."""

import os
from pathlib import Path


def home() -> Path:
    """The project's own folder: the datasets that it writes, and the indexes of others."""
    return Path(os.environ.get("OPENPI_TRAIN_HOME") or "~/.cache/openpi_train").expanduser()


def datasets() -> Path:
    """Where `data prepare` writes, and where the experiments look for it."""
    return home() / "datasets"


def indexes(given: str | None = None) -> Path:
    """Where the indexes of datasets are kept: in a source's `cache_dir`, if one is given."""
    return Path(given).expanduser() if given else home() / "index"
