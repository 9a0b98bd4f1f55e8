"""`launch slurm`: write an sbatch file for a run, and submit it if asked. Read next: `slurm_script.py`, its text.

Inside the job nothing is given: every task learns from Slurm who it is.
"""

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openpi_train.launch.slurm_script import SlurmJob, script
from openpi_train.launch.spec import LaunchError, LaunchSpec

_OWN_FOLDER = "slurm_scripts"
_INTERACTIVE_STEP = "4294967290"  # the shell that salloc may open on the first node, a step of one task


def add_parser(forms: Any) -> None:
    """Add this form to the `launch` verb's."""
    parser = forms.add_parser("slurm", help="write an sbatch file that starts, requeues and continues the run")
    parser.add_argument("--nodes", "--num-nodes", type=int, default=1, help="number of hosts (%(default)s)")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs of each host")
    parser.add_argument("--processes-per-node", type=int, help="processes per host (default: one for each GPU)")
    parser.add_argument("--devices-per-process", type=int, help="make so many CPU devices in each process, use no GPU")
    parser.add_argument("--job-name", help="default: the experiment's name")
    parser.add_argument("--cpus-per-task", type=int, help="CPU cores of each process")
    parser.add_argument("--memory", help="of each host, as Slurm writes it: 200G")
    parser.add_argument("--time-limit", help="as Slurm writes it: 24:00:00, or 2-0 for two days")
    parser.add_argument("--partition")
    parser.add_argument("--account")
    parser.add_argument("--qos")
    parser.add_argument("--output-dir", type=Path, default=Path(_OWN_FOLDER), help="for file and output (%(default)s)")
    parser.add_argument("--file", type=Path, help="the file to write (default: <output dir>/<job name>.sh)")
    parser.add_argument(
        "--venv", type=Path, help="virtual environment to activate (default: the Python that runs this)"
    )
    parser.add_argument("--container", metavar="IMAGE", help="run in this image, whose `python` has the package")
    parser.add_argument("--container-runtime", choices=["pyxis", "apptainer"], default="pyxis")
    parser.add_argument(
        "--container-mount", action="append", default=[], metavar="SOURCE:TARGET", help="may be repeated"
    )
    parser.add_argument("--sbatch-arg", action="append", default=[], help="may be repeated: --sbatch-arg=--exclusive")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    parser.add_argument("--max-restarts", type=int, default=20, help="requeue so often (%(default)s); 0: never")
    parser.add_argument(
        "--stop-before-s", type=int, default=120, help="save and stop so long before the time limit (%(default)s s)"
    )
    parser.add_argument("--submit", action="store_true", help="submit the file and print the job's id")
    parser.add_argument("--dry-run", action="store_true", help="print the file, write and submit nothing")
    parser.set_defaults(launch=launch)


def launch(given: argparse.Namespace, arguments: tuple[str, ...]) -> int:
    """Write the file, say where it is, and with --submit give it to Slurm."""
    job = described(given, arguments, Path.cwd())
    if given.dry_run:
        print(script(job), end="")
        return 0
    file = Path(os.path.abspath(given.file or Path(job.output_dir) / f"{job.job_name}.sh"))
    Path(job.output_dir).mkdir(parents=True, exist_ok=True)
    _write(file, script(job))
    if not given.submit:
        print(f"written: {file}\nsubmit it: sbatch {file}")
        return 0
    number = _submit(file)
    print(f"written: {file}\nsubmitted: job {number}, output {job.output_dir}/{job.job_name}_{number}.out")
    return 0


def described(given: argparse.Namespace, arguments: tuple[str, ...], folder: Path) -> SlurmJob:
    """The job that the options describe, to be run in `folder`.

    Raises:
        LaunchError: the options contradict each other, or --venv is none.
    """
    if given.nodes < 1:
        raise LaunchError(f"--nodes {given.nodes}: there must be at least one")
    per_node = given.processes_per_node or given.gpus_per_node
    if not per_node:
        raise LaunchError("say what each node runs: --gpus-per-node 4 (a process for each), or --processes-per-node 1")
    inside = given.venv or given.container
    run = LaunchSpec(
        arguments=resumed(arguments),
        processes_per_host=per_node,
        hosts=tuple(f"node {node}" for node in range(given.nodes)),
        devices_per_process=given.devices_per_process,
        program=("python" if inside else sys.executable, "-m", "openpi_train"),
    )
    options: dict[str, Any] = {field.name: getattr(given, field.name, None) for field in dataclasses.fields(SlurmJob)}
    for name in ("container_mount", "sbatch_arg", "env"):
        options[name] = tuple(options[name])
    options |= {
        "run": run,
        "job_name": given.job_name or re.sub(r"[^\w.-]+", "-", arguments[0]),
        "chdir": str(folder.absolute()),
        "output_dir": os.path.abspath(folder / given.output_dir),
        "venv": _environment_folder(given.venv, folder),
    }
    return SlurmJob(**options)


def resumed(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The same arguments with --resume: a requeued job must find its own run, and --resume starts one where none is."""
    if bad := [word for word in arguments if word in ("--overwrite", "--no-resume")]:
        raise LaunchError(
            f"{bad[0]} does not go with Slurm: a requeued job starts with the same line and would move its own run "
            "aside. Leave it out; for a new run give another --exp-name"
        )
    return arguments if "--resume" in arguments or not arguments else (*arguments, "--resume")


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether this is a task of a step, which is a process of the run, and no batch script or shell in a job."""
    return "SLURM_STEP_NODELIST" in environ and environ.get("SLURM_STEP_ID") != _INTERACTIVE_STEP


def _environment_folder(venv: Path | None, folder: Path) -> str | None:
    if venv is None:
        return None
    absolute = os.path.abspath(folder / venv)
    if not os.path.isfile(f"{absolute}/bin/activate"):
        raise LaunchError(f"--venv {venv} is no virtual environment: {absolute}/bin/activate is not there")
    return absolute


def _write(file: Path, text: str) -> None:
    """Write the file; one that is there and says something else, perhaps edited by hand, is moved aside."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and file.read_text() != text:
        aside = file.with_name(f"{file.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        file.rename(aside)
        print(f"the file that was there is now {aside}")
    file.write_text(text)
    file.chmod(0o755)


def _submit(file: Path) -> str:
    """Hand the file to sbatch; returns the job's number."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise LaunchError(f"there is no sbatch on this machine: submit {file} from a login node of the cluster")
    done = subprocess.run([sbatch, "--parsable", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"sbatch refused {file}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]  # "4711" or "4711;cluster"
