"""Phases and parts of the model, from names as jax 0.10.2 gives them."""

import pytest

from openpi_train.planning.gpu.scopes import part_of, phase_of

IN_LAYER = "while/body/closed_call"


@pytest.mark.parametrize(
    ("op_name", "phase", "part"),
    [
        (f"jit(step)/gradient/jvp(gemma)/{IN_LAYER}/mlp/dot_general", "forward", "gemma/mlp"),
        (f"jit(step)/gradient/transpose(jvp(gemma))/{IN_LAYER}/checkpoint/mlp/dot_general", "backward", "gemma/mlp"),
        (
            f"jit(step)/gradient/transpose(jvp(gemma))/{IN_LAYER}/checkpoint/rematted_computation/attention/rotary/mul",
            "recomputation",
            "gemma/rotary",
        ),
        (f"jit(step)/gradient/transpose(jvp(gemma))/{IN_LAYER}/checkpoint/gather/all_gather", "gather", "gemma"),
        (f"jit(step)/gradient/transpose(jvp(siglip))/{IN_LAYER}/reduce/reduce_scatter", "reduce", "siglip"),
        ("jit(step)/gradient/shard_map/jvp(loss)/mul", "forward", "loss"),
        ("jit(step)/optimizer/jit(_where)/select_n", "update", "optimizer"),
        ("jit(step)/ema/mul", "update", "ema"),
        ("jit(step)/reduce_sum", "update", "rest"),
        # The last word is an operation: this one looks rows up and gathers nothing from other devices.
        ("jit(step)/gradient/jvp(embed)/gather", "forward", "embed"),
        ("jit(decode)/while/body/decoder/attention/dot_general", "forward", "decoder/attention"),
        ("", "other", "unnamed"),
        (
            "jit(step)/gradient/shard_map/transpose(jvp(loss))/gemma/while/body/closed_call/checkpoint/mlp/btd,dm->btm/dot",
            "backward",
            "gemma/mlp",
        ),
    ],
)
def test_a_name_says_the_phase_and_the_part(op_name, phase, part):
    assert (phase_of(op_name), part_of(op_name)) == (phase, part)
