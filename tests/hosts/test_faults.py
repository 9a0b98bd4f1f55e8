"""What becomes of a run on several hosts when a process, a host or a cable fails, and of one that is told to stop."""

import os
import re
import signal
import subprocess
import time

import numpy as np
import pytest
from fleet import CUT, RUN, ends, until
from runs.command import losses, train
from small_runs import SMALL

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
LOST_S = 12
# The batch divides by the hosts of every test here.
ENDLESS = (*RUN, "--num-train-steps", "1000000", "--batch-size", "12", "--timeouts.lost-s", str(LOST_S))
ENDLESS += ("--data.pause-s", "0.05")


def train_a_while(fleet, launchers: list[subprocess.Popen]) -> None:
    """Return when the run has taken its second step."""
    until(lambda: '"step": 2,' in fleet.metrics(), launchers)


def process_of(host) -> int:
    """The training process on a host with one, as this machine numbers it."""
    (pid,) = host.find(f"-m openpi_train {SMALL}")  # the launcher's line says `openpi_train launch`
    return pid


def expect_all_lost(done: list[tuple[int, str]], lost: dict[int, str], codes: dict[int, int]) -> None:
    """Every launcher has ended with its code of `codes` (else 70), and says its line of `lost`."""
    assert [code for code, _ in done] == [codes.get(node, 70) for node in range(len(done))], done
    for node, line in lost.items():
        assert line in done[node][1], done[node]


# Of three processes on one host either is killed in `runs/test_lost_peers.py`.
@pytest.mark.parametrize(("victim", "hosts"), [(2, 3), (0, 2)], ids=["one_of_three", "the_coordinator"])
def test_a_killed_process_ends_all_others_with_70_and_its_name(fleet, network, victim, hosts):
    launchers = fleet.all_manual(*ENDLESS, hosts=hosts)
    train_a_while(fleet, launchers)
    os.kill(process_of(network.hosts[victim]), signal.SIGKILL)
    lost = {node: f"process {victim} on node{victim} was lost" for node in range(hosts) if node != victim}
    expect_all_lost(ends(launchers), lost, {victim: 137})


def test_a_host_cut_off_for_good_ends_the_processes_on_both_sides_with_70(fleet, network):
    launchers = fleet.all_manual(*ENDLESS, hosts=3)
    train_a_while(fleet, launchers)
    network.link(2, up=False)
    here, there = "process 2 on node2 was lost", "process 0 on node0 was lost"
    expect_all_lost(ends(launchers), {0: here, 1: here, 2: there}, {})


def test_a_slow_network_that_is_away_for_five_seconds_costs_no_step_and_changes_no_loss(fleet, network, tmp_path):
    steps = (*RUN, *CUT, "--num-train-steps", "40")
    train(tmp_path / "undisturbed", *steps, devices=2)
    network.throttle(1, "20mbit")
    launchers = fleet.all_manual(*steps, "--timeouts.lost-s", "30", "--data.pause-s", "0.3", hosts=2)
    train_a_while(fleet, launchers)
    network.link(1, up=False)
    time.sleep(5)
    before = fleet.metrics()
    network.link(1, up=True)
    done = ends(launchers)
    assert [code for code, _ in done] == [0, 0], done
    assert '"step": 40,' not in before, "the run ended before the cable was pulled: take more steps"
    assert losses(fleet.base, "small") == losses(tmp_path / "undisturbed", "small")


def test_a_stop_at_the_desk_saves_on_all_hosts_and_a_killed_desk_leaves_nothing_running(fleet, network, start_ssh):
    launcher = start_ssh(*ENDLESS, hosts=2)
    train_a_while(fleet, [launcher])
    launcher.send_signal(signal.SIGTERM)
    ((code, output),) = ends([launcher])
    assert code == 75 and "and saved: continue" in output, output
    stopped = max(losses(fleet.base, "small"))
    assert (fleet.base / "runs" / "small" / "x" / str(stopped) / "manifest.json").exists()

    launcher = start_ssh(*ENDLESS, "--resume", hosts=2)
    until(lambda: max(losses(fleet.base, "small")) > stopped, [launcher])
    launcher.kill()
    launcher.communicate()
    deadline = time.monotonic() + 240
    while left := [pid for host in network.hosts for pid in host.find("openpi_train")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_host_that_the_desk_loses_for_good_ends_the_run_and_is_named(fleet, network, start_ssh):
    launcher = start_ssh(*ENDLESS, hosts=2)
    train_a_while(fleet, [launcher])
    network.link(1, up=False)
    ((code, output),) = ends([launcher])
    assert code == 70, output
    assert "process 1 on node1 was lost" in output
    network.link(1, up=True)
    deadline = time.monotonic() + 240
    while network.hosts[1].find("openpi_train"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_run_goes_on_without_the_host_that_was_lost(fleet, network, start_ssh, ssh_command, tmp_path):
    if ssh_command.endswith("stand_in_for_ssh"):
        pytest.skip("the stand-in's connection goes by no cable: it is not lost with the host (needs openssh-server)")
    steps = (*RUN, "--num-train-steps", "100", "--batch-size", "12", "--save-interval", "10", "--keep-last", "3")
    train(tmp_path / "undisturbed", *steps, devices=2)
    fewer = ("--max-restarts", "1", "--min-nodes", "1", "--grace-s", "5")
    slow = ("--timeouts.lost-s", str(LOST_S), "--data.pause-s", "0.1")
    launcher = start_ssh(*steps, *slow, hosts=2, options=fewer)
    until(lambda: any((fleet.base / "runs" / "small" / "x").glob("*/manifest.json")), [launcher])
    network.link(1, up=False)
    ((code, output),) = ends([launcher])
    network.link(1, up=True)
    assert code == 0 and "without node1: on node0" in output, output
    assert "grad_accum 2 instead of 1" in output
    found, expected = losses(fleet.base, "small"), losses(tmp_path / "undisturbed", "small")
    assert list(found) == list(expected)
    kept = int(re.findall(r"continuing from step (\d+)", output)[-1])
    assert [found[step] for step in range(1, kept + 1)] == [expected[step] for step in range(1, kept + 1)]
    # One device adds two micro-batches up in another order. Later steps drift: Adam makes more of rounding.
    after = (kept + 1, kept + 2)
    np.testing.assert_allclose([found[step] for step in after], [expected[step] for step in after], rtol=1e-6)
