"""Which dim of which parameter is sharded over the `tensor` axis: heads, and the width inside the feed-forward layers.

As in Megatron (Shoeybi et al. 2019, section 3), weights into heads or into the wide layer are sharded by their output
dim, weights back by their input dim, so that only one sum per block is sent. Parameters that are not in the table are
replicated in a tensor group: norms, embeddings, biases of summed outputs, key and value heads that are too few to
split, and the factors of low-rank additions that have neither heads nor that width.

Read next: `strategy.py`, which uses this, and `shard.py: spread, summed`, which send.
"""

import math
import re
from collections.abc import Mapping

# By path in a stack of layers: the number of dims, with the layers first, and the dim to shard, counted from the last.
CUT_DIMS = (
    (r"experts/\w+/query/(weight|lora_a|lora_b)", 4, -3),  # layers HEADS in out
    (r"(experts/\w+/)?(key_value|query_key_value)/(weight|lora_a|lora_b)", 5, -3),  # layers 2-or-3 HEADS in out
    (r"experts/\w+/output/(weight|lora_a)", 4, -3),  # layers HEADS in out
    (r"(experts/\w+/)?mlp/gate_up/(weight|lora_b)", 4, -1),  # layers 2 in WIDE
    (r"(experts/\w+/)?mlp/down/(weight|lora_a)", 3, -2),  # layers WIDE out
    (r"attention/query/(weight|lora_b)", 4, -2),  # layers in HEADS out
    (r"attention/query_bias", 3, -2),  # layers HEADS out
    (r"attention/key_value/(weight|lora_b)", 5, -2),  # layers 2 in HEADS out
    (r"attention/key_value_bias", 4, -2),  # layers 2 HEADS out
    (r"attention/output/(weight|lora_a)", 4, -3),  # layers HEADS in out
    (r"attention/(query|key|value)/kernel", 4, -2),  # layers in HEADS out
    (r"attention/(query|key|value)/bias", 3, -2),  # layers HEADS out
    (r"attention/out/kernel", 4, -3),  # layers HEADS in out
    (r"mlp/up/kernel", 3, -1),  # layers in WIDE
    (r"mlp/up/bias", 2, -1),  # layers WIDE
    (r"mlp/down/kernel", 3, -2),  # layers WIDE out
)
_PATTERNS = tuple((re.compile(rf"(.*/)?layers/{pattern}"), num_dims, dim) for pattern, num_dims, dim in CUT_DIMS)


def tensor_dim(path: str, shape: tuple[int, ...], tensor_devices: int) -> int | None:
    """The dim to shard over `tensor_devices` devices, or None.

    An optimizer's statistics of a parameter have its path, and are sharded only if they have its dims.
    """
    if tensor_devices == 1:
        return None
    for pattern, num_dims, dim in _PATTERNS:
        if pattern.fullmatch(path):
            is_cut = len(shape) == num_dims and shape[dim] % tensor_devices == 0
            return num_dims + dim if is_cut else None
    return None


def check_sizes(sizes: Mapping[str, int], tensor_devices: int) -> list[str]:
    """Why these sizes of a model, by field, cannot be split over `tensor_devices` devices, as sentences."""
    wrong = ", ".join(f"{name} {size}" for name, size in sizes.items() if size % tensor_devices)
    if not wrong:
        return []
    common = math.gcd(*sizes.values())
    allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    return [f"--sharding.tensor-devices {tensor_devices} does not divide the model's {wrong}; allowed: {allowed}"]
