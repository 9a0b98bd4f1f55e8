"""One Slurm for all tests of this folder. Read next: `benchmarks/drill/slurm_cluster.py`."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from debian import install
from jobs import Slurm

from benchmarks.drill import slurm_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[dict[str, str]]:
    """The variables with which Slurm's commands find the cluster; the tests are skipped where there can be none.

    `make test` sets OPENPI_TRAIN_INSTALL_PACKAGES, which lets root install what is missing.
    """
    install("slurmctld")
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    # Not pytest's own folder: a socket's path may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm_") as folder, slurm_cluster.Cluster(Path(folder)) as found:
        yield found.variables


@pytest.fixture
def slurm(cluster, tmp_path) -> Slurm:
    """Submits jobs, and says what becomes of them."""
    return Slurm(cluster, tmp_path)
