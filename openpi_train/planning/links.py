"""Assign a step's traffic to links: within a host, or between hosts. Read next: `forecast.py`.

Collectives are rings over the devices in the mesh's order (`parallel/mesh.py`: hosts one after the other, `tensor` the
innermost axis, `fsdp` the next). Every member of a ring sends the same bytes to the next one, which is on its own host
or on another.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from openpi_train.parallel.mesh import AXES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """One kind of collective. `within`: bytes that a device sends inside its host; `between`: that a host sends out."""

    within: float
    between: float

    def seconds(self, link_gb_s: float, network_gb_s: float) -> float:
        """Time of the collective: a ring is as fast as its slowest link."""
        return max(self.within / link_gb_s, self.between / network_gb_s) / 1e9


def flows(
    sent_by_axes: Mapping[tuple[str, ...], float], mesh: Mesh | AbstractMesh, devices_per_host: int
) -> list[Flow]:
    """The traffic per link, given what one device sends along each of the mesh's axes (`traffic.py:
    formula_by_axes`)."""
    return [ring_flow(_rings(axes, mesh), sent, devices_per_host) for axes, sent in sent_by_axes.items()]


def ring_flow(rings: Sequence[Sequence[int]], sent: float, devices_per_host: int) -> Flow:
    """The traffic of rings that run at the same time, in which every device sends `sent` bytes to its successor."""
    edges = [edge for ring in rings for edge in _edges(ring, devices_per_host)]
    leaving = [source for source, target in edges if source != target]
    busiest = max(map(leaving.count, set(leaving)), default=0)
    return Flow(within=sent if len(leaving) < len(edges) else 0.0, between=sent * busiest)


def _rings(axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> list[list[int]]:
    """Indices of the devices in each ring along `axes`."""
    grid = np.arange(mesh.size).reshape([mesh.shape[axis] for axis in AXES])
    members = math.prod(mesh.shape[axis] for axis in axes)
    last = np.moveaxis(grid, [AXES.index(axis) for axis in axes], range(-len(axes), 0))
    return last.reshape(-1, members).tolist()


def _edges(ring: Sequence[int], devices_per_host: int) -> list[tuple[int, int]]:
    """The hosts of each member and its successor."""
    if len(ring) < 2:
        return []
    hosts = [device // devices_per_host for device in ring]
    return list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
