"""Process 0 listens on the address by which it is called where that is its own, and on no other."""

import socket

import pytest

from openpi_train.runtime import listening


@pytest.fixture
def names(monkeypatch):
    """What names resolve to; and the addresses of this machine besides loopback's."""
    known: dict[str, list[str]] = {}
    own: set[str] = set()

    def getaddrinfo(host, *_, **__):
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(listening.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(listening, "_is_own", own.__contains__)
    return known, own


@pytest.mark.parametrize(
    ("host", "addresses", "own", "listens"),
    [
        ("127.0.0.1", [], [], "127.0.0.1"),
        ("localhost", [], [], "127.0.0.1"),
        ("::1", [], [], "::1"),
        ("10.0.0.1", ["10.0.0.1"], ["10.0.0.1"], "10.0.0.1"),
        ("node1", ["10.0.0.1", "10.0.0.1"], ["10.0.0.1"], "10.0.0.1"),
        ("fd00::1", ["fd00::1"], ["fd00::1"], "fd00::1"),
        ("10.0.0.9", ["10.0.0.9"], ["10.0.0.1"], ""),  # a machine that passes connections on
        ("node1", ["10.0.0.1", "10.1.0.1"], ["10.0.0.1", "10.1.0.1"], ""),  # others may use either
        ("node1", ["127.0.1.1"], ["127.0.1.1"], ""),  # Debian's name of itself
        ("run-0.run", None, [], ""),  # not known yet
    ],
)
def test_the_address_to_listen_on(host, addresses, own, listens, names):
    known, mine = names
    if addresses is not None:
        known[host] = addresses
    mine.update(own)
    assert listening.listen_host(host) == listens


@pytest.mark.parametrize(("address", "own"), [("127.0.0.1", True), ("192.0.2.1", False), ("fe80::1%lo", False)])
def test_an_address_is_own_if_packets_to_it_stay_here(address, own):
    assert listening._is_own(address) is own


def test_a_door_on_one_address_is_closed_on_others(free_port, monkeypatch):
    for name, answer in (("is_loopback", False), ("_is_own", True)):  # as if it were a network's address
        monkeypatch.setattr(listening, name, lambda address, answer=answer: answer)
    with listening.listen("127.0.0.2", free_port) as server:
        assert server.getsockname() == ("127.0.0.2", free_port)
        socket.create_connection(("127.0.0.2", free_port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", free_port))
