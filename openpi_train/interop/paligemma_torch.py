"""Reader of PaliGemma in Hugging Face's format: a folder of `google/paligemma-3b-pt-224` or similar.

transformers has given its parameters three sets of names: `language_model.model...` (up to 4.51, on the hub),
`model.language_model...` (in memory since), and `vision_tower...` without `vision_model` (written by 5). All are read.
Read next: `torch_names.py` for the layout of weights in tensors, `big_vision.py` for the original format.
"""

import dataclasses
import logging
import re

from openpi_train.interop import safetensors_file
from openpi_train.interop.openpi_torch import joined_params, layouts_of, needed, settle_heads
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Stored, StoredLeaf
from openpi_train.interop.torch_names import TIED_HEAD
from openpi_train.models.model_config import ModelConfig, as_policy
from openpi_train.runtime.exits import CheckpointError

logger = logging.getLogger(__name__)

# Parameters that a published PaliGemma does not have: action experts, their projections, low-rank factors.
NOT_IN_IT = r"(?!PaliGemma/).*|PaliGemma/llm/.*_1/.*|.*lora.*"
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
# transformers pads the vocabulary to a multiple of this.
_FILLED_TO = 64


def recognises(place: Place) -> bool:
    """Whether the folder holds tensors under Hugging Face's names of PaliGemma."""
    return any(re.fullmatch(_EMBEDDING, name) for name in safetensors_file.tensor_names(place))


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """Open PaliGemma's parameters by published name.

    Raises UsageError without a model, CheckpointError if tensors do not fit the model or embeddings are not tied.
    """
    model = needed(model, place)
    stored = safetensors_file.open_model(place)
    found = {_torch_name(name): tensor for name, tensor in stored.items()}
    if len(found) < len(stored):
        raise CheckpointError(f"{place} holds the same parameters under several names; it must have one set of names")
    settle_heads(place, found, speaks=True)
    found[TIED_HEAD] = without_filling(found[TIED_HEAD], as_policy(model).vocab_size, place)
    params = joined_params(place, found, layouts_of(model, without=NOT_IN_IT), model)
    return Stored(where=str(place), format="paligemma", params=params)


def _torch_name(name: str) -> str:
    """The name in `torch_names`; other names unchanged, for `account` to report."""
    for pattern, prefix in _RENAMED.items():
        if match := re.match(pattern, name):
            return prefix + name[match.end() :]
    return name


def without_filling(table: StoredLeaf, vocab_size: int, place: Place) -> StoredLeaf:
    """The embedding table without padding rows; unchanged if it has other rows beyond the model's vocabulary."""
    extra = table.shape[0] - vocab_size
    if not 0 < extra <= _FILLED_TO:
        return table
    logger.info(
        "%s: the last %d rows of the embedding table, beyond the model's %d, are left out", place, extra, vocab_size
    )
    return dataclasses.replace(table, shape=(vocab_size, *table.shape[1:]))
