"""Top-k, top-p and min-p by their definition: the oracle of `nn/token_limits.py`."""

import numpy as np


def sorted_limits(probs, top_k, top_p, min_p):
    """The definition, one row at a time, by sorting (the order of transformers' LogitsProcessors)."""
    order = np.argsort(-probs, kind="stable")
    kept = np.ones(len(probs), bool)
    if top_k:
        kept[order[top_k:]] = False
    if top_p < 1:
        mass = np.cumsum(np.where(kept, probs, 0)[order]) / probs[kept].sum()
        # A token is in if those before it do not have enough.
        before = np.concatenate([[0], mass[:-1]])
        kept[order[before >= top_p]] = False
    return np.where(kept & (probs >= min_p * probs.max()), probs, 0)
