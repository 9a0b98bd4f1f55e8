"""Ends a command quietly whose output is read no more, as `| head` does. Standard library only."""

import os
import select
import sys
from collections.abc import Callable

# What a shell reports of a program that SIGPIPE has ended.
CLOSED = 128 + 13


def quietly(main: Callable[[], int]) -> int:
    """The result of `main`, with its output flushed; CLOSED if whoever read the output has closed it."""
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not is_closed():
            raise  # another pipe or socket
    # What is still in the buffer would be an error at the end of the process.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return CLOSED


def is_closed() -> bool:
    """Whether standard output is a pipe or socket that nobody reads any more."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors are always reported
    except (OSError, ValueError, AttributeError):  # no file, as in tests
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))
