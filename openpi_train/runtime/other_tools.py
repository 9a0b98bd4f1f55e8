"""What another tool's config or variables ask of a run and nothing here does, and that tool's names of our flags.

Doors tell both. A start warns of the first once, when all else is told; an error that names flags of ours ends with the
keys that set them. Read next: `doors/config_file.py`, which finds the keys; `training/start.py`.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping

from openpi_train.runtime.exits import RunError

_STEP_LIMIT = "--timeouts.stuck-s SECONDS is a step's limit, --timeouts.rendezvous-s that of the start"
_LOGS = "logs/process_<k>.log in the run's folder has all of every process; NCCL_DEBUG=INFO adds NCCL's own lines"
# Variables of torch, DeepSpeed and NCCL for torch, that nothing here reads, and what to give instead.
VARIABLES: Mapping[str, str] = {
    **dict.fromkeys(("NCCL_TIMEOUT", "NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"), _STEP_LIMIT),
    **dict.fromkeys(("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"), _STEP_LIMIT),
    **dict.fromkeys(("TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "DEEPSPEED_LOG_LEVEL"), _LOGS),
    "CUDA_LAUNCH_BLOCKING": "a step is one program, so no operation of it is named: --on-nan stop, --profile 10",
    **dict.fromkeys(
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        "XLA_CLIENT_MEM_FRACTION=0.9 is the share of the GPU's memory that jax takes",
    ),
}
_FLAG = re.compile(r"--[a-z][\w.-]*\w")

# What nothing does, by the request as it was written: what to give instead.
_not_done: dict[str, str] = {}
# By the file that has them: keys of another tool by the flag that they set.
_keys: dict[str, Mapping[str, str]] = {}


def note_not_done(requests: Mapping[str, str]) -> None:
    """Remember requests, as they were written, that nothing here does; and what to give instead of each."""
    _not_done.update(requests)


def note_keys(file: str, keys: Mapping[str, str]) -> None:
    """Remember the keys of a file by the flag of ours that each sets, for errors that name flags."""
    _keys[file] = keys


def warning(environ: Mapping[str, str]) -> str | None:
    """One text for all that is asked and not done, by keys and by variables; None if there is nothing."""
    asked = {
        f"{name}={environ[name]}": text for name, text in VARIABLES.items() if environ.get(name) not in (None, "", "0")
    }
    asked |= _not_done
    if not asked:
        return None
    subject = "1 key or variable asks" if len(asked) == 1 else f"{len(asked)} keys and variables ask"
    return "\n".join([f"{subject} for what is not done:", *(f"  {one} -> {text}" for one, text in asked.items())])


@contextlib.contextmanager
def errors_in_their_keys() -> Iterator[None]:
    """Add to a RunError that names flags of ours the keys of the other tool's files that set them."""
    try:
        yield
    except RunError as error:
        named = dict.fromkeys(_FLAG.findall(str(error)))
        lines = []
        for file, keys in _keys.items():
            if found := [f"  {flag}: {keys[flag]}" for flag in named if flag in keys]:
                lines += [f"in the keys of {file}:", *found]
        if lines:
            error.args = ("\n".join([str(error), *lines]),)
        raise
