"""The list of deliberate mistakes fits the tree; a list that does not is refused, naming what is wrong."""

import dataclasses

import pytest
from mutants import catalogue, generated
from mutants.catalogue import CatalogueError, Mutation

FITTING = Mutation(
    name="fold-in-dropped",
    story="All rows share one noise.",
    file="openpi_train/keys.py",
    text="jax.random.fold_in(key, row)",
    replacement="key",
    tests=("tests/test_mutants.py",),
)


def test_every_mutation_fits_the_tree():
    catalogue.check(catalogue.read())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "fold_in"}, "its text occurs 4 times in openpi_train/keys.py; it must occur once: 'fold_in'"),
        ({"text": "fold_out"}, "its text occurs 0 times"),
        ({"file": "openpi_train/kees.py"}, "there is no file openpi_train/kees.py"),
        ({"replacement": "key if"}, "is not Python"),
        ({"replacement": "(jax.random.fold_in(key, row))"}, "does not change what openpi_train/keys.py does"),
        ({"tests": ()}, "it names no test"),
        ({"tests": ("tests/test_keys.py",)}, "there is no test tests/test_keys.py"),
        ({"tests": ("tests/test_mutants.py::test_nothing",)}, "there is no test tests/test_mutants.py::test_nothing"),
        ({"story": " "}, "it tells no story"),
    ],
)
def test_a_mutation_that_does_not_fit_is_named(changes, message):
    catalogue.check([FITTING])
    with pytest.raises(CatalogueError) as caught:
        catalogue.check([dataclasses.replace(FITTING, **changes)])
    assert str(caught.value).startswith("fold-in-dropped: ") and message in str(caught.value)


def test_a_name_given_twice_is_refused():
    with pytest.raises(CatalogueError, match="fold-in-dropped: the name is given 2 times"):
        catalogue.check([FITTING, FITTING])


WHOLE = """[[mutation]]
name = "whole"
story = "All rows share one noise."
file = "openpi_train/keys.py"
text = "a"
replacement = "b"
tests = ["tests/test_mutants.py"]
"""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (WHOLE.replace("file =", "fiel ="), r"typo\.toml, whole: keys must be file, name, replacement, story"),
        (WHOLE.replace('text = "a"', "text = 5"), r"typo\.toml, whole: text must be text"),
        (WHOLE.replace('["tests/test_mutants.py"]', "[2]"), r"typo\.toml, whole: tests must be a list of texts"),
        (WHOLE.replace('["tests/test_mutants.py"]', '"a"'), r"typo\.toml, whole: tests must be a list of texts"),
        (WHOLE.replace("[[mutation]]", "[[mutations]]"), r"typo\.toml has mutations; it must have \[\[mutation\]\]"),
        ("", r"typo\.toml has nothing"),
        (WHOLE + "text", r"typo\.toml is no TOML: "),
    ],
)
def test_what_is_no_table_of_a_mutation_is_refused(tmp_path, content, message):
    file = tmp_path / "typo.toml"
    file.write_text(WHOLE)
    assert [mutation.name for mutation in catalogue.read([file])] == ["whole"]
    file.write_text(content)
    with pytest.raises(CatalogueError, match=message):
        catalogue.read([file])


SOURCE = """
import os
def f(a: int = 3, *, loud: bool = False) -> bool:
    \"\"\"Docstrings, texts + texts, annotations and log lines have no mistakes: 1 < 2.\"\"\"
    logger.info("%d", 4)
    a += 1
    print("ä", a * 2)
    return a < 5 and not loud
"""


def test_small_mistakes_are_made_of_every_operator_constant_and_statement():
    made = generated.small_mistakes("f.py", SOURCE, set(range(20)), ["tests/test_f.py"])
    assert {(mistake.line, mistake.before, mistake.after) for mistake in made} == {
        (3, "3", "(4)"),
        (3, "False", "True"),
        (6, "a += 1", "pass"),
        (6, "1", "(2)"),
        (7, 'print("ä", a * 2)', "pass"),
        (7, "a * 2", "(a / 2)"),
        (7, "2", "(3)"),
        (8, "return a < 5 and not loud", "return None"),
        (8, "a < 5 and not loud", "(a < 5 or not loud)"),
        (8, "a < 5", "(a <= 5)"),
        (8, "5", "(6)"),
        (8, "not loud", "(loud)"),
    }


def test_a_small_mistake_changes_its_place_alone_and_only_on_the_given_lines():
    (product,) = [
        mistake
        for mistake in generated.small_mistakes("f.py", SOURCE, {7}, ["tests/test_f.py"])
        if mistake.before == "a * 2"
    ]
    assert product.applied(SOURCE) == SOURCE.replace("a * 2", "(a / 2)")
    assert product.name == "f.py:7  a * 2  ->  (a / 2)"


def test_the_mirror_of_a_file_and_those_that_import_it_are_its_tests():
    tests = generated.mirrors("openpi_train/training/crash_loop.py")
    assert "tests/runs/test_crash_loop.py" in tests
    assert generated.mirrors("openpi_train/runtime/agree.py")[0] == "tests/runtime/test_agree.py"
