"""The script that a text is written in, by its letters' Unicode names. Languages of one script look alike here."""

import collections
import functools
import re
import unicodedata
from collections.abc import Iterable

# Fewer letters say nothing.
_FEWEST_LETTERS = 3
_LETTERS_LOOKED_AT = 2_000
_SOME_LATIN = re.compile("[A-Za-z][^A-Za-z]*" * _FEWEST_LETTERS)
# Japanese writes Chinese characters between these.
_KANA = ("HIRAGANA", "KATAKANA")
_KANA_SHARE = 0.1


def main_script(text: str) -> str | None:
    """The script of most letters of a text, as "Latin", "Cyrillic", "Chinese" or "Japanese"; None for few letters."""
    if text.isascii():
        return "Latin" if _SOME_LATIN.search(text) else None
    counts = collections.Counter(_script(letter) for letter in text[:_LETTERS_LOOKED_AT] if letter.isalpha())
    if counts.total() < _FEWEST_LETTERS:
        return None
    kana = sum(counts.pop(name, 0) for name in _KANA)
    if kana:
        east = kana + counts.pop("CJK", 0)
        counts["JAPANESE" if kana >= _KANA_SHARE * east else "CHINESE"] += east
    elif "CJK" in counts:
        counts["CHINESE"] += counts.pop("CJK")
    return counts.most_common(1)[0][0].capitalize()


def shares_in_words(counts: Iterable[tuple[str, int]]) -> str:
    """Counts of scripts as a text: `Latin 90, Cyrillic 10`."""
    return ", ".join(f"{script} {count}" for script, count in counts)


@functools.lru_cache(maxsize=1 << 14)
def _script(letter: str) -> str:
    """The first word of a letter's name, which is its script for all but a few."""
    return unicodedata.name(letter, "UNKNOWN").replace("FULLWIDTH ", "").split(" ")[0].split("-")[0]
