"""What becomes of the processes of a run when one of them is lost, stuck, or asked to stop at a bad time."""

import contextlib
import re
import signal
import socket
import time

import pytest
from command import losses
from faulty import Processes

from openpi_train.runtime.exits import BUG, PEER_LOST, PREEMPTED

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

HOST = re.escape(socket.gethostname())
# Each process's words go through the watchdog's beats, which are shorter where the limits are.
LIMITS = ("--timeouts.lost-s", "12", "--timeouts.stuck-s", "12")
# The machine of the tests may be busy with something else: who ended whom, and why, is in the words.
BOUND_S = 240.0


@pytest.mark.parametrize("victim", [1, 0], ids=["another process", "process 0"])
def test_a_killed_process_is_named_by_all_others_with_its_phase(tmp_path, victim):
    others = [index for index in range(3) if index != victim]
    with Processes(tmp_path, 3) as run:
        run.await_training()
        run.send(victim, signal.SIGKILL)
        assert run.codes(BOUND_S, victim) == [PEER_LOST] * 2, run.said()
        for index in others:
            # Its step is told every two seconds: the first may have fallen between.
            killed = rf"process {victim} on {HOST} was lost \(training(, step \d+)?\): it was killed"
            run.check_last_words(index, rf"E process {index} step \d+ \[training\] .*: {killed}")
            # The terminal: who was lost and what to do, in a line, and no stack of jax's or Gloo's.
            terminal = run.outputs[index].read_text()
            assert re.search(rf"E .*{killed}.*\. Start again with --resume\n", terminal), terminal[-3000:]
            assert "Traceback" not in terminal and "where every thread" not in terminal, terminal[-3000:]


def test_a_silent_process_is_named_by_the_others(tmp_path):
    # Two runs, whose limits run out at the same time: one loses process 1, one process 0.
    with Processes(tmp_path / "1", 2, *LIMITS) as one, Processes(tmp_path / "0", 2, *LIMITS) as zero:
        for victim, run in ((1, one), (0, zero)):
            run.await_training()
            run.send(victim, signal.SIGSTOP)
        for victim, run in ((1, one), (0, zero)):
            assert run.codes(BOUND_S, victim) == [PEER_LOST], run.said()
            # In a step that others wait in, being silent and being stuck are one; the first may fall between two beats.
            how = r"(was lost|is stuck) \(training(, step \d+)?\): .*nothing was heard of it for \d+ s"
            run.check_last_words(1 - victim, rf"process {victim} on {HOST} {how}")


def test_a_short_silence_passes_and_sigusr1_saves_as_sigterm_does(tmp_path):
    with Processes(tmp_path, 2, "--timeouts.lost-s", "40") as run:
        run.await_training()
        run.send(1, signal.SIGSTOP)
        time.sleep(5.0)
        before = len(losses(tmp_path, "small"))
        run.send(1, signal.SIGCONT)
        run.wait(lambda: len(losses(tmp_path, "small")) >= before + 5, 240)
        run.send(1, signal.SIGUSR1)
        assert run.codes(240) == [PREEMPTED] * 2, run.said()
        assert (tmp_path / "runs" / "small" / "x" / str(max(losses(tmp_path, "small"))) / "manifest.json").exists()
        for index in (0, 1):
            assert "was lost" not in run.log(index)


def test_an_exception_in_one_process_ends_the_others_with_its_message(tmp_path):
    fault = ("--data.fault", "raises")
    with Processes(tmp_path, 2, *fault) as run:
        assert run.codes(240) == [PEER_LOST, BUG], run.said()
        ended = rf"process 1 on {HOST} ended with code 1 \(training, step \d+\): RuntimeError: the camera is broken"
        run.check_last_words(0, ended)
        assert "Traceback" in run.log(1)


def test_a_step_that_hangs_on_one_process_ends_all_and_names_it(tmp_path):
    fault = ("--data.fault", "hangs")
    with Processes(tmp_path, 2, *LIMITS, *fault) as run:
        assert run.codes(240) == [PEER_LOST] * 2, run.said()
        for index in (0, 1):
            place = r"in wait .*, within \w+ \(feed\.py:\d+\); a reader in batch \(small_runs\.py:\d+\), within .*"
            stuck = rf"process 1 on {HOST} is stuck \(training, step \d+, {place}\): no progress for"
            run.check_last_words(index, stuck)
        assert "in batch" in run.log(1), "the stack that hangs"


PLACES = {
    "opening": ("opening the data", "open"),
    "evaluation": ("evaluating", "<lambda>"),
    "first step": ("training", "next"),
    "save": ("saving, step 8", "<lambda>"),  # in a background thread, for which both wait
}


@pytest.mark.parametrize("places", [("opening", "save"), ("evaluation", "first step")], ids=" ".join)
def test_a_hang_in_any_phase_ends_all_and_says_where(tmp_path, places):
    limits = ("--timeouts.phase-s", "40", "--timeouts.data-s", "40", "--timeouts.stuck-s", "40", "--save-interval", "4")
    with contextlib.ExitStack() as stack:
        runs = {
            place: stack.enter_context(Processes(tmp_path / place, 2, *limits, "--data.fault", f"hangs at {place}"))
            for place in places
        }
        for place, run in runs.items():
            phase, function = PLACES[place]
            assert run.codes(BOUND_S) == [PEER_LOST] * 2, run.said()
            who = "process [01]" if place == "save" else "process 1"
            stuck = rf"{who} on {HOST} is stuck \({phase}, in .*\): no progress for \d+s, limit 40s"
            assert re.search(stuck, run.log(0)) and re.search(stuck, run.outputs[1].read_text()), run.said()
            assert "where every thread of this process is:" in run.log(1) and f"in {function}\n" in run.log(1)
            assert "time without progress: at most 40s in a phase, 40s and ten" in run.outputs[0].read_text()


@pytest.mark.parametrize(("signum", "process"), [(signal.SIGTERM, 1), (signal.SIGUSR1, 0)], ids=["TERM", "USR1"])
def test_a_stop_while_process_0_opens_the_data_ends_all_for_a_requeue(tmp_path, signum, process):
    fault = ("--data.fault", "slow to open", "--data.process", "0")
    with Processes(tmp_path, 2, *fault) as run:
        run.wait(lambda: "the dataset is being opened" in run.outputs[0].read_text(), 240)
        run.send(process, signum)
        assert run.codes(BOUND_S) == [PREEMPTED] * 2, run.said()
        assert "asked to stop (opening the data): there is nothing to save yet" in run.outputs[0].read_text()


def test_three_saves_that_fail_on_one_process_end_all_for_a_restart(tmp_path):
    faults = ("--data.fault", "save fails", "--data.process", "1", "--save-interval", "10")
    with Processes(tmp_path, 2, *faults) as run:
        assert run.codes(480) == [PEER_LOST, PEER_LOST], run.said()
        told = re.compile(r"^\S+ ([WE]) .*saving checkpoint (\d+) failed: process 1: OSError", re.MULTILINE)
        found = told.findall(run.outputs[0].read_text())
        assert found == [("W", "10"), ("W", "20"), ("E", "30")], run.said()


@pytest.mark.parametrize(
    ("fault", "cause"), [("is slow", "waits for data"), ("is busy", "is busy in its own code on the processor")]
)
def test_a_process_for_which_all_wait_is_named_with_what_it_waits_for(tmp_path, fault, cause):
    with Processes(tmp_path, 4, "--batch-size", "8", "--log-interval", "10", "--data.fault", fault) as run:
        line = re.compile(rf"W (process \d) on {HOST} holds up the others by \d+ ms of \d+ ms a step: it (.*)")
        device = re.compile(
            rf"W (process \d) on {HOST} holds up the others: its device is slower, .*: products take (.*)"
        )
        run.wait(lambda: all(one.search(run.outputs[0].read_text()) for one in (line, device)), 240)
        assert line.findall(run.outputs[0].read_text()) == [("process 1", cause)]
        slower = "50% longer there than in the median of the others (the slowest there: GPU 0 is hot)"
        assert device.findall(run.outputs[0].read_text()) == [("process 2", slower)]
