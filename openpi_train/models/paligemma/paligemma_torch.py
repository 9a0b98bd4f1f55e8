"""PaliGemma in Hugging Face's format, read and written: a folder of `google/paligemma-3b-pt-224` or similar.

transformers has given its parameters three sets of names: `language_model.model...` (up to 4.51, on the hub),
`model.language_model...` (in memory since), and `vision_tower...` without `vision_model` (written by 5). All are read,
and the first is written. Read next: `torch_names.py` for the layout of weights in tensors, `big_vision.py` for the
original format.
"""

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core.files import write_json
from openpi_train.data.tokenizers.tokenizer import FILE
from openpi_train.interop import safetensors_file
from openpi_train.interop.checkpoint_tokenizer import copy_token_files
from openpi_train.interop.openpi_torch import joined_params, layouts_of, needed, refuse_factors, settle_heads
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Index, Leaves, Piece, Stored, StoredLeaf, Writer
from openpi_train.interop.torch_names import TIED_HEAD, tensors_of
from openpi_train.models.model_config import ModelConfig, as_policy
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

# Parameters that a published PaliGemma does not have: action experts, their projections, low-rank factors.
NOT_IN_IT = r"(?!PaliGemma/).*|PaliGemma/llm/.*_1/.*|.*lora.*"
# Parameters of a policy that are its PaliGemma; with low-rank factors, which the writer refuses.
HELD = r"PaliGemma/(?!llm/.*_1/).*"
TABLE = "PaliGemma/llm/embedder/input_embedding"
_PREFIX = "paligemma_with_expert.paligemma."
# Hugging Face's names, and the ones of `torch_names`.
_EMBEDDING = r"(language_model\.model|model\.language_model)\.embed_tokens\.weight"
_RENAMED = {
    r"(model\.)?vision_tower\.(vision_model\.)?": f"{_PREFIX}model.vision_tower.vision_model.",
    r"(model\.)?multi_modal_projector\.": f"{_PREFIX}model.multi_modal_projector.",
    r"(language_model\.model|model\.language_model)\.": f"{_PREFIX}model.language_model.",
    r"(language_model\.)?lm_head\.": f"{_PREFIX}lm_head.",
}
# The names of `torch_names`, and the ones on the hub.
_PUBLISHED = {
    TIED_HEAD: "language_model.model.embed_tokens.weight",
    f"{_PREFIX}model.language_model.": "language_model.model.",
    f"{_PREFIX}model.vision_tower.": "vision_tower.",
    f"{_PREFIX}model.multi_modal_projector.": "multi_modal_projector.",
}
# transformers adds a token for images and pads the vocabulary to a multiple of this.
_FILLED_TO = 64
_CONFIG = "config.json"
# Tokens of PaliGemma's tokenizer.
_TOKEN_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_ACTIVATION = "gelu_pytorch_tanh"


def recognises(place: Place) -> bool:
    """Whether the folder holds tensors under Hugging Face's names of PaliGemma."""
    return any(re.fullmatch(_EMBEDDING, name) for name in safetensors_file.tensor_names(place))


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """Open PaliGemma's parameters by published name.

    Raises UsageError without a model, CheckpointError if tensors do not fit the model or embeddings are not tied.
    """
    params = params_of(place, safetensors_file.open_model(place), needed(model, place))
    return Stored(where=str(place), format="paligemma", params=params)


def params_of(place: Place, tensors: Leaves, model: ModelConfig) -> Leaves:
    """The model's PaliGemma by published name, from tensors under transformers' names.

    Raises CheckpointError if the tensors do not fit the model or embeddings are not tied.
    """
    found = {_torch_name(name): tensor for name, tensor in tensors.items()}
    if len(found) < len(tensors):
        raise CheckpointError(f"{place} holds the same parameters under several names; it must have one set of names")
    settle_heads(place, found, speaks=True)
    if TIED_HEAD in found:
        found[TIED_HEAD] = without_filling(found[TIED_HEAD], as_policy(model).vocab_size, place)
    return joined_params(place, found, layouts_of(model, without=NOT_IN_IT), model)


def prepare(stored: Stored, model: ModelConfig | None = None) -> Writer:
    """The writer of a folder for `PaliGemmaForConditionalGeneration.from_pretrained`. In one process.

    Raises UsageError as `backbone_of`.
    """
    del model  # sizes are in the parameters' shapes
    params = dict(backbone_of(stored.params))
    config = published_config(params)
    params[TABLE] = with_filling(params[TABLE])

    def write(directory: Path) -> None:
        directory.mkdir(parents=True)
        write_json(directory / _CONFIG, config)
        copy_token_files(stored, directory, (FILE,))
        with tensors_of(params, directory) as tensors:
            named = {_published_name(name): tensor for name, tensor in tensors.items()}
            safetensors_file.write_model(directory, named, metadata={"format": "pt"})

    return write


def backbone_of(params: Leaves) -> Leaves:
    """The parameters, which must be a PaliGemma's. Raises UsageError if they are not, or have low-rank factors."""
    if TABLE not in params:
        raise UsageError("this model has no PaliGemma in it, and the format holds nothing else; choose another --to")
    refuse_factors(params)
    return params


def published_config(params: Leaves) -> dict[str, Any]:
    """The content of config.json, as transformers writes it, for a PaliGemma with these parameters, not yet filled."""
    block, language = "PaliGemma/img/Transformer/encoderblock/", "PaliGemma/llm/layers/"
    shapes = {name: leaf.shape for name, leaf in params.items()}
    patch_size, _, _, vision_width = shapes["PaliGemma/img/embedding/kernel"]
    num_patches = shapes["PaliGemma/img/pos_embedding"][1]
    vision_depth, _, vision_heads, _ = shapes[f"{block}MultiHeadDotProductAttention_0/query/kernel"]
    depth, num_heads, head_dim, width = shapes[f"{language}attn/attn_vec_einsum/w"]
    key_value = shapes.get(f"{language}attn/kv_einsum/w")
    vocab_size, dtype = shapes[TABLE][0], str(np.result_type(*(leaf.dtype for leaf in params.values())))
    return {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "torch_dtype": dtype,
        "hidden_size": width,
        "projection_dim": width,
        "ignore_index": -100,
        "image_token_index": vocab_size,
        **_TOKEN_IDS,
        "text_config": {
            "model_type": "gemma",
            "torch_dtype": dtype,
            "vocab_size": num_rows(vocab_size),
            "hidden_size": width,
            "intermediate_size": shapes[f"{language}mlp/linear"][1],
            "num_hidden_layers": depth,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads if key_value is None else key_value[2],
            "head_dim": head_dim,
            "hidden_act": _ACTIVATION,
            "hidden_activation": _ACTIVATION,
            "num_image_tokens": num_patches,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "torch_dtype": dtype,
            "hidden_size": vision_width,
            "intermediate_size": shapes[f"{block}MlpBlock_0/Dense_0/kernel"][2],
            "num_hidden_layers": vision_depth,
            "num_attention_heads": vision_heads,
            "image_size": patch_size * math.isqrt(num_patches),
            "patch_size": patch_size,
            "num_image_tokens": num_patches,
            "projection_dim": width,
            "projector_hidden_act": "gelu_fast",
            "vision_use_head": False,
        },
    }


def _torch_name(name: str) -> str:
    """The name in `torch_names`; other names unchanged, for `account` to report."""
    for pattern, prefix in _RENAMED.items():
        if match := re.match(pattern, name):
            return prefix + name[match.end() :]
    return name


def _published_name(name: str) -> str:
    """The name on the hub of a tensor in `torch_names`."""
    prefix = next(prefix for prefix in _PUBLISHED if name.startswith(prefix))
    return _PUBLISHED[prefix] + name.removeprefix(prefix)


def num_rows(vocab_size: int) -> int:
    """Rows of the published embedding table of this vocabulary: one for <image>, and up to a multiple of 64."""
    return -(-(vocab_size + 1) // _FILLED_TO) * _FILLED_TO


def with_filling(table: StoredLeaf) -> StoredLeaf:
    """The embedding table with all its published rows; each of the added ones is the mean of the others.

    On the hub they are drawn around that mean. No text has these tokens, and the mean never has the highest logit.
    """
    count, width = table.shape

    @functools.cache
    def mean() -> np.ndarray:
        total = np.zeros(width, np.float64)
        for where, piece in table.pieces():
            total[where[1]] += piece.astype(np.float32).sum(axis=0, dtype=np.float64)
        return (total / count).astype(table.dtype)

    def stream(index: Index) -> Iterator[Piece]:
        rows, columns = index
        if rows.start < count:
            yield from table.pieces((slice(rows.start, min(rows.stop, count)), columns))
        if rows.stop > count:
            added, row = slice(max(rows.start, count), rows.stop), mean()[columns]
            yield (added, columns), np.broadcast_to(row, (added.stop - added.start, len(row)))

    filled = StoredLeaf.streamed((num_rows(count), width), table.dtype, table.chunk, stream)
    in_any_order = table.stream is None and table.chunk is None
    return dataclasses.replace(filled, stream=None) if in_any_order else filled


def without_filling(table: StoredLeaf, vocab_size: int, place: Place) -> StoredLeaf:
    """The embedding table without padding rows; unchanged if it has other rows beyond the model's vocabulary."""
    extra = table.shape[0] - vocab_size
    if not 0 < extra <= _FILLED_TO:
        return table
    logger.info(
        "%s: the last %d rows of the embedding table, beyond the model's %d, are left out", place, extra, vocab_size
    )
    return dataclasses.replace(table, shape=(vocab_size, *table.shape[1:]))
