"""Low-rank additions: their scale, and what they are once they are folded into the weights, by numpy in float64."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from openpi_train.nn.gated_mlp import GatedMlp
from openpi_train.nn.lora import LoraConfig, LoraWeight, merge_lora
from openpi_train.parallel.params import param_kinds


def test_the_gradients_of_a_gated_layers_factors_are_waited_for_as_those_of_its_weights():
    """They, too, read the widest activations of a layer."""
    layer = GatedMlp(4, 8, lambda shape, make, kind: LoraWeight(shape, make, 2, kind=kind, rngs=nnx.Rngs(0)))
    wide = {path for path, kind in param_kinds(layer).items() if kind.wide}
    assert wide == {f"{one}/{part}" for one in ("gate_up", "down") for part in ("weight", "lora_a", "lora_b")}
    assert {path for path, kind in param_kinds(layer).items() if kind.by_entry} == {"gate_up/weight"}


def test_the_scale_is_alpha_by_the_rank_or_by_its_root():
    for rank, alpha in ((16, 16.0), (4, 2.0), (1, 0.5)):
        assert LoraConfig(attention_rank=rank, alpha=alpha).attention_scale == alpha / rank
        # Kalajdzievski 2023, rank-stabilised LoRA.
        assert LoraConfig(attention_rank=rank, alpha=alpha, rslora=True).attention_scale == alpha / rank**0.5
    assert LoraConfig(mlp_rank=8, alpha=3.0).attention_scale == 3.0, "the MLP's rank has no say"


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_merged_weights_are_weight_plus_scale_times_the_product(dtype):
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.normal(size=shape).astype(dtype)

    heads = {"weight": normal(2, 3, 4, 5), "lora_a": normal(2, 3, 4, 2), "lora_b": normal(2, 3, 2, 5)}
    plain = {"weight": normal(4, 5), "lora_a": normal(4, 2), "lora_b": normal(2, 5)}
    params = {f"{name}/{part}": value for name, one in (("out", heads), ("mlp", plain)) for part, value in one.items()}
    params["norm/scale"] = normal(4)
    merged = merge_lora(
        {name: jnp.asarray(value) for name, value in params.items()},
        {"out": 0.25, "mlp": 3.0}.__getitem__,
        {"out": 1, "mlp": None}.__getitem__,
    )
    assert merged.keys() == {"out/weight", "mlp/weight", "norm/scale"}
    exact = {name: value.astype(np.float64) for name, value in params.items()}
    summed = np.einsum("lndr,lrh->lndh", exact["out/lora_a"], exact["out/lora_b"].sum(axis=1))
    expected = {
        "out/weight": exact["out/weight"] + 0.25 * summed,
        "mlp/weight": exact["mlp/weight"] + 3.0 * exact["mlp/lora_a"] @ exact["mlp/lora_b"],
    }
    for name, value in expected.items():
        assert merged[name].dtype == dtype
        # One rounding to the weight's type of a sum in float32: half a unit in the last place, and float32's own error.
        unit = np.spacing(np.abs(value).astype(np.float32)) * (1 if dtype == np.float32 else 2.0**16)
        difference = np.abs(np.asarray(merged[name], np.float64) - value)
        assert (difference <= 0.5 * unit + 4 * np.spacing(np.float32(np.abs(value).max()))).all(), name
