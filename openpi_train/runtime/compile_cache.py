"""The cache of compiled programs, so that the second start of a run compiles nothing. Read next: `session.py`."""

import logging
import os
import platform
import re
import types
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax._src import compiler, distributed  # what decides who keeps what has no public name (jax 0.10 to 0.12)

from openpi_train.runtime import xla_flags

logger = logging.getLogger(__name__)

# An instruction of XLA's text form that communicates: "%psum.3 = f32[] all-reduce(%x), ...".
_SENDS = re.compile(r" (?:all-gather|all-reduce|reduce-scatter|(?:ragged-)?all-to-all|collective-\w+)(?:-start)?\(")


def use(kind: str) -> None:
    """Enable the cache of compiled programs for devices of this kind ("cpu", "gpu")."""
    folder = compilation_cache_dir(os.environ)
    jax.config.update("jax_compilation_cache_dir", folder)
    if jax.config.jax_enable_compilation_cache:  # pyright: ignore[reportAttributeAccessIssue]
        logger.info("compiled programs are kept in %s (JAX_ENABLE_COMPILATION_CACHE=false: not)", folder)
    if kind == "cpu":
        fit_for_cpus()


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


def fit_for_cpus() -> None:
    """On CPUs, have each process keep its own programs, and neither keep nor load programs that send within loops.

    The key of a compiled program holds its process's topology, which differs between processes on CPUs, and jax writes
    in process 0 alone: the others would compile everything at every start (jax 0.10.2, minutes on two cores).

    A program that is loaded has lost the order of its communication: XLA gives the collectives of each loop's body an
    order of their own (`WhileThunkFromProto` in xla/backends/cpu/runtime/thunk_proto_serdes.cc). What a loop sends and
    what is independent of the loop then run in any order, another one on each device. They wait for each other, and
    after 40 s XLA aborts the process: "Expected 4 threads to join the rendezvous, but only 3 of them arrived on time"
    (jaxlib 0.10.2 and 0.12.0.1).
    """
    read, write = compiler._cache_read, compiler._cache_write
    if getattr(write, "_is_fit_for_cpus", False):
        return
    as_process_0 = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))

    def read_ordered(*arguments, **options):
        found, seconds = read(*arguments, **options)
        return (None, None) if found is not None and sends_within_loops(found) else (found, seconds)

    def write_from_every_process(cache_key, compile_time_secs, module_name, backend, executable, *others, **options):
        if sends_within_loops(executable):
            logger.debug("%s is not kept: it sends within a loop", module_name)
            return
        setattr(compiler, "distributed", as_process_0)  # noqa: B010 (a name of its own, which pyright guards)
        try:
            write(cache_key, compile_time_secs, module_name, backend, executable, *others, **options)
        finally:
            setattr(compiler, "distributed", distributed)  # noqa: B010

    write_from_every_process._is_fit_for_cpus = True  # pyright: ignore[reportFunctionMemberAccess]
    compiler._cache_read, compiler._cache_write = read_ordered, write_from_every_process


def sends_within_loops(executable: Any) -> bool:
    """Whether a compiled program communicates in a part of it that is called: a loop's body, a branch, a function.

    Args: `executable` as jax's `Compiled.runtime_executable()` returns it.
    """
    if jax.process_count() == len(executable.local_devices()) == 1:
        return False
    return any(
        _SENDS.search(computation)
        for module in executable.hlo_modules()
        for computation in module.to_string().split("\n\n")
        if "\nENTRY " not in f"\n{computation}"
    )
