"""The checkpoints in a run directory: which exist, which are kept, which is best. Read next: `checkpoint_store.py`."""

import contextlib
import logging
import os
import pathlib
import re
import shutil
import threading
import time
from collections.abc import Iterator

from openpi_train.checkpoints import fencing
from openpi_train.checkpoints.best import Best
from openpi_train.data.core.files import read_json, set_aside, write_json
from openpi_train.interop.manifest import has_manifest
from openpi_train.runtime.exits import StorageError
from openpi_train.runtime.passing_errors import patiently

logger = logging.getLogger(__name__)

# Orbax writes `<step>.saving.orbax-checkpoint-tmp`, before version 0.2 `<step>.orbax-checkpoint-tmp`.
_LEFT_OVER = re.compile(r"\d+\.(saving.*|orbax-checkpoint-tmp.*|deleting)")
# The next save makes links, too, but there is none after the last.
_LINKS_S = 10.0
# Checkpoints that are of no use any more once a later one is complete.
_USELESS = re.compile(r"(\d+)\.(?:damaged|interrupted|passed-over)-.*")


class StepDirs:
    """The step directories of a run. Only process 0 may call methods that change them.

    Each of these first asks whether a newer start owns the run (`fencing.py`); then it raises UsageError.

    Keeps the newest `keep_last`, those at multiples of `keep_period` (None: none), and the best. The best is not
    moved: `best.json` names it and `best` links to it. `latest` links to the newest complete one. What fails while
    links are made and old checkpoints are deleted is warned of and tried again at the next save: the new checkpoint is
    whole. A file server refuses to delete what a server on another host has open, or a colleague's file.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep_last: int, keep_period: int | None):
        if keep_last < 1 or (keep_period is not None and keep_period < 1):
            raise ValueError(f"keep_last {keep_last} and keep_period {keep_period} must be at least 1 (or None)")
        self.directory = pathlib.Path(directory).absolute()
        self._keep_last, self._keep_period = keep_last, keep_period
        self._metrics: dict[int, float] = {}
        self._lock = threading.Lock()  # metrics are noted while the background thread completes a save

    def path(self, step: int) -> pathlib.Path:
        """The directory of the checkpoint of `step`."""
        return self.directory / str(step)

    def draft(self, step: int) -> pathlib.Path:
        """Where a checkpoint lies until it is complete."""
        return self.directory / f"{step}.saving"

    def new_draft(self, step: int) -> pathlib.Path:
        """Make the draft of a step. What a failed save has left there, and cannot be deleted, goes out of the way."""
        draft = self.draft(step)
        if draft.exists():
            set_aside(draft, "left")
        draft.mkdir(parents=True)
        return draft

    def committed(self) -> list[int]:
        """The steps that have a directory, complete or not, oldest first."""
        return _steps(self.directory)

    def complete(self) -> list[int]:
        """The steps whose save is complete, oldest first."""
        return complete_steps(self.directory)

    @property
    def best(self) -> Best | None:
        """The best checkpoint on disk, if any."""
        return best_of(self.directory)

    def note_metric(self, step: int, value: float) -> None:
        """Record a step's validation metric, and link the step as the best if it is complete and the lowest."""
        with self._lock, _tried("noting the best checkpoint"):
            self._metrics[step] = float(value)
            patiently(lambda: self._update_best(step), "noting the best checkpoint", limit_s=_LINKS_S)

    def commit(self, step: int) -> None:
        """Give the complete draft of the step its name."""
        fencing.require_owned(self.directory)
        # A directory with a number as its name is always complete.
        patiently(lambda: _rename(self.draft(step), self.path(step)), f"renaming {self.draft(step)}")

    def note_complete(self, step: int) -> None:
        """Link the step as the latest, and as the best if it is, and delete checkpoints that are not kept."""
        with self._lock, _tried("linking and deleting checkpoints"):
            fencing.require_owned(self.directory)
            patiently(self.link_latest, "linking `latest`", limit_s=_LINKS_S)
            patiently(lambda: self._update_best(step), "linking `best`", limit_s=_LINKS_S)
            for path in self.directory.iterdir():
                useless = _USELESS.fullmatch(path.name)
                if useless and int(useless[1]) <= step:
                    logger.warning("removing %s: checkpoint %d is complete", path, step)
                    _remove(path)
            complete, best = self.complete(), self.best
            keep = {*complete[-self._keep_last :], *([best.step] if best else [])}
            for old in complete:
                if old not in keep and (self._keep_period is None or old % self._keep_period):
                    # Renamed first: a partly deleted directory must not look like a checkpoint.
                    with _tried(f"deleting {self.path(old)}"):
                        fencing.require_owned(self.directory)
                        _remove(self.path(old).rename(self.path(old).with_suffix(".deleting")))

    def link_latest(self) -> None:
        """Link the newest complete step as `latest`."""
        if steps := self.complete():
            self._link("latest", steps[-1])

    def leave_after(self, step: int, reason: str = "replaced") -> None:
        """Set aside every checkpoint after this one, as `<step>.<reason>-<time>`; if one of them was the best, there is
        none until a metric is noted.
        """
        fencing.require_owned(self.directory)
        with self._lock:
            best = self.best
            for later in [one for one in self.committed() if one > step]:
                place = set_aside(self.path(later), reason)
                logger.warning("checkpoint %d is after step %d and now lies in %s", later, step, place)
            if best is not None and best.step > step:
                for name in ("best.json", "best"):
                    (self.directory / name).unlink(missing_ok=True)
            self._metrics = {one: value for one, value in self._metrics.items() if one <= step}
            self.link_latest()

    def remove_left_overs(self) -> None:
        """Remove remains of saves and clean-ups that failed or were killed."""
        fencing.require_owned(self.directory)
        for path in self.directory.iterdir():
            if _LEFT_OVER.fullmatch(path.name):
                logger.warning("removing %s, left behind by a save or clean-up that failed or was killed", path)
                with _tried(f"removing {path}"):
                    _remove(path)

    def set_aside_interrupted(self) -> None:
        """Set the newest checkpoint aside if it has no manifest: its save was interrupted by an older version of us.

        Only the newest can be: others without one have lost theirs.
        """
        steps = self.committed()
        if steps and not has_manifest(self.path(steps[-1])):
            fencing.require_owned(self.directory)
            place = set_aside(self.path(steps[-1]), "interrupted")
            logger.warning(
                "the save of checkpoint %d was interrupted; what there was of it lies in %s", steps[-1], place
            )

    def set_aside_damaged(self, step: int) -> None:
        """Rename a damaged checkpoint, so that none of its step is found."""
        fencing.require_owned(self.directory)
        set_aside(self.path(step), "damaged")

    def _update_best(self, step: int) -> None:
        value, best = self._metrics.get(step), self.best
        if value is None or not has_manifest(self.path(step)) or (best is not None and value >= best.value):
            return
        fencing.require_owned(self.directory)
        write_json(self.directory / "best.json", {"step": step, "value": value})
        self._link("best", step)

    def _link(self, name: str, step: int) -> None:
        link, target = self.directory / f"{name}.partial", self.directory / name
        if target.is_dir() and not target.is_symlink():  # the run was copied without its links
            set_aside(target, "replaced")
        link.unlink(missing_ok=True)
        link.symlink_to(str(step), target_is_directory=True)
        link.replace(target)


def complete_steps(directory: pathlib.Path) -> list[int]:
    """The steps whose save is complete in a run's directory, oldest first; none where there is no directory."""
    return [step for step in _steps(directory) if has_manifest(directory / str(step))] if directory.is_dir() else []


def best_of(directory: pathlib.Path) -> Best | None:
    """The best checkpoint on disk in a run's directory, if any."""
    try:
        best = Best(**read_json(directory / "best.json"))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        logger.warning("%s cannot be read (%s): no best checkpoint", directory / "best.json", error)
        return None
    return best if has_manifest(directory / str(best.step)) else None


def _steps(directory: pathlib.Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal() and path.is_dir())


@contextlib.contextmanager
def _tried(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, StorageError) as error:
        logger.warning("%s failed and is tried again at the next save: %s", what, error)


def _rename(path: pathlib.Path, target: pathlib.Path) -> None:
    try:
        path.rename(target)
    except FileNotFoundError:
        if not target.exists():  # the server had done it at the first attempt, and its answer was lost
            raise


def _remove(directory: pathlib.Path, attempts: int = 5) -> None:
    for attempt in range(attempts):
        try:
            shutil.rmtree(directory)
            return
        except OSError:  # threads of a failed Orbax save may still be writing into it
            if attempt == attempts - 1:
                raise
            time.sleep(0.2)
