"""One line after the other from a connection, whatever pieces it comes in."""

import socket

import pytest

from openpi_train.runtime.lines import read_line, send_line


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    ours.settimeout(0.05)
    with ours, theirs:
        yield ours, theirs


def test_lines_in_one_piece_are_read_one_by_one(ends):
    ours, theirs = ends
    send_line(theirs, {"a": 1})
    send_line(theirs, [None])
    line, rest = read_line(ours, 100)
    assert (line, rest) == (b'{"a": 1}', b"[null]\n")
    assert read_line(ours, 100, rest) == (b"[null]", b"")


def test_a_line_in_pieces_is_waited_for(ends):
    ours, theirs = ends
    theirs.sendall(b"ab")
    told: list[int] = []

    def meanwhile(num_bytes: int) -> None:
        told.append(num_bytes)
        if len(told) == 3:
            theirs.sendall(b"c\nd")

    assert read_line(ours, 100, meanwhile=meanwhile) == (b"abc", b"d")
    assert told == [0, 2, 2]


def test_what_is_too_long_or_breaks_off_is_told_apart(ends):
    ours, theirs = ends
    theirs.sendall(b"a" * 101)
    with pytest.raises(ValueError, match="101 bytes that are no line"):
        read_line(ours, 100)
    theirs.sendall(b"bc")
    theirs.close()
    with pytest.raises(EOFError, match="2 bytes that are no line"):
        read_line(ours, 100)
