"""Forecast memory of generation, against what the compiler needs for the generator's programs on a CPU device."""

import dataclasses

import jax
import pytest
from openpi_train_configs.arithmetic_rl import arithmetic_grpo
from openpi_train_configs.gsm8k_runs import gsm8k_sft_llama32_1b

from openpi_train.generation.generation_size import GenerationSize
from openpi_train.models.language import LanguageConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan, ShardingConfig
from openpi_train.planning.generation import generation_bytes
from openpi_train.planning.memory import DoesNotFit, require
from openpi_train.tools import plan, plan_text
from openpi_train.tools.lowered_generator import LoweredGenerator

# Layers, a table and a cache of several megabytes each: what one layer needs at once, which is not forecast, is little.
SIZES = DecoderSizes(
    vocab_size=4096, width=256, depth=8, mlp_dim=768, num_heads=4, num_kv_heads=2, head_dim=64, tied=True
)
# Computed in float32, which CPUs do without conversion.
LANGUAGE = LanguageConfig(sizes=SIZES, dtype="float32", remat="none")


def needed(lowered):
    """Bytes of the program's arguments and its own."""
    sizes = lowered.compile().memory_analysis()
    return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "length", "most"), [(4, 32, "made"), (16, 128, "read")])
def test_a_device_needs_what_is_forecast(rows, length, most):
    """To a tenth. Few tokens need most when they are made, from layers that are copied; many when prompts are read."""
    whole = Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated")
    size = GenerationSize(language=LANGUAGE, rows=rows, length=length, flag="")
    generator = LoweredGenerator(size, whole)
    needs = {"read": needed(generator.reading()), "made": needed(generator.decoding())}
    assert max(needs, key=needs.__getitem__) == most
    assert generation_bytes(size) == pytest.approx(needs[most], rel=0.1)


def test_tensor_groups_share_out_weights_and_cache():
    size = GenerationSize(language=LANGUAGE, rows=16, length=256, flag="")
    assert generation_bytes(size, 2) == pytest.approx(generation_bytes(size) / 2, rel=0.15)


def test_a_run_generates_what_its_flags_say():
    assert [(size.rows, size.length) for size in arithmetic_grpo.generation_sizes()] == [
        (
            min(arithmetic_grpo.eval.completions_per_device, arithmetic_grpo.eval.num_prompts),
            arithmetic_grpo.data.max_length + arithmetic_grpo.eval.sampling.max_new_tokens,
        ),
        (arithmetic_grpo.rl.completions_per_device, arithmetic_grpo.data.max_length),
    ]
    silent = dataclasses.replace(
        gsm8k_sft_llama32_1b, eval=dataclasses.replace(gsm8k_sft_llama32_1b.eval, num_prompts=0)
    )
    assert silent.generation_sizes() == []


def test_a_plan_says_what_generation_needs_and_which_flag_lessens_it():
    """Of many long completions at a time, beside a step of a few short rows."""
    experiment = gsm8k_sft_llama32_1b
    many = dataclasses.replace(
        experiment,
        exp_name="plan",
        model=LANGUAGE,
        batch_size=8,
        data=dataclasses.replace(experiment.data, max_length=32),
        eval=dataclasses.replace(experiment.eval, num_prompts=4096, completions_per_device=2048),
        sharding=ShardingConfig(strategy="zero3", min_shard_mib=0),
    )
    report = plan.make_report(many, plan.find_machine("h100", 8, 1, None, 50.0, 0.5))
    memory = report.forecasts[0].memory
    (size,) = many.generation_sizes()
    assert memory.generation == generation_bytes(size) > memory.step
    assert memory.total == memory.state + memory.generation
    text = plan_text.tables(report, ["debug"])
    assert (
        f"2048 texts of at most {size.length} tokens at a time on each device ({size.flag}); beside the state" in text
    )
    least = r"(?s)fewer texts at a time: less than --eval.completions-per-device.*--eval.num-prompts 0"
    with pytest.raises(DoesNotFit, match=least):
        require(memory, memory.total - 1, 8, many)
