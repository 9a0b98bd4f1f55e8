"""torchvision's ResNet-18 as it is published, such as `resnet18-f37072fd.pth`: start weights of ACT's backbone.

Its classifier is left out. All other parameters of the policy are drawn newly. Read next: `torch_file.py`,
`lerobot_act.py` for the names.
"""

import re

from openpi_train.interop.openpi import published_params
from openpi_train.interop.openpi_torch import joined_params, needed
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Stored
from openpi_train.interop.torch_file import is_torch_file, open_torch_file
from openpi_train.models.act.lerobot_act import backbone_layout
from openpi_train.models.model_config import ModelConfig
from openpi_train.runtime.exits import CheckpointError

_ROOT = "backbone/"
# What such a file does not have, of the policy's published names.
NOT_IN_IT = rf"(?!{_ROOT}).*"
# The classifier, and counts of torch's batch norms that nothing needs.
_UNUSED = re.compile(r"fc\.|.*\.num_batches_tracked$")


def recognises(place: Place) -> bool:
    """Whether the place is a file on a disk in torch's format that holds a ResNet's first convolution."""
    return place.local is not None and is_torch_file(place) and "conv1.weight" in open_torch_file(place.local)


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """Open the backbone's parameters by published name. Raises CheckpointError if the model has no such backbone."""
    assert place.local is not None, "`recognises` has looked at it"
    model = needed(model, place)
    shapes = {name: leaf.shape for name, leaf in published_params(model).items() if name.startswith(_ROOT)}
    if not shapes:
        raise CheckpointError(
            f"{place} is torchvision's ResNet-18, which only ACT with cameras starts from: give its experiment"
        )
    layouts = {name: backbone_layout(name.removeprefix(_ROOT), shape) for name, shape in shapes.items()}
    tensors = open_torch_file(place.local)
    found = {name: leaf for name, leaf in tensors.items() if not _UNUSED.match(name)}
    return Stored(where=str(place), format="torchvision", params=joined_params(place, found, layouts, model))
