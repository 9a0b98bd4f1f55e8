"""Names the control steps of spikes: a few values far outside all others. Read next: `normalize.py: spiked`."""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from openpi_train.data.core.findings import Finding
from openpi_train.data.robot.normalize import SPIKE_DISTANCE, NormStats, spiked
from openpi_train.data.robot.windows import Windows


def find_spikes(
    window: Windows,
    samples: Iterable[np.ndarray],
    array: Literal["state", "actions"],
    names: Sequence[str],
    stats: NormStats,
) -> list[Finding]:
    """A finding for each spiked dim of one dataset, in the model's units; no sample is read if no dim is.

    Args: `samples` in blocks; `names` and `stats` are those of the array's dims.
    """
    dims = np.flatnonzero(spiked(stats))
    if not len(dims):
        return []
    width = stats.q99[dims] - stats.q01[dims]
    low, high = stats.q01[dims] - SPIKE_DISTANCE * width, stats.q99[dims] + SPIKE_DISTANCE * width
    steps: list[list[np.ndarray]] = [[] for _ in dims]
    extremes = [np.empty(0) for _ in dims]
    for block in samples:
        state, actions, real = window.chunks(block)
        present = window.starts[block][:, None]  # [n, 1]
        if array == "state":
            values, places = state[:, None, dims], present  # [n, 1, dims]
        else:
            values, places = actions[..., dims], present + window.shape.first_action + np.arange(window.shape.horizon)
            values = np.where(real[..., None], values, low)  # low itself is no spike
        far = (values < low) | (values > high)
        for number in range(len(dims)):
            steps[number].append(np.unique(places[far[..., number]]))
            found = np.concatenate([extremes[number], values[..., number][far[..., number]]])
            extremes[number] = np.array([found.min(), found.max()]) if len(found) else found
    findings = []
    for number, dim in enumerate(dims.tolist()):
        where = np.unique(np.concatenate(steps[number]))
        if not len(where):
            continue  # they are in another dataset of the same norm stats
        ends = " and ".join(f"{value:.4g}" for value in np.unique(extremes[number]))
        findings.append(
            Finding(
                kind="spike",
                count=len(where),
                total=window.source.num_steps,
                unit="control steps",
                where=window.source.describe(int(where[0])),
                what=f"{array} {names[dim]} of {ends}, while 98 of 100 values lie in "
                f"{stats.q01[dim]:.4g}..{stats.q99[dim]:.4g}",
                training="q01 and q99 keep the scale of the other values, so that these become numbers in the hundreds "
                "and above; mean, std, min and max are those of all",
                remedy="Repair these steps, or remove their episodes; z_score and min_max shrink all others",
            )
        )
    return findings
