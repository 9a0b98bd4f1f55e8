"""Checkpoint formats; the format of a checkpoint is detected from its content.

A format says how it is recognised, opened and written. Those of one family of models are registered with it
(`families.py`). Opening gives leaves by name (`stored_leaves.py`), so start weights, `convert` and their accounting are
the same for all. Read next: `interop/{checkpoint_format,stored_leaves,parameter_matching}.py`.
"""

import logging
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from openpi_train import families
from openpi_train.checkpoints import lerobot_policy
from openpi_train.interop import checkpoint_hub, lerobot_folder, native_format, openpi, openpi_torch
from openpi_train.interop.checkpoint_format import Format
from openpi_train.interop.parameter_matching import account
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, Stored, Writer
from openpi_train.interop.torch_file import is_torch_file
from openpi_train.models.language.accompanied import CRITIC, REFERENCE
from openpi_train.models.model_config import ModelConfig
from openpi_train.runtime.exits import CheckpointError, UsageError, kind_for

logger = logging.getLogger(__name__)


def _prepare_openpi(stored: Stored, model: ModelConfig | None) -> Writer:
    """What writes the checkpoint in openpi's form. A warning says so if openpi has no such model."""
    if model is not None and not families.exchange_of(model).in_openpi:
        logger.warning(
            "openpi has no model like this one (%s), and will not load this checkpoint: its format is only a container",
            type(model).__name__,
        )
    return lambda directory: openpi.write(directory, stored)


# Pattern of the names that `convert` gives to unfinished output.
_CUT_OFF = r"\..+\.partial-.+"

# Formats for models of several families.
_COMMON: tuple[Format, ...] = (
    Format(
        name="ours",
        summary="a run's directory, or the directory of a step in it (params/, meta.json, manifest.json)",
        recognises=native_format.recognises,
        open=native_format.open_checkpoint,
        prepare=lambda stored, model: lambda directory: native_format.write(directory, stored, model),
        keeps=native_format.kept,
    ),
    Format(
        name="openpi",
        summary="openpi's: a step's directory, or the params directory in it (_METADATA)",
        recognises=openpi.recognises,
        open=openpi.open_checkpoint,
        prepare=_prepare_openpi,
        keeps=openpi.kept,
        library="openpi",
        loading="uv run scripts/serve_policy.py policy:checkpoint --policy.config=CONFIG --policy.dir=DIRECTORY",
    ),
    Format(
        name="lerobot",
        summary="LeRobot's: a policy's folder (config.json with its type, model.safetensors)",
        recognises=lerobot_policy.recognises,
        open=lerobot_policy.open_checkpoint,
        prepare=lerobot_policy.prepare,
        part=lambda model: model.without_critic(),
        asset_id=lerobot_folder.ASSET_ID,
        library="lerobot",
        loading="lerobot-eval --policy.path={name}",
    ),
    Format(
        name="openpi_torch",
        summary="openpi's in PyTorch: a step of its trainer, or a folder with model.safetensors",
        recognises=openpi_torch.recognises,
        open=openpi_torch.open_checkpoint,
        prepare=openpi_torch.prepare,
        part=lambda model: model.without_critic(),
    ),
)


def formats() -> tuple[Format, ...]:
    """All formats; the first that recognises a place opens it."""
    return tuple(sorted((*_COMMON, *families.formats()), key=lambda form: not form.by_ending))


def named(name: str) -> Format:
    """The format of this name. Raises UsageError with the known ones."""
    for one in formats():
        if one.name == name:
            return one
    raise UsageError(f"unknown format {name!r}; allowed: {', '.join(one.name for one in formats())}")


def recognised(place: Place) -> Format | None:
    """The format of what is at a place; None if it is no checkpoint."""
    return next((one for one in formats() if one.recognises(place)), None)


def foreign(folder: Path) -> str | None:
    """What a folder holds of another project, and what to type for it; None if it holds no checkpoint of another one.

    It is a checkpoint, or a folder of them by step, of which the newest counts. Looks at few files.
    """
    if not folder.is_dir():
        return None
    steps = sorted((name for name in _folders(folder) if name.isdecimal()), key=int, reverse=True)
    for one in (folder, *(folder / name for name in steps)):
        place = Place.of(one)
        form = recognised(place)
        if form is None:
            continue
        if form.name == "ours":
            return None
        more = ", and with --weight-loader.continue-training go on with its training"
        return (
            f"{one} is a checkpoint in the form {form.name}. Start a run from its weights: python -m openpi_train "
            f"EXPERIMENT --exp-name NAME {form.start_flag} {shlex.quote(str(one))}"
            f"{more if openpi.has_training_state(place) else ''}"
        )
    return None


def open_checkpoint(where: str | Path, model: ModelConfig | None = None, name: str | None = None) -> Stored:
    """Open the checkpoint at `where` (a path or an address) in the format `name`; None detects the format.

    Checkpoints on the hub are first downloaded to its cache on this host; copies in openpi's cache are used if present.

    Raises CheckpointError if there is none, or it is damaged.
    """
    place = open_place(where)
    form = recognised(place) if name is None else named(name)
    if form is None:
        if place.local and (runs := [one for one in _folders(place.local) if native_format.recognises(place / one)]):
            raise CheckpointError(f"{place} is no run, it holds runs: give one, {place / runs[0]} ({_listed(runs)})")
        known = "\n".join(f"  {one.name}: {one.summary}" for one in formats())
        raise CheckpointError(f"no checkpoint at {place}{_contents(place)}. Supported formats:\n{known}")
    if name is not None and not form.recognises(place):
        raise CheckpointError(f"{place} is not in the format {name} ({form.summary}){_contents(place)}")
    return form.open(place, model)


def open_place(where: str | Path) -> Place:
    """The folder (or file) that a user gave, local or in a bucket. Raises CheckpointError if it holds nothing."""
    place = Place.of(
        checkpoint_hub.fetch(str(where)) if checkpoint_hub.is_address(str(where)) else openpi.cached(str(where))
    )
    _refuse_what_is_none(place)
    return place


def model_params(stored: Stored, model: ModelConfig, may_miss: str | None = None) -> Leaves:
    """The parameters of `stored` by our path: exactly those that `model` needs. Raises CheckpointError otherwise.

    `may_miss` is a regular expression of published names that may be absent. The reference and the critic that a policy
    was trained with are left out for a model that has none.
    """
    expected = openpi.published_params(model)
    found = {
        name: leaf
        for name, leaf in stored.params.items()
        if name in expected or not name.startswith((REFERENCE, CRITIC))
    }
    account(found, expected, where=stored.where, may_miss=may_miss, explain=model.param_rules.explain)
    paths = {name: path for path, name in openpi.parameter_names(model).items()}
    return {paths[name]: leaf for name, leaf in found.items()}


def _refuse_what_is_none(place: Place) -> None:
    """Raise CheckpointError if the place is clearly not a checkpoint, whatever the format."""
    if place.local is None:
        return
    if not place.local.exists():
        beside = _listed(_folders(place.local.parent))
        raise CheckpointError(
            f"no checkpoint at {place}: there is no such directory; check the path"
            + (f" ({place.local.parent} holds {beside})" if beside else "")
        )
    if ".orbax-checkpoint-tmp" in place.local.name:
        raise CheckpointError(f"{place} is incomplete: its save was interrupted. Use another step of that run")
    if any(re.fullmatch(_CUT_OFF, part) for part in place.local.parts):
        raise CheckpointError(f"{place} is incomplete: a conversion was interrupted, or still runs. Convert again")
    try:
        empty = place.local.is_dir() and not any(place.local.iterdir())
    except OSError as error:
        raise kind_for(error, CheckpointError)(
            f"{place} cannot be read: {error.strerror}; check its permissions"
        ) from error
    if empty:
        raise CheckpointError(f"no checkpoint at {place}: the directory is empty; was its copy interrupted?")


def _is_step(place: Place) -> bool:
    """Whether it is the folder of a step of openpi's trainers: the one in JAX, or the one in PyTorch."""
    return openpi.recognises(place) or openpi_torch.recognises(place)


def _contents(place: Place) -> str:
    if place.local is None:
        return ""
    if is_torch_file(place):
        return ": its tensors are of no model that is read from such a file"
    if not place.local.is_dir():
        return f": it is a file; give the directory, {place.parent}"
    names = sorted(path.name for path in place.local.iterdir())
    if half := [name for name in names if ".orbax-checkpoint-tmp" in name]:
        return f": {half[0]} is incomplete, its save was interrupted; use another step"
    steps = [int(name) for name in names if name.isdecimal() and _is_step(place / name)]
    if steps:
        return f": it is a run's directory; give one of its steps, such as {place / str(max(steps))}"
    return f": it holds {_listed(names)}"


def _folders(of: Path) -> list[str]:
    """The names of the folders in a folder, without hidden ones; none if it cannot be read."""
    try:
        return sorted(path.name for path in of.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _listed(names: Sequence[str]) -> str:
    """The first names, for a message."""
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
