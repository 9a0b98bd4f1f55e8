"""The data side against openpi's own numbers: norm stats, normalisation, delta actions, padding, resizing, prompts."""

import json

import numpy as np
import pytest

from openpi_train.data.robot.norm_stats import summarize
from openpi_train.data.robot.normalize import NormStats, normalize, read_norm_stats, unnormalize, write_norm_stats
from openpi_train.data.robot.resize import resize_with_pad
from openpi_train.data.robot.transforms import PadDims
from openpi_train.data.tokenizers.tokenizer import discretize, load_tokenizer
from openpi_train.robots.robot import Robot


@pytest.fixture(scope="module")
def normalization(golden_file):
    return np.load(golden_file("misc_normalize.npz"))


@pytest.fixture(scope="module")
def transforms(golden_file):
    return np.load(golden_file("misc_transforms.npz"))


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("prefix", ["", "chunk_", "const_"])
def test_norm_stats_equal_openpis_running_statistics(normalization, dtype, prefix):
    stream = normalization[f"stats_{dtype}/{prefix}stream"]
    expected = {key: normalization[f"stats_{dtype}/{prefix}{key}"] for key in ("mean", "std", "q01", "q99")}
    rows = stream.reshape(-1, stream.shape[-1])
    stats = summarize([(1.0, lambda: list(stream.reshape(len(stream), -1, stream.shape[-1]) if prefix != "const_"
                                          else [rows]))])  # fmt: skip
    # openpi sums in the data's type, and takes the variance as a difference of squares.
    tolerance = 1e-12 if dtype == "f64" else 2e-6
    np.testing.assert_allclose(stats.mean, expected["mean"], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(stats.std, expected["std"], rtol=tolerance, atol=tolerance)
    # openpi's bins are 1/5000 of the range; it takes a bin's left edge and moves it with every new range (once per
    # update), which also loses the counts of the lowest bin: so it may be off by one rank and a bin per update.
    resolution = (rows.max(axis=0) - rows.min(axis=0)) / 5000 * (len(stream) + 1) + 1e-6
    ordered = np.sort(rows.astype(np.float64), axis=0)
    for key, level in (("q01", 0.01), ("q99", 0.99)):
        rank = int(np.ceil(level * len(rows))) - 1
        below, above = ordered[max(0, rank - 1)], ordered[min(len(rows) - 1, rank + 1)]
        assert np.all(expected[key] >= below - resolution)
        assert np.all(expected[key] <= above + resolution)
        exact = ordered[rank]
        assert np.all(np.abs(getattr(stats, key) - exact) <= (ordered[-1] - ordered[0]) / 65536 + 1e-9)
    if not prefix:  # enough rows that the lost ones do not matter
        for key in ("q01", "q99"):
            assert np.all(np.abs(getattr(stats, key) - expected[key]) <= resolution)


def test_both_forms_of_normalisation_equal_openpis(normalization):
    stats = NormStats(**{key: normalization[f"norm/{key}"] for key in ("mean", "std", "q01", "q99")})
    names = [name for name in normalization.files if name.startswith(("norm/normalize_", "norm/unnormalize_"))]
    assert {name.split("_")[1] for name in names} == {"z", "quantile"}
    for name in names:
        call, form, width = name.removeprefix("norm/").rsplit("_", 2)
        function = {"normalize": normalize, "unnormalize": unnormalize}[call]
        values = function(normalization[f"norm/x_{width}"], stats, "z_score" if form == "z" else "quantile")
        np.testing.assert_allclose(values, normalization[name], rtol=1e-12, atol=1e-12, err_msg=name)


def test_norm_stats_file_is_read_and_written_as_openpi_does(golden_file, tmp_path):
    path = golden_file("norm_stats_example/norm_stats.json")
    written = write_norm_stats(tmp_path, read_norm_stats(path.parent))
    assert json.loads(written.read_text()) == json.loads(path.read_text())
    assert written.read_text().strip() == path.read_text().strip()


class _Arm(Robot):
    """The plain robot of so many joints with a given delta mask."""

    def __init__(self, num_joints, mask):
        super().__init__()
        object.__setattr__(self, "_mask", mask)
        object.__setattr__(self, "_names", ("joint",) * num_joints)

    control_hz = 5.0

    @property
    def state_names(self):
        return self._names

    action_names = state_names

    @property
    def delta_mask(self):
        return self._mask

    def read(self, columns, episode_ends):
        raise AssertionError("these tests read no columns")


def test_delta_actions_equal_openpis_both_ways(golden_file, transforms):
    masks = json.loads(golden_file("misc_meta.json").read_text())["masks"]
    state, actions = transforms["delta/state"], transforms["delta/actions"]
    for name, mask in masks.items():
        robot = _Arm(actions.shape[-1], None if mask is None else tuple(mask))
        _, relative = robot.to_model(state, actions)
        assert np.array_equal(relative, transforms[f"delta/out_{name}"])
        np.testing.assert_allclose(robot.from_model(relative, state), actions, atol=1e-12)
        assert np.array_equal(robot.from_model(actions, state), transforms[f"absolute/out_{name}"])


def test_padding_equals_openpis(transforms):
    row = PadDims(len(transforms["pad/state"]))(
        {"state": transforms["delta/state"], "actions": transforms["delta/actions"]}
    )
    assert np.array_equal(row["state"], transforms["pad/state"])
    assert np.array_equal(row["actions"], transforms["pad/actions"])


def test_resizing_equals_openpis_pixel_for_pixel(transforms):
    sizes = [name.removeprefix("resize/in_") for name in transforms.files if name.startswith("resize/in_")]
    assert sizes
    for size in sizes:
        expected = transforms[f"resize/pil_uint8_{size}"]
        assert np.array_equal(resize_with_pad(transforms[f"resize/in_{size}"], *expected.shape[:2]), expected), size


def test_prompts_equal_openpis_token_for_token(golden_file):
    tokenizer = load_tokenizer(str(golden_file("tiny_spm.model")))
    cases = json.loads(golden_file("misc_tokenizer.json").read_text())
    compared = set()
    for case in cases:
        if case["kind"] not in ("pi0", "pi05"):
            continue
        state = np.asarray(case["state"]) if case["kind"] == "pi05" else None
        if state is not None:
            assert discretize(state).tolist() == case["discretized"]
        tokens, mask = tokenizer.prompt(case["prompt"], case["max_len"], state)
        assert tokens.tolist() == case["tokens"]
        assert mask.tolist() == case["mask"]
        compared.add(case["kind"])
    assert compared == {"pi0", "pi05"}
