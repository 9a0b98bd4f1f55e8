"""Download of single files from the Hugging Face hub. Not needed for local paths."""

import os
from pathlib import Path


def is_offline() -> bool:
    """Whether the environment variable HF_HUB_OFFLINE forbids access to the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def hub_file(repository: str, file: str, *, offline: bool, what: str, how: str) -> Path:
    """The path of `file` of `repository` in the hub client's cache; downloads it if it is missing and not `offline`.

    Args: for messages, `what` names the thing asked for and `how` says what to do if it is not available.

    Raises FileNotFoundError.
    """
    if repository.count("/") != 1 or repository.startswith((".", "~", "/")):
        raise FileNotFoundError(f"no {what} at {repository}: {how}")
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        raise FileNotFoundError(
            f"{what} {repository} is not a local file, and huggingface_hub, which could download it, is not "
            f"installed: pip install 'openpi_train[hub]', or {how}"
        ) from error
    state = "offline and not cached"
    for only_kept in (True, False):
        if not only_kept and (offline or is_offline()):
            break
        try:
            return Path(huggingface_hub.hf_hub_download(repository, file, local_files_only=only_kept))
        except (OSError, ValueError) as error:  # the hub's errors derive from these
            if not only_kept:
                state = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise FileNotFoundError(f"cannot get {what} {repository} from the hub ({state}): {how}")
