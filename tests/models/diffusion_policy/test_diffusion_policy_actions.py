"""What diffusion_policy's own normaliser computes in the checkpoints that we write is what we compute, in three forms.

`recorded/diffusion_policy_actions.json` holds its numbers (at 5ba07ac), and digests of the files from which they came.
"""

import json
from pathlib import Path

import diffusion_exports
import numpy as np
import pytest

RECORDED = json.loads(
    (Path(__file__).parents[2] / "interop" / "recorded" / "diffusion_policy_actions.json").read_text()
)["cases"]


@pytest.mark.parametrize("name", diffusion_exports.CASES)
def test_diffusion_policy_gives_our_actions_in_the_checkpoint_that_we_write(name, tmp_path):
    diffusion_exports.write(tmp_path / name, name)
    # Another file than diffusion_policy has read: run record_diffusion_policy_actions.py again.
    assert diffusion_exports.digest(tmp_path / name) == RECORDED[name]["digest"]
    found = diffusion_exports.computed(name)
    # It executes the first `n_action_steps` from the present step on.
    found["actions"] = found["actions"][: diffusion_exports.model_of(name).rows.window.num_executed]
    for key, value in found.items():
        # Rounding of float32: scale and offset there, mean and deviation here.
        np.testing.assert_allclose(value, RECORDED[name][key], rtol=2e-6, atol=2e-6, err_msg=key)
