import sys
import threading

import pytest

from openpi_train.launch.child import Child

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),  # other tests import jax
]


class Owner:
    """Keeps its child, which keeps its owner's methods: only the garbage collector ends both."""

    def __init__(self):
        self.said, self.over = [], threading.Event()
        command = [sys.executable, "-c", "print('well')"]
        self.child = Child(command, {}, lambda line, is_error: self.said.append(line), self.end, with_input=True)

    def end(self, code: int) -> None:
        self.over.set()


def test_a_child_that_has_ended_holds_no_file():
    """Many starts of many hosts come before the garbage collector."""
    owner = Owner()
    owner.child.watch()
    assert owner.over.wait(60)
    owner.child.close_input()
    owner.child.close()
    process = owner.child._process
    assert owner.said == [b"well\n"] and all(one.closed for one in (process.stdin, process.stdout, process.stderr))
