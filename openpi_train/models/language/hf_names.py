"""Published names of a language model's parameters: Hugging Face's, without layer numbers.

    layers/attention/key_value/weight  ->  model/layers/self_attn/k_proj+v_proj/weight

A stack of layers is one parameter, and so are keys and values, and gate and up.
Read next: `language.py`, and `models/language/huggingface.py`, which finds the tensors of a file by these names.
"""

from openpi_train.nn.decoder_sizes import DecoderSizes

_NAMES = {
    "token_embedding": "model/embed_tokens/weight",
    "head": "lm_head/weight",
    "final_norm/scale": "model/norm/weight",
    "layers/attention_norm/scale": "model/layers/input_layernorm/weight",
    "layers/attention/query_bias": "model/layers/self_attn/q_proj/bias",
    "layers/attention/key_value_bias": "model/layers/self_attn/k_proj+v_proj/bias",
    "layers/attention/query_norm/scale": "model/layers/self_attn/q_norm/weight",
    "layers/attention/key_norm/scale": "model/layers/self_attn/k_norm/weight",
}
# Each with `weight`, and the factors `lora_a` and `lora_b`.
_WEIGHTS = {
    "layers/attention/query": "model/layers/self_attn/q_proj",
    "layers/attention/key_value": "model/layers/self_attn/k_proj+v_proj",
    "layers/attention/output": "model/layers/self_attn/o_proj",
    "layers/mlp/gate_up": "model/layers/mlp/gate_proj+up_proj",
    "layers/mlp/down": "model/layers/mlp/down_proj",
}
# `post_attention_layernorm` is the norm before the feed-forward layer, except in models with norms after both blocks.
_MLP_NORM = {"layers/mlp_norm/scale": "model/layers/post_attention_layernorm/weight"}
_POST_NORMS = {
    "layers/attention_post_norm/scale": "model/layers/post_attention_layernorm/weight",
    "layers/mlp_norm/scale": "model/layers/pre_feedforward_layernorm/weight",
    "layers/mlp_post_norm/scale": "model/layers/post_feedforward_layernorm/weight",
}

# Names that `--freeze` accepts besides patterns, with the patterns of our paths.
PARTS = {
    "embeddings": "token_embedding|head",
    "attention": "layers/attention/.*",
    "mlp": "layers/mlp/.*",
    "norms": ".*norm/scale",
}


def hf_name(path: str, sizes: DecoderSizes) -> str:
    """The published name of our parameter `path`. Raises KeyError if there is none."""
    name = {**_NAMES, **(_POST_NORMS if sizes.post_norms else _MLP_NORM)}.get(path)
    if name is None:
        weight, _, part = path.rpartition("/")
        name = f"{_WEIGHTS[weight]}/{part}"
    return name


def explain_hf(missing: list[str], extra: list[str], misshapen: list[str]) -> list[str]:
    """What to do about a language model's checkpoint that does not match, by published names."""
    if "score/weight" in extra:
        return ["it is a reward model: train a RewardConfig, or give the language model that it was trained from"]
    found = []
    if missing == ["lm_head/weight"]:
        found.append("its logits are computed with the embedding table: --model.sizes.tied")
    if any(name.endswith("embed_tokens/weight") for name in misshapen):
        found.append("the embedding table has another size: --model.sizes.vocab-size, --model.sizes.width")
    if any("embed_tokens" not in name for name in misshapen):
        found.append("the layers have other sizes: use those of its config.json (`LanguageConfig.published`)")
    return found
