"""Debian packages that some tests need, installed where `make test` lets root do so."""

import os
import shutil
import subprocess


def install(program: str, *packages: str) -> None:
    """Install the packages if `program` is missing and root on a Debian has set OPENPI_TRAIN_INSTALL_PACKAGES."""
    allowed = os.environ.get("OPENPI_TRAIN_INSTALL_PACKAGES") and os.geteuid() == 0 and shutil.which("apt-get")
    if not allowed or shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"):
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "-qq"]
    for words in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        subprocess.run([*apt, *words], env=environment, check=False, stdin=subprocess.DEVNULL)
