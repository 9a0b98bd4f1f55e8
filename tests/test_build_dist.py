"""The wheel and the sdist: nothing is forgotten, and nothing of the machine that makes them is in them."""

import io
import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

import build_dist

PYPROJECT = """[tool.setuptools]
package-dir = { robot_configs = "configs" }
packages = ["robot", "robot.arm", "robot_configs"]

[tool.setuptools.package-data]
robot = ["*.json"]
"""


@pytest.fixture
def source(tmp_path):
    """A small tree that ships whole."""
    for name in ("robot/__init__.py", "robot/sizes.json", "robot/arm/__init__.py", "configs/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    return tmp_path


def test_every_file_of_the_packages_ships():
    assert not build_dist.difference(build_dist.shipped_files(ROOT), build_dist.files_of(ROOT))


def test_a_small_tree_has_the_names_of_its_wheel(source):
    names = {"robot/__init__.py", "robot/sizes.json", "robot/arm/__init__.py", "robot_configs/__init__.py"}
    assert build_dist.files_of(source) == build_dist.shipped_files(source) == names


@pytest.mark.parametrize(
    "name", ["robot/table.npy", "robot/arm/sizes.json", "robot/hand/__init__.py", "configs/a.yaml"]
)
def test_a_forgotten_file_is_named(source, name):
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).touch()
    shipped = name.replace("configs/", "robot_configs/")
    said = build_dist.difference(build_dist.shipped_files(source), build_dist.files_of(source))
    assert said.startswith(f"{shipped}: in a package's folder, but not in the wheel; name a new package in")


def test_a_wheel_has_the_files_of_its_source_and_no_other(source, tmp_path):
    wheel = tmp_path / "robot-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*sorted(build_dist.files_of(source)), "robot-1.dist-info/METADATA"):
            archive.writestr(name, "")
    assert build_dist.forgotten(wheel, source) == ""
    (source / "robot" / "arm" / "__init__.py").unlink()
    assert build_dist.forgotten(wheel, source) == "robot/arm/__init__.py: in the wheel, but not in a package's folder"


def test_wheel_and_sdist_hold_the_licence(tmp_path):
    sdist, wheel = tmp_path / "robot-1.tar.gz", tmp_path / "robot-1-py3-none-any.whl"
    sdist.write_bytes(
        packed([(f"robot-1/{name}", 0o644, 0, 0, b"") for name in ("LICENSE", "NOTICE", "uPlot.LICENSE")])
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("robot-1.dist-info/licenses/LICENSE", "")
        archive.writestr("robot/page/uPlot.LICENSE", "")
    assert build_dist.unlicensed(sdist, wheel) == f"NOTICE is not in {wheel.name}"


def test_the_licence_is_apache_2_and_belongs_to_the_authors():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    of_others = [file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "openpi_train").rglob("*.LICENSE"))]
    assert project["license-files"] == ["LICENSE", "NOTICE", *of_others]
    assert "Apache License\n                           Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
    assert "Copyright 2026 The openpi_train authors" in (ROOT / "NOTICE").read_text()


def test_every_place_that_the_notice_names_exists():
    named = re.findall(r"\b(?:tests|openpi_train)/[\w/]+(?:\*|\.json|\.iife\.min\.js)?", (ROOT / "NOTICE").read_text())
    assert named and not [name for name in named if not list(ROOT.glob(name))]


def test_what_ships_imports_nothing_that_only_a_checkout_has():
    ours = {"benchmarks", "configs", "docs", "scripts", "tests"}
    ours |= {file.stem for folder in ("tests", "scripts") for file in (ROOT / folder).glob("*.py")}
    for file in [*(ROOT / "openpi_train").rglob("*.py"), *(ROOT / "configs").rglob("*.py")]:
        imported = re.findall(r"^ *(?:from|import) (\w+)[\w.]*(?: import|$| as)", file.read_text(), re.MULTILINE)
        assert not set(imported) & ours, file


def packed(members):
    """An sdist of (name, mode, time, owner, content), in this order; None for a folder."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, mode, time, owner, content in members:
            entry = tarfile.TarInfo(name)
            entry.mode, entry.mtime, entry.uid, entry.uname = mode, time, owner, f"user{owner}"
            if content is None:
                entry.type = tarfile.DIRTYPE
            else:
                entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content or b""))
    return made.getvalue()


def test_an_sdist_has_the_same_bytes_wherever_it_was_made(monkeypatch):
    first = [("r-1", 0o700, 5, 0, None), ("r-1/a.py", 0o640, 5.5, 0, b"a"), ("r-1/run.sh", 0o700, 5, 0, b"run")]
    other = [("r-1/run.sh", 0o755, 9, 7, b"run"), ("r-1", 0o755, 9, 7, None), ("r-1/a.py", 0o600, 9, 7, b"a")]
    settled = build_dist.settled(packed(first), 1_700_000_000)
    monkeypatch.setattr("time.time", lambda: 1e9)  # gzip and tarfile write it if they are not told otherwise
    assert build_dist.settled(packed(other), 1_700_000_000) == settled
    with tarfile.open(fileobj=io.BytesIO(settled)) as tar:
        found = [(one.name, one.mode, one.mtime, one.uid, one.uname) for one in tar.getmembers()]
        assert tar.extractfile("r-1/run.sh").read() == b"run"
    expected = [("r-1", 0o755), ("r-1/a.py", 0o644), ("r-1/run.sh", 0o755)]
    assert found == [(*one, 1_700_000_000, 0, "") for one in expected]
    assert int.from_bytes(settled[4:8], "little") == 1_700_000_000  # gzip's own time, RFC 1952


def test_an_sdist_of_links_is_refused():
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        entry = tarfile.TarInfo("r-1/link")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(entry)
    with pytest.raises(build_dist.Failed, match="r-1/link is neither a file nor a folder"):
        build_dist.settled(made.getvalue(), 0)


def test_uncommitted_changes_are_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(build_dist, "_output", lambda *_: " M README.md")
    assert build_dist.main(["--out", str(tmp_path / "dist")]) == 1
    assert "these changes would not be in it" in capsys.readouterr().err and not (tmp_path / "dist").exists()


def build_twice(monkeypatch, tmp_path, contents):
    """`main` with builds of these contents; its code and what it wrote."""

    def built(folder, epoch, number):
        folder.mkdir()
        files = folder / "robot-1.tar.gz", folder / "robot-1-py3-none-any.whl"
        for file in files:
            file.write_bytes(contents[number - 1])
        return files

    def output(command, _):
        return {"status": "", "show": "1700000000"}.get(command[1], "0 0")

    commands = []
    monkeypatch.setattr(build_dist, "built", built)
    monkeypatch.setattr(build_dist, "_output", output)
    monkeypatch.setattr(build_dist, "forgotten", lambda *_: "")
    monkeypatch.setattr(build_dist, "unlicensed", lambda *_: "")
    monkeypatch.setattr(build_dist, "_run", lambda command, *_: commands.append([str(word) for word in command]))
    code = build_dist.main(["--out", str(tmp_path / "dist"), "--no-trial"])
    return code, {file.name: file.read_bytes() for file in (tmp_path / "dist").iterdir()}, commands


def test_what_is_built_twice_with_other_bytes_is_told(monkeypatch, tmp_path, capsys):
    code, written, _ = build_twice(monkeypatch, tmp_path, (b"one", b"two"))
    assert code == 1 and "robot-1.tar.gz was built twice, and differs" in capsys.readouterr().err
    assert written == {"robot-1.tar.gz": b"one", "robot-1.tar.gz.other": b"two"}


def test_what_is_the_same_is_checked_strictly_and_written(monkeypatch, tmp_path):
    code, written, commands = build_twice(monkeypatch, tmp_path, (b"one", b"one"))
    assert code == 0 and set(written) == {"robot-1.tar.gz", "robot-1-py3-none-any.whl"}
    assert [command[1:5] for command in commands] == [["-m", "twine", "check", "--strict"]]


def test_the_trial_is_make_train_but_for_the_number_of_steps():
    recipe = (ROOT / "Makefile").read_text().partition("\ntrain:")[2].partition("\n\n")[0]
    commands = re.findall(r"^\t\$\(BIN\)/python -m openpi_train (.*)$", recipe, re.MULTILINE)
    assert [re.sub(r" --num-train-steps \d+", "", command) for command in build_dist.TRIAL] == commands


def test_the_tools_that_build_are_pinned():
    pins = (ROOT / "constraints-dist.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in pins if line and not line.startswith("#"))
    assert {"build", "setuptools", "twine"} <= set(pins)
    assert "--constraint constraints-dist.txt build setuptools twine\n" in (ROOT / "Makefile").read_text()
