"""Every key of a checkpoint is accounted for: what differs is named, with its closest match and what to do."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from openpi_train.interop.parameter_matching import account
from openpi_train.models.pi0 import pi0_names
from openpi_train.runtime.exits import CheckpointError

NAMES = ("PaliGemma/llm/layers/attn/q_einsum/w", "PaliGemma/llm/layers/attn/q_einsum_1/w", "action_in_proj/kernel")
WANTED = {name: ShapeDtypeStruct((4, 3), jnp.float32) for name in NAMES}
FACTORS = {f"PaliGemma/llm/layers/attn/q_einsum/lora_{one}": ShapeDtypeStruct((4, 2), jnp.float32) for one in "ab"}


def refusal(found, expected=WANTED, **options) -> str:
    with pytest.raises(CheckpointError) as error:
        account(found, expected, where="HERE", **options)
    return str(error.value)


def test_the_same_leaves_are_accepted_whatever_their_floats():
    account(WANTED, WANTED, where="HERE")
    account({name: np.zeros((4, 3), ml_dtypes.bfloat16) for name in WANTED}, WANTED, where="HERE")


def test_all_differences_are_in_one_error_with_the_closest_names():
    found = {
        NAMES[0]: np.zeros((4, 3), np.int32),
        NAMES[1]: np.zeros((3, 4), np.float32),
        "action_in_projection/kernel": np.zeros((4, 3), np.float32),
    }
    text = refusal(found)
    assert text.startswith("HERE does not fit the model: of 3 leaves that it needs, 0 are there as they should be")
    closest = "(closest in the checkpoint: action_in_projection/kernel)"
    assert f"missing in the checkpoint (1):\n  action_in_proj/kernel {closest}" in text
    assert "unknown to the model (1):\n  action_in_projection/kernel" in text
    assert f"of another shape (1):\n  {NAMES[1]} is (3, 4), the model wants (4, 3)" in text
    assert f"of another kind of number (1):\n  {NAMES[0]} is int32, the model wants float32" in text
    assert "compare the model's variants and sizes" in text


def test_only_what_may_be_missing_is_let_pass():
    account(WANTED, {**WANTED, **FACTORS}, where="HERE", may_miss=".*lora.*")
    assert "missing in the checkpoint (1)" in refusal(dict(list(WANTED.items())[1:]), may_miss=".*lora.*")
    # A part of a name is no match.
    assert "missing in the checkpoint (1)" in refusal(dict(list(WANTED.items())[1:]), may_miss="PaliGemma/llm")


def test_long_lists_are_counted():
    many = {f"name_{number}": WANTED[NAMES[0]] for number in range(20)}
    assert "unknown to the model (20):" in refusal({**WANTED, **many})
    assert "  ... and 12 more" in refusal({**WANTED, **many})


@pytest.mark.parametrize(
    ("found", "expected", "says"),
    [
        ({**WANTED, **FACTORS}, WANTED, "these 2 are LoRA factors and the model has none"),
        (FACTORS, {**WANTED, **FACTORS}, "holds LoRA factors only"),
        (WANTED, {**WANTED, **FACTORS}, "no LoRA factors, but the model has"),
        ({"conv/kernel": WANTED[NAMES[0]]}, WANTED, "a checkpoint of another model"),
    ],
)
def test_it_says_what_to_do_about_what_happens_often(found, expected, says):
    assert says in refusal(found, expected)


@pytest.mark.parametrize(
    ("pi05", "missing", "extra", "misshapen", "says"),
    [
        (
            True,
            ["time_mlp_in/kernel"],
            ["action_time_mlp_in/kernel"],
            [],
            "the checkpoint is pi0's and the model pi0.5",
        ),
        (
            False,
            ["action_time_mlp_in/bias"],
            ["time_mlp_in/bias"],
            [],
            "is pi0.5's and the model pi0: give --model.pi05",
        ),
        (False, [], [], [NAMES[0]], "--model.paligemma-variant"),
        (False, [], [], [NAMES[1]], "--model.action-expert-variant"),
        (False, [], [], ["PaliGemma/img/pos_embedding"], "--model.siglip"),
        (False, [NAMES[1], NAMES[2]], [], [], "the action expert is missing"),
    ],
)
def test_pi0_says_which_of_its_fields_to_change(pi05, missing, extra, misshapen, says):
    (sentence,) = pi0_names.explain(pi05, missing, extra, misshapen)
    assert says in sentence
