"""`doctor`'s checks of a machine before jax uses its devices, and of its disks. Read next: `check_run.py`."""

import ctypes
import dataclasses
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from openpi_train.runtime import xla
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.world import is_loopback, split_address

_PLUGINS = tuple(f"jax-{kind}-{part}" for kind in ("cuda13", "cuda12", "rocm7") for part in ("plugin", "pjrt"))
# The least driver for a CUDA release: docs.jax.dev/en/latest/installation.html
_LEAST_DRIVER = {"cuda12": (525, 60, 13), "cuda13": (580,)}
_BUSY_GPU_MIB = 1024
_CONNECT_S = 3.0
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized
_SAMPLE_BYTES = 64 << 20
_BLOCK = os.urandom(1 << 20)  # random, since some file systems store nothing for zeros
_SLOW_SAVE_S = 600.0
_SLOW_BYTES_S = 20e6

Level = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of one check, and what to do if it is not ok."""

    level: Level
    topic: str
    text: str
    advice: str = ""

    def __post_init__(self):
        assert self.level == "ok" or self.advice, f"{self.topic}: a {self.level} without what to do"

    def line(self) -> str:
        """The finding as text, with the advice on a separate line."""
        advice = f"\n{'':18}-> {self.advice}" if self.advice else ""
        return f"{self.level:<5} {self.topic:<12}{self.text}{advice}"


def ok(topic: str, text: str) -> CheckResult:
    """All is well."""
    return CheckResult("ok", topic, text)


def warn(topic: str, text: str, advice: str) -> CheckResult:
    """It works, but not as well as it could, or not in every case."""
    return CheckResult("warn", topic, text, advice)


def fail(topic: str, text: str, advice: str) -> CheckResult:
    """A run would fail."""
    return CheckResult("fail", topic, text, advice)


def machine() -> Iterator[CheckResult]:
    """The operating system, Python, processors and memory."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield ok(
        "platform",
        f"{socket.gethostname()}: {platform.platform()}, Python {platform.python_version()}, "
        f"{os.cpu_count()} processors, {memory_gib:.0f} GiB of memory",
    )
    if sys.platform != "linux":
        yield warn("platform", f"{sys.platform} is not what this is tested on", "train on Linux")


def installed() -> dict[str, str]:
    """Versions of jax and of packages that must match it; absent ones are left out."""
    versions = {}
    for package in ("jax", "jaxlib", *_PLUGINS):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def pairing(versions: Mapping[str, str], num_gpus: int) -> Iterator[CheckResult]:
    """Check that jax, jaxlib and the GPU plugin have the same release: jax ignores other plugins."""
    jax, jaxlib = versions["jax"], versions["jaxlib"]
    plugins = {name: version for name, version in versions.items() if name in _PLUGINS}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    if jax != jaxlib:
        yield warn("versions", f"jax {jax} with jaxlib {jaxlib}", f"pip install jax=={jax} jaxlib=={jax}")
    wrong = [name for name, version in plugins.items() if version != jaxlib]
    if wrong:
        yield fail(
            "versions",
            f"{', '.join(f'{name} {plugins[name]}' for name in wrong)} with jaxlib {jaxlib}: jax will not use the GPUs",
            f"pip install {' '.join(f'{name}=={jaxlib}' for name in wrong)}",
        )
    elif num_gpus and not plugins:
        advice = "pip install 'openpi_train[cuda13]', or [cuda12] for a driver before 580"
        yield fail(
            "versions", f"{num_gpus} GPUs, but jax has no plugin for them: it would train on the processor", advice
        )
    else:
        yield ok("versions", listed)


def driver(versions: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check NVIDIA's driver and GPUs with `nvidia-smi`."""
    if shutil.which("nvidia-smi") is None:
        yield ok("driver", "no nvidia-smi here: no NVIDIA GPU")
        return
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30.0, check=False)
    except subprocess.TimeoutExpired:
        yield fail("driver", "nvidia-smi does not answer within 30 s: a GPU hangs", "restart the machine")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not rows or any(len(row) != 4 for row in rows):
        text = (done.stdout + done.stderr).strip()
        yield fail(
            "driver", f"nvidia-smi: {text}", "load or reinstall the driver; after an upgrade restart the machine"
        )
        return
    number = tuple(int(part) for part in rows[0][1].split(".") if part.isdecimal())
    least = max((needed for kind, needed in _LEAST_DRIVER.items() if f"jax-{kind}-plugin" in versions), default=())
    names = ", ".join(dict.fromkeys(row[0] for row in rows))
    if number < least:
        needed = ".".join(map(str, least))
        advice = f"upgrade the driver to {needed} or later, or install the plugin for an older CUDA"
        yield fail("driver", f"{rows[0][1]} is older than {needed}, which the installed plugin needs", advice)
    else:
        yield ok("driver", f"{rows[0][1]}, {len(rows)} x {names}")
    for index, (_, _, total, used) in enumerate(rows):
        if used.isdecimal() and int(used) > _BUSY_GPU_MIB:
            text = f"GPU {index}: {int(used) / 1024:.1f} of {int(total) / 1024:.1f} GiB are in use already"
            yield warn("driver", text, "end what runs there (nvidia-smi), or leave it out with CUDA_VISIBLE_DEVICES")


def settings(kind: str, environ: Mapping[str, str], extent: xla.Extent) -> Iterator[CheckResult]:
    """The settings of XLA and NCCL, and why."""
    decisions = xla.decide(kind, environ, extent)
    if not decisions:
        yield ok("xla", f"nothing is set for {kind} and {extent}; XLA_FLAGS={environ.get('XLA_FLAGS', '')!r}")
    for decision in decisions:
        if "left out" in decision.line:
            yield warn(
                "xla", decision.line, "nothing: it costs speed only; newer releases of jax may have it by default"
            )
        else:
            yield ok("xla", f"{decision.line} [{decision.setting.source}]")
    grows = environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0")
    if kind == "gpu" and (grows or environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform"):
        text = "memory is taken piece by piece: it may come apart, and a run that fits may end for lack of memory"
        yield warn("xla", text, "unset XLA_PYTHON_CLIENT_PREALLOCATE and XLA_PYTHON_CLIENT_ALLOCATOR")


def own_name(kind: str) -> Iterator[CheckResult]:
    """Check that this host's name resolves to an address that other hosts can reach; gloo listens there, even alone."""
    name = socket.gethostname()
    advice = f"give {name} its real address in /etc/hosts or DNS; needed for several hosts without GPUs (gloo)"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        text = f"this host's own name {name!r} does not resolve ({error})"
        yield (fail if kind == "cpu" else warn)("name", text, advice)
        return
    if is_loopback(address):
        yield warn("name", f"this host's own name {name!r} is {address}, which other hosts cannot reach", advice)
    else:
        yield ok("name", f"{name} is {address}")


def ports(port: int, *, chosen: bool) -> Iterator[CheckResult]:
    """Check that the coordinator's port is free. `chosen`: set by the user."""
    try:
        with socket.create_server(("", port), reuse_port=False):
            yield ok("ports", f"{port} is free here")
    except OSError as error:
        advice = "use another with --port (local) or --master-port, or end what listens there (ss -ltnp)"
        reason = os.strerror(error.errno or 0)
        yield (fail if chosen else warn)("ports", f"port {port} cannot be used here ({reason})", advice)


def reach(hosts: Sequence[str], default_port: int) -> Iterator[CheckResult]:
    """Check that each of `hosts` ("name" or "name:port") resolves and answers from here."""
    for given in hosts:
        try:
            host, port = split_address(given) if ":" in given else (given, default_port)
        except UsageError:
            yield fail(
                "reach", f"{given!r} is not a host, or host:port", "correct --hosts; an IPv6 address is [::1]:port"
            )
            continue
        try:
            address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            yield fail(
                "reach", f"{host!r} does not resolve here ({error})", "use its address, or tell DNS or /etc/hosts"
            )
            continue
        if is_loopback(str(address)) and not is_loopback(host):
            advice = f"give {host} its real address in /etc/hosts or DNS"
            yield warn("reach", f"{host} is {address} here: that is this machine itself", advice)
        try:
            with socket.create_connection((host, port), timeout=_CONNECT_S):
                yield ok("reach", f"{host} ({address}) answers on port {port}")
        except ConnectionRefusedError:
            text = f"{host} ({address}) is there; nothing listens on port {port}"
            advice = f"fine before a run; if something should listen on {port}, start it"
            yield ok("reach", text) if ":" not in given else warn("reach", text, advice)
        except OSError as error:
            text = f"{host} ({address}) does not answer on port {port} ({error})"
            yield fail("reach", text, f"is it up, and does the firewall let {port} through?")


def clock() -> Iterator[CheckResult]:
    """Check that the clock is synchronised, so that the logs of several hosts match."""
    if sys.platform != "linux":
        return
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # all zero: only asks
    if state == _TIME_ERROR:
        advice = "run chrony, ntpd or systemd-timesyncd; only the times in logs depend on it"
        yield warn("clock", "the clock is not synchronised", advice)
    else:
        yield ok("clock", "the clock is synchronised" if state >= 0 else "it cannot be told whether it is synchronised")


def shared_memory() -> Iterator[CheckResult]:
    """Check the free space in /dev/shm, which data workers use to pass rows; containers have 64 MiB by default."""
    place = Path("/dev/shm")
    if not place.is_dir():
        yield warn("shm", "there is no /dev/shm", "use --num-workers 0")
        return
    free = shutil.disk_usage(place).free
    if free < 2**30:
        advice = "docker --shm-size 16g, `launch kubernetes --shared-memory-gib`, or --num-workers 0"
        yield warn("shm", f"{free / 2**20:.0f} MiB are free in /dev/shm, little for data workers", advice)
    else:
        yield ok("shm", f"{free / 2**30:.1f} GiB are free in /dev/shm")


def writing(place: Path, flag: str, checkpoint_bytes: int = 0) -> Iterator[CheckResult]:
    """Check space and speed of a directory that a run writes to, set by `flag`; it need not exist yet.

    Args: `checkpoint_bytes` is the size of one checkpoint. There must be space for two: an old one is deleted only
    when a new one is complete.
    """
    folder = place.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    other = f"choose another directory with {flag}"
    if not folder.is_dir():
        yield fail("disk", f"{place} cannot be made: {folder} is a file", other)
        return
    free = shutil.disk_usage(folder).free
    if free < 2 * checkpoint_bytes:
        room = f"{_size(free)} are free in {folder}, two checkpoints need {_size(2 * checkpoint_bytes)}"
        yield fail("disk", room, f"free some space, or {other}")
    elif free < max(4 * checkpoint_bytes, 1 << 30):
        yield warn("disk", f"only {_size(free)} are free in {folder}", f"free some space, or {other}")
    try:
        write_s, read_s, size = _try(folder, min(_SAMPLE_BYTES, free // 4))
    except OSError as error:
        yield fail("disk", f"{folder} cannot be written ({error.strerror})", other)
        return
    text = f"{place}: {_size(free)} free, written at {_speed(size, write_s)}, read at {_speed(size, read_s)}"
    save_s = checkpoint_bytes * write_s / max(size, 1)
    if save_s > _SLOW_SAVE_S or size / write_s < _SLOW_BYTES_S:
        seconds = f"; a checkpoint of {_size(checkpoint_bytes)} takes {save_s:.0f} s" if checkpoint_bytes else ""
        yield warn("disk", text + seconds, f"{other} on a faster disk, or raise --save-interval")
    else:
        yield ok("disk", text)


def reading(dataset: Path) -> Iterator[CheckResult]:
    """Check the read speed of the largest file of a dataset, bypassing the page cache."""
    files = [path for path in dataset.rglob("*") if path.is_file()] if dataset.is_dir() else [dataset]
    largest = max(files, key=lambda path: path.stat().st_size, default=None)
    if largest is None or not largest.is_file() or not largest.stat().st_size:
        return
    try:
        seconds, size = _read(largest)
    except OSError as error:
        yield fail("disk", f"{largest} cannot be read ({error.strerror})", "check its permissions and its disk")
        return
    text = f"{dataset}: read at {_speed(size, seconds)}"
    if size >= 1 << 20 and size / seconds < _SLOW_BYTES_S:
        yield warn("disk", text, "copy the dataset to a faster disk, or `data repack` it there")
    else:
        yield ok("disk", text)


def _try(folder: Path, size: int) -> tuple[float, float, int]:
    """Seconds to write `size` bytes to the disk itself and to read them back, and the number of bytes."""
    size = max(1 << 16, size // len(_BLOCK) * len(_BLOCK))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".openpi_train_doctor_") as file:
        begin = time.perf_counter()
        for offset in range(0, size, len(_BLOCK)):
            file.write(_BLOCK[: size - offset])
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - begin, _read(Path(file.name))[0], size


def _read(path: Path) -> tuple[float, int]:
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # Linux: forget what is in memory of this file
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin, size = time.perf_counter(), 0
        while size < _SAMPLE_BYTES and (block := file.read(1 << 20)):
            size += len(block)
        return max(time.perf_counter() - begin, 1e-9), size


def _speed(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e6:.0f} MB/s"


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
