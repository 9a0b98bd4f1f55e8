"""The layout of a language model's parameters in Hugging Face's tensors, by published name (`models/hf_names.py`).

PyTorch has a tensor per layer, weights as [outputs, inputs], and heads merged. Read next: `torch_names.py`, which
assembles parameters from tensors, and `huggingface.py`.
"""

import re

from openpi_train.interop.torch_names import TensorLayout, lay_out_tensors

# Dims here -> dims there, by the end of the published name; letters in brackets are merged.
_DIMS = {
    r"(embed_tokens|lm_head)/weight": "v d -> v d",
    r".*norm/weight": "d -> d",
    r"q_proj/weight": "d n h -> (n h) d",
    r"q_proj/bias": "n h -> (n h)",
    r"k_proj\+v_proj/weight": "d k h -> (k h) d",
    r"k_proj\+v_proj/bias": "k h -> (k h)",
    r"o_proj/weight": "n h d -> d (n h)",
    r"(gate_proj\+up_proj|down_proj)/weight": "i o -> o i",
    r"score/weight": "o d -> o d",
}


def hf_layout(published: str, shape: tuple[int, ...]) -> TensorLayout:
    """The layout of the parameter of this name and shape. Raises KeyError if no such model has it."""
    end = "/".join(published.split("/")[-2:])
    dims = next((dims for pattern, dims in _DIMS.items() if re.fullmatch(pattern, end)), None)
    if dims is None:
        raise KeyError(f"Hugging Face's language models have no parameter {published}")
    name = re.sub(r"(\w+)\+(\w+)", r"{\1,\2}", published.replace("/", "."))
    return lay_out_tensors(name.replace("model.layers.", "model.layers.{layer}."), dims, shape)
