"""The project's cache folder: `$OPENPI_TRAIN_HOME`, by default `~/.cache/openpi_train`."""

import os
from pathlib import Path


def home() -> Path:
    """The cache folder: the datasets that the project writes, and the indexes of others."""
    return Path(os.environ.get("OPENPI_TRAIN_HOME") or "~/.cache/openpi_train").expanduser()


def datasets() -> Path:
    """The folder that `data prepare` writes to and experiments read from."""
    return home() / "datasets"


def dataset_name(path: str | Path) -> str | None:
    """The name of the dataset in `datasets()` that contains a path; None for all other paths."""
    inner = Path(path).expanduser()
    return inner.relative_to(datasets()).parts[0] if datasets() in inner.parents else None


def how_to_write(missing: str | Path) -> str:
    """A sentence that names the command for writing a missing prepared dataset; empty for all other paths."""
    name = dataset_name(missing)
    if name is None:
        return ""
    return f" `python -m openpi_train data prepare --name {name}` writes it (docs/howto/data.md has the flags of each)."


def lerobot(repo_id: str) -> str:
    """The folder where LeRobot, and openpi with it, keeps the dataset of this name from the Hugging Face hub.

    LeRobot 0.6 downloads into a cache with a folder for each revision, of which this is the newest; a folder of the
    dataset's name, which older releases and `hf download --local-dir` make, comes first.
    """
    home = _lerobot_home()
    revisions = home.expanduser() / "hub" / f"datasets--{repo_id.replace('/', '--')}" / "snapshots"
    if (home.expanduser() / repo_id).is_dir() or not revisions.is_dir():
        return str(home / repo_id)
    return str(max(revisions.iterdir(), key=lambda revision: revision.stat().st_mtime, default=home / repo_id))


def how_to_download(missing: str | Path) -> str:
    """What to type for a dataset that is missing where LeRobot keeps those of the hub; empty for all other paths."""
    home, path = _lerobot_home().expanduser(), Path(missing).expanduser()
    if home not in path.parents:
        return ""
    name = path.relative_to(home)
    return (
        f". With a network `hf download {name} --repo-type dataset --local-dir {path}` gets it; if you have it "
        "elsewhere, give --data.repo-id FOLDER. `plan EXPERIMENT` forecasts memory and speed without it"
    )


def _lerobot_home() -> Path:
    hub = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_LEROBOT_HOME") or f"{hub}/lerobot")


def openpi_assets(checkpoint: str, asset_id: str) -> str:
    """The folder where openpi keeps the norm stats of this name that came with a published checkpoint."""
    cache = Path(os.environ.get("OPENPI_DATA_HOME") or "~/.cache/openpi")
    return str(cache / "openpi-assets" / "checkpoints" / checkpoint / "assets" / asset_id)


def indexes(given: str | None = None) -> Path:
    """The folder for the indexes of datasets: `given`, a source's `cache_dir`, or the default."""
    return Path(given).expanduser() if given else home() / "index"
