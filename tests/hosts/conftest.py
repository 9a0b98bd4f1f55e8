"""Four hosts on a network of their own, a desk to start things from, and ssh between them."""

import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from debian import install
from fleet import Fleet
from netns import Network, why_not

install("ip")
install("sshd")
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
_SERVER = """
ListenAddress 0.0.0.0
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PidFile none
PasswordAuthentication no
PermitRootLogin prohibit-password
"""


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


@pytest.fixture(params=["sshd" if SSHD and shutil.which("ssh") else "stand_in_for_ssh"])
def ssh_command(request, network, tmp_path) -> str:
    """A command like ssh that connects the desk to the hosts: OpenSSH with keys of its own, on each host a server.

    Where there is no OpenSSH server (Debian: openssh-server), a stand-in enters the namespace; the test's name tells.
    """
    return (_real_ssh if request.param == "sshd" else _stand_in)(network, tmp_path)


def _real_ssh(network: Network, folder: Path) -> str:
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "sshd_config").write_text(_SERVER.format(folder=folder))
    (folder / "known_hosts").write_text(f"node* {(folder / 'host_key.pub').read_text()}")
    for host in network.hosts:
        host.run(SSHD or "sshd", "-f", folder / "sshd_config", "-E", folder / f"sshd_{host.name}.txt")
    options = ("BatchMode=yes", f"UserKnownHostsFile={folder}/known_hosts", "ServerAliveInterval=3")
    words = ["ssh", "-F", "none", "-i", f"{folder}/user_key", *(f"-o{option}" for option in options)]
    return shlex.join(words)


def _stand_in(network: Network, folder: Path) -> str:
    cases = "".join(f'{host.name}) exec {shlex.join(host.enter)} sh -c "$2";;\n' for host in network.hosts)
    script = folder / "stand_in_for_ssh"
    script.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}*) echo "no host $1" >&2; exit 255;;\nesac\n')
    script.chmod(0o755)
    return str(script)


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
