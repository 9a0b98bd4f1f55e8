"""`make dist`: the wheel and the sdist of a commit in dist/, with the same bytes whenever they are made.

Files are the commit's own, and every time is that of the commit (SOURCE_DATE_EPOCH). setuptools leaves times, owners
and the order of the entries in an sdist to the machine: they are set here, and the wheel is built from that sdist. All
is built twice, in other folders and with other hashes and modes, and compared. Then `twine check --strict`, a look for
files that were forgotten, and the commands of `make train` with the wheel alone in an empty environment.

`docs/install.md` tells how to use it. Runs in an environment with constraints-dist.txt.
"""

import argparse
import gzip
import io
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What `make train` runs, but for fewer optimizer steps.
TRIAL = (
    "data prepare",
    "launch local --processes 2 -- pi0_bridge_traj_tiny --exp-name first_run --overwrite --num-train-steps 4",
)

LICENCES = ("LICENSE", "NOTICE", "uPlot.LICENSE")


class Failed(Exception):
    """What was built is not right, or could not be; the message says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check and try the distributions of HEAD. Returns 0, or 1 with a message."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for both files (%(default)s)")
    parser.add_argument("--no-trial", action="store_true", help="install nothing: needs no network")
    flags = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="openpi-train-dist-") as folder:
            made(Path(folder), flags.out.absolute(), trial=not flags.no_trial)
    except Failed as error:
        print(f"make dist: {error}", file=sys.stderr)
        return 1
    return 0


def made(folder: Path, out: Path, *, trial: bool) -> None:
    """Writes both files to `out`, if everything about them is right. Raises Failed."""
    if changed := _output(["git", "status", "--porcelain", "--untracked-files=no"], ROOT):
        raise Failed(f"these changes would not be in it; commit them, or take them back:\n{changed}")
    epoch = int(_output(["git", "show", "--no-patch", "--format=%ct", "HEAD"], ROOT))
    first, second = (built(folder / str(number), epoch, number) for number in (1, 2))
    for one, other in zip(first, second, strict=True):
        if one.read_bytes() != other.read_bytes():
            aside = out / f"{one.name}.other"
            _copy([one], out)
            shutil.copyfile(other, aside)
            raise Failed(f"{one.name} was built twice, and differs: compare {out / one.name} with {aside}")
    sdist, wheel = first
    if problem := forgotten(wheel, folder / "1" / "source") or unlicensed(sdist, wheel):
        raise Failed(problem)
    _run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], folder)
    if trial:
        tried(wheel, folder / "trial")
    _copy(first, out)
    for file in first:
        print(f"{_output(['sha256sum', file.name], out).split()[0]}  {out / file.name}")


def built(folder: Path, epoch: int, number: int) -> tuple[Path, Path]:
    """The sdist and the wheel of HEAD, with this time; `number` changes what must not matter."""
    archive, source, unpacked = folder / "commit.tar", folder / "source", folder / "sdist"
    folder.mkdir()
    modes = f"tar.umask=00{2 if number == 1 else 7}7"
    _run(["git", "-c", modes, "archive", "--format=tar", f"--output={archive}", "HEAD"], ROOT)
    shutil.unpack_archive(archive, source)
    variables = {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": str(number)}
    build = [sys.executable, "-m", "build", "--no-isolation"]
    _run([*build, "--sdist", "--outdir", str(folder), str(source)], folder, variables)
    (sdist,) = folder.glob("*.tar.gz")
    sdist.write_bytes(settled(sdist.read_bytes(), epoch))
    shutil.unpack_archive(sdist, unpacked)
    (tree,) = unpacked.iterdir()
    _run([*build, "--wheel", "--outdir", str(folder), str(tree)], folder, variables)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def settled(sdist: bytes, epoch: int) -> bytes:
    """An sdist with the same files by name, at this time, without owners, with modes 644 and 755."""
    made = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(sdist)) as given,
        gzip.GzipFile(filename="", mode="wb", fileobj=made, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for member in sorted(given.getmembers(), key=lambda member: member.name):
            if not (member.isfile() or member.isdir()):
                raise Failed(f"{member.name} is neither a file nor a folder; an sdist of links is not made here")
            entry = tarfile.TarInfo(member.name)
            entry.type, entry.size, entry.mtime = member.type, member.size, epoch
            entry.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            tar.addfile(entry, given.extractfile(member) if member.isfile() else None)
    return made.getvalue()


def forgotten(wheel: Path, source: Path) -> str:
    """What is wrong with the files in a wheel of this source: a message, empty if nothing is."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}
    return difference(names, files_of(source))


def unlicensed(sdist: Path, wheel: Path) -> str:
    """What the licence files in both lack: a message, empty if nothing is missing."""
    with tarfile.open(sdist) as tar, zipfile.ZipFile(wheel) as archive:
        held = {sdist: tar.getnames(), wheel: archive.namelist()}
    missing = [
        f"{name} is not in {file.name}"
        for name in LICENCES
        for file, names in held.items()
        if not any(held_name.rpartition("/")[2] == name for held_name in names)
    ]
    return "; ".join(missing)


def difference(shipped: Iterable[str], present: Iterable[str]) -> str:
    """A message that names the files of the packages that do not ship, or ship without being there; empty if none."""
    shipped, present = set(shipped), set(present)
    problems = []
    if missing := sorted(present - shipped):
        problems.append(
            f"{', '.join(missing)}: in a package's folder, but not in the wheel; name a new package in "
            "[tool.setuptools] packages of pyproject.toml, and what is no Python in [tool.setuptools.package-data]"
        )
    if extra := sorted(shipped - present):
        problems.append(f"{', '.join(extra)}: in the wheel, but not in a package's folder")
    return "\n".join(problems)


def files_of(source: Path) -> set[str]:
    """The files below the packages' folders, by their names in a wheel."""
    packages, folders = _packages(source)
    found = set()
    for name in (name for name in packages if "." not in name):
        top = source / folders[name]
        files = (file.relative_to(top) for file in top.rglob("*") if file.is_file())
        found |= {f"{name}/{file.as_posix()}" for file in files if "__pycache__" not in file.parts}
    return found


def shipped_files(source: Path) -> set[str]:
    """The files that pyproject.toml says a wheel has, without building one."""
    packages, folders = _packages(source)
    data: Mapping[str, list[str]] = _settings(source).get("package-data", {})
    found = set()
    for name in packages:
        patterns = ["*.py", *data.get("*", []), *data.get(name, [])]
        folder = source / folders[name]
        files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
        found |= {f"{name.replace('.', '/')}/{file.relative_to(folder).as_posix()}" for file in files}
    return found


def _packages(source: Path) -> tuple[list[str], dict[str, str]]:
    """The packages that pyproject.toml lists, and the folder of each."""
    settings = _settings(source)
    special = settings.get("package-dir", {})
    packages = list(settings["packages"])
    return packages, {name: special.get(name, name.replace(".", "/")) for name in packages}


def _settings(source: Path) -> dict[str, dict]:
    return tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def tried(wheel: Path, folder: Path) -> None:
    """Installs the wheel, with the tested versions, in an empty environment, and trains there. Raises Failed."""
    python, work = folder / "environment" / "bin" / "python", folder / "work"
    work.mkdir(parents=True)
    _run([sys.executable, "-m", "venv", str(folder / "environment")], folder)
    versions = ROOT / ("constraints.txt" if sys.version_info >= (3, 12) else "constraints-oldest.txt")
    install = ["install", "--quiet", "--disable-pip-version-check", "--constraint", str(versions)]
    _run([str(python), "-m", "pip", *install, str(wheel)], work)
    # Nothing of this checkout, nor of an earlier run.
    variables = {"OPENPI_TRAIN_HOME": str(folder / "home"), "PYTHONNOUSERSITE": "1", "JAX_PLATFORMS": "cpu"}
    where = _output([str(python), "-c", "import openpi_train; print(openpi_train.__file__)"], work)
    if not Path(where).is_relative_to(folder / "environment"):
        raise Failed(f"the empty environment imports openpi_train from {where}")
    for command in TRIAL:
        _run([str(python), "-m", "openpi_train", *shlex.split(command)], work, variables)


def _run(command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> None:
    """Runs a command; what it says is shown where it fails. New files can be read by everybody."""
    print(f"$ {shlex.join(command)}", flush=True)
    done = subprocess.run(
        command,
        cwd=folder,
        env=_environment(variables or {}),
        umask=0o022,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failed(f"{shlex.join(command)} ended with code {done.returncode}:\n{done.stdout}")


def _output(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=_environment({}), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{shlex.join(command)} ended with code {done.returncode}:\n{done.stderr}")
    return done.stdout.strip()


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's, without what would put other modules on a Python's path."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, **variables}


def _copy(files: Sequence[Path], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, out / file.name)


if __name__ == "__main__":
    sys.exit(main())
