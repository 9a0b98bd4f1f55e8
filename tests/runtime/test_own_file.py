"""A file of the user's that fails is told with its line, and not with our own frames."""

import re

import pytest

from openpi_train import cli
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.own_file import import_file, told_of_file


def written(folder, name, text):
    (folder / f"{name}.py").write_text(text)
    return folder / f"{name}.py"


@pytest.mark.parametrize(
    ("name", "text", "line", "last"),
    [
        ("fails_by_key", "table = {}\nx = table['b']\n", 2, "KeyError: 'b'"),
        ("fails_by_package", "import some_robot_sdk\n", 1, "ModuleNotFoundError: No module named 'some_robot_sdk'"),
        ("fails_by_value", "\n\nx = int('four')\n", 3, "ValueError: invalid literal"),
        ("fails_by_file", "open('/nowhere/at/all')\n", 1, "FileNotFoundError: "),
        ("fails_deep", "def f(n):\n    return f(n - 1) if n else 1 / 0\nf(50)\n", 3, "ZeroDivisionError: "),
        ("ends_itself", "import sys\nsys.exit('usage: ...')\n", 2, "begin what it runs with if __name__ == "),
    ],
)
def test_a_file_that_cannot_be_run_is_told_with_its_line(tmp_path, name, text, line, last):
    file = written(tmp_path, name, text)
    with pytest.raises(UsageError) as caught:
        import_file(file, "experiment file")
    told = str(caught.value)
    assert told.startswith(f'experiment file {file} fails at line {line}:\n  File "{file}", line {line}')
    assert last in told.splitlines()[-1] and "importlib" not in told and len(told.splitlines()) < 25


def test_what_the_file_imports_is_in_the_traceback(tmp_path):
    written(tmp_path, "imported_by_it", "x = 1 / 0\n")
    file = written(tmp_path, "imports_another", "import imported_by_it\n")
    with pytest.raises(UsageError, match=r"imports_another\.py fails at line 1:\n(.*\n)+.*imported_by_it\.py"):
        import_file(file, "experiment file")


def test_what_is_not_the_files_doing_stays_as_it_is(tmp_path):
    with pytest.raises(ZeroDivisionError), told_of_file(written(tmp_path, "innocent", ""), "the file"):
        raise ZeroDivisionError


def test_the_command_line_tells_it_as_a_mistake_of_the_users(tmp_path, capsys):
    file = written(tmp_path, "fails_in_a_command", "x = [][0]\n")
    for words in ([f"{file}:x", "--exp-name", "x"], ["data", "check", f"{file}:x"]):
        assert cli.run(words) == 2
        assert re.match(rf"error: experiment file {file} fails at line 1:", capsys.readouterr().err)


def test_a_program_without_the_name_of_an_experiment_is_not_run(tmp_path, capsys):
    file = written(tmp_path, "any_program", f"open({str(tmp_path / 'made')!r}, 'w')\n")
    assert cli.run(["data", "check", str(file)]) == 2
    assert "give the experiment as file.py:name" in capsys.readouterr().err and not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"a\0b = 1", b"\xff\xfe = 1"])
def test_a_file_that_is_no_text_is_told_by_its_name(tmp_path, capsys, content):
    file = tmp_path / f"no_text_{len(content)}.py"
    file.write_bytes(content)
    assert cli.run([f"{file}:mine", "--exp-name", "x"]) == 2
    said = capsys.readouterr().err
    assert f"error: {file}" in said and "None" not in said
