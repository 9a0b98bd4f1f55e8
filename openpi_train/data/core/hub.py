"""Addresses on the Hugging Face hub, and downloads to its client's cache. Not needed for local paths.

An address is `hub:USER/NAME`, optionally with a folder and a revision: `hub:USER/NAME/FOLDER@REVISION`. Without a
revision it is the newest commit when the process first asks, and that one from there on; a run that goes on is given
those of its first start (`pin`).
"""

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from openpi_train.runtime.exits import CheckpointError, DataError, RunError, UsageError

logger = logging.getLogger(__name__)

SCHEME = "hub:"
_ADDRESS = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<folder>[^@]+?))?/?(?:@(?P<revision>[\w./-]+))?")
_FORM = "hub:USER/NAME, hub:USER/NAME/FOLDER or hub:USER/NAME@REVISION"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """A folder of a repository; `str` gives the address as a user writes it."""

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


# The commits of repositories that were named without a revision, by kind and name: "model USER/NAME".
_commits: dict[str, str] = {}


def commits() -> dict[str, str]:
    """The commits that this process has used of repositories named without a revision, by "model USER/NAME"."""
    return dict(sorted(_commits.items()))


def pin(recorded: Mapping[str, str]) -> None:
    """Use these commits from here on, in the form of `commits`, for addresses without a revision."""
    for name, commit in recorded.items():
        if (used := _commits.get(name)) not in (None, commit):
            logger.warning(
                "%s has changed on the hub: its commit was %s when the run began, which is used, and is %s now; to "
                "use that one, begin another run, or give @%s behind the address",
                name,
                commit,
                used,
                used,
            )
        elif used is None:
            logger.info("%s on the hub: the run's commit is %s", name, commit)
        _commits[name] = commit


def revision_of(name: str, revision: str | None, repo_type: str = "model") -> str | None:
    """The revision to ask for: the given one, else the commit that is used already; None for the newest."""
    return revision or _commits.get(f"{repo_type} {name}")


def note_commit(name: str, revision: str | None, file: Path, repo_type: str = "model") -> None:
    """Keep, and log, the commit of a file or folder in the client's cache, which names it, if no revision was given."""
    found = re.search(r"/snapshots/([0-9a-f]{40})(/|$)", file.as_posix())
    if found is not None and revision is None and f"{repo_type} {name}" not in _commits:
        _commits[f"{repo_type} {name}"] = found[1]
        logger.info("%s %s on the hub: its newest commit is %s", repo_type, name, found[1])


def is_offline() -> bool:
    """Whether the environment variable HF_HUB_OFFLINE forbids access to the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def may_be_repository(name: str) -> bool:
    """Whether `name` has the form of a repository on the hub, USER/NAME, and not of a path."""
    return name.count("/") == 1 and not name.startswith((".", "~", "/"))


def hub_file(repository: str, file: str, *, offline: bool, what: str, how: str) -> Path:
    """The path of `file` of `repository` in the hub client's cache; downloads it if it is missing and not `offline`.

    Args: for messages, `what` names the thing asked for and `how` says what to do if it is not available.

    Raises FileNotFoundError; UsageError if the client is missing.
    """
    if not may_be_repository(repository):
        raise FileNotFoundError(f"no {what} at {repository}: {how}")
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        raise UsageError(
            f"{what} {repository} is not a local file, and huggingface_hub, which could download it, is not "
            f"installed: pip install 'openpi_train[hub]', or {how}"
        ) from error
    pinned: Any = {"revision": found} if (found := revision_of(repository, None)) else {}
    try:
        path = Path(huggingface_hub.hf_hub_download(repository, file, local_files_only=True, **pinned))
    except (OSError, ValueError) as missing:  # the hub's errors derive from these
        if offline or is_offline():
            raise FileNotFoundError(f"{what} {repository} is offline and not cached: {how}") from missing
        try:  # unlike `hf_hub_download` it asks once, and does not try for half a minute where there is no network
            path = Path(huggingface_hub.snapshot_download(repository, allow_patterns=[file], **pinned)) / file
        except (OSError, ValueError) as error:
            reason = _reason(error, Address(name=repository), file)
            raise FileNotFoundError(f"{what} {repository} cannot be fetched: {reason}; or {how}") from error
    if not path.is_file():
        raise FileNotFoundError(f"{repository} on the hub has no {file}, so it is no {what}: {how}")
    note_commit(repository, None, path)
    return path


def require(text: str, repo_type: Literal["model", "dataset"], raised: type[RunError], file: str = "") -> None:
    """Raise as `hub_folder` if the repository of an address is neither in the client's cache nor given by the hub.

    Nothing is downloaded, and the hub is asked once, if at all. `file` is the one that is needed of it; none: all.
    """
    address = Address.of(text)
    with asking(address, "cannot be fetched", raised, file) as client:
        revision = revision_of(address.name, address.revision, repo_type)
        try:
            client.snapshot_download(address.name, repo_type=repo_type, revision=revision, local_files_only=True)
        except client.errors.LocalEntryNotFoundError:
            if is_offline():
                raise
            client.HfApi().repo_info(address.name, repo_type=repo_type, revision=revision, timeout=_ASK_S)


def hub_folder(
    text: str,
    *,
    repo_type: Literal["model", "dataset"],
    patterns: Sequence[str],
    offline: bool = False,
    raised: type[RunError] = DataError,
) -> Path:
    """The folder of an address in the client's cache, with its files that match `patterns`; missing ones are fetched.

    Raises UsageError for an invalid address or a missing client, `raised` if the hub does not give the files: DataError
    for datasets and tokenizers, CheckpointError for models.
    """
    address = Address.of(text)
    below = f"{address.folder}/" if address.folder else ""
    with asking(address, "cannot be fetched", raised) as client:
        snapshot = client.snapshot_download(
            address.name,
            repo_type=repo_type,
            revision=revision_of(address.name, address.revision, repo_type),
            allow_patterns=[below + pattern for pattern in patterns],
            local_files_only=offline or is_offline(),
        )
    note_commit(address.name, address.revision, Path(snapshot), repo_type)
    return Path(snapshot) / below


@contextlib.contextmanager
def asking(address: Address, what: str, raised: type[RunError] = CheckpointError, file: str = "") -> Iterator[Any]:
    """The hub's client; its errors, and those of two libraries that it uses, are `raised`, with advice on `file`."""
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
        raise raised(f"{address} {what}: {_reason(error, address, file)}") from error


_ASK_S = 10.0
# Repositories that are given only to those who have accepted their terms.
_GATED = re.compile(r"google/(pali)?gemma|meta-llama/")
_UNREACHABLE = (
    "it is not in the cache, and the hub cannot be reached: where there is a network type `hf download {what}`{login}, "
    "and copy the cache (HF_HOME) here, or give a copy's path in place of the name (docs/install.md)"
)
# Advice for each class of error, by its name in the client.
_ADVICE = {
    "GatedRepoError": "it is gated: ask for access on its page, then log in with `hf auth login` or set HF_TOKEN",
    "RepositoryNotFoundError": "there is no such repository, or no access to it: check the name, and log in with "
    "`hf auth login` or set HF_TOKEN if it is private",
    "RevisionNotFoundError": "the repository has no such revision: check the part after the @",
    "LocalTokenNotFoundError": "not logged in: run `hf auth login`, or set HF_TOKEN",
    "BadRequestError": "the hub refused the request: check the name, and that the token has write access",
    "HfHubHTTPError": "the hub refused: check the token's permissions",
    "LocalEntryNotFoundError": _UNREACHABLE,
    "ConnectError": _UNREACHABLE,
    "TimeoutException": _UNREACHABLE,
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set; unset it",
}


def _reason(error: Exception, address: Address, file: str = "") -> str:
    kinds = [kind.__name__ for kind in type(error).__mro__]
    advice = next((_ADVICE[name] for name in kinds if name in _ADVICE), "is the hub reachable (HF_ENDPOINT, proxies)?")
    if is_offline() and "LocalEntryNotFoundError" in kinds:
        advice = "HF_HUB_OFFLINE is set and it is not in the cache; unset it, or fetch it elsewhere (`hf download`)"
    login = " (it is gated: accept its terms on its page, and log in with `hf auth login`)"
    what = " ".join(filter(None, (address.name, file, address.revision and f"--revision {address.revision}")))
    advice = advice.format(what=what, login=login if _GATED.match(address.name) else "")
    said = (str(error).strip().splitlines() or [""])[0]
    return f"{advice} ({type(error).__name__}: {said})"
