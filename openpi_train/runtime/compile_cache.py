"""The cache of compiled programs, so that the second start of a run compiles nothing. Read next: `session.py`."""

import logging
import os
import platform
import types
import zlib
from collections.abc import Mapping
from pathlib import Path

import jax
from jax._src import compiler, distributed  # what decides who writes has no public name (jax 0.10 to 0.12)

from openpi_train.runtime import xla_flags

logger = logging.getLogger(__name__)


def use(kind: str) -> None:
    """Enable the cache of compiled programs for devices of this kind ("cpu", "gpu")."""
    folder = compilation_cache_dir(os.environ)
    jax.config.update("jax_compilation_cache_dir", folder)
    if jax.config.jax_enable_compilation_cache:  # pyright: ignore[reportAttributeAccessIssue]
        logger.info("compiled programs are kept in %s (JAX_ENABLE_COMPILATION_CACHE=false: not)", folder)
    if kind == "cpu":
        _let_every_process_write()


def compilation_cache_dir(environ: Mapping[str, str]) -> str:
    """The folder of compiled programs: JAX_COMPILATION_CACHE_DIR, or one per kind of machine in the user's cache.

    Machines that share a home directory may differ in their CPU, and a program compiled for one may crash another.
    """
    if given := environ.get("JAX_COMPILATION_CACHE_DIR"):
        return given
    machine = f"{platform.machine()}-{zlib.crc32(_cpu_features()):08x}"
    return os.path.join(xla_flags.cache_dir(environ), "compiled", machine)


def _cpu_features() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:  # not Linux
        return platform.processor().encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def _let_every_process_write() -> None:
    """On CPUs, have each process keep its own programs.

    The key of a compiled program holds its process's topology, which differs between processes on CPUs, and jax writes
    in process 0 alone: the others would compile everything at every start (jax 0.10.2, minutes on two cores).
    """
    write = compiler._cache_write
    if getattr(write, "_from_every_process", False):
        return
    as_process_0 = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))

    def write_from_every_process(*arguments, **options):
        setattr(compiler, "distributed", as_process_0)  # noqa: B010 (a name of its own, which pyright guards)
        try:
            write(*arguments, **options)
        finally:
            setattr(compiler, "distributed", distributed)  # noqa: B010

    write_from_every_process._from_every_process = True  # pyright: ignore[reportFunctionMemberAccess]
    compiler._cache_write = write_from_every_process
