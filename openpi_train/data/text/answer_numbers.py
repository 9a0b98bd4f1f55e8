r"""The number that an answer gives, as an exact fraction. Read next: `answer_scores.py`.

It is the last number of the marked part: of the line after `####` (as in GSM8K), or inside `\boxed{}` (as in MATH), the
last of these that holds a number. Without one it is the last number of the text.

    18    1,234.50    -3    $7    50%    3/4    1 1/2    \frac{3}{4}    1{,}000

Currency and percent signs are left out. A minus after a number or a bracket subtracts. Digits after a letter, as in
H2O, are no number.
"""

import re
from fractions import Fraction

# Longer numbers are no answers. Python refuses to convert thousands of digits.
_MOST_CHARACTERS = 100
_MARK = re.compile(r"####|\\boxed\s*\{")
# LaTeX and signs of other scripts, in plain characters; in this order.
_PLAIN = (
    (re.compile("[\u2212\u2013]"), "-"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[!,;]"), ""),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"(?<=\d)\s*(?=\\[dt]?frac)"), " "),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), lambda found: f"{found[1].strip()}/{found[2].strip()}"),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r"\1/\2"),
    (re.compile(r"([-+])\s?[$€£¥]"), r"\1"),
    (re.compile("[$€£¥]"), " "),
)
_NUMBER = re.compile(
    r"""
    (?P<sign> (?<![\w)\]}%]) [-+] )?
    (?<!\w)
    (?: (?P<whole> \d+ ) [ ] (?=\d+/\d) )?
    (?P<digits> \d{1,3} (?:,\d{3})+ (?!\d) | \d+ | (?=\.\d) )
    (?P<decimals> \.\d+ )?
    (?: \s?/\s? (?P<below> \d+ (?:\.\d+)? ) )?
    """,
    re.VERBOSE | re.ASCII,
)


def number_of(text: str) -> Fraction | None:
    """The number that the text gives as its answer; None if it has none."""
    for mark in reversed(list(_MARK.finditer(text))):
        rest = text[mark.end() :]
        marked = (rest.lstrip().splitlines() or [""])[0] if mark[0] == "####" else _inside(rest)
        if (found := _last(marked)) is not None:
            return found
    return _last(text)


def _inside(text: str) -> str:
    """The text up to the brace that closes the one before it."""
    depth = 1
    for place, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return text[:place]
    return text


def _last(text: str) -> Fraction | None:
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    found = list(_NUMBER.finditer(text))
    return _value(found[-1]) if found else None


def _value(found: re.Match[str]) -> Fraction | None:
    """The value of a match; None for a division by zero, or too many digits."""
    if len(found[0]) > _MOST_CHARACTERS:
        return None
    value, below = Fraction(f"{found['digits'].replace(',', '')}{found['decimals'] or ''}"), found["below"]
    if below is not None:
        if not (divisor := Fraction(below)):
            return None
        value /= divisor
    # In `16 24/4` the first number is one by itself.
    if found["whole"] is not None and value < 1:
        value += int(found["whole"])
    return -value if found["sign"] == "-" else value
