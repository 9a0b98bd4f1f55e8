"""Which ends of a run another start can mend, and how the launcher goes about it."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openpi_train.launch import supervise
from openpi_train.launch.processes import LaunchOutcome
from openpi_train.launch.status import Status
from openpi_train.launch.supervise import Rules, Start, after, announcement, can_be_mended, resumed

ROOT = Path(__file__).resolve().parents[2]
FIRST = Start(arguments=("debug", "--exp-name", "x", "--overwrite"), hosts=("a", "b", "c", "d"))


@pytest.mark.parametrize("code", [70, 71, 75, 128 + 9, 128 + 15, 128 + 11, 128 + 6])
def test_a_lost_peer_a_stop_from_elsewhere_and_a_kill_are_mended(code):
    assert can_be_mended(LaunchOutcome(code=code))
    assert after(FIRST, LaunchOutcome(code=code), Rules(max_restarts=1)) is not None
    assert after(FIRST, LaunchOutcome(code=code), Rules(max_restarts=0)) is None


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 130])
def test_errors_of_the_run_itself_and_its_end_are_left_alone(code):
    assert after(FIRST, LaunchOutcome(code=code), Rules(max_restarts=9)) is None


@pytest.mark.parametrize("code", [70, 71, 75, 137, 143])
def test_a_stop_asked_of_the_launcher_is_obeyed(code):
    assert after(FIRST, LaunchOutcome(code=code, asked=True), Rules(max_restarts=9)) is None


def test_only_a_run_that_was_opened_is_resumed():
    # Before that, an older run of this name may lie there, which nobody asked to continue.
    following = after(FIRST, LaunchOutcome(code=137), Rules(max_restarts=3))
    assert following and following.arguments == FIRST.arguments
    following = after(following, LaunchOutcome(code=137, status=Status(opened=True)), Rules(max_restarts=3))
    assert following and following.arguments == ("debug", "--exp-name", "x", "--resume")
    following = after(following, LaunchOutcome(code=137), Rules(max_restarts=3))
    assert following and following.arguments == ("debug", "--exp-name", "x", "--resume")
    assert after(following, LaunchOutcome(code=137), Rules(max_restarts=3)) is None


@pytest.mark.parametrize("words", [("--resume-from", "40"), ("--resume-from=best",), ("--resume_from", "latest")])
def test_a_run_that_went_back_and_has_saved_does_not_go_back_again(words):
    assert resumed(("debug", *words, "--seed", "1"), has_saved=True) == ("debug", "--seed", "1", "--resume")
    assert resumed(("debug", *words), has_saved=False) == ("debug", *words, "--resume")
    start = dataclasses.replace(FIRST, arguments=("debug", *words))
    saved = LaunchOutcome(code=137, status=Status(opened=True, saved_step=41))
    following = after(start, saved, Rules(max_restarts=3))
    assert following and following.arguments == ("debug", "--resume")
    begun = ("debug", "--resume-from", "runs/debug/other", "--resume")  # where it has nothing of its own yet
    assert resumed(begun, has_saved=True) == begun


def test_a_verb_that_takes_no_resume_is_started_again_as_it_was():
    assert resumed(("reproduce", "fetch_reach"), has_saved=True) == ("reproduce", "fetch_reach")


def test_resumed_says_it_once():
    assert resumed(("debug", "--resume")) == ("debug", "--resume")
    assert resumed(("debug", "--no-resume", "--seed", "1")) == ("debug", "--seed", "1", "--resume")


def test_the_pause_doubles_to_a_minute_and_begins_anew_after_progress():
    start, pauses = FIRST, []
    for saved_step in (10, 10, 10, 10, 0, 10, 10, 10, 10, 20, 20):
        following = after(
            start, LaunchOutcome(code=70, status=Status(opened=True, saved_step=saved_step)), Rules(max_restarts=99)
        )
        assert following
        start = following
        pauses.append(start.pause_s)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 1, 2]


@pytest.mark.parametrize(
    ("lost", "min_hosts", "batch", "expected"),
    [
        ((), 1, 12, "abcd"),
        (("b",), None, 12, "abcd"),  # always all
        (("b",), 1, 12, "acd"),
        (("a", "c"), 2, 12, "bd"),
        (("b",), 2, 4, "ac"),  # four rows on three hosts: two take them
        (("b",), 3, 4, "acd"),  # no allowed number divides: the run says so
        (("a", "b", "c"), 2, 12, "abcd"),  # too few would be left: perhaps they come back
        (("a", "b", "c", "d"), 1, 12, "abcd"),  # our own network
    ],
)
def test_lost_hosts_are_left_out_where_enough_are_left_that_can_share_the_batch(lost, min_hosts, batch, expected):
    rules = Rules(
        max_restarts=1, min_hosts=min_hosts, sharing=lambda counts: [count for count in counts if batch % count == 0]
    )
    following = after(FIRST, LaunchOutcome(code=70, lost_hosts=lost), rules)
    assert following and following.hosts == tuple(expected)


def test_hosts_that_come_back_and_spare_ones_are_used_again():
    back: set[str] = set()
    rules = Rules(max_restarts=9, min_hosts=1, hosts=(*"abcdef",), num_hosts=4, answers=back.__contains__)
    start = dataclasses.replace(FIRST, hosts=(*"abcd",))
    steps = [
        # lost, of them with broken hardware, back before this start: hosts
        ("b", "b", "", "acde"),
        ("ae", "", "", "cdf"),
        ("", "", "ab", "acdf"),  # the one that is broken answers, and stays away
        ("cdf", "", "cdf", "acdf"),  # they were lost, and answer at once
        ("acdf", "", "", "abcd"),  # nobody is left: all are tried again
    ]
    for lost, broken, answering, hosts in steps:
        back.clear()
        back |= {*answering}
        outcome = LaunchOutcome(code=70, lost_hosts=(*lost,), broken_hosts=(*broken,))
        following = after(start, outcome, rules)
        assert following and following.hosts == (*hosts,), (lost, following)
        start = dataclasses.replace(following, restarts=0)
    assert start.missing == ()


def test_restarts_are_counted_from_the_last_progress_on():
    """A preemptible run goes on for ever; one that saves nothing new ends after `max_restarts`."""
    start, rules = FIRST, Rules(max_restarts=2)
    for saved_step in range(1, 101):
        following = after(start, LaunchOutcome(code=75, status=Status(opened=True, saved_step=saved_step)), rules)
        assert following and following.restarts == 1
        start = following
    assert start.number == 100
    no_progress = LaunchOutcome(code=70, status=Status(opened=True, saved_step=100))
    start = after(start, no_progress, rules)
    assert start and after(start, no_progress, rules) is None


def test_the_announcement_says_why_when_where_and_how_often_still():
    outcome = LaunchOutcome(code=70, reason="process 3 on b failed with exit code 70", lost_hosts=("b",))
    rules = Rules(max_restarts=2, min_hosts=1)
    following = after(FIRST, outcome, rules)
    assert following
    assert announcement(FIRST, outcome, following, rules) == (
        "starting again in 2 s (1 more restart left): process 3 on b failed with exit code 70; without b: on a, c, d"
    )


def test_each_start_has_a_folder_of_its_own_for_its_output(tmp_path):
    following = after(FIRST, LaunchOutcome(code=70), Rules(max_restarts=1))
    assert following
    assert (FIRST.log_dir(tmp_path), following.log_dir(tmp_path)) == (tmp_path, tmp_path / "restart_1")


def test_the_last_code_is_the_launchers_and_the_end_of_restarts_is_said(monkeypatch, capsys):
    monkeypatch.setattr(supervise, "_stopped_within", lambda pause_s, reason: supervise.tell(reason))
    codes = [137, 75, 70]
    begun = []

    def begin(start: Start) -> LaunchOutcome:
        begun.append(start.number)
        return LaunchOutcome(code=codes[start.number], reason="lost")

    assert supervise.supervise(begin, FIRST, Rules(max_restarts=2)) == 70
    assert begun == [0, 1, 2]
    *said, last = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == [
        "starting again in 2 s (1 more restart left)",
        "starting again in 4 s (0 more restarts left)",
    ]
    assert last == "not restarted: 2 in a row saved nothing new (--max-restarts)"


def launcher(child: str, folder: Path, *options: str, first: str = "") -> subprocess.Popen:
    """`launch local` of one process that runs the Python text `child`; the launcher itself runs `first`."""
    (folder / "openpi_train_child.py").write_text("import os, signal, sys, time\n" + child)
    driver = (
        f"import sys\nfrom openpi_train.launch import launchers, spec, supervise\n{first}\n"
        f"program = (sys.executable, {str(folder / 'openpi_train_child.py')!r})\n"
        "spec.LaunchSpec.__init__.__kwdefaults__['program'] = program\n"
        "sys.exit(launchers.main(sys.argv[1:]))\n"
    )
    words = ["local", "--processes", "1", "--log-dir", str(folder / "output"), *options, "--", "x", "--overwrite"]
    return subprocess.Popen(
        [sys.executable, "-c", driver, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


COUNTS = """
print("begun", os.environ["MASTER_PORT"], os.environ["OPENPI_TRAIN_JOB_TOKEN"], *sys.argv[1:], flush=True)
from openpi_train.launch import status
status.tell(opened=True)
if "--resume" not in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.multiprocess
def test_a_killed_run_starts_again_with_another_port_and_token_and_resumes(tmp_path):
    process = launcher(COUNTS, tmp_path, "--max-restarts", "1")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert re.search(r"in 2 s \(0 .*restarts.*process 0 .*137 .*SIGKILL", err)
    outputs = [tmp_path / "output" / "process_0.txt", tmp_path / "output" / "restart_1" / "process_0.txt"]
    first, second = (re.findall("^begun (.*)$", path.read_text(), re.MULTILINE)[0].split() for path in outputs)
    assert first[2:] == ["x", "--overwrite"] and second[2:] == ["x", "--resume"]
    assert first[0] != second[0] and first[1] != second[1]
    assert " ".join(second) in out


@pytest.mark.multiprocess
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_two_starts_ends_the_launcher_with_the_runs_code(tmp_path, signum):
    long = "supervise.Start.pause_s = 600.0"
    process = launcher("os.kill(os.getpid(), signal.SIGKILL)", tmp_path, "--max-restarts", "1", first=long)
    assert process.stderr
    for line in process.stderr:
        if "starting again in 600 s" in line:
            break
    os.kill(process.pid, signum)
    process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGKILL
    assert not (tmp_path / "output" / "restart_1").exists()


def test_a_batch_that_does_not_divide_is_tried_on_one_host_less_as_long_as_that_is_allowed():
    refused = LaunchOutcome(code=6)
    following = after(FIRST, refused, Rules(max_restarts=9, min_hosts=2))
    assert following and following.hosts == ("a", "b", "c") and following.arguments == FIRST.arguments
    following = after(following, refused, Rules(max_restarts=9, min_hosts=2))
    assert following and following.hosts == ("a", "b")
    assert after(following, refused, Rules(max_restarts=9, min_hosts=2)) is None
    assert after(FIRST, refused, Rules(max_restarts=9)) is None
    assert after(FIRST, LaunchOutcome(code=2), Rules(max_restarts=9, min_hosts=2)) is None
