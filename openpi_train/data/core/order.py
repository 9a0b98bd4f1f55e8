"""Data order as a pure function from position to sample, with no state and no list of samples.

A keyed Feistel network permutes [0, 2^k); values outside [0, n) are permuted again until they fall inside ("cycle
walking"), which gives a permutation of [0, n). So each epoch visits every sample exactly once, and looking up a
position takes constant time and memory. Read next: `mixture.py`.
"""

import numpy as np

_ROUNDS = 8

Integers = np.ndarray | np.integer | int


def scramble(*words: Integers) -> np.ndarray:
    """A 64-bit hash of integer words, elementwise over arrays (uint64). Not cryptographic."""
    state = np.uint64(0)
    with np.errstate(over="ignore"):
        for word in words:
            # The finaliser of splitmix64 (Steele, Lea and Flood 2014), applied word by word.
            state = state ^ np.asarray(word).astype(np.uint64)
            state = state + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)


def permute(index: Integers, size: int, key: Integers) -> np.ndarray:
    """The image of `index` (each in [0, size)) under the permutation of [0, size) selected by `key`, int64.

    Args: `key` is one integer, or one per index.
    """
    index, key = np.broadcast_arrays(np.asarray(index, np.int64), np.asarray(key, np.uint64))
    shape, value, key = index.shape, index.astype(np.uint64).ravel(), key.ravel()
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    value = _feistel(value, half_bits, key)
    while (outside := np.flatnonzero(value >= size)).size:
        value[outside] = _feistel(value[outside], half_bits, key[outside])
    return value.astype(np.int64).reshape(shape)


def sample_at(position: Integers, size: int, seed: int, stream: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The (epoch, sample index) at each position of an endless pass over `size` samples, reshuffled every epoch.

    `stream` separates orders that share a seed (one per dataset of a mixture).
    """
    epoch, place = np.divmod(np.asarray(position, np.int64), size)
    return np.asarray(epoch), permute(place, size, scramble(seed, stream, epoch))


def _feistel(value: np.ndarray, half_bits: int, key: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (scramble(key, number, right) & mask)
    return (left << bits) | right
