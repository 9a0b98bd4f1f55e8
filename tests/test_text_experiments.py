"""Experiments on texts: the sizes of published models, every kind of run, data that do not fit the objective."""

import dataclasses
import math

import jax
import pytest
from flax import nnx
from openpi_train_configs import arithmetic_runs, published_models

from openpi_train import registry
from openpi_train.models.language import LanguageConfig
from openpi_train.models.language.hf_config import hf_config, sizes_of
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.objectives.judged_completions import JudgedCompletions
from openpi_train.objectives.preference_pairs import PreferencePairs
from openpi_train.runtime.exits import UsageError

# What the models' config.json files on the hub say of sizes and kinds (read 2026-11-23), and their numbers of
# parameters, as the hub counts them in their safetensors files.
PUBLISHED = {
    "smollm2_135m": (
        134_515_008,
        {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
        },
    ),
    "qwen25_05b": (
        494_032_768,
        {
            "model_type": "qwen2",
            "hidden_act": "silu",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "llama32_1b": (
        1_235_814_400,
        {
            "model_type": "llama",
            "attention_bias": False,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
    ),
    "gemma3_1b": (
        999_885_952,
        {
            "model_type": "gemma3_text",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
    ),
}
MODELS = dict(zip(PUBLISHED, published_models.MODELS, strict=True))
KINDS = ("sft", "sft_lora", "reward", "dpo", "dpo_lora", "kto")


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_of_the_published_files(name):
    num_parameters, config = PUBLISHED[name]
    model, address = MODELS[name]
    assert model == LanguageConfig.published(config, address)
    assert sizes_of(hf_config(model.family, model.sizes, model.context_length, "bfloat16"), "it") == model.sizes
    state = nnx.state(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) == num_parameters


@pytest.mark.parametrize("model", PUBLISHED)
def test_every_model_has_every_kind_of_run(model):
    published, address = MODELS[model]
    forms = {
        "sft": published,
        "sft_lora": dataclasses.replace(published, adapter=registry.load(f"gsm8k_sft_lora_{model}").model.adapter),
        "reward": RewardConfig(language=published),
        "dpo": ReferencedConfig(policy=published),
    }
    forms["dpo_lora"], forms["kto"] = forms["sft_lora"], forms["dpo"]
    assert forms["sft_lora"].adapter.enabled
    for kind in KINDS:
        experiment = registry.load(f"gsm8k_{kind}_{model}")
        assert experiment.name == f"gsm8k_{kind}_{model}" and experiment.model == forms[kind]
        assert experiment.data.tokenizer == experiment.weight_loader.params_path == address
        dataclasses.replace(experiment, exp_name="x").check(8)


def test_data_that_an_objective_cannot_be_trained_on_are_refused():
    for experiment, kind, takes in (
        (arithmetic_runs.arithmetic_sft, "preferences", "texts"),
        (arithmetic_runs.arithmetic_dpo, "unpaired", "preferences"),
        (arithmetic_runs.arithmetic_reward, "prompts", "preferences"),
    ):
        wrong = dataclasses.replace(experiment, exp_name="x", data=dataclasses.replace(experiment.data, kind=kind))
        with pytest.raises(UsageError, match=f"is trained on --data.kind {takes}, not on {kind}"):
            wrong.check(1)


def test_kto_judges_pairs_and_labelled_completions():
    experiment = dataclasses.replace(arithmetic_runs.arithmetic_kto, exp_name="x")
    assert experiment.objective == JudgedCompletions() and experiment.data.kind == "preferences"
    for kind in ("preferences", "unpaired"):
        dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, kind=kind)).check(1)


@pytest.mark.parametrize(
    ("objective", "reads"),
    [
        (PreferencePairs(reference="precomputed"), True),
        (JudgedCompletions(reference="precomputed", baseline="zero"), True),
        (PreferencePairs(variant="simpo", reference="precomputed"), False),  # simpo has no reference
    ],
)
def test_a_precomputed_reference_must_be_among_the_data(objective, reads):
    without = dataclasses.replace(arithmetic_runs.arithmetic_dpo, exp_name="x", objective=objective)
    data = dataclasses.replace(without.data, reference_log_probs=True)
    dataclasses.replace(without, model=without.model.policy, data=data).check(1)
    if reads:
        with pytest.raises(UsageError, match=r"--objective\.reference precomputed needs .*--data\.reference-log-probs"):
            without.check(1)


def test_the_small_model_has_the_size_that_its_description_says():
    state = nnx.state(nnx.eval_shape(lambda: arithmetic_runs.arithmetic_sft.model.build(nnx.Rngs(0))))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) == 132_416
