"""docs/howto/check_data.md has a line, with an example, for every kind of finding in the tree."""

import ast
import re
from pathlib import Path

from openpi_train.data.check.fault_kinds import KINDS
from openpi_train.data.check.text_kinds import TEXT_KINDS

ROOT = Path(__file__).resolve().parents[3]


def rows() -> dict[str, tuple[bool, list[str]]]:
    """Of each kind on the page: whether it is marked as told at every opening, and its other cells."""
    text = (ROOT / "docs" / "howto" / "check_data.md").read_text()
    lines = [line.strip("|").split("|") for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    cells = [[cell.strip() for cell in line] for line in lines if not set(line[0]) <= set("- ")]
    return {first.removesuffix(" *"): (first.endswith(" *"), rest) for first, *rest in cells if first != "kind"}


def told_in_code() -> set[str]:
    """The kinds of all findings that are made with a literal one."""
    found = set()
    for file in (ROOT / "openpi_train").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Finding":
                given = next(word.value for word in node.keywords if word.arg == "kind")
                if isinstance(given, ast.Constant):
                    found.add(given.value)
    return found


def test_every_kind_has_a_line_with_a_sentence_and_an_example():
    page = rows()
    kinds = {name for kind in KINDS for name in kind.names} | {kind.name for kind in TEXT_KINDS} | told_in_code()
    assert {"refused", "not finite", "damaged episodes"} <= kinds
    assert kinds <= set(page)
    assert all(len(rest) == 2 and all(rest) for _, rest in page.values())


def test_the_page_marks_what_every_opening_tells():
    page = rows()
    # `languages mixed` is also a kind of texts, which have no such mark.
    told = {name: kind.at_opening for kind in KINDS for name in kind.names if name != "languages mixed"}
    assert {name: page[name][0] for name in told} == told
