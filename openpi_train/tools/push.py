"""A converted checkpoint pushed to the hub, with a card that tells of the run it came from.

Read next: `interop/checkpoint_hub.py` (the upload), `interop/model_card.py` (the card).
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openpi_train.interop import checkpoint_hub
from openpi_train.interop.model_card import model_card
from openpi_train.interop.stored_leaves import Stored


def by_way_of_a_folder(address: str, private: bool, convert: Callable[[Path], tuple[Stored, str]]) -> str:
    """Push what `convert` writes into the folder that it is given; it returns what that is, and its format.

    Where it now is comes back. Raises UsageError and CheckpointError as `check_push` and `push` do.
    """
    checkpoint_hub.check_push(address, private=private)
    with tempfile.TemporaryDirectory(prefix="openpi_train-push-") as folder:
        target = Path(folder) / "checkpoint"
        stored, form = convert(target)
        results, command = _record(stored)
        name = checkpoint_hub.Address.of(address).name
        return checkpoint_hub.push(target, address, model_card(stored, form, name, results=results, command=command))


def _record(stored: Stored) -> tuple[Any, list[str] | None]:
    """The `results.json` of the run that a checkpoint of ours lies in, and the command that started it."""
    run = Path(stored.where).parent
    results, environment = (_read(run / name) for name in ("results.json", "environment.json"))
    if not environment or not environment.get("starts"):
        return results, None
    argv = environment["starts"][0]["argv"]
    return results, ["python", "-m", "openpi_train", *argv[1:]]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None  # of a checkpoint copied out of its run, the card says what the checkpoint itself knows
