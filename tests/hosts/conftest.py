"""Four hosts on a network of their own, a desk to start things from, and ssh between them."""

import subprocess
from collections.abc import Callable, Iterator, Sequence

import pytest
from debian import install
from fleet import Fleet

from benchmarks.drill.netns import Network, why_not
from benchmarks.drill.remote_shell import real_ssh, sshd, stand_in

install("ip")
install("sshd")


@pytest.fixture
def network(tmp_path) -> Iterator[Network]:
    """`node0` to `node3` and `desk`, from the kernel up; the test is skipped where that is not permitted."""
    if reason := why_not():
        pytest.skip(reason)
    made = Network(tmp_path)
    yield made
    made.remove()


@pytest.fixture
def fleet(network, tmp_path) -> Fleet:
    """Starts runs on the network's hosts."""
    return Fleet(network, tmp_path)


@pytest.fixture(params=["sshd" if sshd() else "stand_in_for_ssh"])
def ssh_command(request, network, tmp_path) -> str:
    """A command like ssh that connects the desk to the hosts: OpenSSH with keys of its own, on each host a server.

    Where there is no OpenSSH server (Debian: openssh-server), a stand-in enters the namespace; the test's name tells.
    """
    return (real_ssh if request.param == "sshd" else stand_in)(network, tmp_path)


@pytest.fixture
def start_ssh(fleet, ssh_command) -> Callable[..., subprocess.Popen]:
    """Start `launch ssh` at the desk: start_ssh(*experiment and flags, hosts=4, per_node=1, options=())."""

    def start(
        *arguments: str,
        hosts: int = 4,
        per_node: int = 1,
        devices: int = 1,
        options: Sequence[str] = (),
        **variables: str,
    ):
        names = ",".join(host.name for host in fleet.network.hosts[:hosts])
        words = ["ssh", "--hosts", names, "--processes-per-node", per_node, "--ssh-command", ssh_command]
        words += options
        words += ["--env", *fleet.variables, *(f"{name}={value}" for name, value in variables.items())]
        return fleet.launch(fleet.network.desk, *words, arguments=arguments, devices=devices)

    return start
