"""What is kept of freed memory: glibc's counters say it, before and after the setting."""

import subprocess
import sys

import pytest

from openpi_train.runtime.heap import keep_freed_memory

# Blocks are allocated and freed by a thread, as XLA's are. Faults are counted in units of pages.
PROGRAM = """
import ctypes, os, resource, sys, threading
from openpi_train.runtime.heap import keep_freed_memory

LARGE = 96 << 20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_size_t,), (ctypes.c_void_p,)

def use():
    block = libc.malloc(LARGE)
    ctypes.memset(block, 1, LARGE)
    libc.free(block)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

def faults_of(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(keep_freed_memory(os.environ))
faults_of(1)
held = resident()
print(faults_of(3) * os.sysconf("SC_PAGESIZE") / LARGE, (resident() - held) / LARGE)
"""


def measured(**environ):
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    line, numbers = done.stdout.splitlines()
    return line, *map(float, numbers.split())


def test_the_next_step_gets_the_pages_of_the_last_one_and_no_more_are_held():
    line, faults, more = measured()
    assert line.startswith("freed memory is kept for the next step")
    assert faults < 0.1 and abs(more) < 0.1


def test_users_settings_are_left_alone():
    line, faults, _ = measured(MALLOC_TRIM_THRESHOLD_="131072")
    assert line == "freed memory is kept as MALLOC_TRIM_THRESHOLD_ (yours)"
    assert faults > 2.9  # every block anew


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"MALLOC_ARENA_MAX": "4"}, "MALLOC_ARENA_MAX"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, "GLIBC_TUNABLES"),
    ],
)
def test_every_setting_of_the_users_counts(environ, names):
    assert keep_freed_memory(environ) == f"freed memory is kept as {names} (yours)"


def test_another_c_library_is_said(monkeypatch):
    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr("os.confstr", unknown)
    assert "this is not glibc's malloc" in keep_freed_memory({})
