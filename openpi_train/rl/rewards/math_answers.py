r"""Whether a completion's answer equals the reference as mathematics: the reward `math_verify`, by that package.

`\frac{1}{2}`, `0.5` and `\boxed{2/4}` are equal. Parsing may hang on what a policy writes: it is called in a process of
its own, which is killed. The package's own limits raise a signal, which stops no long computation in C, and count
what they stop as wrong; they are off. Must not import jax. Read next: `reward_process.py`.
"""

import logging

import math_verify

# It would warn once per process that its limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_NO_LIMIT = 0
# Delimiters of formulas, without which the package reads no LaTeX; and the mark of final answers (GSM8K).
_DELIMITERS = ("$", r"\(", r"\[", r"\boxed", r"\begin")
_FINAL = "####"


def is_right(prompt: str, completion: str, reference: str) -> float | None:
    """1 if the answer in the completion equals that of the reference, else 0; None if the reference has none.

    The answer is what is boxed, or else the last formula or number.
    """
    del prompt
    wanted = _parsed(_delimited(reference.rpartition(_FINAL)[2].strip()))
    if not wanted:
        return None
    return float(math_verify.verify(wanted, _parsed(completion), timeout_seconds=_NO_LIMIT))


def _parsed(text: str) -> list:
    return math_verify.parse(text, parsing_timeout=_NO_LIMIT)


def _delimited(reference: str) -> str:
    """The reference as a formula: it may be LaTeX without delimiters."""
    is_bare = "\\" in reference and not any(one in reference for one in _DELIMITERS)
    return f"${reference}$" if is_bare else reference
