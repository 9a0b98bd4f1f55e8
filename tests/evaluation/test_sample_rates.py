"""pass@k and the vote of the majority, against the enumeration of all cases."""

import collections
import itertools
from fractions import Fraction

import pytest

from openpi_train.evaluation.text_evaluations import majority_rate, pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n):
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * right + [False] * (n - right), k))
        assert pass_at_k(n, right, k) == pytest.approx(float(Fraction(sum(map(any, subsets)), len(subsets))), abs=1e-15)


def test_pass_at_one_is_the_mean():
    assert pass_at_k(200, 37, 1) == pytest.approx(37 / 200, rel=1e-14)
    assert pass_at_k(1000, 1, 999) == pytest.approx(0.999, rel=1e-12)


@pytest.mark.parametrize(
    "answers", [*itertools.product("ab", repeat=3), *itertools.product(["a", "b", None], repeat=4)]
)
def test_of_equally_frequent_answers_each_is_drawn_as_often(answers):
    is_right = [answer == "a" for answer in answers]
    # The most frequent answer that comes first, over all orders of the completions.
    found = []
    for order in itertools.permutations([answer for answer in answers if answer is not None]):
        chosen = collections.Counter(order).most_common(1)
        found.append(bool(chosen) and chosen[0][0] == "a")
    assert majority_rate(answers, is_right) == pytest.approx(sum(found) / len(found))
