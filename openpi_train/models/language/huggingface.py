"""Language models in Hugging Face's format, read and written: a folder as `save_pretrained` writes it.

    config.json                            sizes and kinds (`models/language/hf_config.py`)
    model.safetensors                      the tensors, or several files and model.safetensors.index.json
    tokenizer.json, tokenizer_config.json, chat_template.jinja, ...    copied unchanged
    generation_config.json                 copied; the tokens that end an answer are added if no file names them

PyTorch has a tensor per layer, weights as [outputs, inputs], and heads merged. Read next: `torch_names.py`, which
assembles parameters from tensors, and `safetensors_file.py`.
"""

import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

from openpi_train.data.core.files import write_json
from openpi_train.data.core.hub import SCHEME, hub_folder
from openpi_train.data.tokenizers.text_tokenizer import GENERATION, KEPT, end_tokens, load_text_tokenizer
from openpi_train.interop import native_format, safetensors_file
from openpi_train.interop.checkpoint_tokenizer import copy_token_files
from openpi_train.interop.openpi_torch import joined_params, layouts_of, refuse_factors
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Stored, StoredLeaf, Writer, same_values
from openpi_train.interop.torch_names import TensorLayout, lay_out_tensors, tensors_of
from openpi_train.json_object import JsonObject
from openpi_train.models.language.accompanied import AccompaniedConfig
from openpi_train.models.language.hf_config import FAMILIES, hf_config, hf_reward_config, sizes_of
from openpi_train.models.language.language import LanguageConfig
from openpi_train.models.language.language_part import language_of
from openpi_train.models.language.reward import SCORE, RewardConfig
from openpi_train.models.model_config import ModelConfig
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
# Keys that a generated config takes over from the one that came with the weights.
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TABLE, _HEAD, _SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
# Tables of frequencies, which earlier versions of transformers wrote; nothing reads them.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")
# Dims here -> dims there, by the end of the published name (`hf_names.py`); letters in brackets are merged.
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
    r"q_proj/lora_a": "d r -> r d",
    r"q_proj/lora_b": "r n h -> (n h) r",
    r"k_proj\+v_proj/lora_a": "d r -> r d",
    r"k_proj\+v_proj/lora_b": "r k h -> (k h) r",
    r"o_proj/lora_a": "n h r -> r (n h)",
    r"o_proj/lora_b": "r d -> d r",
    r"(gate_proj\+up_proj|down_proj)/lora_a": "i r -> r i",
    r"(gate_proj\+up_proj|down_proj)/lora_b": "r o -> o r",
}


@dataclasses.dataclass(frozen=True)
class CarriedFiles(Place):
    """A model's folder that lists only the files that checkpoints of ours keep, and that are written back unchanged."""

    def names(self, below: str = "") -> list[str]:
        return [name for name in KEPT if name.startswith(below) and self.has(name)]


def recognises(place: Place) -> bool:
    """Whether the folder has a config.json of transformers, and safetensors files."""
    if not place.has(CONFIG) or not (place.has(safetensors_file.FILE) or place.has(safetensors_file.INDEX)):
        return False
    return "model_type" in place.json(CONFIG)


def read_model(place: Place, **fields: object) -> LanguageConfig:
    """The model of the folder's config.json, with these fields changed. Raises CheckpointError."""
    if not place.has(CONFIG):
        raise CheckpointError(f"{place} has no {CONFIG}: name the folder of a language model as Hugging Face has it")
    return LanguageConfig.published(place.json(CONFIG), f"{place}/{CONFIG}", **fields)


def named_model(where: str) -> LanguageConfig:
    """The model of a folder, or of the repository `hub:USER/NAME`, by its config.json alone; its `path` is `where`.

    Raises CheckpointError if there is no such file, or no model of a known family in it.
    """
    if where.startswith(SCHEME):
        place = Place.of(hub_folder(where, repo_type="model", patterns=(CONFIG,), raised=CheckpointError))
    else:
        place = Place.of(where)
        if place.local is not None and not place.local.is_dir():
            raise CheckpointError(
                f"--model.path {where}: there is no such folder; give a model's folder in Hugging Face's form, or "
                f"{SCHEME}USER/NAME"
            )
        if not place.has(CONFIG) and native_format.recognises(place):
            raise CheckpointError(
                f"--model.path {where} is a run of ours: start from its weights with --weight-loader.params-path, and "
                "name the published model that it began with here"
            )
    return read_model(place, path=where)


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """The parameters by published name, and the files that belong to them. `model` None is the folder's own.

    A reward model's score is among them, for whoever asks for a language model to allow or refuse. Raises
    CheckpointError if the tensors are not the model's, or the tokenizer has more tokens than the model.
    """
    config = place.json(CONFIG)
    sizes = sizes_of(config, f"{place}/{CONFIG}")
    language = read_model(place) if model is None else language_of(model)
    if language is None:
        raise CheckpointError(
            f"{place} holds a language model ({config['model_type']}), and this is for a {type(model).__name__}: name "
            "an experiment of a language model, or another checkpoint"
        )
    if sizes != language.sizes:
        raise CheckpointError(_other_sizes(place, sizes, language))
    _check_tokenizer(place, sizes.vocab_size)
    found = {name: leaf for name, leaf in safetensors_file.open_model(place).items() if not _DERIVED.fullmatch(name)}
    layouts = layouts_of(language, hf_layout)
    if (score := found.pop(_SCORE, None)) is not None:
        if score.shape[0] != 1:
            raise CheckpointError(
                f"{place} tells {score.shape[0]} classes apart ({_SCORE} is {score.shape}); a reward model has one "
                "score (num_labels 1)"
            )
        if _HEAD not in found:
            layouts.pop("lm_head/weight", None)  # a reward model has none, whatever its config says of tables
    if sizes.tied:
        _leave_one_table(place, found)
    params = dict(joined_params(place, found, layouts, language))
    if score is not None:
        params[SCORE] = score
    return Stored(where=str(place), format="huggingface", params=params, token_files=CarriedFiles(place.url))


def write(directory: Path, stored: Stored, model: ModelConfig | None = None) -> None:
    """Check and write, as `prepare`."""
    prepare(stored, model)(directory)


def prepare(stored: Stored, model: ModelConfig | None = None) -> Writer:
    """The writer of a folder for `AutoModelForCausalLM.from_pretrained` and its tokenizer's. In one process.

    A reward model's is for `AutoModelForSequenceClassification`. Raises UsageError if the model cannot be written.
    """
    language = None if isinstance(model, AccompaniedConfig) or model is None else language_of(model)
    if language is None:
        raise UsageError(
            f"--to huggingface writes language models; this is a {type(model).__name__}. The PaliGemma in a policy is "
            "written with --to paligemma"
        )
    refuse_factors(stored.params)
    dtypes = {str(leaf.dtype) for leaf in stored.params.values()}
    try:
        config = hf_config(
            language.family, language.sizes, language.context_length, dtypes.pop() if len(dtypes) == 1 else "float32"
        )
    except ValueError as error:
        raise UsageError(f"this model cannot be written for transformers: {error}") from error
    if isinstance(model, RewardConfig):
        config = hf_reward_config(config)

    def write(directory: Path) -> None:
        directory.mkdir(parents=True)
        copy_token_files(stored, directory, KEPT)
        known = json.loads((directory / CONFIG).read_bytes()) if (directory / CONFIG).is_file() else {}
        if not _describes(known, language, config):
            write_json(directory / CONFIG, {key: known[key] for key in _TOKEN_IDS if key in known} | config)
        if not isinstance(model, RewardConfig) and (directory / TOKENIZER).is_file():
            _write_end_tokens(directory)
        with tensors_of(stored.params, directory, hf_layout) as tensors:
            safetensors_file.write_model(directory, tensors, metadata={"format": "pt"})

    return write


def hf_layout(published: str, shape: tuple[int, ...]) -> TensorLayout:
    """The layout of the parameter of this name and shape. Raises KeyError if no such model has it."""
    end = "/".join(published.split("/")[-2:])
    dims = next((dims for pattern, dims in _DIMS.items() if re.fullmatch(pattern, end)), None)
    if dims is None:
        raise KeyError(f"Hugging Face's language models have no parameter {published}")
    name = re.sub(r"(\w+)\+(\w+)", r"{\1,\2}", published.replace("/", ".")).replace("layers.", "layers.{layer}.")
    return lay_out_tensors(re.sub(r"lora_(a|b)$", lambda end: f"lora_{end[1].upper()}.weight", name), dims, shape)


def written_part(model: ModelConfig) -> ModelConfig:
    """What is written of a model: of a policy and its reference the policy, else all of it."""
    return model.policy if isinstance(model, AccompaniedConfig) else model


def _write_end_tokens(directory: Path) -> None:
    """Name the tokens that end a completion in generation_config.json, unless files of the folder do.

    Without them transformers takes those of the family's default, which are another vocabulary's. Raises
    CheckpointError if the tokenizer cannot be read.
    """
    config, said = (
        json.loads((directory / file).read_bytes()) if (directory / file).is_file() else {}
        for file in (CONFIG, GENERATION)
    )
    if said.get("eos_token_id") is not None:
        return
    try:
        tokenizer = load_text_tokenizer(str(directory))
        ends, others = end_tokens(tokenizer), tokenizer.special_ids
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    known = config.get("eos_token_id")
    known = known if isinstance(known, list) else [] if known is None else [known]
    if not set(ends) <= set(known):
        found = list(dict.fromkeys([*ends, *known]))
        own = {f"{role}_id": others[role] for role in ("bos_token", "pad_token") if role in others}
        write_json(directory / GENERATION, own | said | {"eos_token_id": found if len(found) > 1 else found[0]})


def _describes(known: JsonObject, model: LanguageConfig, config: JsonObject) -> bool:
    """Whether the config that came with the weights still describes what is written."""
    if known.get("model_type") not in FAMILIES or sizes_of(known, CONFIG) != model.sizes:
        return False
    if known.get("architectures") != config["architectures"]:
        return False
    if "id2label" in config and len(known.get("id2label", ())) != len(config["id2label"]):
        return False
    said = known.get("dtype") or known.get("torch_dtype")
    return said in (None, config["torch_dtype"]) and known.get("max_position_embeddings") == model.context_length


def _other_sizes(place: Place, sizes: Any, model: LanguageConfig) -> str:
    lines = []
    for field in dataclasses.fields(sizes):
        its, own = getattr(sizes, field.name), getattr(model.sizes, field.name)
        if its != own:
            lines.append(f"  --model.sizes.{field.name.replace('_', '-')}: it has {its}, the model {own}")
    return "\n".join(
        [f"{place} is another model than the experiment's; give its sizes, or another checkpoint:", *lines]
    )


def _leave_one_table(place: Place, found: dict[str, StoredLeaf]) -> None:
    """Remove the second copy of the embedding table, if the file has two. Raises CheckpointError if they differ."""
    head, table = found.pop(_HEAD, None), found.get(_TABLE)
    if head is not None and table is not None and not same_values(head, table):
        raise CheckpointError(
            f"{place}: {_HEAD} and {_TABLE} differ, and {CONFIG} says that they are one (tie_word_embeddings): set "
            "that to false if the model was trained with two"
        )


def _check_tokenizer(place: Place, vocab_size: int) -> None:
    """Raise CheckpointError if the tokenizer has token ids beyond the embedding table. Special ones are only logged.

    Gemma 3's tokenizer has one for images, for which its text models' tables have no row.
    """
    if not place.has(TOKENIZER):
        return
    said = place.json(TOKENIZER)
    try:
        vocab = said["model"]["vocab"]
        ids = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
        added = {token["id"]: token for token in said.get("added_tokens", [])}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{place}/{TOKENIZER} is damaged ({type(error).__name__}: {error}); fetch it again"
        ) from error
    special = {number for number, token in added.items() if token.get("special")}
    beyond = sorted(number for number in ids | added.keys() if number >= vocab_size)
    if wrong := [number for number in beyond if number not in special]:
        raise CheckpointError(
            f"{place}: the tokenizer has {len(wrong)} tokens, from {wrong[0]} on, beyond the {vocab_size} rows of the "
            f"model's table: {TOKENIZER} belongs to another model; fetch both from one place, or give the table these "
            "rows (resize_token_embeddings)"
        )
    if beyond:
        names = ", ".join(repr(added[number]["content"]) for number in beyond[:4])
        logger.warning("%s: the model's table has no row for %s: texts must not hold them", place, names)
