"""Observations of Gymnasium's environments: nested dictionaries of arrays, some of which are pictures.

Read next: `gym_env.py`.
"""

from collections.abc import Mapping

import numpy as np


def entries(observation: object, prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays of an observation by name, those of a nested one joined by "/"; an array alone is called state."""
    if not isinstance(observation, Mapping):
        return {prefix.removesuffix("/") or "state": np.asarray(observation)}
    found: dict[str, np.ndarray] = {}
    for name, one in observation.items():
        found |= entries(one, f"{prefix}{name}/")
    return found


def picture(seen: np.ndarray) -> np.ndarray:
    """A picture as uint8 [height, width, 3]: of fractions, of shades of grey, with transparency or channels first."""
    if seen.ndim == 2:
        seen = seen[:, :, None]
    if seen.shape[-1] not in (1, 3, 4):
        seen = np.moveaxis(seen, 0, -1)
    seen = np.broadcast_to(seen, (*seen.shape[:2], 3)) if seen.shape[-1] == 1 else seen[:, :, :3]
    return seen if seen.dtype == np.uint8 else np.round(255 * np.clip(seen, 0, 1)).astype(np.uint8)


def is_picture(seen: np.ndarray) -> bool:
    """Whether an array is a picture: bytes or fractions with 1, 3 or 4 channels, first or last; or bytes without."""
    if seen.dtype == np.uint8:
        return seen.ndim == 2 or (seen.ndim == 3 and bool({seen.shape[0], seen.shape[-1]} & {1, 3, 4}))
    is_colored = seen.ndim == 3 and bool({seen.shape[0], seen.shape[-1]} & {3, 4})
    return is_colored and seen.dtype.kind == "f" and seen.size > 0 and seen.min() >= 0 and seen.max() <= 1
