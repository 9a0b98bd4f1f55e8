"""A few values far outside all others: quantiles keep the scale of those, and the steps are named."""

import dataclasses
import logging

import numpy as np
import pytest

from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.norm_stats import Asset, _outermost, summarize
from openpi_train.data.robot.normalize import guard, normalize, read_norm_stats, spiked, write_norm_stats
from openpi_train.data.robot.windows import Windows, WindowShape
from openpi_train.robots.bridge import Bridge

NAMES = ("j0", "j1", "j2")
INT_OVERFLOW = -2147483648


@pytest.fixture(scope="module")
def sound():
    return np.random.default_rng(0).uniform(-1, 1, (20_000, 3)).astype(np.float32)


def summary(values, blocks=3):
    return summarize([(1 / len(values), lambda: np.array_split(values, blocks))])


@pytest.mark.parametrize("seed", range(6))
def test_quantiles_are_numpys_whatever_the_range_and_the_blocks(seed):
    random = np.random.default_rng(seed)
    values = random.standard_normal((random.integers(100, 3000), 4)) * 10.0 ** random.integers(-30, 30, 4)
    values = values.astype(np.float32)
    values[random.integers(len(values))] = random.choice([INT_OVERFLOW, 3e38, -1e-38, 0.0])
    values[:3, 0] = [0.0, -0.0, -0.0]
    stats = summary(values)
    assert stats.most_low is not None and stats.most_high is not None
    for level, found in ((0.01, stats.q01), (0.99, stats.q99), (5e-4, stats.most_low), (1 - 5e-4, stats.most_high)):
        assert np.array_equal(found, np.quantile(values, level, axis=0, method="inverted_cdf"))
    other = summary(values, blocks=5)
    assert np.array_equal(other.q01, stats.q01) and np.array_equal(other.q99, stats.q99)
    # A file's order of the memory is none of the numbers'.
    assert np.array_equal(summary(np.asfortranarray(values)).q99, stats.q99)


def test_numbers_that_float32_lacks_are_rounded_inside_the_range():
    values = np.linspace(0.1, 0.3, 101)[:, None]
    stats = summary(values)
    assert stats.most_low is not None and stats.most_high is not None
    assert 0.1 <= stats.most_low < 0.1 * (1 + 6e-8) and np.array_equal(stats.most_high, [0.3])
    np.testing.assert_allclose(stats.q99, np.quantile(values, 0.99, axis=0, method="inverted_cdf"), rtol=6e-8)


def test_shares_of_several_datasets_are_weighted_exactly():
    one, two = np.zeros((100, 1), np.float32), np.ones((300, 1), np.float32)
    # 3 of 4 rows are of the first, so a value of the second is reached at 75 % and above.
    stats = summarize([(0.989 / 100, lambda: [one]), (0.011 / 300, lambda: [two])])
    assert stats.q99.tolist() == [1] and stats.q01.tolist() == [0]
    stats = summarize([(0.991 / 100, lambda: [one]), (0.009 / 300, lambda: [two])])
    assert stats.q99.tolist() == [0]


@pytest.mark.parametrize("spike", [10.0, 150.0, 1e3, 1e6, 3e38, INT_OVERFLOW])
@pytest.mark.parametrize("number", [1, 5])
def test_a_dim_keeps_its_scale_whatever_a_few_frames_hold(sound, spike, number):
    values = sound.copy()
    values[777 : 777 + number, 0] = spike
    stats, notes = guard(summary(values), NAMES)
    exact = np.quantile(values, [0.01, 0.99], axis=0, method="inverted_cdf")
    assert not notes and np.array_equal([stats.q01, stats.q99], exact)
    spread = normalize(values[sound[:, 0] == values[:, 0]], stats, "quantile")[:, 0].std()
    np.testing.assert_allclose(spread, 1 / np.sqrt(3) / 0.98, rtol=0.01)  # uniform over -1/.98..1/.98; 20,000 draws
    assert spiked(stats).tolist() == [abs(spike) > 199, False, False]


def test_a_spike_is_told_by_how_many_values_lie_outside(sound):
    """18 of 20,000 are a spike, 22 are a motion, at the same distance."""
    for number, is_spike in ((18, True), (2, True), (22, False), (150, False)):
        values = sound.copy()
        values[:number, 0] = np.where(np.arange(number) % 2, 1e3, -1e3)
        stats, notes = guard(summary(values), NAMES)
        assert spiked(stats)[0] == is_spike, number
        assert (stats.q99[0] == 1e3) != is_spike and (list(notes) == []) == is_spike


def test_dims_that_rest_have_their_range_of_motion(sound):
    """A gripper that closes in 3 frames, a joint at rest with one jump, and one that moves in 1 of 200 frames."""
    values = sound.copy()
    values[:, 0] = 0
    values[100:103, 0] = 1
    values[:, 1] *= 1e-5
    values[5, 1] = 0.5
    stats, notes = guard(summary(values), NAMES)
    assert list(notes) == ["j0", "j1"] and not spiked(stats).any()
    assert (stats.q01[0], stats.q99[0]) == (0, 1) and stats.q99[1] == 0.5
    values[:, 0] = 1e-3 * sound[:, 0]
    values[:100, 0] = 1.6 * sound[:100, 0]
    moving, notes = guard(summary(values), NAMES)
    most = np.quantile(values[:, 0], [5e-4, 1 - 5e-4], method="inverted_cdf")
    assert list(notes) == ["j0", "j1"] and [moving.q01[0], moving.q99[0]] == [values[:, 0].min(), values[:, 0].max()]
    values[9000, 0] = INT_OVERFLOW
    spike, notes = guard(summary(values), NAMES)
    assert spiked(spike)[0] and list(notes) == ["j0", "j1"]
    # As if it moved only so far as all but 1 in 1000 say.
    np.testing.assert_allclose([spike.q01[0], spike.q99[0]], most, rtol=0.05)  # one value more lies outside


def test_the_file_says_that_it_was_a_spike_so_that_it_can_be_given_again(sound, tmp_path):
    values = sound.copy()
    values[0, 2] = 1e6
    stats, _ = guard(summary(values), NAMES)
    write_norm_stats(tmp_path, {"state": stats})
    again, notes = guard(read_norm_stats(tmp_path)["state"], NAMES)
    assert not notes and np.array_equal(again.q99, stats.q99)
    # A file of another project does not say how many they are: the full range, as ever.
    other = dataclasses.replace(stats, most_low=None, most_high=None)
    assert guard(other, NAMES)[0].q99[2] == 1e6


def test_small_datasets_may_have_a_spike_too():
    assert _outermost([100_000], [1.0]) == 5e-4
    assert _outermost([1000], [2.0]) == 2e-3
    assert _outermost([1000, 10**6], [1.0, 3.0]) == 5e-4
    assert _outermost([100], [1.0]) == 9e-3


def windows(column=None, step=100, value=INT_OVERFLOW):
    source = FakeData(num_episodes=10, episode_length=30).open()
    if column is not None:
        source.columns[column][step, 1] = value
    return Windows(source=source, robot=Bridge(trajectory=True), shape=WindowShape(horizon=4))


def asset(window, folder):
    return Asset(name="arm", windows=[window], weights=[1.0], folder=folder, max_samples=10**6)


def test_the_step_of_a_spike_is_in_the_log_of_every_start(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    sound = asset(windows(), tmp_path / "sound").stats()
    assert "spike" not in caplog.text
    for _ in range(2):
        caplog.clear()
        window = windows("observation/state")
        stats = asset(window, tmp_path / "arm").stats()
        assert "nearly constant" not in caplog.text
        lines = [line for line in caplog.messages if "spike" in line]
        first = window.source.describe(100)
        said = f"arm: spike: 1 of {window.source.num_steps} control steps (state y_m of -2.147e+09, while 98 of 100"
        assert lines[0].startswith(said)
        assert f"; the first: {first}. In training q01 and q99 keep the scale" in lines[0]
        # Of actions, which are relative to it: those of the chunk that begins there.
        assert "actions y_m of" in lines[1] and len(lines) == 2
        np.testing.assert_allclose(stats["state"].q99, sound["state"].q99, rtol=0.1)


def test_samples_are_read_for_spikes_only_where_there_are_some(tmp_path, monkeypatch):
    window = windows()
    stats = asset(window, tmp_path).compute()[0]
    monkeypatch.setattr(Windows, "chunks", None)
    assert asset(window, tmp_path).spikes(stats) == []
