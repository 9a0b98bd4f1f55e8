"""Checkpoints on a fast disk in each host, more often than in the run directory (`--local-checkpoints.dir`).

    <dir>/<experiment>/<exp_name>/process_<k>/<step>/    the shards of process k's devices (`local_files.py`)

Each process saves and reads back independently. A save is valid if it is complete on all processes: the
next call checks this, and then removes older ones. Saves have the id of the run, stored in `.run_id` in the run
directory, and of the start that wrote them, so saves of different runs or starts are never mixed. Before a save and its
record, and before it deletes, a process asks whether a newer start has the run (`fencing.py`).
Read next: `copy_out.py` (from here to the run directory), `checkpoint_store.py` (what a run continues from).
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import platform
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from openpi_train.checkpoints import fencing, local_files
from openpi_train.checkpoints.copy_out import PieceSource
from openpi_train.checkpoints.layout import Leaves
from openpi_train.checkpoints.local_files import DamagedError
from openpi_train.checkpoints.pieces import Pieces, describe_pieces, fetch
from openpi_train.data.core.files import write_text
from openpi_train.json_object import JsonObject
from openpi_train.runtime import agree
from openpi_train.runtime.exits import HardwareError, StorageError, UsageError
from openpi_train.runtime.passing_errors import patiently

logger = logging.getLogger(__name__)

# A host's own disk has no failover.
_OPEN_S = 20.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSave:
    """A local save that all processes have read: this process's path, metadata and pieces."""

    step: int
    directory: Path
    meta: dict[str, Any]
    pieces: Pieces


class LocalTier:
    """The local saves of a run. All processes must make the same calls in the same order, from the main thread.

    Args:
        directory: the same path on every host, on a local disk. Processes of one host share it.
        run_directory: the run's own, which all hosts share.

    Raises:
        UsageError: on every process; a directory cannot be used, or several hosts see the same one.
        HardwareError: this host's disk fails; StorageError: another one's does.
    """

    def __init__(self, directory: str | Path, run_directory: Path):
        self._index = jax.process_index()
        self._run = Path(directory) / run_directory.parent.name / run_directory.name
        self._folder = self._run / f"process_{self._index}"
        self._run_directory = run_directory
        ids = None
        if self._index == 0:
            ids = [_run_id(run_directory), secrets.token_hex(8), fencing.claimed(run_directory)]
        self._run_id, self._start_id, claim = agree.broadcast("the run's id", ids)
        fencing.join(run_directory, claim)
        self._hosts = self._open(Path(directory))
        self._whole: int | None = None
        self._is_settled = False
        self._writing: tuple[int, concurrent.futures.Future[Pieces]] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="local-checkpoint")

    def save(self, step: int, items: Mapping[str, Leaves], meta: JsonObject) -> PieceSource | None:
        """Start saving, and return where its pieces can be copied from.

        The leaves are copied to the host before this returns, so they may be donated. Waits until the former save is
        complete. If a disk has no space, the save is skipped on all processes with a warning, and None is returned.
        """
        self.finish()
        self._require_owned()
        if not self._is_settled:
            self.settle(None)
        described = describe_pieces(items)
        if step == self._whole:
            there = concurrent.futures.Future()
            there.set_result(local_files.map_pieces(self._folder / str(step), described))
            return PieceSource({}, there)
        problem = ""
        try:
            local_files.reserve(self._folder / str(step), described)
        except OSError as error:
            problem = f"{self._folder} cannot be written ({error})"
        if not self._all_are_well(f"room for local checkpoint {step}", problem):
            self._require_owned()
            _remove(self._folder / str(step))
            return None
        belongs = {"run": self._run_id, "start": self._start_id, **_topology(), "meta": dict(meta)}
        pieces = fetch(items)
        written = self._thread.submit(self._write, step, pieces, described, belongs)
        self._writing = step, written
        return PieceSource(pieces, written)

    def finish(self) -> None:
        """Wait for the last save. If it is complete on all processes, older ones are removed; otherwise it is, with a
        warning.

        Raises errors that are not due to a disk.
        """
        if self._writing is None:
            return
        (step, written), self._writing = self._writing, None
        error = written.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        problem = f"{self._folder} cannot be written ({error})" if error else ""
        if self._all_are_well(f"local checkpoint {step}", problem):
            self._whole = step
            self._keep(step)
        else:
            self._require_owned()
            _remove(self._folder / str(step))

    def restore(self, wanted: Mapping[str, Leaves]) -> LocalSave | None:
        """The newest save that is complete on all processes and sharded as `wanted`, None if there is none.

        Unusable saves are logged with the reason.
        """
        everyone = agree.gather("list local checkpoints", self._look(describe_pieces(wanted)))
        steps = {int(step) for found in everyone for step in found}
        if not steps:
            logger.info("there is no local checkpoint in %s on any host", self._run)
        for step in sorted(steps, reverse=True):
            reason = self._why_not(step, [found.get(str(step), {}) for found in everyone])
            if not reason:
                save, problem = self._read(step)
                reason = self._first(agree.gather(f"read local checkpoint {step}", problem))
                if save is not None and not reason:
                    return save
            logger.warning("local checkpoint %d is passed over: %s", step, reason)
        return None

    def settle(self, step: int | None) -> None:
        """Remove all saves but that of `step`, from which this process continues; None: remove all.

        Removed saves are older or newer than the state of the run, damaged, or of another run of the same name.
        """
        self._whole, self._is_settled = step, True
        self._keep(step)
        here = [index for index, (host, _) in enumerate(self._hosts) if host == self._hosts[self._index][0]]
        if self._index == here[0]:
            for folder in self._run.glob("process_*"):
                if folder.name not in [f"process_{index}" for index in here]:
                    _remove(folder)

    def close(self) -> None:
        """`finish`, and end the background thread. The newest save stays."""
        self.finish()
        self._thread.shutdown()

    def wait(self) -> None:
        """Wait until nothing is being written on this process; `finish` reports errors."""
        if self._writing is not None:
            concurrent.futures.wait([self._writing[1]])

    def _write(self, step: int, pieces: Pieces, described: Mapping[str, str], belongs: JsonObject) -> Pieces:
        directory = self._folder / str(step)
        local_files.write(directory, pieces, described, belongs, self._require_owned)
        return local_files.map_pieces(directory, described)

    def _look(self, described: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """The saves on this process's disk, by step: `start`, or the `reason` why a save cannot be used."""
        found = {}
        for path in self._folder.iterdir():
            if not path.name.isdecimal():
                continue
            try:
                record = local_files.read_record(path)
                reason = self._misfit(record, described)
            except DamagedError as error:
                record, reason = {}, str(error)
            found[path.name] = {"reason": reason} if reason else {"start": record["start"]}
        return found

    def _misfit(self, record: JsonObject, described: Mapping[str, str]) -> str:
        if record["run"] != self._run_id:
            return "it belongs to another run of this name"
        now = _topology()
        if record["processes"] != now["processes"] or record["devices"] != now["devices"]:
            return (
                f"it was saved by another number of processes ({record['processes']}, now {now['processes']}) or "
                f"devices ({record['devices']}, now {now['devices']})"
            )
        return "" if record["pieces"] == described else "it was saved with another model, or cut otherwise"

    def _why_not(self, step: int, found: list[dict[str, str]]) -> str:
        """Why the processes cannot continue from this step, given each one's save; empty if they can try."""
        absent = f"it has no save of step {step} in {self._run}: another host than before, or it was removed"
        problem = self._first([one.get("reason", "") if one else absent for one in found])
        if not problem and len({one["start"] for one in found}) > 1:
            problem = "the processes have it from different starts of the run"
        return problem

    def _read(self, step: int) -> tuple[LocalSave | None, str]:
        directory = self._folder / str(step)
        try:
            record = local_files.read_record(directory)
            pieces = local_files.read_pieces(directory, record)
            return LocalSave(step=step, directory=directory, meta=record["meta"], pieces=pieces), ""
        except DamagedError as error:
            return None, str(error)

    def _all_are_well(self, name: str, problem: str) -> bool:
        first = self._first(agree.gather(name, problem))
        if first:
            logger.warning("%s: %s. It is left out, on all; the run goes on", name, first)
        return not first

    def _first(self, problems: list[str]) -> str:
        """The first problem, with its process."""
        for index, problem in enumerate(problems):
            if problem:
                return f"process {index} on {self._hosts[index][1]}: {problem}"
        return ""

    def _require_owned(self) -> None:
        """Raise UsageError if a newer start has the run; a shared disk that cannot be read now holds nothing up."""
        fencing.require_owned_if_readable(self._run_directory)

    def _keep(self, step: int | None) -> None:
        self._require_owned()
        for path in self._folder.iterdir():
            if path.name != str(step):
                _remove(path)

    def _open(self, directory: Path) -> list[list[str]]:
        """Create this process's folder and check that no other host sees it; returns each process's host, and its name.

        Raises what the class says.
        """
        word, name, problem, is_broken = f"{secrets.token_hex(8)}.mark", platform.node(), "", False

        def make() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / word).touch()

        try:
            patiently(make, f"writing to {self._folder}", limit_s=_OPEN_S)
        except (OSError, StorageError) as error:
            is_broken = isinstance(error, StorageError)
            problem = f"--local-checkpoints.dir {directory} cannot be used by process {self._index} on {name} ({error})"
        everyone = agree.gather("open the local directories", [_host(), name, word])
        for index, (host, other, mark) in enumerate(everyone):
            if not problem and host != _host() and (self._run / f"process_{index}" / mark).exists():
                problem = (
                    f"--local-checkpoints.dir {directory} is one directory for {other} and {name}; it must lie on a "
                    "disk of each host's own. Leave it out where hosts have none: the run directory is enough"
                )
        found = agree.gather("local directories are apart", [problem, is_broken])
        with contextlib.suppress(OSError):  # what is in the way has been said
            (self._folder / word).unlink()
        for text, other_is_broken in found:
            if text:
                broken = HardwareError if text == problem else StorageError
                raise (broken if other_is_broken else UsageError)(text)
        return [[host, name] for host, name, _ in everyone]


def _topology() -> dict[str, int]:
    return {"processes": jax.process_count(), "devices": jax.device_count()}


def _host() -> str:
    """An identifier of this host, also different from containers of the same name on other hosts."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node()


def _run_id(run_directory: Path) -> str:
    path = run_directory / ".run_id"
    if not path.exists():
        write_text(path, secrets.token_hex(8))
    return path.read_text(encoding="utf-8")


def _remove(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed (%s)", path, error)
