"""Checkpoints of a run: saved while it trains on, counted only when whole, restored onto any devices.

    <run>/<step>/params/        what inference loads, as openpi publishes it (`layout.py`)
                 train_state/   what only training needs
                 assets/<asset_id>/norm_stats.json
                 meta.json      step, data position, experiment, versions, dtype and shape of every leaf
                 manifest.json  size and crc32 of every file, written last (`manifest.py`)
    <run>/best.json, best       the step with the lowest validation metric, and a link to its directory

Orbax's `AsyncCheckpointer` writes the arrays. Its `CheckpointManager` is not used: it would delete the old checkpoint
before the new one has its manifest, and it restores what is damaged.
Read next: `layout.py` (what lies in the items), `step_dirs.py` (what is kept), `restore.py`.
"""

import concurrent.futures
import logging
import math
import os
import pathlib
import shutil
import time
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from openpi_train.data.files import read_json, set_aside, write_json
from openpi_train.interop.manifest import find_damage, has_manifest, write_manifest
from openpi_train.nn.params import nested_params
from openpi_train.runtime.exits import PEER_LOST, CheckpointError, exit_code_of
from openpi_train.training.agreement import from_process_0, gather
from openpi_train.training.layout import (
    Leaves,
    PublicName,
    check_same_leaves,
    describe,
    leaves_by_item,
    size_bytes,
    state_from_items,
)
from openpi_train.training.restore import read_item
from openpi_train.training.rundir import package_versions
from openpi_train.training.state import TrainState
from openpi_train.training.step_dirs import Best, StepDirs

logger = logging.getLogger(__name__)

_SLACK_BYTES = 1 << 20  # metadata, norm stats and manifest beside the arrays


class Checkpoints:
    """The checkpoints of one training run. For its training processes only: opening cleans up after killed saves.

    Every process must make the same calls in the same order. An error of a save in the background is raised, on all
    processes, by the next `save`, `wait` or `close`.

    Args:
        directory: the run directory, on a file system that all processes share.
        public_name: internal parameter path to published name.
        keep_last: how many of the newest checkpoints are kept.
        keep_period: checkpoints at multiples of this step are kept for good; None keeps none of them.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        public_name: PublicName = str,
        keep_last: int = 1,
        keep_period: int | None = None,
    ):
        self._dirs = StepDirs(directory, keep_last=keep_last, keep_period=keep_period)
        self.directory = self._dirs.directory
        self._public_name = public_name
        self._is_writer = jax.process_index() == 0
        self._saved_step: int | None = None
        if self._is_writer:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._dirs.remove_left_overs()
        self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler("params", "train_state"))
        self._background = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None

    def save(
        self,
        state: TrainState,
        *,
        data_position: Mapping[str, Any],
        experiment: Mapping[str, Any],
        norm_stats: Mapping[str, Any],
        extra: Mapping[str, Any] | None = None,
    ) -> float:
        """Start saving and return the seconds for which the caller was held up (`time/checkpoint_stall_s`).

        The arrays are copied to the host before this returns, so the state may be donated to the next step. A step
        that has just been saved or restored is not saved again. Waits for the former save to be complete.

        Args:
            norm_stats: what `assets/<asset_id>/norm_stats.json` shall hold, by asset id.
            extra: more JSON values to keep beside these, such as the wandb run id.

        Raises:
            CheckpointError: the former save failed, or the disk has no room for this one. Older checkpoints are whole.
        """
        started = time.monotonic()
        step = int(state.step)
        if step == self._saved_step:
            logger.info("checkpoint %d is already there and is not saved again", step)
            return 0.0
        _check_asset_ids(norm_stats)
        items = leaves_by_item(state, self._public_name)
        problem = self._finish_pending()
        if self._is_writer and not problem:
            self._dirs.remove_left_overs()  # a failed save's files may be what fills the disk
            problem = self._obstacle(step, items)
        self._raise_together(problem)
        meta = _describe_run(step, items) | {
            "data_position": dict(data_position),
            "experiment": dict(experiment),
            **(extra or {}),
        }
        trees = {item: ocp.args.PyTreeSave(nested_params(leaves)) for item, leaves in items.items()}
        try:
            self._writer.save(self.step_dir(step), args=ocp.args.Composite(**trees))
        except Exception as error:
            if exit_code_of(error) == PEER_LOST:
                raise
            raise CheckpointError(f"checkpoint {step} cannot be saved in {self.directory}: {error}") from error
        self._saved_step = step
        self._pending = self._background.submit(self._finish, step, meta, dict(norm_stats))
        return time.monotonic() - started

    def restore(self, abstract: TrainState, *, cast: bool = False) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest checkpoint that is whole for every process, with its `meta`; None where there is none at all.

        Damaged newer ones are named in the log and renamed to `<step>.damaged-<time>`.

        Args:
            abstract: shapes with dtypes and shardings (or arrays); the result is laid out like it, whatever number of
                devices and processes the checkpoint was written by.
            cast: allow another dtype than the saved one.

        Raises:
            CheckpointError: every checkpoint is damaged, or they are another model's, naming the leaves that differ.
        """
        step = self._newest_whole()
        if step is None:
            return None
        started = time.monotonic()
        meta = read_json(self.step_dir(step) / "meta.json")
        wanted = leaves_by_item(abstract, self._public_name)
        check_same_leaves(meta["leaves"], describe(wanted), where=str(self.step_dir(step)), cast=cast)
        items = {item: read_item(self.step_dir(step) / item, leaves) for item, leaves in wanted.items()}
        self._saved_step = step
        logger.info("restored checkpoint %d from %s in %.1f s", step, self.directory, time.monotonic() - started)
        return state_from_items(items, abstract, self._public_name), meta

    def note_metric(self, step: int, value: float) -> None:
        """Tell the validation metric at `step`; the checkpoint of the lowest finite one so far is kept as `best`.

        May be called before or after that step is saved. Steps without a checkpoint do not compete.
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
        """Where the checkpoint of `step` lies."""
        return self._dirs.path(step)

    def wait(self) -> None:
        """Return when the last save is complete, on all processes. Raises CheckpointError where it failed."""
        self._raise_together(self._finish_pending())

    def close(self) -> None:
        """Wait for the last save and end the background threads."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._writer.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _obstacle(self, step: int, items: Mapping[str, Any]) -> str:
        if self.step_dir(step).exists() and not has_manifest(self.step_dir(step)):
            set_aside(self.step_dir(step), "damaged")
        elif self.step_dir(step).exists():
            return (
                f"{self.step_dir(step)} exists already, from another run or one that was not restored; "
                "use --resume to continue that run, or --overwrite to move it aside"
            )
        needed, free = size_bytes(items) + _SLACK_BYTES, shutil.disk_usage(self.directory).free
        if needed <= free:
            return ""
        return (
            f"not enough disk space for checkpoint {step} in {self.directory}: it needs {_megabytes(needed)}, "
            f"{_megabytes(free)} are free. Free some space, lower --keep-last, raise --keep-period, or use another "
            f"--checkpoint-base-dir. Nothing was written; usable checkpoints: {self.steps() or 'none'}"
        )

    def _finish_pending(self) -> str:
        """Wait for the background save and say what went wrong with it."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except Exception as error:  # handed on by _raise_together
            logger.error("saving checkpoint %s failed", self._saved_step, exc_info=error)
            return f"saving checkpoint {self._saved_step} failed: {type(error).__name__}: {error}"
        return ""

    def _raise_together(self, problem: str) -> None:
        problems = [text for text in gather(f"complete checkpoint {self._saved_step}", problem) if text]
        if problems:
            self._saved_step = None
            raise CheckpointError("; ".join(dict.fromkeys(problems)))

    def _finish(self, step: int, meta: Mapping[str, Any], norm_stats: Mapping[str, Any]) -> None:
        """In the background: wait for the arrays, add what makes the checkpoint count, then make room."""
        self._writer.wait_until_finished()
        if not self._is_writer:
            return
        directory = self.step_dir(step)
        for asset_id, stats in norm_stats.items():
            path = directory / "assets" / asset_id / "norm_stats.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, stats)
        write_json(directory / "meta.json", meta)
        write_manifest(directory)
        self._dirs.note_complete(step)

    def _newest_whole(self) -> int | None:
        """The newest step that every process finds whole. Each process reads a share of its files."""
        steps = from_process_0("list checkpoints", self._dirs.committed() if self._is_writer else None)
        damaged: dict[int, str] = {}
        chosen = None
        for step in reversed(steps):
            damage = find_damage(self.step_dir(step), share=jax.process_index(), shares=jax.process_count())
            votes = [text for text in gather(f"verify checkpoint {step}", damage) if text]
            if not votes:
                chosen = step
                break
            damaged[step] = votes[0]
            logger.warning("checkpoint %d cannot be used: %s", step, votes[0])
        if damaged and chosen is None:
            listing = "\n".join(f"  {step}: {reason}" for step, reason in damaged.items())
            raise CheckpointError(
                f"all {len(damaged)} checkpoints in {self.directory} are damaged:\n{listing}\n"
                "  Put a copy back, or start anew with --overwrite (which moves this run aside)."
            )
        if damaged:
            logger.warning("falling back to checkpoint %s; steps after it are trained again", chosen)
        if self._is_writer:
            for step in damaged:
                set_aside(self.step_dir(step), "damaged")
        return chosen


def _describe_run(step: int, items: Mapping[str, Leaves]) -> dict[str, Any]:
    return {
        "step": step,
        "versions": package_versions(),
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "leaves": describe(items),
    }


def _check_asset_ids(norm_stats: Mapping[str, Any]) -> None:
    for asset_id in norm_stats:
        path = pathlib.PurePosixPath(asset_id)
        if not asset_id or path.is_absolute() or ".." in path.parts:
            raise ValueError(
                f"asset id {asset_id!r} must be a relative path without '..': it names a folder in assets/"
            )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
