"""The flags of a command line, in any order."""

import re


def each(words: str) -> set[str]:
    """The flags of a command line, each with its value."""
    return set(re.split(" (?=--)", words.strip()))
