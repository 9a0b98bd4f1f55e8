"""Names that a wrong one was perhaps meant to be. Read next: `damage.py`."""

import difflib
from pathlib import Path

# By difflib's ratio: of five letters one is wrong.
_CLOSE = 0.8


def guess(path: Path) -> str:
    """A question that names what lies beside a missing path with nearly its name; empty if nothing does."""
    try:
        names = [one.name for one in path.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=_CLOSE)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""
