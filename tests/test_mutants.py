"""The list of deliberate mistakes fits the tree; a list that does not is refused, naming what is wrong."""

import dataclasses

import pytest
from mutants import catalogue
from mutants.catalogue import CatalogueError, Mutation

FITTING = Mutation(
    name="fold-in-dropped",
    holds=("promise 2",),
    file="openpi_train/keys.py",
    text="jax.random.fold_in(key, row)",
    replacement="key",
    tests=("tests/test_mutants.py",),
)


@pytest.mark.slow
def test_every_mutation_fits_the_tree():
    catalogue.check(catalogue.read())


def test_every_group_has_its_mutations():
    mutations = catalogue.read()
    assert not catalogue.too_few(mutations)
    assert len(mutations) >= 100


def test_groups_are_read_from_the_product():
    assert {"objective Diffusion", "optimizer Lion", "serve --tls-cert", "promise 10"} <= catalogue.groups()


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
        ({"holds": ()}, "it belongs to no group"),
        ({"holds": ("promise 11",)}, "there is no group 'promise 11'; groups are "),
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
holds = ["promise 2"]
file = "openpi_train/keys.py"
text = "a"
replacement = "b"
tests = ["tests/test_mutants.py"]
"""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (WHOLE.replace("file =", "fiel ="), r"typo\.toml, whole: keys must be file, holds, name"),
        (WHOLE.replace('text = "a"', "text = 5"), r"typo\.toml, whole: text must be text"),
        (WHOLE.replace('["promise 2"]', "[2]"), r"typo\.toml, whole: holds must be a list of texts"),
        (WHOLE.replace('["promise 2"]', '"promise 2"'), r"typo\.toml, whole: holds must be a list of texts"),
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
