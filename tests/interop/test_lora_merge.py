"""Factors folded in where a weight is read: any part of it, layer by layer."""

import numpy as np

from openpi_train.interop.lora_merge import merged_lora
from openpi_train.interop.stored_leaves import in_memory
from openpi_train.models.param_rules import ParamRules


def add_products(params):
    """Adds each layer's product, as a model's own `merge_lora` does."""
    return {"mlp/weight": params["mlp/weight"] + params["mlp/lora_a"] @ params["mlp/lora_b"]}


def test_each_layer_is_merged_with_its_own_factors():
    random = np.random.default_rng(0)
    shapes = {"mlp/weight": (3, 4, 5), "mlp/lora_a": (3, 4, 2), "mlp/lora_b": (3, 2, 5), "norm": (4,)}
    params = {name: random.integers(-8, 8, shape).astype(np.float32) for name, shape in shapes.items()}
    merged = merged_lora(
        ParamRules(merge_lora=add_products), {name: in_memory(value) for name, value in params.items()}
    )
    assert merged.keys() == {"mlp/weight", "norm"}
    expected = params["mlp/weight"] + np.einsum("lir,lro->lio", params["mlp/lora_a"], params["mlp/lora_b"])
    np.testing.assert_array_equal(merged["mlp/weight"].whole(), expected)  # sums of small whole numbers are exact
    part = (slice(1, 3), slice(2, 4), slice(0, 3))
    np.testing.assert_array_equal(merged["mlp/weight"].read(part), expected[part])
