"""Start weights from a checkpoint of the PaliGemma VLA's PyTorch trainer: a file by torch.save, such as best_model.pth.

Its backbone is a PaliGemma under transformers' names. Its flow head is another network than ours and is left out, as
are the optimizer and the config. Read next: `torch_file.py`, `paligemma_torch.py`.
"""

import collections
import logging
import re

from openpi_train.interop.openpi_torch import needed
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Stored
from openpi_train.interop.torch_file import is_torch_file, open_torch_file
from openpi_train.models.model_config import ModelConfig
from openpi_train.models.paligemma.paligemma_torch import params_of

logger = logging.getLogger(__name__)

# Names in a state dict: of a model, or of one that DDP wraps.
_WRAPPED = "module."
_BACKBONE = re.compile(r"(?:module\.)?paligemma_vlm\.paligemma_model\.")
# The part of the model that has the backbone, and parts of its own.
_AROUND = "paligemma_vlm"


def recognises(place: Place) -> bool:
    """Whether the place is a file on a disk in torch's format that holds the trainer's backbone."""
    if place.local is None or not is_torch_file(place):
        return False
    return any(_BACKBONE.match(name) for name in open_torch_file(place.local))


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """Open the backbone's parameters by published name; the log names the parts that are left out.

    Raises UsageError without a model, CheckpointError if the tensors do not fit the model.
    """
    assert place.local is not None, "`recognises` has looked at it"
    backbone, others = {}, collections.Counter()
    for name, tensor in open_torch_file(place.local).items():
        if match := _BACKBONE.match(name):
            backbone[name[match.end() :]] = tensor
        else:
            others[_part(name)] += 1
    listed = ", ".join(f"{part} ({count})" for part, count in sorted(others.items()))
    logger.info(
        "%s: the %d tensors of the backbone are taken. Left out are %s: the trainer's flow head is another network",
        place,
        len(backbone),
        listed or "none",
    )
    return Stored(where=str(place), format="vla", params=params_of(place, backbone, needed(model, place)))


def _part(name: str) -> str:
    """The part of the trainer's model that a tensor belongs to."""
    parts = name.removeprefix(_WRAPPED).split(".")
    return ".".join(parts[: 2 if parts[0] == _AROUND else 1])
