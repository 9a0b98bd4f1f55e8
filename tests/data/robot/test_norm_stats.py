import dataclasses
import json
import logging
import re

import numpy as np
import pydantic
import pytest

from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.norm_stats import Asset, compute_norm_stats, summarize
from openpi_train.data.robot.normalize import (
    NormStats,
    guard,
    normalize,
    read_norm_stats,
    unnormalize,
    write_norm_stats,
)
from openpi_train.data.robot.windows import Windows, WindowShape
from openpi_train.robots.bridge import Bridge

FAKE = FakeData(num_episodes=12, episode_length=15)
ROBOT = Bridge(trajectory=True)


def windows(seed=0, fraction=0.2, horizon=6, episodes=12):
    source = dataclasses.replace(FAKE, seed=seed, num_episodes=episodes).open()
    return Windows(source=source, robot=ROBOT, shape=WindowShape(horizon=horizon), validation_fraction=fraction)


def kept_stats(windows, weights=(1.0,), *, folder, max_samples=10**6):
    """The stats of these datasets, kept in `folder`."""
    asset = Asset(name=folder.name, windows=windows, weights=weights, folder=folder, max_samples=max_samples)
    return asset.stats()


def explicit(window):
    """All states and all valid actions, row by row, and not a step of the held-out episodes."""
    rows = [window.row(sample) for sample in range(len(window))]
    return np.stack([row["state"] for row in rows]), np.concatenate(
        [row["actions"][row["action_mask"]] for row in rows]
    )


def test_stats_are_those_of_explicit_windows(monkeypatch):
    monkeypatch.setattr("openpi_train.data.robot.norm_stats._BLOCK_VALUES", 200)  # several blocks
    window = windows()
    stats, notes = compute_norm_stats([window], [1.0], 10**6)
    assert not any(notes.values())
    for name, values in zip(("state", "actions"), explicit(window), strict=True):
        values = values.astype(np.float64)
        np.testing.assert_allclose(stats[name].mean, values.mean(axis=0), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(stats[name].std, values.std(axis=0), rtol=1e-9)
        assert np.array_equal(stats[name].low, values.min(axis=0))
        assert np.array_equal(stats[name].high, values.max(axis=0))
        for level, found in ((0.01, stats[name].q01), (0.99, stats[name].q99)):
            exact = np.quantile(values, level, axis=0, method="inverted_cdf")
            assert np.array_equal(found, exact)


def test_shared_stats_weigh_datasets_as_the_mixture_draws_them():
    group, weights = [windows(0), windows(1, episodes=3)], [1.0, 3.0]
    stats, _ = compute_norm_stats(group, weights, 10**6)
    pairs = [explicit(window) for window in group]
    # A row of dataset k is drawn with probability w_k / n_k.
    shares = [weight / len(window) for weight, window in zip(weights, group, strict=True)]
    for number, name in enumerate(("state", "actions")):
        values = np.concatenate([pair[number] for pair in pairs]).astype(np.float64)
        share = np.concatenate([np.full(len(pair[number]), s) for pair, s in zip(pairs, shares, strict=True)])
        mean = np.average(values, axis=0, weights=share)
        np.testing.assert_allclose(stats[name].mean, mean, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(stats[name].std ** 2, np.average((values - mean) ** 2, axis=0, weights=share))


def test_a_runs_stats_are_those_of_its_training_episodes(open_small):
    opened = open_small(DataConfig(datasets=(Dataset(source=FAKE, robot=ROBOT),), validation_fraction=0.3))
    (train,), (held_out,) = opened.train.windows, opened.validation.windows
    for name, mine, other in zip(("state", "actions"), explicit(train), explicit(held_out), strict=True):
        stats = opened.norm_stats["FakeData"][name]
        np.testing.assert_allclose(stats.mean, mine.astype(np.float64).mean(axis=0), rtol=1e-9, atol=1e-12)
        assert not np.allclose(stats.mean, np.concatenate([mine, other]).mean(axis=0), rtol=1e-6)


def test_a_runs_mean_action_is_that_of_its_training_rows_whatever_stats_are_given(tmp_path, open_small):
    other = kept_stats([windows(seed=9)], folder=tmp_path / "other")
    assert other
    datasets = [
        Dataset(source=FAKE, robot=ROBOT, weight=3.0, norm_stats=str(tmp_path / "other")),
        Dataset(source=dataclasses.replace(FAKE, seed=1), robot=ROBOT, asset_id="second"),
    ]
    opened = open_small(DataConfig(datasets=tuple(datasets), validation_fraction=0.3))
    means = []
    for window, transforms in zip(opened.train.windows, opened.train.transforms, strict=True):
        rows = [transforms[0](window.row(sample)) for sample in range(len(window))]
        means.append(np.concatenate([row["actions"][row["action_mask"]] for row in rows]).mean(axis=0))
    expected = 0.75 * means[0] + 0.25 * means[1]
    found = opened.mean_action()
    np.testing.assert_allclose(found[: len(expected)], expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected).max() > 0.01 and not found[len(expected) :].any()


def test_a_sample_of_a_large_dataset_represents_it():
    window = windows(episodes=300)
    whole, _ = compute_norm_stats([window], [1.0], 10**6)
    part, _ = compute_norm_stats([window], [1.0], 1000)
    assert not np.array_equal(part["state"].mean, whole["state"].mean)
    # Five standard errors of the mean of 1,000 correlated draws.
    assert np.all(np.abs(part["state"].mean - whole["state"].mean) < 5 * whole["state"].std / np.sqrt(1000))


def test_nan_in_a_column_is_named():
    with pytest.raises(ValueError, match=r"NaN or infinity in dims \[1\]"):
        summarize([(1.0, lambda: [np.array([[0.0, 1.0], [0.0, np.nan]])])])


def make(std, q_range, low, high):
    zero = np.zeros(len(std))
    std, q_range, low, high = (np.asarray(value, float) for value in (std, q_range, low, high))
    return NormStats(mean=zero, std=std, q01=-q_range / 2, q99=q_range / 2, low=low, high=high)


def test_a_joint_that_seldom_moves_keeps_bounded_targets():
    # The case of openpi#814: q99 - q01 = 1e-3 on one joint that moves by 1.6 now and then: targets of -3200.
    stats = make([0.4, 0.02, 0.5], [1.5, 1e-3, 1.8], [-2, -1.6, -2], [2, 1.6, 2])
    assert normalize(np.array([0, -1.6, 0]), stats, "quantile")[1] < -3000
    guarded, notes = guard(stats, ("shoulder_rad", "elbow_rad", "wrist_rad"))
    assert list(notes) == ["elbow_rad"]
    assert np.all(np.abs(normalize(np.array([[2, 1.6, 2], [-2, -1.6, -2]]), guarded, "quantile")) < 5)
    assert np.array_equal(guarded.q99[[0, 2]], stats.q99[[0, 2]])


def test_constant_dims_become_zero_and_small_units_stay_as_they_are():
    # Metres per step beside a gripper: a factor of 50 between the scales is no fault.
    stats = make([0.0, 0.01, 0.45, 1e-9], [0.0, 0.04, 1.0, 3e-9], [0, -0.3, 0, -1e-8], [0, 0.3, 1, 1e-8])
    guarded, notes = guard(stats, ("still", "x_m", "gripper", "noise"))
    assert set(notes) == {"still", "noise"}
    for form in ("z_score", "quantile"):
        values = normalize(np.array([0.0, 0.0, 0.0, 1e-8]), guarded, form)
        # Off 0 by the share that the form's own 1e-6 has in the floor (1e-3 of the median range of 0.04).
        assert abs(values[0]) < 1e-6 / 4e-5
        assert abs(values[3]) < 1e-2 + 1e-6 / 4e-5
    again, notes = guard(guarded, ("still", "x_m", "gripper", "noise"))
    assert not notes
    assert np.array_equal(again.std, guarded.std)


def test_a_robot_that_never_moves_at_all_gives_zeros():
    guarded, notes = guard(make([0, 0], [0, 0], [0, 0], [0, 0]), ("a", "b"))
    assert set(notes) == {"a", "b"}
    assert np.all(np.isfinite(normalize(np.array([0.5, -0.5]), guarded, "quantile")))


def test_bridge_like_rotations_with_rare_wraps_are_left_alone():
    # Published statistics of BridgeData V2 (Octo): yaw deltas of std 0.0755, q01..q99 of about 0.4, extremes of 2 pi.
    stats = make([0.0096, 0.0755, 0.477], [0.057, 0.40, 1.0], [-0.4, -6.28, 0], [0.41, 6.28, 1])
    assert not guard(stats, ("delta_x_m", "delta_yaw_rad", "gripper"))[1]


def test_cached_stats_are_reused_until_the_data_change(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = tmp_path / "asset"
    first = kept_stats([windows()], [2.0], folder=folder)
    assert "computing from" in caplog.text
    caplog.clear()
    again = kept_stats([windows()], [1.0], folder=folder)
    assert "computing" not in caplog.text
    for name, stats in first.items():
        for key in ("mean", "std", "q01", "q99", "low", "high"):
            assert np.array_equal(getattr(again[name], key), getattr(stats, key))
    changes = [{"windows": [windows(**change)]} for change in ({"seed": 1}, {"horizon": 3}, {"fraction": 0.4})]
    for change in (*changes, {"max_samples": 100}, {"windows": [windows(), windows(seed=1)], "weights": [1.0, 2.0]}):
        same = {"windows": [windows()], "weights": [1.0], "folder": folder, "max_samples": 10**6}
        kept_stats(**same)
        caplog.clear()
        kept_stats(**same | change)
        assert "changed since" in caplog.text, change


def test_an_edited_file_is_kept_and_not_taken_for_a_computed_one(tmp_path, caplog):
    computed = kept_stats([windows()], [1.0], folder=tmp_path)
    path = tmp_path / "norm_stats.json"
    path.write_text(path.read_text().replace("0.0", "0.5", 1))
    edited = path.read_bytes()
    again = kept_stats([windows()], [1.0], folder=tmp_path)
    assert "was edited since it was computed; kept as norm_stats.edited.json" in caplog.text
    assert (tmp_path / "norm_stats.edited.json").read_bytes() == edited
    assert np.array_equal(again["state"].q01, computed["state"].q01)


def test_degenerate_dims_are_named_in_a_warning_each_time(tmp_path, caplog):
    source = FAKE.open()
    source.columns["observation/state"][:, 2] = 0.25
    window = Windows(source=source, robot=Bridge(), shape=WindowShape(horizon=2))
    for _ in range(2):
        caplog.clear()
        kept_stats([window], [1.0], folder=tmp_path / "arm")
        assert re.search(r"norm stats of arm: .*state: z_m \(std = 0", caplog.text)


def test_the_file_is_read_back_as_written(tmp_path):
    stats, _ = compute_norm_stats([windows()], [1.0], 10**6)
    path = write_norm_stats(tmp_path, stats)
    for name, entry in read_norm_stats(path).items():
        for key in ("mean", "std", "q01", "q99"):
            assert np.array_equal(getattr(entry, key), getattr(stats[name], key))


def test_files_that_are_no_norm_stats_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no norm stats at"):
        read_norm_stats(tmp_path / "nowhere")
    (tmp_path / "norm_stats.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a norm_stats.json: KeyError"):
        read_norm_stats(tmp_path)
    entry = {"mean": [0, 0], "std": [1, 1], "q01": [0], "q99": [1, 1]}
    (tmp_path / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": entry}}))
    with pytest.raises(ValueError, match="state differ in width"):
        read_norm_stats(tmp_path)


def test_given_stats_must_fit_the_robot(tmp_path, open_small):
    narrow = make([1, 1], [2, 2], [-1, -1], [1, 1])
    write_norm_stats(tmp_path, {"state": narrow, "actions": narrow})
    dataset = Dataset(source=FAKE, robot=Bridge(), norm_stats=str(tmp_path))
    with pytest.raises(ValueError, match=r"mismatched norm stats: 2 dims for 7 named \(x_m"):
        open_small(DataConfig(datasets=(dataset,)))


def test_given_stats_are_used_and_guarded(tmp_path, open_small, caplog):
    given = make([1.0] * 6 + [0.0], [2.0] * 6 + [0.0], [-1] * 7, [1] * 7)
    write_norm_stats(tmp_path, {"state": given, "actions": given})
    opened = open_small(DataConfig(datasets=(Dataset(source=FAKE, robot=Bridge(), norm_stats=str(tmp_path)),)))
    stats = opened.norm_stats["FakeData"]["state"]
    np.testing.assert_allclose(stats.std, [1.0] * 6 + [2e-3 * 2], rtol=1e-12)
    assert (stats.q01[6], stats.q99[6]) == (-1, 1)
    assert re.search(r"state: gripper_fraction \(q99 - q01 = 0: .*full range; std = 0: raised", caplog.text)


@pytest.mark.parametrize("form", ["z_score", "quantile"])
def test_unnormalize_undoes_normalize(form):
    stats, _ = compute_norm_stats([windows()], [1.0], 10**6)
    values = np.random.default_rng(0).normal(size=(5, 3, 7))
    np.testing.assert_allclose(unnormalize(normalize(values, stats["state"], form), stats["state"], form), values)


def test_widths_that_do_not_fit_are_errors():
    stats = make([1, 1], [2, 2], [-1, -1], [1, 1])
    with pytest.raises(ValueError, match="the data has 3 dims, the norm stats 2"):
        normalize(np.zeros(3), stats, "z_score")
    with pytest.raises(ValueError, match="1 dims to un-normalise, the norm stats have 2"):
        unnormalize(np.zeros(1), stats, "z_score")


def test_min_max_maps_the_extremes_to_one_and_a_constant_dim_to_zero(tmp_path):
    low, high = [-0.3, 5.0, 2.0, 0.0], [1.7, 5.0 + 9e-5, 512.0, 1e-4]
    stats = make([0.5, 1e-5, 80.0, 1e-5], [1.0, 1e-5, 400.0, 1e-5], low, high)
    ends = np.array([low, high])
    normal = normalize(ends, stats, "min_max")
    assert np.array_equal(normal[0], [-1, 0, -1, -1])  # the second moves less than 1e-4: scale 1, centred to 0
    np.testing.assert_allclose(normal[1], [1, 9e-5, 1, 1], atol=1e-15)  # an ulp of 5
    np.testing.assert_allclose(unnormalize(normal, stats, "min_max"), ends, rtol=1e-15, atol=1e-15)
    inside = np.random.default_rng(0).uniform(low, high, (100, 4))
    assert np.abs(normalize(inside, stats, "min_max")).max() <= 1
    np.testing.assert_allclose(unnormalize(normalize(inside, stats, "min_max"), stats, "min_max"), inside, rtol=1e-12)
    padded = np.concatenate([normal, np.full((2, 1), 7.0)], axis=1)
    assert np.array_equal(unnormalize(padded, stats, "min_max")[:, 4], [7, 7])
    write_norm_stats(tmp_path, {"actions": stats})
    again = read_norm_stats(tmp_path)["actions"]
    assert np.array_equal(normalize(inside, again, "min_max"), normalize(inside, stats, "min_max"))


def test_min_max_needs_stats_that_have_them(tmp_path, open_small):
    given = dataclasses.replace(make([1.0] * 7, [2.0] * 7, [-1] * 7, [1] * 7), low=None, high=None)
    write_norm_stats(tmp_path, {"state": given, "actions": given})
    dataset = Dataset(source=FAKE, robot=Bridge(), norm_stats=str(tmp_path))
    with pytest.raises(ValueError, match=r"have no min and max; set --data\.normalization z_score, or give none"):
        open_small(DataConfig(datasets=(dataset,), normalization="min_max"))
    rows = open_small(DataConfig(datasets=(dataclasses.replace(dataset, norm_stats=None),), normalization="min_max"))
    actions = rows.train.batch(np.arange(64))[0]["actions"]
    assert -1 <= actions.min() < -0.9 and 0.9 < actions.max() <= 1


def test_openpi_reads_our_file_and_passes_over_min_and_max(tmp_path):
    # Its classes of this name (shared/normalize.py), with their arrays as lists.
    @pydantic.dataclasses.dataclass
    class OpenpiNormStats:
        mean: list[float]
        std: list[float]
        q01: list[float] | None = None
        q99: list[float] | None = None

    class File(pydantic.BaseModel):
        norm_stats: dict[str, OpenpiNormStats]

    path = write_norm_stats(tmp_path, {"state": make([1, 2], [3, 4], [-1, -2], [1, 2])})
    assert "min" in path.read_text()
    assert File.model_validate_json(path.read_text()).norm_stats["state"].std == [1, 2]
