"""A published config.json says the sizes of its model; what this decoder does not compute is refused by name."""

import dataclasses

import pytest

from openpi_train.models.language import LanguageConfig
from openpi_train.models.language.hf_config import FAMILIES, hf_config, sizes_of
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.runtime.exits import CheckpointError

# The keys that say sizes, as the hub's files have them (before transformers 5).
LLAMA_32_1B = {
    "model_type": "llama", "attention_bias": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": True, "vocab_size": 128256,
}  # fmt: skip
GEMMA_3_4B_TEXT = {
    "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2560,
    "intermediate_size": 10240, "num_attention_heads": 8, "num_hidden_layers": 34, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_theta": 1000000,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, "sliding_window_pattern": 6,
    "vocab_size": 262208,
}  # fmt: skip
QWEN_25_05B = {
    "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
    "max_window_layers": 21, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MISTRAL_7B_V01 = {
    "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
GEMMA_2_2B = {
    "model_type": "gemma2", "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 2304,
    "intermediate_size": 9216, "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "vocab_size": 256000, "rope_theta": 10000.0,
}  # fmt: skip


def read(config, **changes):
    return sizes_of({**config, **changes}, "config.json")


def test_llama_3s_positions_are_stretched_by_its_rule():
    sizes = read(LLAMA_32_1B)
    assert (sizes.rope_base, sizes.rope_factor, sizes.rope_original_length) == (5e5, 32.0, 8192)
    assert (sizes.rope_low_frequency, sizes.rope_high_frequency) == (1.0, 4.0)
    assert sizes.tied and sizes.activation == "silu" and not sizes.norms_from_one and sizes.norm_eps == 1e-5


def test_gemma_3_has_five_local_layers_to_a_global_one_with_bases_of_their_own():
    sizes = read(GEMMA_3_4B_TEXT)
    assert sizes.window == 1024
    assert sizes.sliding_layers == tuple(layer for layer in range(34) if layer % 6 != 5)
    assert (sizes.rope.base, sizes.rope.factor) == (1e6, 8.0)
    assert (sizes.sliding_rope.base, sizes.sliding_rope.factor) == (1e4, 1.0)
    assert sizes.query_scale == 1 / 16 and sizes.attention_cap is None and sizes.score_cap is None
    assert sizes.post_norms and sizes.query_key_norms and sizes.scaled_embeddings and sizes.tied


def test_gemma_2_slides_in_even_layers_and_has_the_caps_that_its_file_leaves_out():
    sizes = read(GEMMA_2_2B)
    assert sizes.sliding_layers == tuple(range(0, 26, 2)) and sizes.window == 4096
    assert (sizes.attention_cap, sizes.score_cap) == (50.0, 30.0)
    assert sizes.rope == sizes.sliding_rope
    assert read(GEMMA_2_2B, final_logit_softcapping=None).score_cap is None


def test_qwen_2_has_biases_and_slides_only_where_it_says_so():
    sizes = read(QWEN_25_05B)
    assert sizes.biases and sizes.head_dim == 64 and sizes.window is None and not sizes.sliding_layers
    sliding = read(QWEN_25_05B, use_sliding_window=True)
    assert sliding.window == 32768 and sliding.sliding_layers == (21, 22, 23)
    assert read({**QWEN_25_05B, "model_type": "qwen3"}).query_key_norms


def test_mistral_slides_everywhere_or_nowhere():
    assert read(MISTRAL_7B_V01).sliding_layers == tuple(range(32))
    later = read(MISTRAL_7B_V01, sliding_window=None, rope_theta=1e6)
    assert later.window is None and later.rope_base == 1e6 and not later.tied


@pytest.mark.parametrize("config", [LLAMA_32_1B, GEMMA_3_4B_TEXT, QWEN_25_05B, MISTRAL_7B_V01, GEMMA_2_2B])
def test_a_config_that_is_written_says_the_same(config):
    model = LanguageConfig.published(config, "config.json")
    written = hf_config(model.family, model.sizes, model.context_length, "bfloat16")
    assert LanguageConfig.published(written, "it") == model
    assert model.context_length == config.get("max_position_embeddings", 2048)


def test_sizes_that_a_family_cannot_have_are_not_written():
    sizes = dataclasses.replace(read(LLAMA_32_1B), biases=True, score_cap=3.0)
    with pytest.raises(ValueError, match=r"no llama model has these biases, score_cap; --model\.family"):
        hf_config("llama", sizes, 2048, "float32")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gemma3"}, r"'gemma3' are not known; known are llama, gemma, .*closest: gemma"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            r"rope type 'yarn' is not known; known are default, lin",
        ),
        ({"rope_scaling": {"type": "longrope"}}, r"rope type 'longrope' is not known"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"llama3 needs low_freq_factor, high_freq_factor"),
        ({"hidden_act": "relu2"}, r"the activation 'relu2' is not known; known are silu, gelu_pytorch_tanh"),
        ({"attention_bias": True}, r"attention_bias True is not computed here; allowed: False"),
        ({"mlp_bias": True}, r"mlp_bias True is not computed here"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config .* is not computed here; allowed: None"),
        ({"num_hidden_layers": None}, r"says no num_hidden_layers"),
        ({"num_attention_heads": "four"}, r"num_attention_heads is 'four'; needed is a whole number"),
        ({"hidden_size": True}, r"hidden_size is True; needed is a whole number"),
        ({"num_key_value_heads": 5}, r"num_heads 32 is not a multiple of num_kv_heads 5"),
        ({"rope_scaling": "yarn"}, r"rope_scaling is 'yarn'; needed is an object: correct it, or fetch it again"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, r"factor is 'two'; needed is a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"rope_factor 0\.0 must be above 0"),
        ({"rope_scaling": LLAMA_32_1B["rope_scaling"] | {"high_freq_factor": 1}}, r"rope_high_frequency 1\.0 must be"),
        ({"rope_parameters": {"rope_type": "default"}}, r"rope_scaling .*'llama3'.* and rope_parameters .* differ"),
        ({"rope_parameters": {"full_attention": 5}, "rope_scaling": None}, r"rope_parameters of some layers are 5"),
        ({"rope_theta": -1}, r"rope_base -1\.0 must be above 0"),
        ({"head_dim": "64"}, r"head_dim is '64'; needed is a whole number"),
        ({"rms_norm_eps": "1e-6"}, r"rms_norm_eps is '1e-6'; needed is a number"),
        ({"max_position_embeddings": "256"}, r"max_position_embeddings is '256'; needed is a whole number"),
        ({"tie_word_embeddings": "false"}, r"tie_word_embeddings is 'false'; needed is true or false"),
    ],
)
def test_what_is_not_computed_here_is_refused(changes, says):
    with pytest.raises(CheckpointError, match=rf"config\.json.*{says}"):
        read(LLAMA_32_1B, **changes)


def test_kinds_of_layers_must_be_known_and_as_many_as_layers():
    for kinds in (["full_attention"], ["chunked_attention"] * 34):
        with pytest.raises(CheckpointError, match=r"layer_types must name sliding_attention or full_attention"):
            read(GEMMA_3_4B_TEXT, layer_types=kinds)
    with pytest.raises(CheckpointError, match=r"sliding_window_pattern is 0; needed is at least 1"):
        read(GEMMA_3_4B_TEXT, sliding_window_pattern=0)
    with pytest.raises(CheckpointError, match=r"use_bidirectional_attention True"):
        read(GEMMA_3_4B_TEXT, use_bidirectional_attention=True)


def test_what_is_null_is_as_if_it_were_missing():
    names = ("rope_theta", "rms_norm_eps", "max_position_embeddings", "head_dim", "tie_word_embeddings")
    nulls = LanguageConfig.published({**MISTRAL_7B_V01, **dict.fromkeys(names)}, "config.json")
    without = {key: value for key, value in MISTRAL_7B_V01.items() if key not in names}
    assert nulls == LanguageConfig.published(without, "config.json")
    assert nulls.sizes.rope_base == 1e4 and nulls.sizes.norm_eps == 1e-6


def test_every_family_is_known():
    assert {"llama", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3", "mistral"} == set(FAMILIES)
    assert isinstance(read(LLAMA_32_1B), DecoderSizes)
