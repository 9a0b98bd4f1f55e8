"""Pictures of Gymnasium's environments, whatever their form, become bytes with three channels last."""

import numpy as np
import pytest

from openpi_train.envs.gym_observation import entries, is_picture, picture

BYTES = np.arange(30, dtype=np.uint8).reshape(2, 5, 3)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (BYTES, BYTES),
        (np.moveaxis(BYTES, -1, 0), BYTES),
        (np.concatenate([BYTES, BYTES[:, :, :1]], -1), BYTES),
        (BYTES[:, :, 0], np.repeat(BYTES[:, :, :1], 3, -1)),
        (BYTES[:, :, :1], np.repeat(BYTES[:, :, :1], 3, -1)),
        (BYTES / 255, BYTES),
        (np.array([[[0.0, 0.5, 1.0]]]), np.array([[[0, 128, 255]]])),
    ],
    ids=["bytes", "channels first", "transparency", "grey", "one channel", "fractions", "ends"],
)
def test_every_form_of_a_picture_is_read(seen, expected):
    found = picture(seen)
    assert is_picture(seen) and found.dtype == np.uint8
    np.testing.assert_array_equal(found, expected)


def test_other_arrays_are_no_pictures():
    depth, flow, vector = np.full((5, 5, 3), 2.5), np.zeros((5, 5, 2)), np.zeros(3)
    assert not any(map(is_picture, (depth, flow, vector, np.zeros((5, 5)), np.zeros((2, 5, 5, 3), np.uint8))))


def test_nested_names_are_joined():
    assert list(entries({"pixels": {"top": vector()}, "agent_pos": vector()})) == ["pixels/top", "agent_pos"]
    assert list(entries(vector())) == ["state"]


def vector():
    return np.zeros(2)
