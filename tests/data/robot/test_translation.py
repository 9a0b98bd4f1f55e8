"""From what a robot sees to a model's row: what the model reads and this robot lacks."""

import dataclasses

import following
import numpy as np
import pytest

from openpi_train.data.robot.windows import WindowShape

CAMERA = {"image/wrist": ((4, 6, 3), "uint8"), "image_mask/wrist": ((), "bool")}


def seeing(**more):
    """A translation whose model sees a camera that the robot lacks, and reads these entries too."""
    plain = following.translation(WindowShape(horizon=4))
    return dataclasses.replace(plain, spec={**plain.spec, **CAMERA, **more})


def test_another_robots_camera_is_black_and_masked():
    row = seeing().row({}, np.array([3.0, 4.0]), "")
    assert row["image/wrist"].shape == (4, 6, 3) and row["image/wrist"].dtype == np.uint8
    assert not row["image/wrist"].any()
    assert row["image_mask/wrist"].dtype == np.bool_ and row["image_mask/wrist"] == np.False_
    # A millionth is added to what is divided by.
    np.testing.assert_allclose(row["state"], [3, 4, 0], rtol=2e-6)


def test_what_is_no_camera_must_be_there_and_fit():
    with pytest.raises(ValueError, match="the model reads force, which is missing"):
        seeing(force=((2,), "float32")).row({}, np.zeros(2), "")
    with pytest.raises(ValueError, match=r"state has shape \[3\]; the model takes \[5\]"):
        seeing(state=((5,), "float32")).row({}, np.zeros(2), "")
