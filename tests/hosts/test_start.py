"""Starting on several hosts, by hand and by ssh: what trains, and what each process says where it cannot."""

import re
import shutil
import subprocess
import sys

import pytest
from fleet import CUT, RUN, SOON, ends
from runs.command import ROOT, losses, train

from openpi_train.launch.spec import DEFAULT_PORT

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
RENDEZVOUS = f"port {DEFAULT_PORT}"


@pytest.fixture(scope="module")
def one_by_four(tmp_path_factory):
    """The losses of one process with four devices."""
    base = tmp_path_factory.mktemp("one_by_four")
    train(base, *RUN, *CUT, devices=4)
    return losses(base, "small")


@pytest.fixture(scope="module")
def one_by_two(tmp_path_factory):
    """The losses of one process with two devices."""
    base = tmp_path_factory.mktemp("one_by_two")
    train(base, *RUN, *CUT, devices=2)
    return losses(base, "small")


@pytest.mark.parametrize(("hosts", "per_node"), [(4, 1), (2, 2)])
def test_by_hand_the_losses_are_those_of_one_process_bit_for_bit(fleet, network, one_by_four, hosts, per_node):
    done = ends(fleet.all_manual(*RUN, *CUT, hosts=hosts, per_node=per_node))
    assert [code for code, _ in done] == [0] * hosts, done
    assert losses(fleet.base, "small") == one_by_four
    for node in range(hosts):
        place = rf"node{node} \({network.hosts[node].address}, jax [\d.]+, python [\d.]+\)"
        assert re.search(rf"{place}: process {node * per_node}: 1 x cpu", fleet.output("node0", 0))


def test_by_ssh_the_losses_are_those_of_one_process_bit_for_bit(fleet, start_ssh, one_by_two):
    ((code, output),) = ends([start_ssh(*RUN, *CUT, hosts=2)])
    assert code == 0, output
    assert losses(fleet.base, "small") == one_by_two
    assert "[node0:0] " in output and "starting 2 processes on node0, node1" in output


def test_a_port_that_is_taken_and_a_name_that_does_not_resolve_are_named(fleet, network):
    program = f"import socket; s = socket.create_server(('', {DEFAULT_PORT})); print('in', flush=True); input()"
    command = [*network.hosts[0].enter, sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline() == b"in\n"
        astray = fleet.manual(2, *RUN, *SOON, hosts=3, master="nowhere")
        (first, second, third) = ends([*fleet.all_manual(*RUN, *SOON, hosts=2), astray])
    assert first[0] == 2 and f"port {DEFAULT_PORT} on node0 cannot be used" in first[1], first
    assert second[0] == 70 and f"process 1 on node1 could not reach process 0 at node0, {RENDEZVOUS}" in second[1]
    assert third[0] == 2 and "the coordinator's host name 'nowhere' does not resolve on node2" in third[1], third


def test_one_of_another_job_is_refused_and_the_host_that_never_comes_is_named_by_all_others_with_the_time(fleet):
    words = ("word", "word", "another word")
    *done, stranger = ends([fleet.manual(node, *RUN, *SOON, hosts=3, token=word) for node, word in enumerate(words)])
    assert stranger[0] == 2 and f"process 0 at node0, {RENDEZVOUS} is another job" in stranger[1], stranger
    assert "turned away process 2 on node2, which does not know the token of this run" in fleet.output("node0", 0)
    here = "process 0 on node0, process 1 on node1"
    for code, output in done:
        assert code == 70, done
        missing = "host 2 (process 2), which never came within 15 s"
        assert f"waiting for 1 of 3 processes (here: {here}): {missing}" in output


def test_hosts_with_other_code_or_another_configuration_refuse_each_other(fleet, tmp_path):
    copy = tmp_path / "other"
    shutil.copytree(ROOT / "openpi_train", copy / "openpi_train", ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "openpi_train" / "keys.py").open("a") as file:
        file.write("# one comment more\n")
    first = fleet.manual(0, *RUN, hosts=2)
    # Both processes end with 2 and name both differences.
    for code, output in (done := ends([first, fleet.manual(1, *RUN, "--seed", "7", hosts=2, folder=copy)])):
        assert code == 2, done
        assert "process 0 on node0 (there) and process 1 on node1 (here) do not run the same:" in output
        assert "code of openpi_train is " in output and "seed is 42 there and 7 here" in output
