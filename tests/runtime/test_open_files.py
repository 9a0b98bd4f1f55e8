"""The limit of open files is raised at the start, and one that cannot be enough is told before the processes meet."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def run(code, soft, hard):
    """A process with these limits of open files."""
    limited = f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"'
    return subprocess.run(
        ["bash", "-c", limited, "limited", sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


ALLOW = """
import resource, socket
from openpi_train.runtime.open_files import allow_open_files
print(allow_open_files({index}, {count}), *resource.getrlimit(resource.RLIMIT_NOFILE))
pairs = [socket.socketpair() for _ in range(100)]
"""


def test_a_process_may_open_as_many_files_as_the_system_allows():
    done = run(ALLOW.format(index=0, count=64), 64, 1024)
    assert done.stdout.split() == ["1024"] * 3, done.stderr


@pytest.mark.parametrize(("index", "count", "is_allowed"), [(0, 193, True), (0, 194, False), (1, 4096, True)])
def test_process_0_needs_four_sockets_for_each_other(index, count, is_allowed):
    done = run(ALLOW.format(index=index, count=count), 64, 1024)
    assert (done.returncode == 0) == is_allowed, done.stderr
    if not is_allowed:
        assert re.search(r"1024 files .*ulimit -Hn.* 1028 .*194 processes", done.stderr)


def test_a_limit_that_is_too_low_is_told_before_the_processes_meet(free_port):
    code = f"""
from openpi_train.runtime import exits, session
from openpi_train.runtime.world import WorldFlags, find_world
flags = WorldFlags(coordinator="127.0.0.1:{free_port}", num_processes=400, process_id=0)
exits.run_guarded(lambda: session.start(find_world(flags, {{}})) and None)
"""
    done = run(code, 256, 512)
    assert done.returncode == 2, done.stderr
    assert "may have 512 files open (ulimit -Hn) and needs 2251 in a run of 400 processes" in done.stderr
    assert "waiting for" not in done.stderr
