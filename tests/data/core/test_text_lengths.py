"""Which lengths of text a run's batches have, and what they save: by the formula, and by hand."""

import itertools

import numpy as np
import pytest

from openpi_train.data.core.text_lengths import TextLengths, choose_lengths, rounded, shares_of_rows


def test_a_batch_has_the_least_length_that_holds_its_longest_row():
    text = TextLengths(lengths=(16, 40), tokens=(np.array([9, 16]), np.array([17])))
    assert text.of(np.array([0, 0]), np.array([0, 1])) == 16
    assert text.of(np.array([0, 1, 0]), np.array([0, 0, 0])) == 40
    assert [rounded(tokens, 20) for tokens in (1, 8, 9, 17, 20)] == [8, 8, 16, 20, 20]


def test_lengths_are_those_of_least_expected_cost():
    shares = {5: 0.5, 14: 0.4, 30: 0.07, 39: 0.03}
    for batch_size, most in itertools.product((1, 8, 64), (1, 2, 3)):
        chosen = choose_lengths(shares, 40, batch_size=batch_size, cost=lambda length: 100.0 + length, most=most)
        fits = {8: 0.5, 16: 0.9, 32: 0.97, 40: 1.0}

        def expected(lengths, batch_size=batch_size, fits=fits):
            total, below = 0.0, 0.0
            for length in lengths:
                total += (fits[length] ** batch_size - below) * (100 + length)
                below = fits[length] ** batch_size
            return total

        others = [(*shorter, 40) for count in range(most) for shorter in itertools.combinations((8, 16, 32), count)]
        # The best, but for one more program that would save less than 2 % of the longest's cost.
        assert expected(chosen) <= min(map(expected, others)) + 0.02 * 140
        fewer = [lengths for lengths in others if len(lengths) < len(chosen)]
        assert not fewer or expected(chosen) <= min(map(expected, fewer)) - 0.02 * 140


def test_where_nothing_is_saved_there_is_one_length():
    even = {38: 0.9, 40: 0.1}
    assert choose_lengths(even, 40, batch_size=8, cost=float, most=3) == (40,)
    rare_but_large_batch = {8: 0.99, 40: 0.01}
    assert choose_lengths(rare_but_large_batch, 40, batch_size=4096, cost=float, most=3) == (40,)
    assert choose_lengths(rare_but_large_batch, 40, batch_size=8, cost=float, most=3) == (8, 40)
    assert choose_lengths(rare_but_large_batch, 40, batch_size=8, cost=lambda length: 1e4 + length, most=3) == (40,)


def test_shares_are_of_rows_by_weight():
    tokens = (np.array([5, 5, 5, 9]), np.array([9, 9]))
    assert shares_of_rows(tokens, [3.0, 1.0]) == pytest.approx({5: 9 / 16, 9: 7 / 16})
