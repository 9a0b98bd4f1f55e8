r"""The reward `math_verify`, by the real package: equal values in other forms, and what is no answer."""

import pytest

pytest.importorskip("math_verify", reason="the extra `math` is not installed")

from openpi_train.rl.rewards.math_answers import is_right


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("so it is $0.5$", r"\frac{1}{2}", 1),
        (r"the answer is \boxed{\frac{2}{4}}", "0.5", 1),
        (r"\boxed{3}", r"\frac{1}{2}", 0),
        ("20 + 22 makes 42", "6 times 7, step by step.\n#### 42", 1),
        ("42, or rather 43", "#### 42", 0),
        (r"$\sqrt{2}$", r"\sqrt{2}", 1),  # without delimiters the package reads no formula, or half of one
        ("2", r"2\pi", 0),
        (r"$x^2 + 2x + 1$", r"$(x+1)^2$", 1),
        (r"\boxed{\{3, 1\}}", r"$\{1, 3\}$", 1),
        ("I do not know", "7", 0),
        ("", "7", 0),
        ("7", "", None),
        ("7", "nobody knows", None),
    ],
)
def test_answers_are_compared_as_mathematics(completion, reference, expected):
    assert is_right("how many?", completion, reference) == expected
