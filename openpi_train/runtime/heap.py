"""Have glibc keep the memory that a step frees, for the next step. Read next: `session.py`, which calls it."""

import ctypes
import os
from collections.abc import Mapping

# glibc's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX. By default every step on a CPU gets its buffers from the
# system as new pages, which the system fills with zeros, and gives them back. Threads other than the first would
# allocate in arenas of their own, which hold no large blocks (malloc/arena.c: HEAP_MAX_SIZE): hence one arena.
_OPTIONS = {-1: 2**31 - 1, -3: 2**31 - 1, -8: 1}
_VARIABLES = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory(environ: Mapping[str, str]) -> str:
    """Keep freed blocks of up to 2 GB in this process, on the devices' host; a line for the log says so, or why not.

    The process then holds as much memory as it has used at most at one time. Call it before threads allocate. The
    user's own settings of glibc's malloc are left alone.
    """
    users = [name for name in _VARIABLES if name in environ]
    users += ["GLIBC_TUNABLES"] if "glibc.malloc" in environ.get("GLIBC_TUNABLES", "") else []
    if users:
        return f"freed memory is kept as {' and '.join(users)} (yours)"
    if not _is_glibc() or not all(ctypes.CDLL(None).mallopt(*option) for option in _OPTIONS.items()):
        return "freed memory is given back to the system: this is not glibc's malloc"
    return "freed memory is kept for the next step (mallopt); MALLOC_TRIM_THRESHOLD_=131072 gives it back"


def _is_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (ValueError, OSError):
        return False
