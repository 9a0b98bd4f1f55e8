"""The drill itself: one fault after another, each with its verdict. Read next: `kinds.py`, `leftovers.py`."""

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.drill.experiments import Drilled
from benchmarks.drill.kinds import KINDS, Kind, possible_windows
from benchmarks.drill.laboratory import Laboratory
from benchmarks.drill.leftovers import Baseline
from benchmarks.drill.running import AGAIN, CODE, CONTINUING, STEP, Running, steps_told
from benchmarks.drill.scene import FaultFailed, Scene
from benchmarks.drill.windows import WINDOWS
from openpi_train.faults import PREEMPTED

# Of the first start, which compiles.
_FIRST_START_S = 300.0
# A fault may take as many usual starts, and this, beside the time until it is noticed.
_STARTS, _SLACK_S = 3, 60.0
# A fault that strikes hosts may come back while the launcher tries: it is gone when the next start ends.
_MOST_RESTARTS = 6
# A run that goes on through a fault shows it by so many steps.
_STEPS_ON = 5
_POLL_S = 0.05
# Per core, of a drill alone.
_USUAL_LOAD = 4.0
ENDLESS = ("--num-train-steps", "1000000")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survived:
    """What one fault, or two at once, have cost. `codes` are the run's, by its launcher; none: there was no restart."""

    names: tuple[str, ...]
    windows: tuple[str, ...]
    codes: tuple[int, ...]
    steps_again: int
    recovery_s: float


@dataclasses.dataclass(frozen=True)
class Notice:
    """The launcher's line that says why it restarts the run, and where among its lines it stands."""

    place: int
    reason: str

    @property
    def code(self) -> int:
        """The run's exit code."""
        found = CODE.search(self.reason)
        return int(found[1]) if found else PREEMPTED


class Drill:
    """A run of `drilled` in a laboratory, its faults, those from number `first` on to come, and those survived."""

    def __init__(
        self,
        lab: Laboratory,
        drilled: Drilled,
        num_hosts: int,
        faults: Sequence[tuple[str, ...]],
        seed: int,
        first: int,
        tell: Callable[[str], None],
    ):
        self._lab, self._drilled, self._num_hosts = lab, drilled, num_hosts
        self._faults, self._seed, self._first, self._tell = faults, seed, first, tell
        self.run = Running(lab, drilled, num_hosts, "disturbed")
        self.survived: list[Survived] = []
        self._start_s = 0.0

    def go(self) -> str:
        """Inject all faults, then stop; returns what went wrong, or an empty string."""
        run, number = self.run, 0
        try:
            began = time.monotonic()
            run.start(*ENDLESS, "--resume")
            try:
                self._await(lambda: steps_told(run.lines), _FIRST_START_S, "the first start came to no step")
                self._start_s = time.monotonic() - began
                self._await_checkpoint(after=max(run.checkpoints(), default=0))
                self._baseline = Baseline(self._lab, run)
                for number, names in enumerate(self._faults[self._first - 1 :], self._first):
                    self._rng = random.Random(f"{self._seed}/{number}")  # so that each can be repeated alone
                    self._tell(f"{number} of {len(self._faults)}: {', then '.join(names)}")
                    self.survived.append(one := self._one(names))
                    where, codes = ", ".join(one.windows), one.codes or "no restart"
                    self._tell(f"  {where}: {codes}, {one.steps_again} steps again, {one.recovery_s:.1f} s")
            except FaultFailed as error:
                names = ", then ".join(self._faults[number - 1]) if number else "no fault yet"
                return f"fault {number} ({names}): {error}\n{run.said(80)}"
            code = run.launched.stop()
            return "" if code == PREEMPTED else f"the stop at the end: code {code} instead of 75\n{run.said()}"
        finally:
            run.close()

    def _one(self, names: Sequence[str]) -> Survived:
        """Inject one fault, and others while it is being mended; wait until the run trains again, and judge."""
        run, kinds = self.run, [KINDS[name] for name in names]
        before = run.checkpoints()[-1]
        token = self._await(self._whole, _FIRST_START_S, "the run has lost processes before the fault")
        time.sleep(self._rng.uniform(0.0, 1.0))
        first, heard = run.launched, len(run.lines)
        notices, at = [], 0.0
        scenes = [self._armed(kinds[0], token, is_next=False)]
        for number, kind in enumerate(kinds):
            scene, launched = scenes[number], run.launched
            since = notices[-1].place + 1 if notices else heard
            with self._struck(scene, kind) as fired_at:
                at = at or fired_at
                if kind.codes:
                    notices.append(self._noticed(scene, kind, since))
                elif kind.codes is None and run.launched.process.poll() is None:
                    self._await_steps(since, self._bound_s([kind]), "the run went neither on nor down")
                # Before the first is mended, or the next start would be past the window.
                scenes += [self._armed(later, token, is_next=True) for later in kinds[number + 1 : number + 2]]
            if run.launched is launched and kind.codes is None:
                notices += _notices(run, since)
        deadline = at + self._bound_s(kinds)
        restarted = bool(notices) or run.launched is not first
        continued, trained_at = self._recovered(notices, run.launched is first, heard, deadline, restarted)
        told = steps_told([line for line in first.lines[heard:] if line.at < trained_at] if restarted else [])
        lost = max([before, *told]) - continued if restarted else 0
        self._require(kinds, notices if run.launched is first else [], heard, continued, before, restarted)
        self._await_checkpoint(after=max([continued, before]))
        self._judge(scenes)
        return Survived(
            names=tuple(names),
            windows=tuple(scene.window for scene in scenes),
            codes=tuple(notice.code for notice in notices),
            steps_again=max(lost, 0),
            recovery_s=trained_at - at,
        )

    def _armed(self, kind: Kind, token: str, *, is_next: bool) -> Scene:
        """The fault, which waits from now on for its victim to come to its window."""
        window = self._rng.choice(possible_windows(kind, self._drilled, is_next=is_next))
        rank = 0 if WINDOWS[window].of_process_0 else self._rng.randrange(self._num_hosts)
        scene = Scene(
            lab=self._lab, run=self.run, rng=self._rng, rank=rank, window=window, token=token, is_next=is_next
        )
        scene.arm(kind.harm, kind.value, kind.times)
        return scene

    @contextlib.contextmanager
    def _struck(self, scene: Scene, kind: Kind) -> Any:
        """Once the harm is done, yields when. It is mended at the end of the block, if that is the drill's part."""
        armed, rank = self._lab.armed, scene.rank
        limit_s = self._bound_s([kind]) + _FIRST_START_S * scene.is_next
        self._await(lambda: armed.fired(rank) is not None, limit_s, f"process {rank} never came to {scene.window!r}")
        scene.fired = fired = armed.fired(rank)
        assert fired is not None
        with kind.outside(scene) if kind.outside else contextlib.nullcontext():
            armed.forget(rank)
            yield fired.at

    def _noticed(self, scene: Scene, kind: Kind, since: int) -> Notice:
        """The launcher's line about it, which must have a right code and name the host."""
        limit_s = kind.noticed_s + self._bound_s([])
        problem = f"the launcher did not start the run again ({scene.window})"
        notice: Notice = self._await(lambda: next(iter(_notices(self.run, since)), None), limit_s, problem)
        assert scene.fired and kind.codes
        if notice.code not in kind.codes:
            expected = ", ".join(map(str, sorted(kind.codes)))
            wrong = f"the launcher's code is {notice.code} and not {expected}"
            raise FaultFailed(f"{wrong} ({scene.window}): {notice.reason}")
        if kind.names_host and notice.code != PREEMPTED and scene.fired.host not in notice.reason:
            wrong = f"the launcher's line does not name {scene.fired.host}"
            raise FaultFailed(f"{wrong} ({scene.window}): {notice.reason}")
        return notice

    def _recovered(
        self, notices: Sequence[Notice], is_same: bool, heard: int, deadline: float, restarted: bool
    ) -> tuple[int, float]:
        """The step from which the run has continued after the last restart, and when it trained again."""
        run = self.run
        if not restarted:
            trained_at = self._await_steps(len(run.lines), deadline - time.monotonic(), "the run did not go on")
            return 0, trained_at
        since = (notices[-1].place if notices else heard) if is_same else 0

        def again() -> tuple[int, float] | None:
            first = max([since, *(one.place for one in _notices(run, since))])
            lines = run.lines[first:]
            continuing = [int(found[1]) for line in lines if (found := CONTINUING.search(line.text))]
            trained = [line.at for line in lines if STEP.search(line.text)]
            return (continuing[-1], trained[0]) if continuing and trained else None

        limit_s = deadline - time.monotonic()
        return self._await(again, limit_s, "the run did not train again within its bound")

    def _require(
        self,
        kinds: Sequence[Kind],
        notices: Sequence[Notice],
        heard: int,
        continued: int,
        before: int,
        restarted: bool,
    ) -> None:
        """Raise FaultFailed unless the run continued from the newest checkpoint, and no more often than it must."""
        if not restarted:
            return
        more = max(kind.more_lost for kind in kinds)
        if continued < before - more * self._drilled.save_interval:
            raise FaultFailed(f"continued from step {continued}, although checkpoint {before} was complete")
        restarts = len(_notices(self.run, heard)) if notices else 0
        if restarts > _MOST_RESTARTS:
            raise FaultFailed(f"{restarts} restarts for {len(kinds)} faults")

    def _judge(self, scenes: Sequence[Scene]) -> None:
        """Raise FaultFailed if something is left over, or grows."""
        left = [pid for scene in scenes for pid in scene.left_behind]
        problems = self._baseline.problems(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if problems:
            raise FaultFailed("; ".join(problems))

    def _bound_s(self, kinds: Sequence[Kind]) -> float:
        """How long these faults may take until the run trains again."""
        return sum(kind.noticed_s + _STARTS * self._start_s for kind in kinds) + _SLACK_S

    def _whole(self) -> str | None:
        """The token of the start that is there with all its processes; None: some are missing."""
        present = self.run.present()
        return present[0].token if len(present) == self._num_hosts and 0 in present else None

    def _await_checkpoint(self, after: int) -> int:
        """The newest complete checkpoint, once it is later than `after`."""
        limit_s = self._bound_s([]) + 3 * _STARTS * self._start_s
        self._await(lambda: max(self.run.checkpoints(), default=0) > after, limit_s, "no new checkpoint was saved")
        return self.run.checkpoints()[-1]

    def _await_steps(self, since: int, limit_s: float, problem: str) -> float:
        """When the run has taken some more steps, or is restarted."""

        def on() -> float | None:
            lines = self.run.lines[since:]
            told = [line.at for line in lines if STEP.search(line.text)]
            again = [line.at for line in lines if AGAIN.search(line.text)]
            return again[0] if again else told[_STEPS_ON - 1] if len(told) >= _STEPS_ON else None

        return self._await(on, limit_s, problem)

    def _await(self, condition: Callable[[], Any], limit_s: float, problem: str) -> Any:
        """The condition's value, once it is true. Raises FaultFailed after the time-out, or if the launcher ends."""
        spent_s, launched, now = 0.0, self.run.launched, time.monotonic()
        while not (value := condition()):
            if launched.process.poll() is not None:
                raise FaultFailed(f"the launcher ended with code {launched.process.returncode}: {problem}")
            if spent_s > limit_s:
                raise FaultFailed(f"{problem}, after {limit_s:.0f} s")
            time.sleep(_POLL_S)
            before, now = now, time.monotonic()
            spent_s += (now - before) / _crowd()
        return value


def _crowd() -> float:
    """How much more slowly a run goes because of other programs here, roughly; 1 where there are none."""
    return max(1.0, os.getloadavg()[0] / (_USUAL_LOAD * (os.cpu_count() or 1)))


def _notices(run: Running, since: int) -> list[Notice]:
    """The launcher's restarts from this line on."""
    lines = enumerate(run.lines[since:], since)
    return [Notice(place, found[1]) for place, line in lines if (found := AGAIN.search(line.text))]
