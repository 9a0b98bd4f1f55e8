"""Forecast memory of language models' steps, against what the compiler needs for the same steps on CPU devices."""

import dataclasses

import pytest
from openpi_train_configs.gsm8k_runs import gsm8k_dpo_llama32_1b, gsm8k_reward_llama32_1b, gsm8k_sft_llama32_1b

from openpi_train import cli
from openpi_train.data.core.files import write_json
from openpi_train.experiment import Experiment
from openpi_train.models.language.language_part import language_of, with_language
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.parallel.mesh import planned_mesh
from openpi_train.parallel.strategy import Plan, ShardingConfig
from openpi_train.planning.forecast import Forecast
from openpi_train.planning.memory import OFF, DoesNotFit, Memory, predict, require
from openpi_train.runtime.device_kinds import GIB, UNKNOWN
from openpi_train.tools import compiled_memory, plan
from openpi_train.training.prepare import whole_layout

# Two tables of 4 million parameters, and 32 layers of a million: what one layer needs at once, which is not forecast,
# is little beside a device's part of all.
SIZES = DecoderSizes(
    vocab_size=16_384, width=256, depth=32, mlp_dim=1024, num_heads=4, num_kv_heads=2, head_dim=64, tied=False
)
H100 = plan.find_machine("h100", 8, 1, None, 50.0, 0.5)
# As much memory, without what only XLA's programs for GPUs need.
COMPILED_HERE = dataclasses.replace(H100, kind=UNKNOWN)


def chosen(experiment, strategy="auto", machine=H100, **fields) -> tuple[Experiment, Forecast]:
    """A smaller version of the experiment in float32, on 8 devices, and the forecast of its step."""
    language = dataclasses.replace(language_of(experiment.model), sizes=SIZES, dtype="float32", remat="full")
    small = dataclasses.replace(
        experiment,
        exp_name="plan",
        model=with_language(experiment.model, language),
        data=dataclasses.replace(experiment.data, max_length=64),
        eval=dataclasses.replace(experiment.eval, num_prompts=0),
        sharding=ShardingConfig(strategy=strategy, min_shard_mib=0),
        **{"batch_size": 16, **fields},
    )
    report = plan.make_report(small, machine)
    assert report.recommended is not None
    return report.experiment, report.recommended


def ratio(experiment, found: Forecast) -> float:
    """Of the forecast's bytes to the compiler's."""
    compiled = compiled_memory.compile_step(experiment, found)
    assert found.grad_accum == experiment.grad_accum
    return (found.memory.state + found.memory.step) / (compiled.state_bytes + compiled.program_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "strategy", "accum"),
    [
        (gsm8k_sft_llama32_1b, "replicated", 2),
        (gsm8k_sft_llama32_1b, "zero1", 2),
        (gsm8k_sft_llama32_1b, "zero2", 2),
        (gsm8k_dpo_llama32_1b, "zero3", 1),
    ],
)
def test_a_step_needs_what_is_forecast(experiment, strategy, accum):
    assert ratio(*chosen(experiment, strategy, COMPILED_HERE, grad_accum=accum)) == pytest.approx(1, abs=OFF)


@pytest.mark.parametrize(("strategy", "shares"), [("replicated", (1, 0)), ("zero1", (1, 1)), ("zero2", (8, 1))])
def test_tables_that_are_cut_are_neither_copied_nor_is_their_gradient_whole(strategy, shares):
    """Their rows stay where they are (`nn/vocabulary.py`); layers are gathered, to compute in float32 as they are."""
    experiment = gsm8k_sft_llama32_1b
    layout = whole_layout(experiment, Plan(mesh=planned_mesh(1, 1), strategy="replicated"))
    shapes = layout.shapes.params
    cut = Plan(mesh=planned_mesh(1 if strategy == "replicated" else 8, 8), strategy=strategy)
    memory = predict(layout.under(cut), cut, dtype="float32")
    table = 4 * shapes["token_embedding"].size
    layers = sum(4 * leaf.size for leaf in shapes.values()) - table
    gradient, copies = shares
    table_share = 1 if strategy == "replicated" else 8
    assert memory.grads == pytest.approx(layers / gradient + table / table_share, rel=1e-3)
    assert memory.compute_copy == pytest.approx(copies * layers, rel=1e-3)


@pytest.mark.parametrize(
    ("experiment", "flag"),
    [
        (gsm8k_sft_llama32_1b, "--model.adapter.rank 16"),
        (gsm8k_dpo_llama32_1b, "need no copy as a reference"),
        (gsm8k_reward_llama32_1b, "--model.language.adapter.rank 16"),
    ],
)
def test_what_needs_less_is_said_for_language_models(experiment, flag):
    with pytest.raises(DoesNotFit) as found:
        require(
            Memory(params=GIB, frozen=0, optimizer=0, ema=0, grads=0, compute_copy=0, activations=0), 1, 8, experiment
        )
    assert flag in str(found.value) and "--data.max-length" in str(found.value) and "pi0" not in str(found.value)


@pytest.mark.slow
def test_the_head_of_a_plan_has_the_length_of_rows():
    experiment, _ = chosen(gsm8k_dpo_llama32_1b)
    assert experiment.data.row_in_words == "rows of 128 tokens"  # two texts


@pytest.mark.slow
def test_a_folder_with_a_config_alone_is_planned(tmp_path):
    """Qwen2.5-7B: no weights, no tokenizer, no data."""
    config = {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    config |= {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064, "rms_norm_eps": 1e-6}
    write_json(tmp_path / "config.json", {**config, "rope_theta": 1e6, "tie_word_embeddings": False})
    flags = ["--exp-name", "plan", "--model.path", str(tmp_path), "--model.remat", "full"]
    report = plan.make_report(cli.parse_experiment("gsm8k_sft_qwen25_05b", flags), H100)
    assert report.num_params == 7_615_616_512  # as the hub counts them
    assert report.recommended is not None
