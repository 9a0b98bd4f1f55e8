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

TRAINING = PeerStatus(phase="training", step=12, idle_s=1.0, limit_s=45.0)
STUCK = dataclasses.replace(TRAINING, idle_s=46.0)
SAVING = dataclasses.replace(STUCK, phase="saving", limit_s=None)


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
    peer.status = dataclasses.replace(STUCK, step=11)
    reason = "process 1 on b is stuck (training, step 11): no further step for 46 s (--timeouts.stuck-s)"
    reason += ". Start again with --resume"
    assert judged(STUCK, peer) == Ending(70, reason)
    assert judged(STUCK, peer, is_process_0=False) is None, "process 0 decides"


def test_a_silent_process_is_the_stuck_one_though_others_have_fewer_steps(peer):
    peer.status, peer.unheard_beats = dataclasses.replace(TRAINING, step=13), 20
    assert judged(STUCK, peer).reason == (
        "process 1 on b is stuck (training, step 13): no further step for 41 s (--timeouts.stuck-s); "
        "nothing was heard of it for 40 s. Start again with --resume"
    )


def test_a_step_that_waits_for_another_process_in_an_endless_phase_is_not_stuck(peer):
    peer.status = SAVING
    assert judged(STUCK, peer) is None
    assert judged(SAVING, peer) is None


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
def no_steps(monkeypatch):
    monkeypatch.setattr(phases, "_current", phases.Phase(name="starting"))
    phases._step_durations_s.clear()
    yield
    phases._step_durations_s.clear()


@pytest.mark.usefixtures("no_steps")
def test_a_step_is_limited_once_the_first_ones_have_run_and_other_phases_are_not():
    with phase("training", limited=True):
        for step in (5, 6):
            step_done(step)
            assert phases.limit_s(45.0) is None
        step_done(7)
        assert phases.limit_s(45.0) == 45.0
        with phase("saving"):
            assert phases.limit_s(45.0) is None
            assert (phases.current().name, phases.current().step) == ("saving", 7)
        assert phases.limit_s(45.0) == 45.0
    assert (phases.current().name, phases.current().step) == ("starting", 7)
    assert phases.limit_s(45.0) is None


@pytest.mark.usefixtures("no_steps")
def test_slow_steps_have_ten_times_their_usual_duration(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(phases, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    with phase("training", limited=True):
        for step in range(1, 8):
            now[0] += 12.0 if step > 1 else 300.0  # the first one compiles
            step_done(step)
    with phase("training", limited=True):
        assert phases.limit_s(45.0) == 120.0


@pytest.mark.usefixtures("no_steps")
def test_what_lies_in_an_abandonable_phase_is_abandonable_and_an_error_keeps_its_phase():
    with pytest.raises(ValueError), phase("preparing", abandonable=True), phase("opening the data"):
        assert phases.current().abandonable
        raise ValueError
    assert phases.current().name == "opening the data"
