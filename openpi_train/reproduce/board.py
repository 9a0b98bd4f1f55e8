"""The board: every entry by name, and the table of them. Read next: `reproduction.py`, then a module of entries."""

import difflib

from openpi_train.reproduce import (
    aloha_entries,
    fetch_entries,
    libero_entries,
    maniskill_entries,
    metaworld_entries,
    pusht_entries,
    tabletop_entries,
)
from openpi_train.reproduce.reproduction import Reproduction
from openpi_train.runtime.exits import UsageError

BOARD: dict[str, Reproduction] = {
    entry.name: entry
    for module in (
        tabletop_entries,
        fetch_entries,
        metaworld_entries,
        maniskill_entries,
        pusht_entries,
        aloha_entries,
        libero_entries,
    )
    for entry in module.ENTRIES
}


def entry_of(name: str) -> Reproduction:
    """The entry of this name. Raises UsageError with the closest one."""
    if name not in BOARD:
        close = difflib.get_close_matches(name, BOARD, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise UsageError(f"the board has no {name!r}{hint} It has {', '.join(BOARD)}")
    return BOARD[name]


def table() -> str:
    """The board as a table in Markdown: a line for each entry."""
    rows = [("name", "what", "needs", "machine", "published", "minutes"), ("---",) * 6]
    for entry in BOARD.values():
        needs = f"`[{entry.extra}]`" if entry.extra else "nothing"
        published = "none" if entry.published is None else f"{entry.published.success:.2%}: {entry.published.source}"
        minutes = "not measured" if entry.minutes is None else f"{entry.minutes:g}"
        rows.append((f"`{entry.name}`", entry.what, needs, entry.machine, published, minutes))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
