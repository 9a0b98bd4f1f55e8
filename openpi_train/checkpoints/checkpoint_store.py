"""Checkpoints of a run: saved in the background, valid only when complete, restored onto any devices.

    <run>/<step>/params/        for inference, in openpi's form (`layout.py`)
                 train_state/   for training only
                 assets/<asset_id>/norm_stats.json
                 tokenizer/     its files, so that the checkpoint answers wherever it is copied to
                 meta.json      step, data position, experiment, versions, dtype and shape of every leaf
                 manifest.json  size and crc32 of every file, written last (`manifest.py`); each process sums up its own
    <run>/<step>.saving         the same until it is complete; then it gets its name
    <run>/best.json, best       the step with the lowest validation metric, and a link to its directory

Each process copies its part to the host; the rest of a save happens in one background thread, so a save
blocks the loop only for the copy. Orbax's handlers write the arrays. Its `CheckpointManager` is not used: it would
delete the old checkpoint before the new one has its manifest, and it restores damaged ones.
Read next: `layout.py` (content of the items), `copy_out.py` (how they are written), `interop/orbax_item.py` (how they
are read), `step_dirs.py` (what is kept), `local_tier.py` (more frequent saves on a disk in each host, from which those
here are copied).
"""

import concurrent.futures
import functools
import logging
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax

from openpi_train.checkpoints import fencing
from openpi_train.checkpoints.best import Best
from openpi_train.checkpoints.copy_out import ArrayWriter, PieceSource, background_thread, host_arrays
from openpi_train.checkpoints.layout import (
    Leaves,
    PublicName,
    check_same_leaves,
    describe,
    leaves_by_item,
    size_bytes,
    state_from_items,
)
from openpi_train.checkpoints.local_tier import LocalTier
from openpi_train.checkpoints.meta import check_asset_ids, make_meta, write_beside
from openpi_train.checkpoints.pieces import fetch_share, place
from openpi_train.checkpoints.step_dirs import StepDirs, complete_steps
from openpi_train.data.core.files import read_json
from openpi_train.interop.manifest import Sums, find_damage, write_manifest
from openpi_train.interop.orbax_item import open_item
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import place as on_devices
from openpi_train.json_object import JsonObject
from openpi_train.parallel.state import TrainState
from openpi_train.runtime import agree, preempt
from openpi_train.runtime.exits import (
    HARDWARE,
    PEER_LOST,
    USAGE,
    CheckpointError,
    HardwareError,
    PeerLostError,
    RunError,
    StorageError,
    UsageError,
    exit_code_of,
    reported_as,
)
from openpi_train.runtime.passing_errors import is_of_surroundings, patiently

logger = logging.getLogger(__name__)

# How long process 0 waits for the others' parts of a save. One that is lost is noticed before.
_TIMEOUT_S = 3600.0
_OTHER_FAULTS = {PEER_LOST: PeerLostError, HARDWARE: HardwareError, USAGE: UsageError}
_SLACK_BYTES = 1 << 20  # metadata, norm stats and manifest beside the arrays


class _FailedElsewhere(Exception):
    """Another process could not write its part of a save."""


class Checkpoints:
    """The checkpoints of one training run. For its training processes only: opening cleans up after killed saves.

    Every process must make the same calls in the same order. An error of a save in the background is raised by the next
    `save`, `wait` or `close`, on every process if a file system is to blame.

    Args:
        directory: the run directory, on a file system that all processes share.
        public_name: internal parameter path to published name.
        keep_last: how many of the newest checkpoints are kept.
        keep_period: checkpoints at multiples of this step are kept permanently; None: none.
        local_directory: a directory on a local disk of each host, for `save_locally`; None: no local saves.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        public_name: PublicName = str,
        keep_last: int = 1,
        keep_period: int | None = None,
        local_directory: str | None = None,
    ):
        self._dirs = StepDirs(directory, keep_last=keep_last, keep_period=keep_period)
        self.directory = self._dirs.directory
        self._public_name = public_name
        self._is_writer = jax.process_index() == 0
        self._saved_step: int | None = None
        self.copy_is_missing = False
        """Whether the state was restored from a local save that the run directory has no copy of."""
        if self._is_writer:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._dirs.remove_left_overs()
        self._local = LocalTier(local_directory, self.directory) if local_directory else None
        self._writer = ArrayWriter("params", "train_state")
        self._source: PieceSource | None = None
        self._background = background_thread()
        self._pending: concurrent.futures.Future[None] | None = None
        self._num_saves = 0

    def save(
        self,
        state: TrainState,
        *,
        data_position: JsonObject,
        experiment: JsonObject,
        norm_stats: JsonObject,
        files: Mapping[str, bytes] | None = None,
        extra: JsonObject | None = None,
    ) -> float:
        """Start saving and return the seconds for which the caller was blocked (`time/checkpoint_stall_s`).

        This process's part is copied to the host before this returns, so the state may be donated to the next
        step. A step that has just been saved or restored is not saved again. Waits until the former save is complete,
        so the host never holds two states. With a local directory the step is saved there first, and copied
        from there in the background.

        Args:
            norm_stats: content of `assets/<asset_id>/norm_stats.json`, by asset id.
            files: further files of the checkpoint, by path.
            extra: further JSON values, such as the wandb run id.

        Raises:
            CheckpointError, StorageError: the former save failed, or, on every process, there is no disk space.
                StorageError where the file system or the host is to blame, or the disk had room for a checkpoint
                before. Older checkpoints are intact.
        """
        started = time.monotonic()
        step = int(state.step)
        if step == self._saved_step:
            logger.info("checkpoint %d is already there and is not saved again", step)
            return 0.0
        check_asset_ids(norm_stats)
        items = leaves_by_item(state, self._public_name)
        meta = make_meta(step, items, data_position, experiment, extra)
        local = self._start_locally(step, items, meta)
        self._finish_pending()
        problem = None
        if self._is_writer:
            size = size_bytes(items) + sum(map(len, (files or {}).values()))
            try:
                patiently(lambda: self._begin(step, size), f"beginning {self._dirs.draft(step)}")
            except (CheckpointError, StorageError) as error:
                problem = [str(error), isinstance(error, StorageError)]
            except OSError as error:
                problem = [f"saving checkpoint {step} failed: {error}", is_of_surroundings(error)]
        self._raise_together(problem)
        self._source = source = local or PieceSource(fetch_share(items))
        self._saved_step = step
        arrays = host_arrays(items, source)
        beside = functools.partial(write_beside, meta=meta, norm_stats=dict(norm_stats), files=dict(files or {}))
        self._num_saves += 1
        self._pending = self._background.submit(self._write, step, arrays, beside, started, source)
        return time.monotonic() - started

    def save_locally(
        self,
        state: TrainState,
        *,
        data_position: JsonObject,
        experiment: JsonObject,
        extra: JsonObject | None = None,
    ) -> float | None:
        """Start saving only in the local directory, and return the seconds for which the caller was blocked.

        Waits for the former local save, not for its copy. None if a disk has no space, with a warning.
        """
        started, step = time.monotonic(), int(state.step)
        items = leaves_by_item(state, self._public_name)
        source = self._start_locally(step, items, make_meta(step, items, data_position, experiment, extra))
        return time.monotonic() - started if source else None

    def restore(
        self, abstract: TrainState, *, step: int | None = None, cast: bool = False, later: str = "replaced"
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """Restore the newest checkpoint that is complete on every process, with its `meta`; None if there is none.

        A local one is used if none in the run directory is newer; otherwise the log says why. Damaged ones in
        the run directory are logged and renamed to `<step>.damaged-<time>`.

        Args:
            abstract: shapes with dtypes and shardings (or arrays) of the result, independent of the
                devices and processes that wrote the checkpoint.
            step: restore this one of the run directory, and set aside those after it; None: the newest.
            later: what those set aside are called: `<step>.<later>-<time>`.
            cast: allow a dtype that differs from the saved one.

        Raises:
            CheckpointError: every checkpoint is damaged, or they are another model's, naming the leaves that differ.
        """
        started, is_given = time.monotonic(), step is not None
        wanted = leaves_by_item(abstract, self._public_name)
        local = self._local.restore(wanted) if self._local and not is_given else None
        if step is not None:
            self._require_whole(step)
        else:
            step = self._newest_whole(above=local.step if local else -1)
        if step is not None:
            if local:
                logger.info("local checkpoint %d is older than the run directory's %d", local.step, step)
            local, directory = None, self.step_dir(step)
            meta = patiently(lambda: read_json(directory / "meta.json"), f"reading {directory}")
            check_same_leaves(meta["leaves"], describe(wanted), where=str(directory), cast=cast)
        elif local is not None:
            step, directory, meta = local.step, local.directory, local.meta
            complete = agree.broadcast("complete checkpoints", self.steps() if self._is_writer else None)
            self.copy_is_missing = step not in complete
        else:
            return None
        if local:
            items = place(local.pieces, wanted)
        else:
            items = patiently(functools.partial(_read_items, directory, wanted), f"reading {directory}")
        self._saved_step = None if self.copy_is_missing else step
        if self._local:
            self._local.settle(local.step if local else None)
        if self._is_writer:
            if is_given:
                self._dirs.leave_after(step, later)
            self._dirs.link_latest()
        logger.info("restored checkpoint %d from %s in %.1f s", step, directory, time.monotonic() - started)
        return state_from_items(items, abstract, self._public_name), meta

    def note_metric(self, step: int, value: float) -> None:
        """Record the validation metric at `step`; the checkpoint with the lowest finite one so far is kept as `best`.

        May be called before or after that step is saved. Steps without a checkpoint are ignored.
        """
        if not math.isfinite(value):
            logger.warning("validation metric %s at step %d: not a candidate for the best checkpoint", value, step)
            return
        if self._is_writer:
            self._dirs.note_metric(step, value)

    @property
    def best(self) -> Best | None:
        """The best checkpoint on disk, if any."""
        return self._dirs.best

    def steps(self) -> list[int]:
        """The steps whose save is complete, oldest first."""
        return self._dirs.complete()

    def step_dir(self, step: int) -> pathlib.Path:
        """The directory of the checkpoint of `step`."""
        return self._dirs.path(step)

    def finish_former(self) -> bool:
        """Wait until the last save is complete, and return whether there was one to wait for.

        Raises CheckpointError or StorageError if it failed, on the process where it did.
        """
        was_pending = self._pending is not None
        self._finish_pending()
        return was_pending

    def wait(self) -> None:
        """Wait until the last save is complete on all processes. Raises CheckpointError if it failed."""
        if self._local:
            self._local.finish()
        self._finish_pending()
        agree.gather(f"complete checkpoint {self._saved_step}", None)

    def close(self) -> None:
        """Wait for the last save and end the background threads."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._writer.close()
            if self._local:
                self._local.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start_locally(self, step: int, items: Mapping[str, Leaves], meta: JsonObject) -> PieceSource | None:
        """Start a local save; returns its source for a copy, or None."""
        if self._local is None:
            return None
        self._local.finish()
        if self._pending is not None and self._source is not None and self._source.holds_memory:
            concurrent.futures.wait([self._pending])  # the copy of a save that failed: no second state in memory
        return self._local.save(step, items, meta)

    def _begin(self, step: int, size: int) -> None:
        """Make room and the folders for a save."""
        self._dirs.remove_left_overs()  # a failed save's files may fill the disk
        self._require_room(step, size)
        self._writer.begin(self._dirs.new_draft(step))

    def _require_room(self, step: int, size: int) -> None:
        """Raise CheckpointError where nothing can be saved; StorageError on a disk that has had room before."""
        self._dirs.set_aside_interrupted()
        if self.step_dir(step).exists():
            raise CheckpointError(
                f"{self.step_dir(step)} exists already, from another run or one that was not restored; "
                "use --resume to continue that run, or --overwrite to move it aside"
            )
        needed, free = size + _SLACK_BYTES, shutil.disk_usage(self.directory).free
        if needed <= free:
            return
        usable = self.steps()
        raise (StorageError if usable else CheckpointError)(
            f"not enough disk space for checkpoint {step} in {self.directory}: it needs {_megabytes(needed)}, "
            f"{_megabytes(free)} are free. Free some space, lower --keep-last, raise --keep-period, or use another "
            f"--checkpoint-base-dir. Nothing was written; usable checkpoints: {usable or 'none'}"
        )

    def _finish_pending(self) -> None:
        """Wait for the background save. Raises CheckpointError or StorageError, on every process, if any failed.

        Of another fault than of the save, such as a lost peer, the error is raised at once where it is known.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error = pending.exception()
        own = None if error is None or isinstance(error, _FailedElsewhere) else error
        if own is not None and exit_code_of(own) in _OTHER_FAULTS and not is_of_surroundings(own):
            self._give_up(f"saving checkpoint {self._saved_step} failed: {type(own).__name__}: {own}", own)
        said = None if own is None else [f"{type(own).__name__}: {own}", is_of_surroundings(own)]
        told = agree.gather(f"outcome of checkpoint {self._saved_step}", said)
        found = {index: what for index, what in enumerate(told) if what is not None}
        if found:
            texts = [text if len(told) == 1 else f"process {index}: {text}" for index, (text, _) in found.items()]
            kind = StorageError if all(of_storage for _, of_storage in found.values()) else CheckpointError
            self._give_up(f"saving checkpoint {self._saved_step} failed: {'; '.join(texts)}", own, kind)

    def _raise_together(self, problem: list[Any] | None) -> None:
        """Raise process 0's problem, and whether it is a StorageError, on every process."""
        problem = agree.gather(f"room for checkpoint after {self._saved_step}", problem)[0]
        if problem is not None:
            text, is_of_storage = problem
            self._give_up(text, kind=StorageError if is_of_storage else CheckpointError)

    def _give_up(
        self, problem: str, cause: BaseException | None = None, kind: type[RunError] = CheckpointError
    ) -> NoReturn:
        self._saved_step = None
        if self._is_writer and cause is not None:
            fencing.require_owned(self.directory)  # a newer start removes what it finds half saved
        if self._local:
            self._local.wait()  # the run ends here, and may continue from the local save in progress
        # Of a lost process the watchdog knows the reason; neither is a failed device a fault of the checkpoint, nor a
        # newer start of the run.
        if cause is not None and not is_of_surroundings(cause):
            kind = _OTHER_FAULTS.get(exit_code_of(cause), kind)
        raise kind(problem) from cause

    def _write(
        self,
        step: int,
        arrays: Mapping[str, Leaves],
        beside: Callable[[pathlib.Path], None],
        started: float,
        source: PieceSource,
    ) -> None:
        """In the background: write the arrays; process 0 then completes the checkpoint, and deletes old ones."""
        draft, save, own, error = self._dirs.draft(step), f"save/{self._num_saves}", None, None
        try:
            own = self._writer.write(draft, arrays, source)
        except Exception as raised:
            error = raised
        written = [own]
        if not self._is_writer:
            agree.tell(f"{save}/{jax.process_index()}", own)
        else:
            # Also after an own error, so that nobody writes any more where the next save removes what there is.
            written += [agree.heard(f"{save}/{index}", _TIMEOUT_S) for index in range(1, jax.process_count())]
            agree.forget(save)
        if error is not None:
            raise error
        if None in written:
            raise _FailedElsewhere
        if self._is_writer:
            known = {folder: inside for one in written if one is not None for folder, inside in one.items()}
            self._complete(step, draft, beside, known, started)

    def _complete(
        self,
        step: int,
        draft: pathlib.Path,
        beside: Callable[[pathlib.Path], None],
        known: Mapping[str, Sums],
        started: float,
    ) -> None:
        """Process 0's part of a save that all have written; `known` are the sums of their folders."""
        self._writer.finish(draft)
        patiently(lambda: beside(draft), f"writing {draft}")
        size = patiently(lambda: write_manifest(draft, known), f"writing {draft}")
        self._dirs.commit(step)
        preempt.note_save(step, time.monotonic() - started, size)
        self._dirs.note_complete(step)

    def _damage(self, step: int) -> str:
        """What is wrong with the checkpoint, empty if nothing. Each process reads a share of its files.

        Raises on every process, if none has found damage and one cannot read its share: StorageError where that may
        pass, otherwise CheckpointError.
        """
        directory, share, shares = self.step_dir(step), jax.process_index(), jax.process_count()
        damage, obstacle = "", None
        try:
            with reported_as(CheckpointError):  # no permission: neither damage, nor will it pass
                damage = patiently(lambda: find_damage(directory, share=share, shares=shares), f"reading {directory}")
        except (CheckpointError, StorageError) as error:
            obstacle = [str(error), isinstance(error, StorageError)]
        everyone = agree.gather(f"verify checkpoint {step}", [damage, obstacle])
        found = next((damage for damage, _ in everyone if damage), "")
        for text, may_pass in [obstacle for _, obstacle in everyone if obstacle and not found]:
            raise (StorageError if may_pass else CheckpointError)(text)
        return found

    def _require_whole(self, step: int) -> None:
        """Raise CheckpointError, on every process, unless every process finds this checkpoint complete."""
        if damage := self._damage(step):
            others = ", ".join(str(other) for other in complete_steps(self.directory) if other != step)
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} cannot be used: {damage}. Nothing was changed; give another "
                f"step to --resume-from ({f'there are {others}' if others else 'there is no other'})"
            )

    def _newest_whole(self, above: int) -> int | None:
        """The newest step that every process finds complete.

        Only steps above `above`, that of a local save; -1: there is none.
        """
        committed = None
        if self._is_writer:
            self._dirs.set_aside_interrupted()
            committed = [step for step in self._dirs.committed() if step > above]
        steps = agree.broadcast("list checkpoints", committed)
        damaged: dict[int, str] = {}
        chosen = None
        for step in reversed(steps):
            damage = self._damage(step)
            if not damage:
                chosen = step
                break
            damaged[step] = damage
            logger.warning("checkpoint %d cannot be used: %s", step, damage)
        if damaged and chosen is None and above < 0:
            listing = "\n".join(f"  {step}: {reason}" for step, reason in damaged.items())
            raise CheckpointError(
                f"all {len(damaged)} checkpoints in {self.directory} are damaged:\n{listing}\n"
                "  Put a copy back, or start anew with --overwrite (which moves this run aside)."
            )
        if damaged:
            logger.warning("falling back to checkpoint %s; steps after it are trained again", chosen or above)
        if self._is_writer:
            for step in damaged:
                self._dirs.set_aside_damaged(step)
        return chosen


def _read_items(directory: pathlib.Path, wanted: Mapping[str, Leaves]) -> dict[str, Leaves]:
    """The items' arrays, with the dtypes and shardings of `wanted` (by path). Each process reads its own shards."""
    items = {}
    for item, leaves in wanted.items():
        found = open_item(Place.of(directory / item))
        items[item] = {path: on_devices(found[path], leaf.dtype, leaf.sharding) for path, leaf in leaves.items()}
    return items


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
