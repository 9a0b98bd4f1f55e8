"""Reader and writer of this project's own checkpoints: a step's directory, or a run's, whose newest step is used.

The layout of parameters is openpi's, so any reader of openpi's checkpoints reads them too; beside them are `meta.json`
and `manifest.json`. Training saves and restores with other code (`checkpoints/checkpoint_store.py`).
"""

import contextlib
import contextvars
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from openpi_train.data.core.files import write_bytes, write_json
from openpi_train.data.tokenizers.text_tokenizer import FOLDER
from openpi_train.interop import openpi
from openpi_train.interop.checkpoint_tokenizer import token_files_of
from openpi_train.interop.manifest import MANIFEST, find_damage, write_manifest
from openpi_train.interop.orbax_item import METADATA, open_item, save_item
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Index, Leaves, Piece, Stored, StoredLeaf
from openpi_train.json_object import JsonObject
from openpi_train.models.model_config import ModelConfig
from openpi_train.parallel.params import nested_params
from openpi_train.runtime import agree
from openpi_train.runtime.exits import CheckpointError, reported_as
from openpi_train.runtime.passing_errors import patiently

META = "meta.json"
_verifies = contextvars.ContextVar("verifies", default=True)


def recognises(place: Place) -> bool:
    """Whether the place is one of our step directories, its `params`, or a run's directory."""
    return any(folder.has(META) or folder.has(MANIFEST) for folder in _steps(place)) or place.has("experiment.json")


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """Open a step, its `params`, or the newest step of a run. On a disk, checksums are verified.

    Each process verifies a share of the files. The training state is translated if the model is known, else left out.
    Raises CheckpointError if it is not such a checkpoint, or damaged.
    """
    step = next((folder for folder in _steps(place) if (folder / "params").has(METADATA)), None)
    if step is None:
        step = _newest(place)
    if not step.has(MANIFEST):
        raise CheckpointError(
            f"{step} is incomplete: {MANIFEST}, which is written last, is missing. Use another step of that run"
        )
    for below in ("params/", f"{FOLDER}/"):
        _check(step, below)
    meta = _meta(step)
    params, state = openpi.read_params(step / "params"), None
    if model is not None and step.url != place.parent.url and (step / "train_state").has(METADATA):
        state = openpi.published_state(_checked_state(step), params, openpi.parameter_names(model))
    return Stored(
        where=str(step),
        format="ours",
        params=params,
        train_state=state,
        norm_stats=openpi.read_norm_stats(step),
        experiment=meta.get("experiment"),
        tokenizer=meta.get("tokenizer"),
        token_files=token_files_of(step),
        text_length=_text_length(meta),
    )


def _text_length(meta: JsonObject) -> int | None:
    """The `text_length` of the run's data; older checkpoints have it in their model's config."""
    if "text_length" in meta:
        return meta["text_length"]
    return ((meta.get("experiment") or {}).get("model") or {}).get("used_token_len")


@contextlib.contextmanager
def without_sums() -> Iterator[None]:
    """Checkpoints that are opened within are not verified: this reads all of their files."""
    token = _verifies.set(False)
    try:
        yield
    finally:
        _verifies.reset(token)


def _check(step: Place, below: str) -> None:
    if step.local is None or not _verifies.get():
        return
    share, shares = agree.process_index(), agree.process_count()
    local = step.local
    with reported_as(CheckpointError):  # no permission
        damage = patiently(lambda: find_damage(local, share=share, shares=shares, below=below), f"reading {step}")
    if damage:
        raise CheckpointError(f"{step} cannot be used: {damage}. Use another step, or fetch it again")


def _checked_state(step: Place) -> Leaves:
    """The training state's leaves; its files are verified at the first read, since start weights do not read them."""
    check = functools.cache(lambda: _check(step, "train_state/"))
    try:
        state = open_item(step / "train_state")
    except CheckpointError:
        check()  # names the damaged file
        raise

    def checked(leaf: StoredLeaf) -> StoredLeaf:
        def stream(index: Index) -> Iterator[Piece]:
            check()
            return leaf.pieces(index)

        return StoredLeaf.streamed(leaf.shape, leaf.dtype, leaf.chunk, stream)

    return {name: checked(leaf) for name, leaf in state.items()}


def recorded_tokenizer(place: Place) -> str | None:
    """`tokens_fingerprint` of the run that saved one of our checkpoints; None if not recorded."""
    return _meta(_described(place)).get("tokenizer") if recognises(place) else None


def recorded_experiment(place: Place) -> tuple[Mapping[str, Any] | None, Place | None]:
    """The experiment (its JSON) that saved one of our checkpoints, and the folder of its tokenizer's files, if there.

    Reads no arrays and starts no device. Raises CheckpointError if a run has no checkpoint yet.
    """
    step = _described(place)
    return _meta(step).get("experiment"), token_files_of(step)


def _described(place: Place) -> Place:
    """The step, or the newest step of a run."""
    return next((folder for folder in _steps(place) if folder.has(META)), None) or _newest(place)


def _meta(step: Place) -> dict[str, Any]:
    return step.json(META) if step.has(META) else {}


def write(directory: Path, stored: Stored, model: ModelConfig | None) -> None:
    """Write a checkpoint as our runs save it, manifest last. Call it in one process."""
    params, state = stored.params, None
    if stored.train_state is not None:
        assert model is not None, "a training state is translated by its model's names"
        params, state = openpi.our_items(stored, openpi.parameter_names(model))
    save_item(directory / "params", {"params": nested_params(params)})
    if state is not None:
        save_item(directory / "train_state", nested_params(state))
    openpi.write_norm_stats(directory, stored.norm_stats)
    if (tokens := stored.token_files) is not None:
        for name in tokens.names():
            write_bytes(directory / FOLDER / name, tokens.read(name))
    meta = {
        "source": stored.where,
        "experiment": stored.experiment,
        "tokenizer": stored.tokenizer,
        "text_length": stored.text_length,
    }
    write_json(directory / META, meta)
    write_manifest(directory)


def kept(stored: Stored, model: ModelConfig) -> Stored:
    """The checkpoint with one value of each frozen parameter: the one used in training, not its average."""
    names = openpi.parameter_names(model)
    params, state = openpi.our_items(stored, names)
    return dataclasses.replace(stored, params=params, train_state=openpi.published_state(state, params, names))


def _steps(place: Place) -> tuple[Place, ...]:
    return (place, place.parent) if place.url.endswith("/params") else (place,)


def _newest(run: Place) -> Place:
    names = (
        run.names() if run.local is None else [path.relative_to(run.local).as_posix() for path in run.local.glob("*/*")]
    )
    steps = [int(match[1]) for name in names if (match := re.fullmatch(rf"(\d+)/{MANIFEST}", name))]
    if not steps:
        raise CheckpointError(
            f"{run} has no checkpoint yet; the first is saved at step {_save_interval(run)} (--save-interval), or at "
            "the run's end, if that is earlier, also where SIGTERM ends it"
        )
    return run / str(max(steps))


def _save_interval(run: Place) -> str:
    """The steps between the checkpoints of a run, as it has recorded them."""
    try:
        return str(run.json("experiment.json")["save_interval"])
    except (CheckpointError, LookupError):
        return "N"
