"""Checkpoints on the Hugging Face hub: downloaded to the hub client's cache, and pushed with a model card.

An address is `hub:USER/NAME`, optionally with a folder and a revision: `hub:USER/NAME/FOLDER@REVISION`. With
HF_HUB_OFFLINE set only the cache is used. Read next: `model_card.py`, `checkpoint_formats.py`.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openpi_train.data.files import write_text
from openpi_train.data.hub import is_offline
from openpi_train.runtime.exits import CheckpointError, UsageError

SCHEME = "hub:"
_ADDRESS = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<folder>[^@]+?))?/?(?:@(?P<revision>[\w./-]+))?")
_FORM = "hub:USER/NAME, hub:USER/NAME/FOLDER or hub:USER/NAME@REVISION"
# Weights of other libraries, which are often in the same repository and equally large.
_NOT_READ = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf")
CARD = "README.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """A folder of a model repository; `str` gives the address as a user writes it."""

    name: str
    folder: str | None = None
    revision: str | None = None

    @classmethod
    def of(cls, text: str) -> "Address":
        """Parse an address. Raises UsageError."""
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise UsageError(f"{text} is not an address on the hub; allowed: {_FORM}")
        return cls(**match.groupdict())

    def __str__(self) -> str:
        folder = f"/{self.folder}" if self.folder else ""
        return f"{SCHEME}{self.name}{folder}{f'@{self.revision}' if self.revision else ''}"


def is_address(text: str) -> bool:
    """Whether the text is an address on the hub, valid or not."""
    return text.startswith(SCHEME)


def fetch(text: str) -> Path:
    """Download the address's files and return their folder; cached files are not downloaded again.

    Raises UsageError for an invalid address or a missing client, CheckpointError if they are not available.
    """
    address = Address.of(text)
    folder = address.folder
    with _asking(address, "cannot be fetched") as client:
        snapshot = client.snapshot_download(
            address.name,
            revision=address.revision,
            allow_patterns=[f"{folder}/**"] if folder else None,
            ignore_patterns=list(_NOT_READ),
            local_files_only=is_offline(),
        )
    found = Path(snapshot) / folder if folder else Path(snapshot)
    if not found.is_dir():
        raise CheckpointError(f"{address}: the repository has no folder {folder}; look at its files on the hub")
    return found


def check_push(text: str, *, private: bool = True) -> None:
    """Create the repository if it does not exist, to find problems with a push before it is prepared.

    Raises UsageError and CheckpointError as `fetch` does.
    """
    address = Address.of(text)
    if is_offline():
        raise UsageError(f"{address} cannot be pushed to: HF_HUB_OFFLINE is set; unset it, or give a directory")
    with _asking(address, "cannot be pushed to") as client:
        client.HfApi().create_repo(address.name, private=private, exist_ok=True)


def push(directory: Path, text: str, card: str) -> str:
    """Upload the directory's files and the model card in one commit, after `check_push`; returns the new address.

    Raises UsageError and CheckpointError as `fetch` does; the repository is then unchanged.
    """
    address = Address.of(text)
    write_text(directory / CARD, card)
    with _asking(address, "could not be pushed") as client:
        commit: Any = client.HfApi().upload_folder(
            repo_id=address.name,
            folder_path=str(directory),
            path_in_repo=address.folder,
            revision=address.revision,
            commit_message="Upload by openpi_train",
        )
    return str(getattr(commit, "commit_url", commit))


@contextlib.contextmanager
def _asking(address: Address, what: str) -> Iterator[Any]:
    """The hub's client; its errors, and those of two libraries that it uses, are raised as CheckpointError."""
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        raise UsageError(
            "addresses on the hub need huggingface_hub: pip install 'openpi_train[hub]', or fetch the files by other "
            "means and give their directory"
        ) from error
    try:
        yield huggingface_hub
    except Exception as error:
        raise CheckpointError(f"{address} {what}: {_reason(error)}") from error


# Advice for each class of error, by its name in the client.
_ADVICE = {
    "GatedRepoError": "it is gated: ask for access on its page, then log in with `hf auth login` or set HF_TOKEN",
    "RepositoryNotFoundError": "there is no such repository, or no access to it: check the name, and log in with "
    "`hf auth login` or set HF_TOKEN if it is private",
    "RevisionNotFoundError": "the repository has no such revision: check the part after the @",
    "LocalTokenNotFoundError": "not logged in: run `hf auth login`, or set HF_TOKEN",
    "BadRequestError": "the hub refused the request: check the name, and that the token has write access",
    "HfHubHTTPError": "the hub refused: check the token's permissions",
    "LocalEntryNotFoundError": "it is not in the cache, and the hub cannot be reached: fetch it where there is a "
    "network (`hf download`), and copy the cache (HF_HOME) or the files",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set; unset it",
}


def _reason(error: Exception) -> str:
    kinds = [kind.__name__ for kind in type(error).__mro__]
    advice = next((_ADVICE[name] for name in kinds if name in _ADVICE), "is the hub reachable (HF_ENDPOINT, proxies)?")
    if is_offline() and "LocalEntryNotFoundError" in kinds:
        advice = "HF_HUB_OFFLINE is set and it is not in the cache; unset it, or fetch it elsewhere (`hf download`)"
    said = (str(error).strip().splitlines() or [""])[0]
    return f"{advice} ({type(error).__name__}: {said})"
