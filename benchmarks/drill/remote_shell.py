"""ssh from the desk to the hosts of a network: OpenSSH with keys of its own, or a stand-in. Read next: `netns.py`."""

import shlex
import shutil
import subprocess
from pathlib import Path

from benchmarks.drill.netns import Host, Network

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


def sshd() -> str | None:
    """OpenSSH's server, None where it or its client is not installed (Debian: openssh-server)."""
    return shutil.which("sshd", path="/usr/sbin:/usr/local/sbin") if shutil.which("ssh") else None


def real_ssh(network: Network, folder: Path) -> str:
    """A command that connects to the hosts by OpenSSH; on each host a server is started, again with its power."""
    server = sshd()
    assert server is not None, "ask sshd first"
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "sshd_config").write_text(_SERVER.format(folder=folder))
    (folder / "known_hosts").write_text(f"node* {(folder / 'host_key.pub').read_text()}")

    def serve(host: Host) -> None:
        host.run(server, "-f", folder / "sshd_config", "-E", folder / f"sshd_{host.name}.txt")

    network.on_boot(serve)
    options = ("BatchMode=yes", f"UserKnownHostsFile={folder}/known_hosts", "ServerAliveInterval=3", "ConnectTimeout=5")
    words = ["ssh", "-F", "none", "-i", f"{folder}/user_key", *(f"-o{option}" for option in options)]
    return shlex.join(words)


def stand_in(network: Network, folder: Path) -> str:
    """A command that enters the hosts' namespaces: its connection goes by no cable, so it is not lost with one."""
    cases = "".join(f'{host.name}) exec {shlex.join(host.enter)} sh -c "$2";;\n' for host in network.hosts)
    script = folder / "stand_in_for_ssh"
    script.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}*) echo "no host $1" >&2; exit 255;;\nesac\n')
    script.chmod(0o755)
    return str(script)
