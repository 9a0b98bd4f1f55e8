"""Checkpoints on the Hugging Face hub: downloaded to the hub client's cache, and pushed with a model card.

An address is `hub:USER/NAME`, optionally with a folder and a revision: `hub:USER/NAME/FOLDER@REVISION`. With
HF_HUB_OFFLINE set only the cache is used. Read next: `model_card.py`, `checkpoint_formats.py`.
"""

import importlib.util
from pathlib import Path
from typing import Any

from openpi_train.data.core.files import write_text
from openpi_train.data.core.hub import SCHEME, Address, asking, is_offline, note_commit, revision_of
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.runtime.phases import phase

# Weights of other libraries, which are often in the same repository and equally large.
_NOT_READ = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf")
_DOWNLOAD_S = 6 * 3600.0
CARD = "README.md"


def is_address(text: str) -> bool:
    """Whether the text is an address on the hub, valid or not."""
    return text.startswith(SCHEME)


def is_cached(text: str) -> bool:
    """Whether the hub client's cache has a snapshot of the address's repository, whole or in part."""
    address = Address.of(text)
    if importlib.util.find_spec("huggingface_hub") is None:
        return False
    with asking(address, "cannot be looked for") as client:
        try:
            revision = revision_of(address.name, address.revision)
            client.snapshot_download(address.name, revision=revision, local_files_only=True)
        except client.errors.LocalEntryNotFoundError:
            return False
    return True


def fetch(text: str) -> Path:
    """Download the address's files and return their folder; cached files are not downloaded again.

    Raises UsageError for an invalid address or a missing client, CheckpointError if they are not available.
    """
    address = Address.of(text)
    folder = address.folder
    with asking(address, "cannot be fetched") as client, phase("downloading the checkpoint", least_s=_DOWNLOAD_S):
        snapshot = client.snapshot_download(
            address.name,
            revision=revision_of(address.name, address.revision),
            allow_patterns=[f"{folder}/**"] if folder else None,
            ignore_patterns=list(_NOT_READ),
            local_files_only=is_offline(),
        )
    note_commit(address.name, address.revision, Path(snapshot))
    found = Path(snapshot) / folder if folder else Path(snapshot)
    if not found.is_dir():
        raise CheckpointError(f"{address}: the repository has no folder {folder}; look at its files on the hub")
    return found


def check_push(text: str, *, private: bool = True, create: bool = True) -> None:
    """Create the repository if it does not exist, to find problems with a push before it is prepared.

    Without `create` it only asks who is logged in. Raises UsageError and CheckpointError as `fetch` does.
    """
    address = Address.of(text)
    if is_offline():
        raise UsageError(f"{address} cannot be pushed to: HF_HUB_OFFLINE is set; unset it, or give a directory")
    with asking(address, "cannot be pushed to") as client:
        hub = client.HfApi()
        if create:
            hub.create_repo(address.name, private=private, exist_ok=True)
        else:
            hub.whoami()


def push(directory: Path, text: str, card: str) -> str:
    """Upload the directory's files and the model card in one commit, after `check_push`; returns the new address.

    Raises UsageError and CheckpointError as `fetch` does; the repository is then unchanged.
    """
    address = Address.of(text)
    write_text(directory / CARD, card)
    with asking(address, "could not be pushed") as client:
        commit: Any = client.HfApi().upload_folder(
            repo_id=address.name,
            folder_path=str(directory),
            path_in_repo=address.folder,
            revision=address.revision,
            commit_message="Upload by openpi_train",
        )
    return str(getattr(commit, "commit_url", commit))
