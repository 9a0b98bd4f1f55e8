"""How states follow actions: correlations at several lags, measures for `episode_table.py`, of one block of episodes.

Arrays are those of whole episodes, one after the other: values [n, dims], `starts` and `ends` [episodes]. Read next:
`following_kinds.py`, which judges by them.
"""

from collections.abc import Sequence

import numpy as np

# By how many control steps a state's change comes after the action's; below 0 it comes before.
LAGS = np.arange(-6, 9)
# What an action is: the position that the state is to reach, or the motion to it.
FORMS = ("position", "motion")
# A gripper takes its time: its state is compared with the actions of so many steps before.
_GRIPPER_LAGS = np.arange(17)


def of_arms(
    states: np.ndarray, actions: np.ndarray, starts: np.ndarray, ends: np.ndarray, dims: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For each of `FORMS`, float32: the profile [e, lags] and the signs [e, d].

    The profile is the mean of absolute correlations between a state's changes and the actions (or the changes of
    actions) over `dims`, bool [d]; the signs are the correlations at the profile's best lag.
    """
    change = np.zeros(states.shape)
    change[:-1] = np.diff(states.astype(np.float64), axis=0)
    change[ends - 1] = 0
    change = _centred(change, starts, ends)
    found = {}
    for form in FORMS:
        commands = actions.astype(np.float64)
        if form == "position":
            commands = np.diff(commands, axis=0, prepend=commands[:1])
            commands[starts] = 0
        each = correlations(_centred(commands, starts, ends), change, starts, ends, LAGS)
        if dims.any():
            profile = np.abs(each[:, dims]).mean(axis=1)
        else:
            profile = np.zeros((len(starts), len(LAGS)))
        best = profile.argmax(axis=1)
        signs = np.take_along_axis(each, best[:, None, None], axis=2)[..., 0]
        found[form] = profile.astype(np.float32), signs.astype(np.float32)
    return found


def of_grippers(states: np.ndarray, actions: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The largest correlation of each state's level with its action's, and the largest negative one, [e, d, 2]."""
    state, action = (_centred(values.astype(np.float64), starts, ends) for values in (states, actions))
    each = correlations(action, state, starts, ends, _GRIPPER_LAGS)
    return np.stack([each.max(axis=2), (-each).max(axis=2)], axis=2).astype(np.float32)


def correlations(
    one: np.ndarray, other: np.ndarray, starts: np.ndarray, ends: np.ndarray, lags: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Correlations of `one` [n, d] with `other` so many steps later, both centred, [e, d, lags]; 0 if one is still."""
    norms = [np.sqrt(np.add.reduceat(np.square(values), starts, axis=0)) for values in (one, other)]
    norm = norms[0] * norms[1]
    episode = np.repeat(np.arange(len(starts)), ends - starts)
    found = np.zeros((*norm.shape, len(lags)))
    for number, lag in enumerate(lags):
        if abs(lag) >= len(one):  # no episode is as long
            continue
        early, late = (slice(0, len(one) - abs(lag)), slice(abs(lag), len(one)))
        mine, theirs = (early, late) if lag >= 0 else (late, early)
        products = np.zeros(one.shape)
        products[early] = one[mine] * other[theirs] * (episode[early] == episode[late])[:, None]
        found[..., number] = np.add.reduceat(products, starts, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found /= norm[..., None]
    return np.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0)


def _centred(values: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Values less their episode's mean; what is not finite counts as the mean, rounding is no motion."""
    finite = np.where(np.isfinite(values), values, 0)
    lengths = (ends - starts)[:, None]
    mean = np.add.reduceat(finite, starts, axis=0) / lengths
    episode = np.repeat(np.arange(len(starts)), ends - starts)
    centred = np.where(np.isfinite(values), finite - mean[episode], 0)
    largest = np.maximum.reduceat(np.abs(finite), starts, axis=0)[episode]
    return np.where(np.abs(centred) <= 1e-12 * largest, 0, centred)
