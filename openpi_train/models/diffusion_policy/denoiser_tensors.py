"""The UNet of diffusion policies in PyTorch: diffusion_policy's names of its tensors, and their layouts.

LeRobot's are the same tensors under slightly other names. Two parameters differ in more than layout: PyTorch's
transposed convolution turns its kernel around, and a library's condition has its parts in an order of its own, so that
the rows of what reads the condition are taken in that order (`in_order`). Read next: `lerobot_diffusion.py`,
`diffusion_policy_checkpoint.py`.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np

from openpi_train.interop.stored_leaves import Index, Leaves, StoredLeaf
from openpi_train.interop.torch_names import TensorLayout, lay_out_tensors
from openpi_train.models.diffusion_policy.diffusion_policy import DiffusionPolicyConfig
from openpi_train.nn.resnet import num_features

ENCODERS, DENOISER = "encoders/", "denoiser/"
# The widths of image encoders that PyTorch's libraries build: torchvision's.
WIDTHS = (64, 128, 256, 512)
_WHERE = {"down": "down_modules", "middle": "mid_modules", "up": "up_modules"}
_ENDS = {"step_in": "diffusion_step_encoder.1", "step_out": "diffusion_step_encoder.3", "outputs": "final_conv.1"}
_PARTS = {"conv": 0, "norm": 1}
_DIMS = {1: "d -> d", 2: "i o -> o i", 3: "k i o -> o i k"}


def unet_layout(name: str, shape: tuple[int, ...]) -> TensorLayout:
    """The layout of a parameter of the UNet, given by its path in `nn/unet1d.py: ConditionalUnet1d`.

    Raises KeyError if diffusion_policy's UNet has none.
    """
    dims = "k i o -> i o k" if name.startswith("lengthen/") and len(shape) == 3 else _DIMS[len(shape)]
    return lay_out_tensors(_unet_tensor(name), dims, shape)


def _unet_tensor(name: str) -> str:
    *modules, leaf = name.split("/")
    leaf = "bias" if leaf == "bias" else "weight"
    match modules:
        case ["step_in" | "step_out" | "outputs" as end]:
            found = _ENDS[end]
        case ["last_block", part]:
            found = f"final_conv.0.block.{_PARTS[part]}"
        case ["shorten" | "lengthen" as way, level]:
            found = f"{_WHERE['down' if way == 'shorten' else 'up']}.{level}.2.conv"
        case [where, *numbers, "block_1" | "block_2" as block, part] if where in _WHERE:
            found = f"{'.'.join([_WHERE[where], *numbers])}.blocks.{int(block[-1]) - 1}.block.{_PARTS[part]}"
        case [where, *numbers, "film" | "shortcut" as part] if where in _WHERE:
            end = "cond_encoder.1" if part == "film" else "residual_conv"
            found = f"{'.'.join([_WHERE[where], *numbers])}.{end}"
        case _:
            raise KeyError(f"a UNet of PyTorch's diffusion policies has no parameter {name}")
    return f"{found}.{leaf}"


def renamed(
    layout: TensorLayout, prefix: str, pattern: str = "", replacement: str | Callable[[re.Match[str]], str] = ""
) -> TensorLayout:
    """The layout with other names of tensors: `pattern` replaced everywhere, then the prefix before it."""
    tensors = {at: prefix + re.sub(pattern, replacement, name) for at, name in layout.tensors.items()}
    return dataclasses.replace(layout, tensors=tensors)


def condition_order(model: DiffusionPolicyConfig, cameras: Sequence[str], *, state_first: bool) -> np.ndarray:
    """Where each number of a library's condition stands in ours: the encoded step, then every observed step's parts.

    `cameras` are the model's slots in the library's order; here they are sorted, and the state comes last.
    """
    width = num_features(model.pooling, model.encoder_widths, model.num_keypoints)
    slots, step = sorted(model.cameras), model.diffusion_step_embed_dim
    images = [slots.index(slot) * width + np.arange(width) for slot in cameras]
    state = len(slots) * width + np.arange(model.used_state_dim)
    parts = [state, *images] if state_first else [*images, state]
    own = np.concatenate(parts)
    starts = step + np.arange(model.n_obs_steps) * model.condition_width
    return np.concatenate([np.arange(step), *(start + own for start in starts)])


def to_torch(params: Leaves, order: np.ndarray) -> dict[str, StoredLeaf]:
    """The parameters by published name with rows in the library's order, whose condition is ours at `order`."""
    return {name: _reordered(name, leaf, order) for name, leaf in params.items()}


def from_torch(params: Leaves, order: np.ndarray) -> dict[str, StoredLeaf]:
    """The inverse of `to_torch`."""
    return {name: _reordered(name, leaf, np.argsort(order)) for name, leaf in params.items()}


def _reordered(name: str, leaf: StoredLeaf, order: np.ndarray) -> StoredLeaf:
    if re.fullmatch(rf"{DENOISER}.*/film/kernel", name):
        return in_order(leaf, order)
    if re.fullmatch(rf"{DENOISER}lengthen/.*/kernel", name):
        return in_order(leaf, np.arange(leaf.shape[0])[::-1])
    return leaf


def in_order(leaf: StoredLeaf, order: np.ndarray) -> StoredLeaf:
    """The leaf whose first axis is the other's at `order`, a permutation; a part of it needs all of that axis."""
    if np.array_equal(order, np.arange(leaf.shape[0])):
        return leaf

    def read(index: Index) -> np.ndarray:
        return leaf.read((slice(0, leaf.shape[0]), *index[1:]))[order[index[0]]]

    in_parts = leaf.chunk is None and leaf.stream is None
    return StoredLeaf(shape=leaf.shape, dtype=leaf.dtype, read=read, chunk=None if in_parts else leaf.shape)
