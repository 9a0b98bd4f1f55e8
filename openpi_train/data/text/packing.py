"""Packing of texts into rows of one length, by best fit in decreasing order. Read next: `text_rows.py`."""

import bisect

import numpy as np

from openpi_train.data.core import order


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put texts of these lengths [n], each in 1..capacity, into as few rows of `capacity` tokens as best fit needs.

    The longest text goes first; each text goes into the row with the least room in which it fits, else into a new one.
    Texts of equal length are taken in scrambled order, so that neighbours in a file do not share a row.

    Returns: the texts of all rows, row after row, int64 [n], and the end of each row in that list, int64 [rows].
    """
    assert len(lengths) == 0 or 1 <= lengths.min() <= lengths.max() <= capacity
    texts = np.arange(len(lengths))
    decreasing = np.lexsort((order.scramble(0, texts), -lengths.astype(np.int64)))
    rows: list[list[int]] = []
    # The rows with each amount of room, and the amounts that there are, ascending.
    with_room: dict[int, list[int]] = {}
    amounts: list[int] = []
    for text, length in zip(decreasing.tolist(), lengths[decreasing].tolist(), strict=True):
        place = bisect.bisect_left(amounts, length)
        if place == len(amounts):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = amounts[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del amounts[place], with_room[room]
        rows[row].append(text)
        if (left := room - length) not in with_room:
            with_room[left] = []
            bisect.insort(amounts, left)
        with_room[left].append(row)
    members = np.array([text for row in rows for text in row], np.int64)
    return members, np.cumsum([len(row) for row in rows], dtype=np.int64)
