"""Debian packages that some tests need, installed where `make test` lets root do so."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


def install(program: str, *packages: str) -> None:
    """Install the packages if `program` is missing and root on a Debian has set OPENPI_TRAIN_INSTALL_PACKAGES."""
    if not (os.environ.get("OPENPI_TRAIN_INSTALL_PACKAGES") and os.geteuid() == 0 and shutil.which("apt-get")):
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "-qq"]
    # Two workers of the suite may want packages at the same time: apt's own time-out is not for the lists of packages.
    with open(Path(tempfile.gettempdir()) / "openpi_train_apt.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"):
            return
        for words in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            subprocess.run([*apt, *words], env=environment, check=False, stdin=subprocess.DEVNULL)
