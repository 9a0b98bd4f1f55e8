"""Configs that the guides of other tools name, and that ship with this project, in `configs/`.

A guide's command names such a file relative to its project. Standard library only. Read next:
`posttraining/posttraining_launch.py`.
"""

import functools
import importlib.util
import os
import sys
from pathlib import Path

from openpi_train.launch.spec import LaunchError

_DEEPSPEED = ("zero1.json", "zero2.json", "zero3.json", "zero2_with_profiling.json")
# The guides' paths, and the files below `configs/`.
_SHIPPED = {
    **{name: name for name in ("config_distributed_example.yaml", "config_deepspeed_example.yaml")},
    **{f"configs/{name}": name for name in ("vla_config.yaml", "sft_example.jsonl")},
    **{f"configs/deepspeed/{name}": f"deepspeed/{name}" for name in _DEEPSPEED},
    **{f"pi0/ript/config/{name}": name for name in ("distributed_train_pi0.yaml", "debug_distributed_train.yaml")},
}


def found(path: str | Path) -> str:
    """`path`, or where it is one that a guide names and there is no such file here, the one that ships."""
    name = os.path.normpath(path)
    if name not in _SHIPPED or os.path.exists(name):
        return str(path)
    shipped = _folder() / _SHIPPED[name]
    if not shipped.is_file():
        return str(path)
    if os.environ.get("RANK", "0") == "0":
        _tell_once(f"there is no {path} here; the one that ships with openpi_train is used: {shipped}\n")
    return str(shipped)


@functools.cache
def _tell_once(text: str) -> None:
    sys.stderr.write(text)


def required(path: str) -> str:
    """`found(path)`. Raises LaunchError, before any process is started, if there is no such file."""
    there = found(path)
    if not Path(there).expanduser().is_file():
        raise LaunchError(f"there is no config {path} (looked in {Path.cwd()})")
    return there


def _folder() -> Path:
    """The checkout's `configs/`, or where it is installed."""
    beside = Path(__file__).resolve().parents[2] / "configs"
    if beside.is_dir():
        return beside
    spec = importlib.util.find_spec("openpi_train_configs")
    return Path(spec.origin).parent if spec is not None and spec.origin else beside
