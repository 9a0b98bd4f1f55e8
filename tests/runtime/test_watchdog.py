"""Who is to blame, and whether anybody is, from what one process knows of the others."""

import dataclasses
import json
import socket
import threading
import time
import types

import pytest

from openpi_train.runtime import phases, watchdog
from openpi_train.runtime.peer import Ending, Peer, PeerStatus
from openpi_train.runtime.phases import phase, step_done
from openpi_train.runtime.waiting import Timeouts

TRAINING = PeerStatus(phase="training", step=12, idle_s=1.0, limit_s=45.0)
STUCK = dataclasses.replace(TRAINING, idle_s=46.0)
SAVING = dataclasses.replace(STUCK, phase="saving", limit_s=1800.0)


@pytest.fixture
def peer():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = Peer(1, "b", ours)
        peer.status = TRAINING
        yield peer


def judged(own: PeerStatus, *peers: Peer, is_process_0: bool = True):
    return watchdog.judge(own, "process 0 on a", peers, is_process_0=is_process_0, beat_s=2.0, silence_s=45.0)


def test_all_is_well_while_all_talk_and_make_progress(peer):
    peer.unheard_beats = 22
    assert judged(TRAINING, peer) is None


def test_a_closed_connection_is_a_lost_process_with_its_phase(peer):
    peer.closed = True
    ending = judged(TRAINING, peer)
    assert ending.code == 70
    assert ending.reason.startswith("process 1 on b was lost (training, step 12): it was killed or crashed")


def test_a_process_that_never_spoke_can_be_lost(peer):
    peer.status, peer.closed = None, True
    assert judged(TRAINING, peer).reason.startswith("process 1 on b was lost: it was killed")


def test_silence_beyond_the_limit_is_a_lost_process(peer):
    peer.unheard_beats = 23
    assert "nothing was heard of it for 46 s (--timeouts.lost-s)" in judged(TRAINING, peer).reason


def test_last_words_are_heard_although_the_speaker_has_not_read_everything():
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)  # so that the second message waits at the sender
    ours.sendall(b"{}\n")
    leaving, hearing = Peer(0, "a", theirs), Peer(1, "b", ours)
    listener = threading.Thread(target=hearing.listen)
    listener.start()
    leaving.send("status", TRAINING)
    leaving.send("farewell", Ending(3, "torn file"))
    leaving.hang_up()
    leaving.listen()  # returns when the other end has closed
    listener.join()
    assert leaving.closed and hearing.farewell == Ending(3, "torn file")


@pytest.mark.parametrize(("code", "expected"), [(1, 70), (5, 70), (70, 70), (75, 75)])
def test_a_farewell_ends_the_others_after_they_could_fail_by_themselves(peer, code, expected):
    peer.farewell, peer.farewell_time, peer.closed = Ending(code, "loss nan"), time.monotonic(), True
    assert judged(TRAINING, peer) is None
    peer.farewell_time -= 3.0
    assert judged(TRAINING, peer) == Ending(
        expected, f"process 1 on b ended with code {code} (training, step 12): loss nan"
    )


def test_whoever_has_left_in_order_is_not_lost(peer):
    peer.farewell, peer.closed, peer.unheard_beats = Ending(0, "done"), True, 1000
    assert judged(TRAINING, peer) is None


def test_the_verdict_of_process_0_is_taken_as_it_is(peer):
    peer.verdict, peer.closed = Ending(70, "process 2 on c was lost"), True
    assert judged(TRAINING, peer, is_process_0=False) is peer.verdict


def test_the_process_with_the_fewest_steps_is_the_stuck_one(peer):
    peer.status = dataclasses.replace(STUCK, step=11, where="in read (files.py:7)")
    reason = "process 1 on b is stuck (training, step 11, in read (files.py:7)): no progress for 46s, limit 45s"
    reason += " (--timeouts). Start again with --resume"
    assert judged(STUCK, peer) == Ending(70, reason)
    assert judged(STUCK, peer, is_process_0=False) is None, "process 0 decides"


def test_of_two_at_one_step_the_stuck_one_has_passed_fewer_points(peer):
    peer.status = dataclasses.replace(STUCK, points=7, idle_s=60.0)
    assert judged(dataclasses.replace(STUCK, points=6), peer).reason.startswith("process 0 on a is stuck")
    peer.status = dataclasses.replace(STUCK, points=6, idle_s=60.0)
    assert judged(dataclasses.replace(STUCK, points=6), peer).reason.startswith("process 1 on b is stuck")


def test_of_processes_that_have_come_equally_far_none_is_blamed_alone(peer):
    peer.status = STUCK
    reason = judged(STUCK, peer).reason
    assert reason.startswith("each of 2 processes waits for something that none of them shows, and process 0 on a is")


def test_of_processes_that_have_come_equally_far_the_one_in_a_phase_of_its_own_is_blamed(peer):
    """One hangs in a save, and the others have gone on to act, where they wait for it."""
    acting, saving = dataclasses.replace(STUCK, phase="acting"), dataclasses.replace(STUCK, phase="saving")
    other = types.SimpleNamespace(**{**vars(peer), "who": "process 2 on c", "status": acting})
    peer.status = saving
    assert judged(acting, peer, other).reason.startswith("process 1 on b is stuck (saving, step 12)")
    peer.status = dataclasses.replace(saving, limit_s=1800.0)
    assert judged(acting, peer, other) is None, "it may have longer"


def test_a_silent_process_is_the_stuck_one_though_others_have_fewer_steps(peer):
    peer.status, peer.unheard_beats = dataclasses.replace(TRAINING, step=13), 20
    assert judged(STUCK, peer).reason == (
        "process 1 on b is stuck (training, step 13): no progress for 41s, limit 45s (--timeouts); "
        "nothing was heard of it for 40 s. Start again with --resume"
    )


def test_a_step_that_waits_for_a_process_in_a_longer_phase_is_not_stuck_until_that_one_is(peer):
    waiting = dataclasses.replace(STUCK, points=3, idle_s=1700.0)
    peer.status = dataclasses.replace(SAVING, idle_s=1700.0)
    assert judged(waiting, peer) is None
    peer.status = dataclasses.replace(SAVING, idle_s=1801.0)
    assert judged(waiting, peer).reason.startswith("process 1 on b is stuck (saving, step 12): no progress for 30m01s")


def test_process_0_knows_how_long_a_phase_took_in_earlier_starts(peer):
    phases.expect({"saving": 300.0})
    peer.status = dataclasses.replace(SAVING, idle_s=2900.0)
    assert judged(STUCK, peer) is None
    peer.status = dataclasses.replace(SAVING, idle_s=3001.0)
    assert "limit 50m00s" in judged(dataclasses.replace(STUCK, points=1), peer).reason


def test_a_tool_that_gives_no_limits_is_never_stuck(peer):
    peer.status = dataclasses.replace(STUCK, limit_s=None)
    assert judged(dataclasses.replace(STUCK, limit_s=None), peer) is None


def test_a_process_alone_can_be_stuck():
    assert judged(TRAINING) is None
    assert judged(STUCK).reason.startswith("process 0 on a is stuck (training, step 12)")


def test_messages_arrive_whole_and_count_as_signs_of_life():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = Peer(0, "a", ours), Peer(1, "b", theirs, received=b'{"status": {"phase": "start')
        receiver.unheard_beats = 7
        news = threading.Event()
        receiver.on_news = news.set
        listener = threading.Thread(target=receiver.listen)
        listener.start()
        ours.sendall(b'ing", "step": 0, "idle_s": 1.5, "limit_s": null}}\n')
        sender.send("farewell", Ending(3, "torn file"))
        assert news.wait(10)
        assert receiver.status == PeerStatus(phase="starting", step=0, idle_s=1.5, limit_s=None)
        assert (receiver.farewell, receiver.unheard_beats) == (Ending(3, "torn file"), 0)
        ours.shutdown(socket.SHUT_RDWR)
        listener.join(10)
        assert receiver.closed
        receiver.send("status", TRAINING)  # to nobody, which is no error


@pytest.mark.parametrize("line", [b"[1]\n", b"no json\n", json.dumps({"status": {"phase": 1}}).encode() + b"\n"])
def test_whoever_says_what_is_no_message_is_taken_for_gone(line, caplog):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = Peer(1, "b", ours)
        theirs.sendall(line)
        peer.listen()
    assert peer.closed
    assert "process 1 on b said something that is no message of ours" in caplog.text


@pytest.fixture
def clock(monkeypatch):
    """The time of the phases, which stands until a test sets it."""
    now = [0.0]
    monkeypatch.setattr(phases, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(phases, "_counted_until", 0.0)
    monkeypatch.setattr(phases, "_current", phases.Phase(name="starting", began=0.0, since=0.0))
    return now


def test_every_phase_has_a_limit_and_a_step_its_own_once_the_first_ones_have_run(clock):
    assert phases.limit_s() is None, "nobody has set one"
    phases.limit_by(Timeouts(), shows=False)
    assert phases.limit_s() == 1800.0
    with phase("training", of_steps=True):
        for step in (5, 6):
            step_done(step)
            assert phases.limit_s() == 1800.0
        step_done(7)
        assert phases.limit_s() == 360.0
        with phase("saving"):
            assert phases.limit_s() == 1800.0
            assert (phases.current().name, phases.current().step) == ("saving", 7)
        assert phases.limit_s() == 360.0
    assert (phases.current().name, phases.current().step) == ("starting", 7)
    with phase("opening the data", least_s=6 * 3600.0):
        assert phases.limit_s() == 6 * 3600.0


def test_slow_steps_have_ten_times_their_usual_duration_more(clock):
    phases.limit_by(Timeouts(), shows=False)
    with phase("training", of_steps=True):
        for step in range(1, 8):
            clock[0] += 12.0 if step > 1 else 300.0  # the first one compiles
            step_done(step)
            phases.progress()  # on the way to the next, which is no step
    with phase("training", of_steps=True):
        assert phases.limit_s() == 360.0 + 120.0
    assert phases.longest_s() == {"starting": 0.0, "the first steps of training": 300.0}


def test_a_phase_has_ten_times_the_longest_that_it_was_without_progress(clock):
    phases.limit_by(Timeouts(), shows=False)
    with phase("evaluating"):
        for took in (100.0, 250.0, 10.0):
            with phases.point():
                clock[0] += took
        assert phases.limit_s() == 2500.0
    with phase("evaluating"):
        assert phases.limit_s() == 2500.0
        clock[0] += 60.0
        phases.progress()
    assert phases.longest_s()["evaluating"] == 250.0
    assert phases.seconds() == {"starting": 0.0, "evaluating": 420.0}


def test_the_limits_are_shown_once_and_another_one_where_such_a_phase_begins(clock, caplog):
    caplog.set_level("INFO", "openpi_train")
    phases.limit_by(Timeouts(phase_s=60.0), shows=True)
    for took in (1.0, 2.0, 9.0, 1.0):
        with phase("saving"):
            clock[0] += took
    with phase("opening the data", least_s=7200.0):
        pass
    with phase("training", of_steps=True):
        for step in range(6):
            step_done(step)
    with phase("training", of_steps=True):
        phases._step_durations_s.extend([30.0] * 32)
        for _ in range(2):
            with phase("evaluating"):
                pass
    with phase("training", of_steps=True):
        pass
    assert [record.message for record in caplog.records] == [
        "time without progress: at most 1m00s in a phase, 6m00s and ten usual steps in a step (--timeouts)",
        "saving (limit 1m30s)",
        "opening the data (limit 2h00m)",
        "training (limit 11m00s a step)",
    ]


def test_what_lies_in_an_abandonable_phase_is_abandonable_and_an_error_keeps_its_phase():
    with pytest.raises(ValueError), phase("preparing", abandonable=True), phase("opening the data"):
        assert phases.current().abandonable
        raise ValueError
    assert phases.current().name == "opening the data"
