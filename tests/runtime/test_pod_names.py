"""The cluster's DNS learns a pod's name only once the pod is there: the others wait for it, and say so."""

import socket

import pytest

from openpi_train.runtime import rendezvous, waiting
from openpi_train.runtime.exits import PeerLostError, UsageError
from openpi_train.runtime.rendezvous_server import Hello

OWN = Hello(process_index=1, process_count=2, host="run-1", facts={}, local_name_is_loopback=False)


@pytest.fixture
def resolver(monkeypatch):
    """Names resolve after so many failures; the sleeps between are counted, not slept."""

    def set_up(failures: int) -> list[float]:
        slept: list[float] = []

        def getaddrinfo(*_: object):
            if len(slept) < failures:
                raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr(rendezvous.socket, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(waiting.time, "sleep", slept.append)
        return slept

    return set_up


def test_a_pods_name_is_waited_for(resolver):
    slept = resolver(failures=3)
    rendezvous._await_name(OWN, "run-0.run", timeout_s=300.0)
    assert len(slept) == 3


def test_a_pod_that_never_comes_is_a_lost_peer_so_that_it_is_tried_again(resolver):
    resolver(failures=10**9)
    with pytest.raises(PeerLostError, match=r"'run-0.run' does not resolve on run-1 \(.*Name or service not known"):
        rendezvous._await_name(OWN, "run-0.run", timeout_s=0.01)


def test_elsewhere_an_unknown_name_is_a_mistake_at_once(resolver):
    slept = resolver(failures=10**9)
    with pytest.raises(UsageError, match="does not resolve on run-1"):
        rendezvous._await_name(OWN, "node7", timeout_s=0.0)
    assert not slept
