"""Debian packages that some tests need, installed where `make test` lets root do so.

python tests/debian.py    installs all of them: `make test` does, while pip works on the environment
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# By the program that is missing where they are.
PACKAGES = {
    "slurmctld": ("slurm-wlm", "munge"),
    "ip": ("iproute2",),
    "sshd": ("openssh-server", "openssh-client"),
    "chromium": ("chromium",),
    "fusermount3": ("fuse3",),
}


def install(*programs: str) -> None:
    """Install the packages of those that are missing if root on a Debian has set OPENPI_TRAIN_INSTALL_PACKAGES."""
    if not (os.environ.get("OPENPI_TRAIN_INSTALL_PACKAGES") and os.geteuid() == 0 and shutil.which("apt-get")):
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "-qq"]
    path = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
    # Two workers of the suite may want packages at the same time: apt's own time-out is not for the lists of packages.
    with open(Path(tempfile.gettempdir()) / "openpi_train_apt.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [package for name in programs if not shutil.which(name, path=path) for package in PACKAGES[name]]
        if not missing:
            return
        for words in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
            subprocess.run([*apt, *words], env=environment, check=False, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    install(*PACKAGES)
