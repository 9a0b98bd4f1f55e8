"""What has LIBERO's interface (`envs/stand_ins/libero`), found as LIBERO is."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent / "envs" / "stand_ins"


def forget() -> None:
    """Let its modules be imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "libero"]:
        del sys.modules[name]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """Its modules `benchmark` and `envs`, with the files of two tasks of libero_goal in this folder."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(folder))
    (folder / "config.yaml").write_text("benchmark_root: x\n")
    (folder / "bddl_files" / "libero_goal").mkdir(parents=True)
    for task in ("open_the_drawer", "turn_on_the_stove"):
        (folder / "bddl_files" / "libero_goal" / f"{task}.bddl").touch()
    benchmark, envs = (importlib.import_module(f"libero.libero.{name}") for name in ("benchmark", "envs"))
    return benchmark, envs
