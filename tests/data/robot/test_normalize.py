"""The guard on both sides of each of its constants, and the forms' own constants, in closed form."""

import dataclasses

import numpy as np
import pytest

from openpi_train.data.robot.normalize import NormStats, differing_norm_stats, guard, normalize, unnormalize

# Just above a bound, and just below it; float64 would tell 1e-12.
ABOVE, BELOW = 1 + 1e-6, 1 - 1e-6
NAMES = ("a", "b", "c", "d", "e")


def make(*, std=1.0, quantiles=1.0, extremes=1.0, middle=0.25):
    """Five dims around `middle` with these stds, quantile ranges and ranges (a number is that of all)."""
    std, quantiles, extremes = (np.broadcast_to(np.float64(value), 5) for value in (std, quantiles, extremes))
    return NormStats(
        mean=np.full(5, 0.125),
        std=std,
        q01=middle - quantiles / 2,
        q99=middle + quantiles / 2,
        low=middle - extremes / 2,
        high=middle + extremes / 2,
    )


def test_a_std_is_raised_to_a_500th_of_its_own_range():
    bound = 2e-3 * 8.0
    stats = make(std=[1.0, 1.0, 1.0, bound * ABOVE, bound * BELOW], extremes=8.0)
    guarded, notes = guard(stats, NAMES)
    assert notes == {"e": "std = 0.016: raised"}
    assert np.array_equal(guarded.std[:4], stats.std[:4])
    np.testing.assert_allclose(guarded.std[4], bound, rtol=1e-12)
    assert np.array_equal(guarded.mean, stats.mean)
    # What the bound is for: no value of the range is normalised to more than 500.
    farthest = normalize(np.array(stats.high), dataclasses.replace(guarded, mean=stats.low), "z_score")
    assert 499 < farthest[4] < 500 and farthest[3] < 500


def test_a_quantile_range_below_a_100th_of_the_full_one_becomes_the_full_one():
    bound = 1e-2 * 8.0
    stats = make(quantiles=[1.0, 1.0, 1.0, bound * ABOVE, bound * BELOW], extremes=8.0)
    guarded, notes = guard(stats, NAMES)
    assert notes == {"e": "q99 - q01 = 0.08: replaced by the full range"}
    assert np.array_equal(guarded.q01[:4], stats.q01[:4]) and np.array_equal(guarded.q99[:4], stats.q99[:4])
    assert (guarded.q01[4], guarded.q99[4]) == (-3.75, 4.25)


def test_a_std_is_raised_to_a_1000th_of_the_dims_median():
    bound = 1e-3 * 2.0
    stats = make(std=[2.0, 2.0, 9.0, bound * ABOVE, bound * BELOW], extremes=[8.0, 8.0, 8.0, 0.01, 0.01])
    guarded, notes = guard(stats, NAMES)
    assert notes == {"e": "std = 0.002: raised"}
    assert np.array_equal(guarded.std[:4], stats.std[:4])
    np.testing.assert_allclose(guarded.std[4], bound, rtol=1e-12)


def test_a_quantile_range_is_widened_around_its_middle_to_a_1000th_of_the_dims_median():
    bound = 1e-3 * 2.0
    stats = make(quantiles=[2.0, 2.0, 9.0, bound * ABOVE, bound * BELOW], extremes=[8.0, 8.0, 9.0, 0.01, 0.01])
    guarded, notes = guard(stats, NAMES)
    assert notes == {"e": "q99 - q01 = 0.002: widened"}
    assert np.array_equal(guarded.q01[:4], stats.q01[:4]) and np.array_equal(guarded.q99[:4], stats.q99[:4])
    np.testing.assert_allclose([guarded.q01[4], guarded.q99[4]], [0.249, 0.251], rtol=1e-12)


def test_dims_that_never_move_do_not_count_in_the_median():
    scales = [0.0, 0.0, 0.0, 4.0, 2.0]
    guarded, notes = guard(make(std=scales, quantiles=scales, extremes=scales), NAMES)
    assert list(notes) == ["a", "b", "c"]
    np.testing.assert_allclose(guarded.std, [3e-3, 3e-3, 3e-3, 4, 2], rtol=1e-12)
    np.testing.assert_allclose(guarded.q99 - guarded.q01, [3e-3, 3e-3, 3e-3, 4, 2], rtol=1e-12)


def test_where_nothing_moves_values_keep_their_unit():
    guarded, notes = guard(make(std=0.0, quantiles=0.0, extremes=0.0), NAMES)
    assert list(notes) == list(NAMES)
    assert np.array_equal(guarded.std, np.ones(5))
    assert np.array_equal(guarded.q01, np.full(5, -0.25)) and np.array_equal(guarded.q99, np.full(5, 0.75))


def test_without_extremes_the_quantiles_stand_for_them():
    bound = 2e-3 * 8.0
    stats = make(std=[1.0, 1.0, 1.0, bound * ABOVE, bound * BELOW], quantiles=8.0)
    guarded, notes = guard(dataclasses.replace(stats, low=None, high=None), NAMES)
    assert list(notes) == ["e"]
    np.testing.assert_allclose(guarded.std[4], bound, rtol=1e-12)
    # Nor are there quantiles in some of openpi's files: the median is left.
    bound = 1e-3
    nothing = np.full(5, np.nan)
    stats = make(std=[1.0, 1.0, 1.0, bound * ABOVE, bound * BELOW])
    guarded, notes = guard(dataclasses.replace(stats, low=None, high=None, q01=nothing, q99=nothing), NAMES)
    assert list(notes) == ["e"]
    np.testing.assert_allclose(guarded.std, [1, 1, 1, bound * ABOVE, bound], rtol=1e-12)


def test_names_must_be_as_many_as_dims():
    with pytest.raises(ValueError, match=r"mismatched norm stats: 5 dims for 2 named \(a, b\)"):
        guard(make(), ("a", "b"))


@pytest.mark.parametrize("form", ["z_score", "quantile"])
def test_a_millionth_is_added_to_what_is_divided_by(form):
    """As in openpi; seen where the scale is a millionth itself."""
    stats = make(std=1e-6, quantiles=1e-6)
    x = stats.mean + 3e-6 if form == "z_score" else stats.q01 + 3e-6
    want = 1.5 if form == "z_score" else 2.0  # 3 / (1 + 1), and twice that less 1
    np.testing.assert_allclose(normalize(x, stats, form), want, rtol=1e-9)
    np.testing.assert_allclose(unnormalize(np.full(5, want), stats, form), x, rtol=1e-15)


def test_a_dim_that_moves_less_than_a_ten_thousandth_is_constant_to_min_max():
    stats = make(extremes=[1e-4 * ABOVE, 1e-4 * BELOW, 0.0, 2.0, 2.0], middle=0.0)
    assert stats.high is not None
    np.testing.assert_allclose(normalize(stats.high, stats, "min_max"), [1, 1e-4 * BELOW, 0, 1, 1], rtol=1e-9)
    np.testing.assert_allclose(unnormalize(np.ones(5), stats, "min_max")[[0, 3]], stats.high[[0, 3]], rtol=1e-9)


def saved_stats(**changed):
    entry = {"mean": [0.0, 5.0], "std": [1.0, 2.0], "q01": [-2.0, 1.0], "q99": [2.0, 9.0]}
    return {"norm_stats": {"state": entry | changed}}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"mean": [0.04, 5.09], "q01": [-2.1, 1.1]}, None),  # other code's, of the same data
        ({"q01": None, "q99": None}, None),  # not known to one of them
        ({"mean": None, "q99": [2.0, 90.0]}, "state[1] has q01 1 and q99 9, not 1 and 90"),
        ({"mean": [0.0, 5.2]}, "state[1] has mean 5 and std 2, not 5.2 and 2"),
        ({"std": [1.2, 2.0]}, "state[0] has mean 0 and std 1, not 0 and 1.2"),
        ({"q99": [2.0, 90.0]}, "state[1] has q01 1 and q99 9, not 1 and 90"),
        ({"mean": [0.0], "std": [1.0]}, "state has 2 dims, not 1"),
    ],
)
def test_norm_stats_that_scale_a_dim_otherwise_are_named(changed, told):
    assert differing_norm_stats({"mine": saved_stats()}, {"theirs": saved_stats(**changed)}) == told
    both = {"mine": saved_stats(), "b": saved_stats()}
    assert differing_norm_stats(both, {"mine": saved_stats(**changed)}) == told
    assert differing_norm_stats(both, {"theirs": saved_stats(**changed)}) is None  # of none of these
    assert differing_norm_stats({}, {"theirs": saved_stats(**changed)}) is None
