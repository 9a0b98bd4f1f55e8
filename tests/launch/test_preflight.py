"""What a start would refuse is refused before a job waits for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openpi_train.launch import launchers, own_python, preflight
from openpi_train.launch.preflight import VARIABLE, require_start
from openpi_train.launch.spec import LaunchError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def python(tmp_path):
    """Makes a stand-in for Python that says this on stderr and ends with this code."""

    def make(code, *lines, out=""):
        file = tmp_path / "python"
        said = "\n".join(f"echo '{line}' >&2" for line in lines)
        file.write_text(f"#!/bin/sh\n{said}\necho '{out}'\nexit {code}\n")
        file.chmod(0o755)
        return str(file)

    return make


@pytest.mark.parametrize("code", [2, 3, 4, 6])
def test_what_a_start_refuses_is_refused_with_its_words(python, code):
    said = ("10:00:00 I something", "error: no dataset there", "give another")
    with pytest.raises(LaunchError) as told:
        require_start(["debug"], num_devices=1, python=python(code, *said))
    assert "--no-check" in str(told.value) and str(told.value).endswith("error: no dataset there\ngive another")
    assert told.value.exit_code == code


@pytest.mark.parametrize("code", [3, 4])
def test_files_that_only_a_container_has_are_not_missed(python, code, capsys):
    require_start(["debug"], num_devices=1, python=python(code, "error: no dataset there"), has_files=False)
    assert "not found out here: error: no dataset there" in capsys.readouterr().err
    with pytest.raises(LaunchError):
        require_start(["debug"], num_devices=1, python=python(2, "error: no such flag"), has_files=False)


def test_what_cannot_be_asked_here_is_said_and_goes_on(python, capsys):
    require_start(["debug"], num_devices=1, python=python(1, "Traceback", "RuntimeError: no device"))
    assert "not found out here: RuntimeError: no device" in capsys.readouterr().err
    require_start(["debug"], num_devices=1, python="/no/python")
    assert "not found out here: [Errno 2]" in capsys.readouterr().err
    require_start(["debug"], num_devices=1, python=python(0, out="not checked: the tokenizer"))
    assert "launch: not checked: the tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "last", ["ModuleNotFoundError: No module named tyro", "/env/bin/python: No module named openpi_train"]
)
def test_a_python_without_the_packages_is_refused(python, last):
    with pytest.raises(LaunchError, match=f"(?s){last}.*--venv"):
        require_start(["debug"], num_devices=1, python=python(1, "Traceback", last))


def test_a_launcher_of_containers_needs_no_packages(python, monkeypatch, capsys):
    monkeypatch.setattr(own_python, "_NEEDED", ("no_such_package",))
    require_start(["debug"], num_devices=1, has_files=False)
    assert "not found out here" in (said := capsys.readouterr().err) and "no_such_package" in said


def asked(*arguments, num_devices=8):
    """What the run itself answers."""
    clean = {name: value for name, value in os.environ.items() if name not in preflight.RANK_VARIABLES}
    return subprocess.run(
        [sys.executable, "-m", "openpi_train", *arguments],
        env={**clean, VARIABLE: str(num_devices), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_the_run_looks_at_what_it_can_without_its_devices_and_starts_nothing(tmp_path):
    base = ("debug", "--exp-name", "x", "--checkpoint-base-dir", str(tmp_path / "runs"))
    done = asked(*base, "--batch-size", "12")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        6,
        "error: --batch-size 12 is not a multiple of the 8 devices; try 8 or 16",
    )
    assert asked(*base, "--dataset", str(tmp_path / "nothing")).returncode == 3
    assert asked(*base).returncode == 0 and not (tmp_path / "runs").exists()


def test_by_ssh_the_host_is_asked_in_its_folder_and_with_its_variables(tmp_path, monkeypatch, capsys):
    (tmp_path / "a folder").mkdir()
    monkeypatch.setenv("RANK", "3")
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/sh\necho "error: $PWD $A $RANK $OPENPI_TRAIN_CHECK_DEVICES $JAX_PLATFORMS $*" >&2\nexit 2\n'
    )
    program.chmod(0o755)
    asked = {"python": str(program), "folder": tmp_path / "a folder", "env": {"A": "b c"}, "host": ("sh", "-c")}
    with pytest.raises(LaunchError) as told:
        require_start(["debug", "--exp-name", "x y"], num_devices=8, **asked)
    assert str(told.value).endswith(f"error: {tmp_path}/a folder b c  8 cpu -m openpi_train debug --exp-name x y")
    require_start(["debug"], num_devices=8, host=("sh", "-c", "exit 255"))  # it cannot be reached: the start says so
    assert "not found out here" in capsys.readouterr().err


def test_ssh_starts_nothing_that_would_be_refused(monkeypatch, capsys):
    def refuse(arguments, *, num_devices, host, **_):
        assert arguments[0] == "debug" and num_devices == 4 and host[-1] == "ann@node1"
        raise LaunchError("it would not start", exit_code=6)

    monkeypatch.setattr(sys.modules[launchers.Ssh.__module__], "require_start", refuse)
    words = ["ssh", "--hosts", "ann@node1,node2", "--gpus-per-node", "2", "--", "debug", "--exp-name", "x"]
    assert launchers.main(words) == 6 and capsys.readouterr().err.count("it would not start") == 1


def test_other_verbs_are_not_begun():
    done = asked("stats", "no_such_experiment")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_an_evaluation_of_no_checkpoint_is_refused(tmp_path):
    done = asked("eval", str(tmp_path / "nowhere"))
    assert (done.returncode, done.stdout) == (4, "") and "there is no such directory" in done.stderr
    assert asked("eval", str(tmp_path), "--no-such-flag", "1").returncode == 2


@pytest.mark.parametrize(
    "program", ["slurm --nodes 1 --gpus-per-node 1", "kubernetes --name a --image b --nodes 1 --gpus-per-node 1"]
)
def test_launchers_ask_and_no_check_goes_past_it(program, monkeypatch, capsys, tmp_path):
    def refuse(arguments, *, num_devices, **_):
        assert arguments[:3] == ("debug", "--exp-name", "x") and num_devices == 1
        raise LaunchError("it would not start")

    for launcher in (launchers.Slurm, launchers.Kubernetes):
        monkeypatch.setattr(sys.modules[launcher.__module__], "require_start", refuse)
    monkeypatch.chdir(tmp_path)
    run = ["--", "debug", "--exp-name", "x", "--resume"]
    assert launchers.main([*program.split(), *run]) == 2
    assert "it would not start" in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert launchers.main([*program.split(), "--dry-run", *run]) == 0
    assert launchers.main([*program.split(), "--no-check", *run]) == 0
