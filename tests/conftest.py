"""Set up before any test imports jax: eight CPU devices, a shared compilation cache, shape checks on.

Folders of reference data: OPENPI_TRAIN_GOLDEN and OPENPI_TRAIN_DATA, by default beside the checkout.
"""

import collections
import gc
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(os.environ.get("OPENPI_TRAIN_GOLDEN", ROOT.parent / "shared" / "golden"))
DATA = Path(os.environ.get("OPENPI_TRAIN_DATA", ROOT.parent / "shared" / "data"))

# Nothing here leaves much garbage, and each look for it goes through hundreds of thousands of objects.
gc.set_threshold(100_000, 20, 20)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Every process of the suite shares one compilation cache, of small programs, too: compiling dominates the time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Programs do not tell which lines of Python made their operations: 7 % of the time in which they are made.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

from jaxtyping import install_import_hook


def _modules_with_shapes() -> list[str]:
    """The modules of the package whose signatures give shapes."""
    files = (ROOT / "openpi_train").rglob("*.py")
    shaped = [path for path in files if "from jaxtyping import" in path.read_text(encoding="utf-8")]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in shaped]


# The run-time shape checks that production does without. Elsewhere pyright's checks do: a check of every call of the
# package, most of them while programs are traced, takes a third of the time of what runs in this process.
install_import_hook(_modules_with_shapes(), "typechecker.check")

import forks
import huggingface_hub.constants  # noqa: F401  # reads HF_HUB_OFFLINE: here, and not in the first test that sets it
import jax
import tracers

from openpi_train.runtime import compile_cache, logs, other_tools, phases, xla_flags

# The suite's programs run for milliseconds and compile for seconds: LLVM need not try, and XLA's older emitters, which
# do without MLIR, take a third of the time. Cutting programs for several compiling threads takes a tenth, and the cores
# have other files' tests to run (jaxlib 0.10.2). A later one may not know these flags, and is asked.
LITTLE_EFFORT, NO_MLIR = "--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false"
QUICK_TO_COMPILE = f"{LITTLE_EFFORT} {NO_MLIR} --xla_cpu_parallel_codegen_split_count=1"
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = LITTLE_EFFORT if xla_flags.rejected(QUICK_TO_COMPILE) else QUICK_TO_COMPILE

forks.read_sources_once()
jax.config.update("jax_num_cpu_devices", 8)
compile_cache.fit_for_cpus()  # programs of several devices that were loaded may end the process
tracers.say_little()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes come first, Slurm's before all: they wait, and the others fill that time.

    Of the others, those with most slow tests come first, so that in the end no long file keeps one worker busy alone.
    No test runs twice: one that fails now and then has a cause, in the product or in itself.
    """
    waiting = {item.path for item in items if item.get_closest_marker("multiprocess")}
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.path.parent.name != "slurm", item.path not in waiting, -slow[item.path]))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def start_of_a_process() -> Iterator[None]:
    """What a run leaves in its process, the root logger's level and handlers and how far it got, ends with a test.

    What a module's fixture left before is taken away, too.
    """
    _forget_the_run()
    yield
    _forget_the_run()


def _forget_the_run() -> None:
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if getattr(handler, logs._MARK, False)]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(logging.WARNING)
    logging.captureWarnings(False)
    phases._current = phases.Phase(name="starting")
    for learned in (phases._step_durations_s, phases._longest_s, phases._seconds, phases._shown):
        learned.clear()
    phases._timeouts = None


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


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """The folder of GSM8K's problems; the test is skipped where it is absent."""
    path = DATA / "gsm8k"
    if not path.is_dir():
        pytest.skip(f"no GSM8K at {path} (set OPENPI_TRAIN_DATA)")
    return path


@pytest.fixture
def small_disk(tmp_path, request) -> Iterator[Path]:
    """A file system of its own with room for 1 MiB, or for the indirect parameter; `fill_disk` takes that room."""
    size = getattr(request, "param", "1m")
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


@pytest.fixture
def fill_disk(small_disk) -> Callable[[], Path]:
    """A function that fills the small disk to the last byte, and returns the file to delete to have room again."""

    def fill() -> Path:
        path = small_disk / "filler"
        with path.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return path

    return fill


@pytest.fixture(autouse=True)
def no_links_of_a_door(monkeypatch):
    """A door that a test opens in this process asks for links, and has keys: the next test's runs have none."""
    monkeypatch.setenv("OPENPI_TRAIN_LINKS", "")
    monkeypatch.setattr(other_tools, "_not_done", {})
    monkeypatch.setattr(other_tools, "_keys", {})
