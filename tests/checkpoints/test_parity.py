"""What is asked of a model's capabilities: probes find no difference where there is none, and the one there is."""

import jax
import numpy as np
import pytest
from flax import nnx
from openpi_train_configs.debug import debug
from openpi_train_configs.fast import pi0_fast_tiny

from openpi_train.checkpoints.parity import compare_outputs
from openpi_train.interop.stored_leaves import in_memory
from openpi_train.parallel.params import module_params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "capability"), [(debug.model, "velocity"), (pi0_fast_tiny.model, "logits")], ids=["pi0", "pi0-FAST"]
)
def test_a_changed_leaf_shows_in_the_outputs(model, capability):
    params = jax.jit(lambda: module_params(model.build(nnx.Rngs(0))))()
    model = model.with_compute(attention="cudnn")  # trained where there is cuDNN, which is not here
    leaves = {path: in_memory(leaf) for path, leaf in params.items()}
    name = next(
        path for path in leaves if path.endswith("final_norm/language/scale") or "action_out_proj/kernel" in path
    )
    other = {**leaves, name: in_memory(np.asarray(params[name]) + 0.5)}
    same = compare_outputs((model, leaves), (model, leaves), ("base_0_rgb",))
    changed = compare_outputs((model, leaves), (model, other), ("base_0_rgb",))
    assert same.keys() == {capability} and same[capability]["largest_difference"] == 0.0
    assert same[capability]["largest_value"] > 0.0 and changed[capability]["largest_difference"] > 1e-3
