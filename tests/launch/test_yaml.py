import random
import string

import pytest
import yaml

from openpi_train.launch.yaml import dump_all

LETTERS = string.printable + "é\x85\u2028\ufeff\x00\x7f😀"
TRAPS = ["", "yes", "No", "on", "null", "~", "1e3", "0x1f", "1:30", "=", "<<", "-", "- a", "a: b", "#", "2001-01-01"]
TRAPS += [
    ".5",
    "NaN",
    "a/b",
    "1_000",
    "&a",
    "*a",
    "!a",
    "%a",
    "@a",
    "a #b",
    "a:",
    "'",
    '"',
    "\\",
    "None",
    "-1",
    "|",
    ">",
]


def made_up(chance: random.Random, depth: int = 0):
    """A nested value of every kind that is written, with texts that YAML readers are known to misread."""

    def text():
        return "".join(chance.choice(LETTERS) for _ in range(chance.randrange(6)))

    kind = chance.randrange(7 if depth < 4 else 4)
    if kind == 4:
        return [made_up(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind > 4:
        return {chance.choice([text(), *TRAPS]): made_up(chance, depth + 1) for _ in range(chance.randrange(4))}
    return [text(), chance.choice(TRAPS), chance.randrange(-(10**12), 10**12), chance.choice([True, False])][kind]


@pytest.mark.parametrize("seed", range(300))
def test_another_reader_gets_the_same_values(seed):
    chance = random.Random(seed)
    documents = [made_up(chance) for _ in range(chance.randrange(1, 4))]
    assert list(yaml.safe_load_all(dump_all(documents))) == documents


def test_it_looks_as_people_write_it():
    value = {
        "kind": "Job",
        "spec": {"completions": 2, "args": ["--resume", "x"], "rules": [{"a": 1, "b": "2"}], "e": {}},
    }
    assert dump_all([value, {"on": True}]) == (
        'kind: Job\nspec:\n  completions: 2\n  args:\n  - "--resume"\n  - x\n  rules:\n  - a: 1\n    b: "2"\n  e: {}\n'
        '---\n"on": true\n'
    )


def test_what_no_manifest_holds_is_not_written():
    with pytest.raises(AssertionError, match="float is not written"):
        dump_all([{"share": 0.5}])
