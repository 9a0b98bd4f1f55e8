"""Table of checkpoint formats; the format of a checkpoint is detected from its content.

A new format is a row: how it is recognised, opened and written. Opening gives leaves by name (`stored_leaves.py`), so
start weights, `convert` and their accounting are the same for all. Read next: `stored_leaves.py`, `accounting.py`.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openpi_train.interop import (
    big_vision,
    checkpoint_hub,
    diffusion_policy_checkpoint,
    huggingface,
    lerobot_policy,
    openpi,
    openpi_torch,
    ours,
    paligemma_torch,
    peft_adapter,
    torchvision_resnet,
    vla_checkpoint,
)
from openpi_train.interop.accounting import account
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, Stored, Writer
from openpi_train.interop.torch_file import is_torch_file
from openpi_train.models.accompanied import CRITIC, REFERENCE
from openpi_train.models.model_config import ModelConfig
from openpi_train.runtime.exits import CheckpointError, UsageError, kind_for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A checkpoint format.

    Attributes:
        name: its name in `--from` and `--to`.
        summary: one line of help: what such a checkpoint looks like.
        recognises: whether a place holds one; looks at few files.
        open: opens one, with published names; gets the model, if known, for formats with other layouts.
        prepare: checks that a checkpoint of a model can be written in this format, and returns what writes it into a
            directory that does not exist yet; None if the format is read only.
        keeps: the parts of an opened checkpoint that the format can hold; None: all but the training state.
        lacks: a regular expression for published names that such a base checkpoint does not have.
        part: the part of a model that such a checkpoint holds; default: all of it.
        holds: a regular expression for the published names of the parameters that it holds of that part; None: all.
        has_norm_stats: whether it can hold norm stats.
    """

    name: str
    summary: str
    recognises: Callable[[Place], bool]
    open: Callable[[Place, ModelConfig | None], Stored]
    prepare: Callable[[Stored, ModelConfig | None], Writer] | None = None
    keeps: Callable[[Stored, ModelConfig], Stored] | None = None
    lacks: str | None = None
    part: Callable[[ModelConfig], ModelConfig] = lambda model: model
    holds: str | None = None
    has_norm_stats: bool = True

    def write(self, directory: Path, stored: Stored, model: ModelConfig | None = None) -> None:
        """Check and write into a directory that does not exist yet. Raises UsageError if it cannot be written."""
        assert self.prepare is not None, f"{self.name} is only read"
        self.prepare(stored, model)(directory)

    def kept(self, stored: Stored, model: ModelConfig) -> Stored:
        """The parts of the model's checkpoint that can be written in this format."""
        if stored.train_state is None:
            return stored
        return self.keeps(stored, model) if self.keeps else dataclasses.replace(stored, train_state=None)


def _of(module: Any, name: str, summary: str, **others: Any) -> Format:
    """The format whose module recognises, opens and, unless it is read only, writes it.

    A module without `prepare` writes every checkpoint.
    """
    prepare, write = getattr(module, "prepare", None), getattr(module, "write", None)

    def unchecked(stored: Stored, model: ModelConfig | None) -> Writer:
        return lambda directory: write(directory, stored, model)  # pyright: ignore[reportOptionalCall]

    prepare = unchecked if prepare is None and write is not None else prepare
    parts = {"recognises": module.recognises, "open": module.open_checkpoint, "prepare": prepare}
    return Format(name=name, summary=summary, **parts, **others)


# Pattern of the names that `convert` gives to unfinished output.
_CUT_OFF = r"\..+\.partial-.+"

# The first format that recognises a place is used.
FORMATS: tuple[Format, ...] = (
    _of(
        big_vision,
        "big_vision",
        "PaliGemma as published: an .npz file (pt_224.npz), or a folder with paligemma.npz",
        lacks=paligemma_torch.NOT_IN_IT,
        holds=paligemma_torch.HELD,
        has_norm_stats=False,
    ),
    _of(
        ours,
        "ours",
        "a run's directory, or the directory of a step in it (params/, meta.json, manifest.json)",
        keeps=ours.kept,
    ),
    _of(
        openpi,
        "openpi",
        "openpi's: a step's directory, or the params directory in it (_METADATA)",
        keeps=openpi.kept,
    ),
    _of(lerobot_policy, "lerobot", "LeRobot's: a policy's folder (config.json with its type, model.safetensors)"),
    _of(openpi_torch, "openpi_torch", "openpi's in PyTorch: a step of its trainer, or a folder with model.safetensors"),
    _of(
        paligemma_torch,
        "paligemma",
        "PaliGemma in Hugging Face's format: a directory with model.safetensors, or several and their index",
        lacks=paligemma_torch.NOT_IN_IT,
        holds=paligemma_torch.HELD,
        has_norm_stats=False,
    ),
    _of(
        huggingface,
        "huggingface",
        "a language model in Hugging Face's form: config.json, model.safetensors or several and their index",
        part=huggingface.written_part,
    ),
    _of(
        peft_adapter,
        "peft",
        "a low-rank adapter of a language model, by PEFT: adapter_config.json, adapter_model.safetensors",
        holds=peft_adapter.HELD,
    ),
    _of(
        diffusion_policy_checkpoint,
        "diffusion_policy",
        "diffusion_policy's: a file by torch.save (latest.ckpt), or the folder of one",
    ),
    _of(
        torchvision_resnet,
        "torchvision",
        "start weights of ACT's backbone: torchvision's ResNet-18, a file by torch.save (resnet18-f37072fd.pth)",
        lacks=torchvision_resnet.NOT_IN_IT,
    ),
    _of(
        vla_checkpoint,
        "vla",
        "start weights of a PaliGemma backbone: a checkpoint of the VLA's PyTorch trainer (best_model.pth)",
        lacks=paligemma_torch.NOT_IN_IT,
    ),
)


def named(name: str) -> Format:
    """The format of this name. Raises UsageError with the known ones."""
    for one in FORMATS:
        if one.name == name:
            return one
    raise UsageError(f"unknown format {name!r}; allowed: {', '.join(one.name for one in FORMATS)}")


def recognised(place: Place) -> Format | None:
    """The format of what is at a place; None if it is no checkpoint."""
    return next((one for one in FORMATS if one.recognises(place)), None)


def open_checkpoint(where: str | Path, model: ModelConfig | None = None, name: str | None = None) -> Stored:
    """Open the checkpoint at `where` (a path or an address) in the format `name`; None detects the format.

    Checkpoints on the hub are first downloaded to its cache on this host; copies in openpi's cache are used if present.

    Raises CheckpointError if there is none, or it is damaged.
    """
    place = open_place(where)
    form = recognised(place) if name is None else named(name)
    if form is None:
        if place.local and (runs := [one for one in _folders(place.local) if ours.recognises(place / one)]):
            raise CheckpointError(f"{place} is no run, it holds runs: give one, {place / runs[0]} ({_listed(runs)})")
        known = "\n".join(f"  {one.name}: {one.summary}" for one in FORMATS)
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
    account(found, expected, where=stored.where, may_miss=may_miss, explain=model.explain)
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
