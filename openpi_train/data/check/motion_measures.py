"""How states and actions move, together and apart: measures for `episode_table.py`, of one block of episodes.

Arrays are those of whole episodes, one after the other: values [n, dims], `starts` and `ends` [episodes]. Read next:
`comparison_kinds.py`, which judges by them.
"""

import numpy as np

# Stretches shorter than this say nothing. A robot follows its command some steps later: as many are cut off both ends.
_STRETCH, _LAG = 10, 5
# Rows are doubled where so many or fewer are equal between steps that move.
_MOST_EQUAL = 5
# A step moves if a dim changes by this many of its smallest changes: coarse sensors pass through equal values.
_RESOLUTIONS = 5


def ranges_while_held(
    held: np.ndarray, moving: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The largest range [e, d] of `moving` in a stretch of equal values of `held`, and that stretch's first step or -1.

    Stretches have at least 10 steps, besides 5 at both ends, unless those are the episode's. Those at the episode's
    lowest or highest value do not count: a robot at its stop.
    """
    ranges = np.zeros((len(starts), held.shape[1]), np.float64)
    first = np.full(ranges.shape, -1, np.int64)
    low, high = (reduce.reduceat(held, starts, axis=0) for reduce in (np.fmin, np.fmax))
    for dim in range(held.shape[1]):
        changed = np.empty(len(held), bool)
        changed[1:] = held[1:, dim] != held[:-1, dim]
        changed[starts] = True
        begins = np.flatnonzero(changed)
        stops = np.append(begins[1:], len(held))
        long = stops - begins >= _STRETCH
        begins, stops = begins[long], stops[long]
        episode = np.searchsorted(ends, begins, side="right")
        inner = np.where(begins == starts[episode], begins, begins + _LAG)
        outer = np.where(stops == ends[episode], stops, stops - _LAG)
        enough = (
            (outer - inner >= _STRETCH)
            & (held[begins, dim] > low[episode, dim])
            & (held[begins, dim] < high[episode, dim])
        )
        for begin, start, stop, one in zip(*(x[enough].tolist() for x in (begins, inner, outer, episode)), strict=True):
            range_ = float(np.ptp(moving[start:stop, dim]))
            if range_ > ranges[one, dim]:
                ranges[one, dim], first[one, dim] = range_, begin
    return ranges, first


def doubled_rows(
    states: np.ndarray, actions: np.ndarray, starts: np.ndarray, ends: np.ndarray, cells: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """How many rows of each episode repeat the one before while the arm moves, int32 [e], and the first or -1 [e].

    Two to five equal rows lie between two steps, or between the episode's start and one, that move a state by more than
    its `cells` [d] and by more than a coarse sensor does.
    """
    counts, first = np.zeros(len(starts), np.int32), np.full(len(starts), -1, np.int64)
    if not states.size or not actions.size:
        return counts, first
    equal = np.zeros(len(states), bool)
    equal[1:] = np.all(states[1:] == states[:-1], axis=1)
    equal[1:] &= np.all(actions[1:] == actions[:-1], axis=1)
    equal[starts] = False
    if not equal.any():
        return counts, first
    change = np.abs(np.diff(states.astype(np.float64), axis=0, prepend=states[:1]))
    change[starts] = 0
    smallest = np.where(change > 0, change, np.inf).min(axis=0)
    moves = np.any(change >= np.maximum(cells, _RESOLUTIONS * smallest), axis=1)
    # A stretch is a row and the equal ones after it; the step into its first row and the one out of its last move.
    begins = np.flatnonzero(~equal)
    stops = np.append(begins[1:], len(states))
    which = (stops - begins >= 2) & (stops - begins <= _MOST_EQUAL) & (stops < len(states))
    begins, stops = begins[which], stops[which]
    which = (moves[begins] | np.isin(begins, starts)) & moves[stops]
    begins, stops = begins[which], stops[which]
    episode = np.searchsorted(ends, begins, side="right")
    np.add.at(counts, episode, stops - begins - 1)
    first[episode[::-1]] = begins[::-1] + 1
    return counts, first
