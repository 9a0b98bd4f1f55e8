"""A language model's sizes from its published config.json, and a config.json for our sizes.

The keys are those of transformers 4 and 5, with its defaults for missing keys. Anything that this decoder does not
support is an error, never ignored. Read next: `nn/decoder_sizes.py`, `language.py`.
"""

import difflib
from collections.abc import Mapping
from typing import Any, Literal, get_args

from openpi_train.json_object import JsonObject
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.runtime.exits import CheckpointError

# `model_type` of each family; SmolLM2 is a llama, and Gemma 3's text model has its own type.
Family = Literal["llama", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3", "mistral"]
FAMILIES: tuple[Family, ...] = get_args(Family)
_CLASSES: Mapping[Family, str] = {
    "llama": "LlamaForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
# Of reward models, where another ending is not all.
_SCORING = {"gemma3_text": "Gemma3TextForSequenceClassification"}
_GEMMAS = ("gemma", "gemma2", "gemma3_text")
# Defaults of transformers for missing keys.
_DEFAULTS: Mapping[Family, Mapping[str, Any]] = {
    "llama": {},
    "gemma": {"head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {
        "head_dim": 256,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "head_dim": 256,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "mistral": {"sliding_window": 4096},
}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
_SLIDING, _FULL = "sliding_attention", "full_attention"
# Keys with the only values that this decoder supports.
_ONLY = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1.0, None),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
}
_ROPE_TYPES = ("default", "linear", "llama3")
_WHOLE, _NUMBER, _FLAG, _OBJECT = "a whole number", "a number", "true or false", "an object"
_TYPES = {_WHOLE: int, _NUMBER: (int, float), _FLAG: bool, _OBJECT: Mapping}
# What the value of a key must be, unless it is null, which is as if the key were missing.
_VALUES: Mapping[str, str] = {
    **dict.fromkeys(("head_dim", "sliding_window", "sliding_window_pattern", "max_window_layers"), _WHOLE),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), _WHOLE),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"), _NUMBER),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _NUMBER),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), _NUMBER),
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window"), _FLAG),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _OBJECT),
}


def family_of(config: JsonObject, where: str) -> Family:
    """The family of a config.json. Raises CheckpointError if it is unknown."""
    kind = config.get("model_type")
    for family in FAMILIES:
        if kind == family:
            return family
    closest = difflib.get_close_matches(str(kind), FAMILIES, n=1, cutoff=0.0)[0]
    raise CheckpointError(
        f"{where}: language models of type {kind!r} are not known; known are {', '.join(FAMILIES)} (closest: "
        f"{closest}). Of a model that also sees, the text part must be saved by itself"
    )


def sizes_of(config: JsonObject, where: str) -> DecoderSizes:
    """The sizes in a config.json; errors name it `where`. Raises CheckpointError for missing keys or unknown values."""
    family = family_of(config, where)
    _check_values(config, where)
    said = {**_DEFAULTS[family], **config}
    _refuse_others(said, where)
    gemma = family in _GEMMAS
    num_heads, width = _number(said, "num_attention_heads", where), _number(said, "hidden_size", where)
    if family == "llama" and said.get("num_key_value_heads") is None:  # the first Llama, without grouped heads
        said["num_key_value_heads"] = num_heads
    depth = _number(said, "num_hidden_layers", where)
    sliding = _sliding_layers(family, said, depth, where)
    sizes = DecoderSizes(
        vocab_size=_number(said, "vocab_size", where),
        width=width,
        depth=depth,
        mlp_dim=_number(said, "intermediate_size", where),
        num_heads=num_heads,
        num_kv_heads=_number(said, "num_key_value_heads", where),
        head_dim=said.get("head_dim") or width // num_heads,
        activation=_activation(family, said, where),
        norms_from_one=gemma,
        norm_eps=float(_or(said, "rms_norm_eps", 1e-6)),
        post_norms=family in ("gemma2", "gemma3_text"),
        scaled_embeddings=gemma,
        biases=family == "qwen2",
        query_key_norms=family in ("qwen3", "gemma3_text"),
        query_divisor=_float(said.get("query_pre_attn_scalar")),
        attention_cap=_float(said.get("attn_logit_softcapping")),
        score_cap=_float(said.get("final_logit_softcapping")),
        window=said["sliding_window"] if sliding else None,
        sliding_layers=sliding,
        tied=bool(said.get("tie_word_embeddings", False)),
        **_rope(family, said, where),
    )
    if problems := sizes.check():
        raise CheckpointError(f"{where} is no model that can be built: {'; '.join(problems)}")
    return sizes


def hf_config(family: Family, sizes: DecoderSizes, context_length: int, dtype: str) -> dict[str, Any]:
    """The config.json of a model of ours, for transformers 4 and 5. `dtype` is that of its tensors.

    Raises ValueError if the family has no such model.
    """
    gemma = family in _GEMMAS
    config: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.mlp_dim,
        "num_hidden_layers": sizes.depth,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": context_length,
        "rms_norm_eps": sizes.norm_eps,
        "tie_word_embeddings": sizes.tied,
        "rope_theta": sizes.rope_base,
        "rope_scaling": _scaling(sizes),
        "torch_dtype": dtype,
    }
    config["hidden_act"] = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}[sizes.activation]
    if gemma:
        config["hidden_activation"] = config["hidden_act"]
    if family in ("gemma2", "gemma3_text"):
        divisor = sizes.head_dim if sizes.query_divisor is None else sizes.query_divisor
        config |= {
            "query_pre_attn_scalar": int(divisor) if float(divisor).is_integer() else divisor,
            "attn_logit_softcapping": sizes.attention_cap,
            "final_logit_softcapping": sizes.score_cap,
        }
    if family == "gemma3_text":
        config["rope_local_base_freq"] = sizes.sliding_rope.base
    if family != "llama" and family != "gemma":
        config["sliding_window"] = sizes.window
        config["layer_types"] = [_SLIDING if at in sizes.sliding_layers else _FULL for at in range(sizes.depth)]
    if family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = sizes.window is not None
        config["max_window_layers"] = min(sizes.sliding_layers, default=sizes.depth)
    if (again := _as_read(config)) != sizes:
        names = [name for name in vars(sizes) if getattr(again, name) != getattr(sizes, name)]
        raise ValueError(f"no {family} model has these {', '.join(names)}; --model.family must be another")
    return config


def hf_reward_config(config: JsonObject) -> dict[str, Any]:
    """The config.json (`hf_config`) of a reward model on this language model: one for classification with one label."""
    family = config["model_type"]
    return {
        **config,
        "architectures": [_SCORING.get(family, _CLASSES[family].replace("ForCausalLM", "ForSequenceClassification"))],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }


def _as_read(config: JsonObject) -> DecoderSizes:
    try:
        return sizes_of(config, "it")
    except CheckpointError as error:
        raise ValueError(str(error)) from error


def _refuse_others(said: JsonObject, where: str) -> None:
    for key, allowed in _ONLY.items():
        if said.get(key) not in allowed:
            raise CheckpointError(f"{where}: {key} {said[key]!r} is not computed here; allowed: {allowed[0]!r}")


def _check_values(values: Mapping[str, object], where: str) -> None:
    """Raise CheckpointError if a value has not the type of `_VALUES`."""
    for key, value in values.items():
        needed = _VALUES.get(key)
        if needed is None or value is None:
            continue
        if not isinstance(value, _TYPES[needed]) or isinstance(value, bool) != (needed == _FLAG):
            raise CheckpointError(f"{where}: {key} is {value!r}; needed is {needed}: correct it, or fetch it again")


def _or(said: JsonObject, key: str, default: object) -> Any:
    return default if said.get(key) is None else said[key]


def _number(said: JsonObject, key: str, where: str) -> int:
    value = said.get(key)
    if value is None:
        raise CheckpointError(f"{where} says no {key}, which a model of type {said['model_type']} has; fetch it again")
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{where}: {key} is {value!r}; needed is a whole number: correct it, or fetch it again")
    return value


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _activation(family: Family, said: JsonObject, where: str) -> Any:
    name = said.get("hidden_activation") or said.get("hidden_act", "silu")
    if family == "gemma" and name == "gelu":  # Gemma 1's first files say gelu and mean the tanh approximation
        name = "gelu_pytorch_tanh"
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"{where}: the activation {name!r} is not known; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _sliding_layers(family: Family, said: JsonObject, depth: int, where: str) -> tuple[int, ...]:
    """The layers with a sliding window, as listed in the file, or else as transformers derives them."""
    if said.get("sliding_window") is None or family in ("llama", "gemma"):
        return ()
    if family in ("qwen2", "qwen3") and not said.get("use_sliding_window", False):
        return ()
    if family == "mistral":
        return tuple(range(depth))
    kinds = said.get("layer_types")
    if kinds is None and family == "gemma2":
        kinds = [_SLIDING if at % 2 == 0 else _FULL for at in range(depth)]
    elif kinds is None and family == "gemma3_text":
        every = _or(said, "sliding_window_pattern", 6)
        if every < 1:
            raise CheckpointError(f"{where}: sliding_window_pattern is {every}; needed is at least 1: fetch it again")
        kinds = [_SLIDING if (at + 1) % every else _FULL for at in range(depth)]
    elif kinds is None:
        kinds = [_SLIDING if at >= _or(said, "max_window_layers", 28) else _FULL for at in range(depth)]
    if not isinstance(kinds, list) or len(kinds) != depth or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        raise CheckpointError(
            f"{where}: layer_types must name {_SLIDING} or {_FULL} for each of the {depth} layers, and is {kinds}"
        )
    return tuple(at for at, kind in enumerate(kinds) if kind == _SLIDING)


def _rope(family: Family, said: JsonObject, where: str) -> dict[str, Any]:
    """The fields of rotary positions, from `rope_parameters` (transformers 5), or `rope_scaling` and the bases."""
    given, scaling = said.get("rope_parameters") or {}, said.get("rope_scaling") or {}
    by_kind = given if _FULL in given else {}
    for values in (scaling, given, *(by_kind.get(kind, {}) for kind in (_FULL, _SLIDING))):
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where}: rope_parameters of some layers are {values!r}; needed is {_OBJECT}")
        _check_values(values, where)
    rope = by_kind.get(_FULL) or given or scaling
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if given and scaling and any(value != rope.get(key) for key, value in scaling.items() if key != "type"):
        raise CheckpointError(f"{where}: rope_scaling {scaling} and rope_parameters {given} differ: remove one of them")
    if kind not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{where}: rope type {kind!r} is not known; known are {', '.join(_ROPE_TYPES)}")
    fields: dict[str, Any] = {"rope_base": float(_or(rope, "rope_theta", _or(said, "rope_theta", 1e4)))}
    if family == "gemma3_text":
        near = by_kind.get(_SLIDING, {})
        if near.get("rope_type", "default") != "default":
            raise CheckpointError(f"{where}: rope type {near['rope_type']!r} of sliding layers is not known: default")
        fields["sliding_rope_base"] = float(_or(near, "rope_theta", _or(said, "rope_local_base_freq", 1e4)))
    wanted = {"linear": {"rope_factor": "factor"}, "llama3": _LLAMA3}.get(kind, {})
    if absent := [key for key in wanted.values() if rope.get(key) is None]:
        raise CheckpointError(f"{where}: rope type {kind} needs {', '.join(absent)}; fetch the file again")
    found = {field: rope[key] for field, key in wanted.items()}
    return fields | {name: value if name == "rope_original_length" else float(value) for name, value in found.items()}


_LLAMA3 = {
    "rope_factor": "factor",
    "rope_low_frequency": "low_freq_factor",
    "rope_high_frequency": "high_freq_factor",
    "rope_original_length": "original_max_position_embeddings",
}


def _scaling(sizes: DecoderSizes) -> dict[str, Any] | None:
    if sizes.rope_original_length is not None:
        return {"rope_type": "llama3", **{key: getattr(sizes, field) for field, key in _LLAMA3.items()}}
    return None if sizes.rope_factor == 1.0 else {"rope_type": "linear", "factor": sizes.rope_factor}
