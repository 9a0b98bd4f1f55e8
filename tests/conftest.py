"""Set up before any test imports jax: eight CPU devices, a shared compilation cache, shape checks on.

Folders of reference data: OPENPI_TRAIN_GOLDEN and OPENPI_TRAIN_DATA, by default beside the checkout.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(os.environ.get("OPENPI_TRAIN_GOLDEN", ROOT.parent / "shared" / "golden"))
DATA = Path(os.environ.get("OPENPI_TRAIN_DATA", ROOT.parent / "shared" / "data"))

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Every process of the suite shares one compilation cache: compiling dominates the time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
# The suite's programs run for milliseconds and compile for seconds: LLVM need not try hard.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")

from jaxtyping import install_import_hook

# The run-time shape checks that production does without.
install_import_hook("openpi_train", "typechecker.check")

import jax

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of openpi's reference numbers; the test is skipped where it is absent."""
    if not (GOLDEN / "meta.json").is_file():
        pytest.skip(f"no golden data at {GOLDEN} (set OPENPI_TRAIN_GOLDEN)")
    return GOLDEN


@pytest.fixture(scope="session")
def golden_file(golden) -> Callable[[str], Path]:
    """A function from a name to the golden set's file or folder; the test is skipped where the set has none."""

    def path(name: str) -> Path:
        if not (golden / name).exists():
            pytest.skip(f"the golden set at {golden} has no {name}")
        return golden / name

    return path


@pytest.fixture(scope="session")
def bridge_sample() -> Path:
    """The real BridgeData V2 sample (a tfds directory); the test is skipped where it is absent."""
    path = DATA / "bridge_dataset" / "1.0.0"
    if not path.is_dir():
        pytest.skip(f"no BridgeData sample at {path} (set OPENPI_TRAIN_DATA)")
    return path
