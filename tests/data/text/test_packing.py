"""Best-fit decreasing: what must hold of every packing, and a search through all packings of a few texts."""

import numpy as np
import pytest

from openpi_train.data.text.packing import pack


def rows_of(lengths, capacity):
    members, ends = pack(np.array(lengths), capacity)
    return [part.tolist() for part in np.split(members, ends[:-1])] if len(ends) else []


def fewest(lengths, capacity):
    """The least number of rows, by trying every row for every text."""

    def fits(left, rooms):
        if not left:
            return True
        tried = set()
        for row, room in enumerate(rooms):
            if room >= left[0] and room not in tried:
                tried.add(room)
                if fits(left[1:], [*rooms[:row], room - left[0], *rooms[row + 1 :]]):
                    return True
        return False

    return next(count for count in range(len(lengths) + 1) if fits(sorted(lengths)[::-1], [capacity] * count))


@pytest.mark.parametrize("seed", range(30))
def test_every_text_is_in_one_row_and_every_row_fits(seed):
    random = np.random.default_rng(seed)
    capacity = int(random.integers(1, 200))
    lengths = random.integers(1, capacity + 1, size=random.integers(1, 400))
    rows = rows_of(lengths, capacity)
    assert sorted(text for row in rows for text in row) == list(range(len(lengths)))
    assert all(sum(lengths[text] for text in row) <= capacity for row in rows)


@pytest.mark.parametrize("seed", range(30))
def test_it_needs_at_most_two_ninths_more_rows_than_the_best(seed):
    """Johnson 1973: best fit decreasing needs at most 11/9 of the fewest rows, and 4 more."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 11, size=9)
    best = fewest(lengths.tolist(), 10)
    assert best <= len(rows_of(lengths, 10)) <= np.ceil(11 / 9 * best)  # without the 4: they are few


@pytest.mark.parametrize("seed", range(10))
def test_each_text_went_into_the_fullest_row_that_had_room(seed):
    lengths = np.random.default_rng(seed).integers(1, 30, size=200)
    members, ends = pack(lengths, 40)
    row_of = dict(
        zip(members.tolist(), np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0)).tolist(), strict=True)
    )
    # A row's texts stand in the order in which they came; replay it.
    rooms = {}
    remaining = [part.tolist() for part in np.split(members, ends[:-1])]
    for _ in range(len(lengths)):
        longest = max((lengths[row[0]], -number) for number, row in enumerate(remaining) if row)[0]
        heads = [row[0] for row in remaining if row and lengths[row[0]] == longest]
        allowed = [room for room in rooms.values() if room >= longest]
        # Of texts of equal length any may be the next.
        fitting = [text for text in heads if rooms.get(row_of[text], 40) == min(allowed, default=40)]
        assert fitting
        text = fitting[0]
        rooms[row_of[text]] = rooms.get(row_of[text], 40) - longest
        remaining[row_of[text]].remove(text)


def test_equal_input_gives_equal_rows_and_no_input_none():
    lengths = np.random.default_rng(0).integers(1, 50, size=300)
    assert rows_of(lengths, 64) == rows_of(lengths.copy(), 64)
    assert rows_of([], 8) == []
    assert rows_of([8, 8], 8) == [[0], [1]] or rows_of([8, 8], 8) == [[1], [0]]


def test_neighbours_of_equal_length_do_not_stay_neighbours():
    rows = rows_of([4] * 1000, 8)
    assert np.mean([abs(a - b) == 1 for a, b in rows]) < 0.05
