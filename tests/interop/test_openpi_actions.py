"""What openpi's own transforms compute with the norm stats that we write is what we compute, for its robots and others.

`recorded/openpi_actions.json` holds its numbers (openpi 15a9616), and a digest of the norm stats from which they came.
"""

import json
from pathlib import Path

import numpy as np
import openpi_exports
import pytest

from openpi_train.interop.robot_actions import openpis_transforms

RECORDED = json.loads((Path(__file__).parent / "recorded" / "openpi_actions.json").read_text())["cases"]


@pytest.mark.parametrize("form", ["z_score", "quantile"])
@pytest.mark.parametrize("name", openpi_exports.ROBOTS)
def test_openpis_transforms_give_our_actions_with_the_norm_stats_that_we_write(name, form, tmp_path):
    openpi_exports.write(tmp_path / "out", name)
    # Another file than openpi has read: run record_openpi_actions.py again.
    assert openpi_exports.digest(tmp_path / "out") == RECORDED[name]["digest"]
    for key, value in openpi_exports.computed(tmp_path / "out", name, form).items():
        # Openpi's in float64, ours in float32; scales are up to 2.3.
        np.testing.assert_allclose(value, RECORDED[name][form][key], rtol=3e-6, atol=3e-6, err_msg=key)


def test_what_a_config_of_openpis_needs_is_said():
    """As its configs have it (training/config.py, examples/ur5/README.md)."""
    said = {name: openpis_transforms(robot) for name, robot in openpi_exports.ROBOTS.items()}
    aloha, masks = "AlohaInputs and AlohaOutputs with adapt_to_pi", "DeltaActions and AbsoluteActions of make_bool_mask"
    assert said == {
        "aloha": f"{aloha}, {masks}(6, -1, 6, -1)",
        "aloha-absolute": aloha,
        "aloha-as-recorded": f"{masks}(6, -1, 6, -1)",
        "droid-velocity": None,
        "droid-position": f"{masks}(7, -1)",
        "libero": None,
        "libero-extra-delta": f"{masks}(6, -1)",
        "ur5": f"{masks}(6, -1)",
        "bridge-trajectory": f"{masks}(6, -1)",
        "all": f"{masks}(3)",
    }
