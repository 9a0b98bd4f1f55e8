"""What is said of an action error beside that of the mean action, for pairs worked out by hand."""

import math

import pytest

from openpi_train.evaluation.baseline import against_mean_action


@pytest.mark.parametrize(
    ("error", "baseline", "begins", "has_learned"),
    [
        (1.0, 3.1, "better than the mean action of the training data by a factor 3.1", True),
        (0.8, 1.2, "better than the mean action of the training data by a factor 1.50", True),
        (0.001, 1.0, "better than the mean action of the training data by a factor 1e+03", True),
        (0.0, 1.0, "better than the mean action of the training data: there is no error", True),
        (2.457, 0.8107, "worse than the mean action of the training data by a factor 3.0: it has not learned", False),
        (1.0, 1.0, "no better than the mean action of the training data: it has not learned", False),
        (1.0, 1.04, "no better than", False),
        (1.04, 1.0, "no better than", False),
        (math.nan, 1.0, "not a number", False),
        (math.inf, 1.0, "not a number", False),
        (1.0, 0.0, "not to be compared", None),
        (0.0, 0.0, "not to be compared", None),
    ],
)
def test_the_words_follow_the_factor(error, baseline, begins, has_learned):
    found = against_mean_action(error, baseline)
    assert found.words.startswith(begins) and found.has_learned is has_learned
    assert ("has not learned" in found.words) == (has_learned is False)
