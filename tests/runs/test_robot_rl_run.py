"""Robots that learn from their own episodes, on any processes, killed and resumed: the same bits."""

import json
import signal
import subprocess
import sys
import time

import pytest
from rl.wandering import WANDERING
from runs.command import ROOT, environment, killed_when_logged, places, train

from openpi_train.tools.report import html_of
from openpi_train.tools.run_files import RunFiles

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
# Two groups of four in a batch: with two processes each has its own, whose pictures the other never sees.
# As many threads in every process, or convolutions add up in another order (docs/understand/numerics.md).
THREADS = {"NPROC": "4"}
RUN = (WANDERING, "--rl.mixed-only", "--rl.max-waves", "2")
# What depends on the machine.
TIMES = ("time/", "_per_s", "data/", "mfu", "hfu")


def lines(base):
    """The lines of the log, without what depends on the machine."""
    text = (base / "runs" / "roaming" / "x" / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in line.items() if not any(time in name for time in TIMES)}
        for line in map(json.loads, text)
    ]


@pytest.fixture(scope="module")
def one_by_four(tmp_path_factory):
    base = tmp_path_factory.mktemp("one_by_four")
    train(base, *RUN, *kept(base), devices=4, **THREADS)
    return base


def kept(base):
    """The flags that keep the episodes of a run in `base`."""
    return "--rl.keep", base / "kept"


def episodes(base):
    """The files of the kept episodes."""
    folder = base / "kept"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_acts_once_per_iteration_and_learns(one_by_four):
    evaluated = [line for line in lines(one_by_four) if "success/all" in line]
    found = [line for line in lines(one_by_four) if "loss" in line]
    assert [line["rl/iteration"] for line in found] == [1] * 4 + [2] * 4
    assert [abs(line["ratio"] - 1) < 1e-6 for line in found] == [True, False, False, False] * 2
    # Tasks are as frequent, so their rates have the mean of all.
    rates = [found[0][f"rl/success/{task}"] for task in ("away_0.06", "away_0.08")]
    assert sum(rates) / 2 == pytest.approx(found[0]["rl/reward"]) and found[0]["rl/groups_mixed"] > 0
    assert {line["step"] for line in evaluated} == {0, 8}


def test_its_report_shows_what_it_did(one_by_four):
    run = one_by_four / "runs" / "roaming" / "x"
    shown = [json.loads(line) for line in (run / "rollouts" / "1" / "rollouts.jsonl").read_text().splitlines()]
    assert {line["outcome"] for line in shown} == {0, 1}
    page = html_of([RunFiles.at(run)], with_batches=False)
    for title in ("Reward of own rollouts", "Success of own rollouts", "Units whose ratio is clipped"):
        assert title in page
    films = {line["video"].partition(".")[0] for line in shown}
    assert films == {f"{place:02d}_{'success' if line['outcome'] else 'failure'}" for place, line in enumerate(shown)}
    assert all(f"<figcaption>{line['what']}</figcaption>" in page for line in shown)


def test_processes_change_no_bit(tmp_path, one_by_four):
    """Nor that the environment of one of them is slow."""
    train(tmp_path, *RUN, *kept(tmp_path), processes=2, devices=2, WANDERING_PAUSE_S="0,0.03", **THREADS)
    assert lines(tmp_path) == lines(one_by_four) and episodes(tmp_path) == episodes(one_by_four)


def test_with_a_critic_processes_change_no_bit_and_its_start_may_lack_it(tmp_path, one_by_four):
    """PPO from the weights of a run without a critic, in episodes that are cut and go on with its value."""
    start = ("--weight-loader.params-path", one_by_four / "runs" / "roaming" / "x")
    ppo = (
        "--model.critic",
        "--objective.value-weight",
        "0.5",
        "--rl.advantages.kind",
        "gae",
        "--rl.dense-weight",
        "0.1",
    )
    ppo = (*start, *ppo, "--rl.advantages.gamma", "0.9", "--rl.group-size", "1", "--rl.num-groups", "16")
    one, two = tmp_path / "one", tmp_path / "two"
    train(one, WANDERING, *ppo, devices=4, **THREADS)
    train(two, WANDERING, *ppo, processes=2, devices=2, **THREADS)
    found = [line for line in lines(one) if "loss" in line]
    assert lines(two) == lines(one) and len(found) == 8
    # The critic knew nothing, and learns what is earned.
    assert found[0]["value"] == 0 and found[0]["return"] > 0 and found[-1]["value"] > 0
    assert all(0 < line["value_loss"] < 100 for line in found)


def test_killed_within_an_iteration_it_goes_on_bit_for_bit(tmp_path, one_by_four):
    """As soon as the first step of the second iteration is logged: it acts for that one again."""
    killed_when_logged(
        tmp_path, 5, *RUN, *kept(tmp_path), "--devices-per-process", "4", experiment="roaming", **THREADS
    )
    done = train(tmp_path, *RUN, *kept(tmp_path), "--resume", devices=4, **THREADS)
    assert "continuing from step 4 of 8" in done.stdout + done.stderr and lines(tmp_path) == lines(one_by_four)
    assert episodes(tmp_path) == episodes(one_by_four)


def test_asked_to_stop_while_acting_all_processes_save_the_last_iteration(tmp_path, one_by_four):
    """A request to one of two processes, as soon as the second iteration begins; one process goes on."""
    flags = (*RUN, *kept(tmp_path), "--save-interval", "8")
    launch = ("launch", "local", "--processes", "2", "--devices-per-process", "2", "--log-dir", tmp_path / "output")
    process = subprocess.Popen(
        [sys.executable, "-m", "openpi_train", *map(str, (*launch, "--", *flags, *places(tmp_path)))],
        env=environment(WANDERING_PAUSE_S="0.3", **THREADS),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log, deadline = tmp_path / "runs" / "roaming" / "x" / "metrics.jsonl", time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if log.exists() and '{"step": 4, "approx_kl"' in log.read_text():
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 75, output[-4000:]
    assert "stopped after step 4 of 8 with a good checkpoint" in output
    assert max(line["step"] for line in lines(tmp_path)) == 4
    done = train(tmp_path, *flags, "--resume", devices=4, **THREADS)
    assert "continuing from step 4 of 8" in done.stdout + done.stderr and lines(tmp_path) == lines(one_by_four)
    assert episodes(tmp_path) == episodes(one_by_four)
