"""Table of the pi0 family's parameters in PyTorch: published name, the tensors that hold it, and their layout.

The names are those of openpi's PyTorch models (`models_pytorch/pi0_pytorch.py` and
`examples/convert_jax_model_to_pytorch.py` at 15a9616), to which LeRobot's policies add a prefix; they contain Hugging
Face's names of PaliGemma and Gemma. PyTorch has one tensor per layer, weights as [outputs, inputs], and heads merged.
Read next: `openpi_torch.py`.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from openpi_train.interop.stored_leaves import Index, Leaves, StoredLeaf, at_hand

_PALIGEMMA = "paligemma_with_expert.paligemma."
_ACTION = "paligemma_with_expert.gemma_expert."
# The embedding's name for the input; its other name is that of the tied head, which openpi and we write alone.
EMBEDDING = f"{_PALIGEMMA}model.language_model.embed_tokens.weight"
TIED_HEAD = f"{_PALIGEMMA}lm_head.weight"
# The action expert's language head is unused, but PyTorch's strict loading requires it.
UNUSED_HEAD = f"{_ACTION}lm_head.weight"

# Published name -> (tensor, our dims -> PyTorch's dims). Our first axes are those of {layer} and of alternatives in the
# tensor's name; letters in brackets are merged. A bias has the first of PyTorch's dims, and the weight's name.
_TOWER = {
    "embedding/kernel": ("embeddings.patch_embedding.weight", "y x c d -> d c y x"),
    "pos_embedding": ("embeddings.position_embedding.weight", "i n d -> (i n) d"),
    "Transformer/encoder_norm/scale": ("post_layernorm.weight", "d -> d"),
}
_BLOCK = {
    "LayerNorm_0/scale": ("layer_norm1.weight", "d -> d"),
    "LayerNorm_1/scale": ("layer_norm2.weight", "d -> d"),
    "MlpBlock_0/Dense_0/kernel": ("mlp.fc1.weight", "i o -> o i"),
    "MlpBlock_0/Dense_1/kernel": ("mlp.fc2.weight", "i o -> o i"),
    "MultiHeadDotProductAttention_0/query/kernel": ("self_attn.q_proj.weight", "d n h -> (n h) d"),
    "MultiHeadDotProductAttention_0/key/kernel": ("self_attn.k_proj.weight", "d n h -> (n h) d"),
    "MultiHeadDotProductAttention_0/value/kernel": ("self_attn.v_proj.weight", "d n h -> (n h) d"),
    "MultiHeadDotProductAttention_0/out/kernel": ("self_attn.out_proj.weight", "n h d -> d (n h)"),
}
# {i} is "" for the language expert and "_1" for the action expert.
_DECODER = {
    "layers/attn/q_einsum{i}/w": ("layers.{layer}.self_attn.q_proj.weight", "n d h -> (n h) d"),
    "layers/attn/kv_einsum{i}/w": ("layers.{layer}.self_attn.{k_proj,v_proj}.weight", "k d h -> (k h) d"),
    "layers/attn/qkv_einsum{i}/w": ("layers.{layer}.self_attn.{q_proj,k_proj,v_proj}.weight", "n d h -> (n h) d"),
    "layers/attn/attn_vec_einsum{i}/w": ("layers.{layer}.self_attn.o_proj.weight", "n h d -> d (n h)"),
    "layers/mlp{i}/gating_einsum": ("layers.{layer}.mlp.{gate_proj,up_proj}.weight", "i o -> o i"),
    "layers/mlp{i}/linear": ("layers.{layer}.mlp.down_proj.weight", "i o -> o i"),
    "layers/pre_attention_norm{i}/scale": ("layers.{layer}.input_layernorm.weight", "d -> d"),
    "layers/pre_attention_norm{i}/Dense_0/kernel": ("layers.{layer}.input_layernorm.dense.weight", "i o -> o i"),
    "layers/pre_ffw_norm{i}/scale": ("layers.{layer}.post_attention_layernorm.weight", "d -> d"),
    "layers/pre_ffw_norm{i}/Dense_0/kernel": ("layers.{layer}.post_attention_layernorm.dense.weight", "i o -> o i"),
    "final_norm{i}/scale": ("norm.weight", "d -> d"),
    "final_norm{i}/Dense_0/kernel": ("norm.dense.weight", "i o -> o i"),
}
_LINEARS = ("state_proj", "action_in_proj", "action_out_proj")
_LINEARS += ("action_time_mlp_in", "action_time_mlp_out", "time_mlp_in", "time_mlp_out")


def _rows() -> Iterator[tuple[str, tuple[str, str]]]:
    tower, paligemma = f"{_PALIGEMMA}model.vision_tower.vision_model.", "PaliGemma/"
    for table, here, there in (
        (_TOWER, f"{paligemma}img/", tower),
        (_BLOCK, f"{paligemma}img/Transformer/encoderblock/", f"{tower}encoder.layers.{{layer}}."),
        (_DECODER, f"{paligemma}llm/", f"{_PALIGEMMA}model.language_model."),
        (_DECODER, f"{paligemma}llm/", f"{_ACTION}model."),
    ):
        suffix = "_1" if there.startswith(_ACTION) else ""
        yield from ((here + name.format(i=suffix), (there + tensor, dims)) for name, (tensor, dims) in table.items())
    yield f"{paligemma}img/head/kernel", (f"{_PALIGEMMA}model.multi_modal_projector.linear.weight", "i o -> o i")
    yield f"{paligemma}llm/embedder/input_embedding", (TIED_HEAD, "v d -> v d")
    yield from ((f"{name}/kernel", (f"{name}.weight", "i o -> o i")) for name in _LINEARS)


_TABLE: Mapping[str, tuple[str, str]] = dict(_rows())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """Layout of a parameter of `shape` in PyTorch's tensors.

    Attributes:
        tensors: names of the tensors by position in the first, stacked axes.
        order: the other axes, in the order that they have in a tensor.
        tensor_shape: the shape of each tensor.
    """

    shape: tuple[int, ...]
    tensors: Mapping[tuple[int, ...], str]
    order: tuple[int, ...]
    tensor_shape: tuple[int, ...]

    @property
    def rest(self) -> tuple[int, ...]:
        """The shape without the stacked axes."""
        return self.shape[len(self.shape) - len(self.order) :]

    def joined(self, tensors: Leaves) -> StoredLeaf:
        """The parameter as a leaf; reading a part of it reads only that part of the tensors."""
        between = tuple(self.rest[axis] for axis in self.order)
        back = tuple(int(axis) for axis in np.argsort(self.order))
        leaves = {place: tensors[name] for place, name in self.tensors.items()}
        dtype = np.result_type(*(leaf.dtype for leaf in leaves.values()))

        def read(index: Index) -> np.ndarray:
            stacked, rest = index[: -len(self.order)], index[-len(self.order) :]
            places = [range(*one.indices(size)) for one, size in zip(stacked, self.shape, strict=False)]
            # `whole` maps a file without reading it; the part is a slice of that view.
            parts = [
                leaves[place].whole().reshape(between).transpose(back)[rest].astype(dtype, copy=False)
                for place in itertools.product(*places)
            ]
            return np.stack(parts).reshape(*map(len, places), *parts[0].shape)

        return StoredLeaf(shape=self.shape, dtype=dtype, read=read)

    def split(self, dtype: np.dtype, near: Callable[[], StoredLeaf]) -> dict[str, StoredLeaf]:
        """The tensors of the parameter that `near` returns with cheap partial reads; it is called for each tensor."""
        as_it_lies = self.tensor_shape == self.shape and self.order == tuple(range(len(self.shape)))

        def tensor(place: tuple[int, ...]) -> StoredLeaf:
            def read(index: Index) -> np.ndarray:
                if as_it_lies:
                    return near().read(index)
                part = (*(slice(at, at + 1) for at in place), *(slice(0, size) for size in self.rest))
                values = near().read(part)[(0,) * len(place)]
                return values.transpose(self.order).reshape(self.tensor_shape)[index]

            return StoredLeaf(shape=self.tensor_shape, dtype=dtype, read=read)

        return {name: tensor(place) for place, name in self.tensors.items()}


def layout_of(published: str, shape: tuple[int, ...]) -> TensorLayout:
    """The layout of the parameter `published` of this shape. Raises KeyError if PyTorch's models have none."""
    return lay_out_tensors(*_row(published), shape)


def lay_out_tensors(tensor: str, dims: str, shape: tuple[int, ...]) -> TensorLayout:
    """The layout of a parameter of this shape, by a row of the table: tensor names, and dims here -> dims there."""
    letters, groups = _parsed(dims)
    stacked = shape[: len(shape) - len(letters)]
    sizes = dict(zip(letters, shape[len(stacked) :], strict=True))
    return TensorLayout(
        shape=shape,
        tensors=dict(_places(tensor, stacked)),
        order=tuple(letters.index(letter) for group in groups for letter in group),
        tensor_shape=tuple(math.prod(sizes[letter] for letter in group) for group in groups),
    )


# The layout of a parameter by its published name and shape.
Layout = Callable[[str, tuple[int, ...]], TensorLayout]


@contextlib.contextmanager
def tensors_of(params: Leaves, folder: Path, layout: Layout = layout_of) -> Iterator[dict[str, StoredLeaf]]:
    """The tensors of all parameters by published name; read in this order, one parameter at a time is `at_hand`."""
    held: dict[str, StoredLeaf] = {}
    with contextlib.ExitStack() as stack:

        def near(name: str) -> StoredLeaf:
            if name not in held:
                held.clear()
                stack.close()
                held[name] = stack.enter_context(at_hand(params[name], folder))
            return held[name]

        tensors: dict[str, StoredLeaf] = {}
        for name, leaf in params.items():
            tensors |= layout(name, leaf.shape).split(leaf.dtype, functools.partial(near, name))
        yield tensors


def _row(published: str) -> tuple[str, str]:
    if published in _TABLE:
        return _TABLE[published]
    siblings = [_TABLE.get(re.sub("/bias$", f"/{name}", published)) for name in ("kernel", "scale")]
    for tensor, dims in filter(None, siblings):
        outputs = _parsed(dims)[1][0]
        merged = f"({' '.join(outputs)})" if len(outputs) > 1 else outputs[0]
        return re.sub("weight$", "bias", tensor), f"{' '.join(outputs)} -> {merged}"
    raise KeyError(f"openpi's PyTorch models have no parameter {published}")


def _parsed(dims: str) -> tuple[list[str], list[list[str]]]:
    here, there = dims.split(" -> ")
    return here.split(), [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\w", there)]


def _places(tensor: str, stacked: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    alternatives = re.search(r"\{(\w+(?:,\w+)+)\}", tensor)
    for place in itertools.product(*map(range, stacked)):
        name = tensor
        if alternatives:
            name = name.replace(alternatives[0], alternatives[1].split(",")[place[-1]])
        yield place, name.replace("{layer}", str(place[0])) if place else name
