"""Runs the program as a user does: a command line in a process of its own, with a small tokenizer-free experiment."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import forks

ROOT = Path(__file__).resolve().parents[2]


def environment(**extra: str) -> dict[str, str]:
    """The suite's environment for a child: CPU, the shared compilation cache, and nothing of a launcher's."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "JAX_NUM_CPU_DEVICES")
    inherited = {name: value for name, value in os.environ.items() if name not in launcher}
    return {**inherited, **forks.ALIKE, **extra}


def openpi_train(
    *arguments: str | Path, timeout_s: float = 300, prefix: Sequence[str] = (), **extra: str
) -> subprocess.CompletedProcess[str]:
    """`python -m openpi_train <arguments>`, to its end; `prefix` is a command that runs it (`unshare --mount`, say)."""
    command = [*prefix, sys.executable, "-m", "openpi_train", *map(str, arguments)]
    if not prefix:
        return forks.run(command, environment(**extra), timeout_s)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment(**extra), cwd=ROOT, check=False
    )


def train(base: Path, *arguments: str | Path, processes: int = 1, devices: int = 1, exp_name: str = "x", **options):
    """A training run in `base`; more than one process goes through `launch local`. Fails with the run's own output."""
    flags = [
        *arguments,
        "--exp-name",
        exp_name,
        "--checkpoint-base-dir",
        base / "runs",
        "--assets-base-dir",
        base / "assets",
    ]
    if processes == 1:
        done = openpi_train(*flags, "--devices-per-process", str(devices), **options)
    else:
        launch = ("launch", "local", "--processes", str(processes), "--devices-per-process", str(devices))
        done = openpi_train(*launch, "--log-dir", base / "output", "--", *flags, **options)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    return done


def copy_without(base: Path, to: Path, step: int, experiment: str = "debug") -> None:
    """Copy `base`, whose run has not come to this checkpoint: killed before, say."""
    shutil.copytree(base, to, dirs_exist_ok=True, symlinks=True)
    shutil.rmtree(to / "runs" / experiment / "x" / str(step))


def losses(base: Path, experiment: str = "debug", exp_name: str = "x") -> dict[int, float]:
    """The training loss by step, exactly as `metrics.jsonl` has it."""
    lines = (base / "runs" / experiment / exp_name / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}


def words(done) -> str:
    """Everything that was printed, without line breaks and the boxes that tyro draws."""
    return re.sub(r"[│╭╮╰╯─\s]+", " ", done.stdout + done.stderr)


def check(done, code: int, *says: str) -> str:
    """The printed words, which must contain `says` and no traceback."""
    text = words(done)
    assert done.returncode == code, f"exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in text, done.stderr
    for part in says:
        assert part in text, f"{part!r} is not in\n{done.stdout}\n{done.stderr}"
    return text


def places(base: Path, exp_name: str = "x") -> tuple[str, ...]:
    """The flags that keep a run inside `base`."""
    return "--exp-name", exp_name, "--checkpoint-base-dir", f"{base}/runs", "--assets-base-dir", f"{base}/assets"


def killed_when_logged(base: Path, step: int, *arguments: str | Path, experiment: str, **extra: str) -> None:
    """A training run in `base` that is killed as soon as this step is in its log and checkpoint 4 is complete.

    Fails if the run ends before.

    It yields the processor to us, who look.
    """
    process = subprocess.Popen(
        ["nice", "-n", "10", sys.executable, "-m", "openpi_train", *map(str, arguments), *places(base)],
        env=environment(**extra),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log, saved = (base / "runs" / experiment / "x" / name for name in ("metrics.jsonl", "4/manifest.json"))
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if saved.exists() and f'{{"step": {step}, "approx_kl"' in log.read_text():
            break
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
