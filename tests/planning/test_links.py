"""Which links carry a step's bytes, against rings drawn by hand."""

import pytest

from openpi_train.parallel.mesh import FSDP, REPLICA, TENSOR, planned_mesh
from openpi_train.planning.links import Flow, flows


@pytest.mark.parametrize(
    ("shards", "devices", "per_host", "axes", "expected"),
    [
        # One host: all within.
        (8, 8, 8, (FSDP,), (1.0, 0.0)),
        # Shard groups are hosts: gathers stay within; each of the 8 replica rings leaves every host once.
        (8, 16, 8, (FSDP,), (1.0, 0.0)),
        (8, 16, 8, (REPLICA,), (0.0, 8.0)),
        # One ring over both hosts leaves each of them once, and so does one over all devices whatever is cut.
        (16, 16, 8, (FSDP,), (1.0, 1.0)),
        (1, 16, 8, (REPLICA,), (1.0, 1.0)),
        (8, 16, 8, (REPLICA, FSDP), (1.0, 1.0)),
        # Two shard groups per host: four replica rings, each with two members per host.
        (4, 16, 8, (REPLICA,), (1.0, 4.0)),
        # Hosts of one device.
        (4, 4, 1, (FSDP,), (0.0, 1.0)),
        # Groups of 3 on hosts of 4: 0-1-2 within, 3|4-5 leaves hosts 0 and 1, ... : host 1 is left by two rings.
        (3, 12, 4, (FSDP,), (1.0, 2.0)),
    ],
)
def test_a_ring_in_the_meshs_order_crosses_these_links(shards, devices, per_host, axes, expected):
    (flow,) = flows({axes: 1.0}, planned_mesh(shards, devices), per_host)
    assert (flow.within, flow.between) == expected


@pytest.mark.parametrize(
    ("shards", "tensor", "axes", "expected"),
    [
        # Two hosts of four devices, groups of two within them: both shard rings leave each host once.
        (4, 2, (TENSOR,), (1.0, 0.0)),
        (4, 2, (FSDP,), (1.0, 2.0)),
        # Hosts are replicas: shard rings of two stay within, the four replica rings do not.
        (2, 2, (FSDP,), (1.0, 0.0)),
        (2, 2, (REPLICA,), (0.0, 4.0)),
        (2, 2, (REPLICA, FSDP), (1.0, 2.0)),
        # A group over both hosts.
        (1, 8, (TENSOR,), (1.0, 1.0)),
    ],
)
def test_tensor_groups_lie_innermost(shards, tensor, axes, expected):
    (flow,) = flows({axes: 1.0}, planned_mesh(shards, 8, tensor), 4)
    assert (flow.within, flow.between) == expected


def test_one_device_sends_nothing():
    assert flows({(FSDP,): 0.0, (REPLICA,): 0.0}, planned_mesh(1, 1), 1) == [Flow(within=0.0, between=0.0)] * 2


def test_a_ring_is_as_fast_as_its_slowest_link():
    flow = Flow(within=20e9, between=20e9)
    assert flow.seconds(link_gb_s=400, network_gb_s=40) == 0.5
    assert flow.seconds(link_gb_s=10, network_gb_s=40) == 2.0
