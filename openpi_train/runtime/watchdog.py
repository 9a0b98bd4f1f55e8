"""Detects a lost or stuck process, and ends all with code 70 and the reason. Read next: `peer.py`, `phases.py`.

A thread in every process sends the process's phase to process 0, and process 0's to all, every two seconds, over the
connections of the rendezvous. A connection that closes without a farewell means a killed process; silence means a
lost host or network; a phase, or a step, without progress for far too long is stuck. Process 0 judges and tells all;
the others judge process 0. Each process then logs the reason and the stacks of its threads, and exits with code 70.

jax also notices, but later or with less information: it says that some task died and aborts. It notices the loss of
process 0 at once, so its abort is caught here until the reason is known. (jax's own hook, `missed_heartbeat_callback`,
ends the process with a `std::bad_cast` before any Python runs: seen with jaxlib 0.10.2 and 0.12.0.1.)
"""

import contextlib
import ctypes
import dataclasses
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from openpi_train.runtime import exits, logs, phases, stacks, step_times
from openpi_train.runtime.exits import DONE, PEER_LOST, PREEMPTED
from openpi_train.runtime.peer import Ending, Peer, PeerStatus
from openpi_train.runtime.step_times import StepTimes
from openpi_train.runtime.waiting import Timeouts, duration

logger = logging.getLogger(__name__)

_BEAT_S = 2.0
_REPORT_EVERY_S = 15.0
_SUSPICIOUS_BEATS = 2  # without a message; one is usual, since heartbeats are not synchronised
# A process that ends by itself gives the others time to fail for the same cause, with its exit code.
_SETTLE_S = 3.0
# Share of a time-out for detection; the rest is for telling the others and for the last messages.
_NOTICING_SHARE = 0.75
# Process 0 serves jax's coordination: when it ends, jax aborts the others, which must first learn the reason.
_LINGER_S = 1.0
# How long live processes may take to receive a farewell.
_HEARING_S = 2.0
# A full disk or a terminal that nobody reads must not keep a process from ending.
_LAST_WORDS_S = 8.0
_WHAT_TO_DO = ". Start again with --resume"


def judge(
    own: PeerStatus, own_who: str, peers: Sequence[Peer], *, is_process_0: bool, beat_s: float, silence_s: float
) -> Ending | None:
    """Why all processes must end now, as far as this one knows; None while all is well."""
    for peer in peers:
        if peer.verdict is not None:
            return peer.verdict
    for peer in peers:
        how = _how_lost(peer, beat_s, silence_s)
        if how is not None:
            return how
    return _who_is_stuck(own, own_who, peers, beat_s) if is_process_0 else None


def _who_is_stuck(own: PeerStatus, own_who: str, peers: Sequence[Peer], beat_s: float) -> Ending | None:
    everyone = [(own_who, own, 0)]
    everyone += [(peer.who, peer.status, peer.unheard_beats) for peer in peers if peer.status is not None]
    if len(everyone) <= len(peers) or not any(_is_stuck(status) for _, status, _ in everyone):
        return None
    # All wait for the stuck process: it does not even answer, or has come least far. It may have longer than those
    # that wait for it: it may be saving, for example, and they in a step. Of those that have come equally far it is in
    # a phase of its own: the others have gone on to one in which they wait for it.
    silent = [one for one in everyone if one[2] > _SUSPICIOUS_BEATS]
    in_phase = Counter(status.phase for _, status, _ in everyone)

    def how_far(one: tuple[str, PeerStatus, int]) -> tuple[float, ...]:
        return one[1].step, one[1].points, in_phase[one[1].phase], -one[1].idle_s

    who, status, unheard = min(silent or everyone, key=how_far)
    limit_s = _limit_s(status)
    if limit_s is None or not (silent or _is_stuck(status)):
        return None
    level = all(_is_level(status, other, beat_s) for _, other, _ in everyone) and len(set(in_phase.values())) == 1
    if not silent and len(everyone) > 1 and level:
        who = f"each of {len(everyone)} processes waits for something that none of them shows, and {who}"
    silence = f"; nothing was heard of it for {unheard * beat_s:.0f} s" if silent else ""
    where = f", {status.where}" if status.where else ""
    reason = (
        f"{who} is stuck ({status.words()}{where}): no progress for {duration(status.idle_s + unheard * beat_s)}, "
        f"limit {duration(limit_s)} (--timeouts){silence}"
    )
    return Ending(PEER_LOST, reason + _WHAT_TO_DO)


def _is_level(one: PeerStatus, other: PeerStatus, beat_s: float) -> bool:
    """Whether two processes have come equally far, and stopped there at one time."""
    return (one.step, one.points) == (other.step, other.points) and abs(one.idle_s - other.idle_s) < 2 * beat_s


def _limit_s(status: PeerStatus) -> float | None:
    """The limit of another process's phase: process 0 alone knows how long the earlier starts of the run took."""
    return None if status.limit_s is None else max(status.limit_s, phases.learned_s(status.phase))


def _is_stuck(status: PeerStatus) -> bool:
    limit_s = _limit_s(status)
    return limit_s is not None and status.idle_s > limit_s


def _how_lost(peer: Peer, beat_s: float, silence_s: float) -> Ending | None:
    place = f" ({peer.status.words()})" if peer.status else ""
    if peer.farewell is not None:
        if peer.farewell.code == DONE or time.monotonic() - peer.farewell_time < _SETTLE_S:
            return None
        # A request to stop that reached a process before the run began applies to all of them.
        code = PREEMPTED if peer.farewell.code == PREEMPTED else PEER_LOST
        return Ending(code, f"{peer.who} ended with code {peer.farewell.code}{place}: {peer.farewell.reason}")
    if peer.closed:
        how = "it was killed or crashed, or its host went down"
        return Ending(PEER_LOST, f"{peer.who} was lost{place}: {how}{_WHAT_TO_DO}")
    if peer.unheard_beats * beat_s > silence_s:
        silence = f"nothing was heard of it for {peer.unheard_beats * beat_s:.0f} s (--timeouts.lost-s)"
        return Ending(
            PEER_LOST, f"{peer.who} was lost{place}: {silence}; it hangs, or the network to it is cut{_WHAT_TO_DO}"
        )
    return None


class Watchdog:
    """The thread that watches this process and its peers, and ends the process if necessary."""

    def __init__(
        self, process_index: int, who: str, peers: Sequence[Peer], timeouts: Timeouts, stop_noticed: Callable[[], bool]
    ):
        """`peers` are all others for process 0, process 0 for all others. Process 0 calls `stop_noticed`."""
        self._is_process_0 = process_index == 0
        self._who, self._peers, self._stop_noticed = who, peers, stop_noticed
        self._silence_s = _NOTICING_SHARE * timeouts.lost_s
        self._beat_s = min(_BEAT_S, self._silence_s / 8, timeouts.stuck_s / 8, timeouts.phase_s / 8)
        self._news = threading.Event()
        self._over = False
        self._leaving = threading.Lock()  # taken by the thread that ends the process, never released
        self._reports = 0
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start watching. From now on, the process exits with code 70 when another is lost."""
        for peer in self._peers:
            peer.on_news = self._news.set
        exits.say_farewell_by(self._say_farewell)
        phases.tell_changes(self._news.set)
        if self._peers:
            self._restore_abort = _catch_abort(self._on_abort)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, after all processes have come to the end of the run."""
        self._over = True
        self._news.set()
        self._thread.join()
        exits.say_farewell_by(None)
        if self._peers:
            self._restore_abort()
        self._say_last(Ending(DONE, "done"))

    def told_times(self) -> dict[str, StepTimes]:
        """What each process has told of its steps, this one included; empty if this is not process 0."""
        if not self._is_process_0:
            return {}
        told = {peer.who: StepTimes(**peer.status.times) for peer in self._peers if peer.status is not None}
        return {self._who: step_times.own(), **told}

    @contextlib.contextmanager
    def limit(self, limit_s: float, reason: str) -> Iterator[None]:
        """End the process with code 70 and `reason` if the block takes longer than `limit_s`."""
        timer = threading.Timer(limit_s, self._end, (Ending(PEER_LOST, reason),))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _watch(self) -> None:
        next_beat, told = time.monotonic(), ""
        try:
            while not self._over:
                status = self._status()
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + self._beat_s
                    self._beat(status)
                elif status.phase != told:
                    self._tell("status", status)
                told = status.phase
                ending = judge(
                    status,
                    self._who,
                    self._peers,
                    is_process_0=self._is_process_0,
                    beat_s=self._beat_s,
                    silence_s=self._silence_s,
                )
                if ending is not None:
                    self._end(ending)
                self._news.wait(max(0.0, next_beat - time.monotonic()))
                self._news.clear()
        except Exception:
            logger.exception("the watchdog failed")
            exits.end(exits.BUG)

    def _beat(self, status: PeerStatus) -> None:
        """The work of every two seconds: send the status, count, report long phases, check for a request to stop."""
        self._tell("status", status)
        for peer in self._peers:
            peer.unheard_beats += 1
        self._report(status)
        phase = phases.current()
        if self._is_process_0 and phase.abandonable and self._stop_noticed():
            reason = f"asked to stop ({phase.name}): there is nothing to save yet; start again with --resume"
            self._end(Ending(PREEMPTED, reason))

    def _report(self, status: PeerStatus) -> None:
        """Log a phase that takes long, repeatedly."""
        reports = int(status.idle_s // _REPORT_EVERY_S)
        if reports > self._reports:
            limit = f", limit {duration(status.limit_s)}" if status.limit_s else ""
            logger.info("%s since %.0f s%s", status.words(), status.idle_s, limit)
        self._reports = reports

    def _status(self) -> PeerStatus:
        now = phases.current()
        idle_s = time.monotonic() - now.since
        return PeerStatus(
            phase=now.name,
            step=now.step,
            idle_s=idle_s,
            limit_s=phases.limit_s(),
            points=phases.points(),
            times=dataclasses.asdict(step_times.own()),
            where=stacks.where() if idle_s > self._beat_s else "",
        )

    def _tell(self, kind: str, message: PeerStatus | Ending) -> None:
        for peer in self._peers:
            peer.send(kind, message)

    def _end(self, ending: Ending) -> NoReturn:
        """End this process because of `ending`; process 0 tells all others first."""
        self._claim_the_end()
        _end_anyway(ending.code)
        if self._is_process_0:
            self._tell("verdict", ending)
        if ending.code == PREEMPTED:
            logger.info("%s", ending.reason)
        else:
            everyone = [("this process", self._status())]
            everyone += [(one.who, one.status) for one in self._peers if one.status is not None and not one.closed]
            for who, status in everyone:
                logger.info("%s: %s since %.0f s %s", who, status.words(), status.idle_s, status.where)
            logger.error("%s", ending.reason)  # last, so that it is visible on a terminal
            logs.dump_stacks()
        if self._is_process_0 and self._peers:
            time.sleep(_LINGER_S)
        exits.end(ending.code)

    def _say_farewell(self, code: int, reason: str) -> None:
        """Tell the others that this process ends by itself, and why; from the main thread."""
        if code == PEER_LOST:
            self._wait_for_the_reason()
        self._claim_the_end()
        self._tell("status", self._status())
        self._say_last(Ending(code, reason.partition("\n")[0][:300]))
        if self._is_process_0 and self._peers:
            time.sleep(_LINGER_S)

    def _say_last(self, farewell: Ending) -> None:
        """Send a farewell; returns when all have received it, or after the time-out."""
        self._tell("farewell", farewell)
        for peer in self._peers:
            peer.hang_up()
        give_up = time.monotonic() + _HEARING_S
        while time.monotonic() < give_up and not all(peer.closed for peer in self._peers):
            time.sleep(0.01)

    def _claim_the_end(self) -> None:
        """Return in the first thread that ends the process; never return in a second."""
        self._leaving.acquire()

    def _wait_for_the_reason(self) -> None:
        """Give the watchdog, which usually knows which process was lost, time to end this one."""
        self._news.set()
        time.sleep(_SETTLE_S + 2.0)

    def _on_abort(self, signum: int) -> None:
        """Called in a C++ thread that aborts the process; returns, which lets it abort, if no other process is the
        cause."""
        del signum
        self._wait_for_the_reason()
        logger.critical("aborted by C++ code, which said why on stderr")
        logs.dump_stacks()


def _end_anyway(code: int) -> None:
    timer = threading.Timer(_LAST_WORDS_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _catch_abort(handler: Callable[[int], None]) -> Callable[[], None]:
    """Have `handler` called in a thread that aborts the process; returns a function that undoes it.

    Does not use Python's `signal`: its handlers run later and in the main thread, when the process is gone.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
    previous = libc.signal(signal.SIGABRT, ctypes.cast(callback, ctypes.c_void_p))

    def restore() -> None:
        libc.signal(signal.SIGABRT, previous)
        nonlocal callback
        del callback  # it had to live until now

    return restore
