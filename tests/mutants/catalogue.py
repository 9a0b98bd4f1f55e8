"""The kept list of deliberate mistakes, each with what it would cost a user: reading it, and checking it.

A mutation is a table `[[mutation]]` in a TOML file of this folder:

    name         what is wrong, in a few words with hyphens; unique
    story        what a user would meet, in a sentence
    file         from the checkout's root
    text         what is replaced; it occurs exactly once in the file
    replacement  what stands there instead
    tests        the tests that must fail, as pytest names them; a file stands for any test in it

A mistake without a story worth telling is none for this list: `generated.py` makes the small ones.
Read next: `__main__.py`, which runs them.
"""

import ast
import dataclasses
import functools
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent


class CatalogueError(Exception):
    """The list of mutations does not fit the tree; the message names every mutation that is wrong, and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutation:
    """One deliberate mistake, and the tests that must notice it."""

    name: str
    story: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """The file's text with the mistake in it."""
        return source.replace(self.text, self.replacement)


def read(files: Iterable[Path] | None = None) -> list[Mutation]:
    """All mutations, in the order of their files' names. Raises CatalogueError for what is no table of a mutation."""
    mutations, wrong = [], []
    types = {field.name: field.type for field in dataclasses.fields(Mutation)}
    for file in sorted(FOLDER.glob("*.toml")) if files is None else files:
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            wrong.append(f"{file.name} is no TOML: {error}")
            continue
        if content.keys() != {"mutation"}:
            wrong.append(f"{file.name} has {', '.join(sorted(content)) or 'nothing'}; it must have [[mutation]] alone")
            continue
        for table in content["mutation"]:
            where = f"{file.name}, {table.get('name', 'no name')}"
            if table.keys() != types.keys():
                wrong.append(f"{where}: keys must be {', '.join(sorted(types))}")
                continue
            values = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
            bad = [key for key, value in values.items() if not _is_of(value, types[key])]
            wrong += [f"{where}: {key} must be {'text' if types[key] is str else 'a list of texts'}" for key in bad]
            if not bad:
                mutations.append(Mutation(**values))
    if wrong:
        raise CatalogueError("\n".join(wrong))
    return mutations


def _is_of(value: Any, kind: Any) -> bool:
    if kind is str:
        return isinstance(value, str)
    return isinstance(value, tuple) and all(isinstance(one, str) for one in value)


def check(mutations: Sequence[Mutation], root: Path = ROOT) -> None:
    """Raises CatalogueError where a mutation could not be applied, changes nothing, or names a test that is none."""
    names = [mutation.name for mutation in mutations]
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    wrong = [f"{name}: the name is given {names.count(name)} times" for name in repeated]
    for mutation in mutations:
        wrong += [f"{mutation.name}: {problem}" for problem in _problems(mutation, root)]
    if wrong:
        raise CatalogueError("\n".join(wrong))


def _problems(mutation: Mutation, root: Path) -> Iterator[str]:
    file = root / mutation.file
    if not file.is_file():
        yield f"there is no file {mutation.file}"
        return
    source = file.read_text(encoding="utf-8")
    if (count := source.count(mutation.text)) != 1:
        yield f"its text occurs {count} times in {mutation.file}; it must occur once: {mutation.text!r}"
    elif mutation.file.endswith(".py"):
        try:
            changed = ast.parse(mutation.applied(source))
        except SyntaxError as error:
            yield f"with its replacement {mutation.file} is not Python: {error}"
        else:
            if ast.dump(changed) == ast.dump(ast.parse(source)):
                yield f"its replacement does not change what {mutation.file} does"
    if not mutation.story.strip():
        yield "it tells no story"
    if not mutation.tests:
        yield "it names no test"
    for test in mutation.tests:
        if not _exists(test, root):
            yield f"there is no test {test}"


def _exists(test: str, root: Path) -> bool:
    """Whether a test of this name is written down; its parameters are only known to pytest."""
    file, _, function = test.partition("[")[0].partition("::")
    path = root / file
    if not file.startswith("tests/") or not path.is_file():
        return False
    return not function or function in _functions(path)


@functools.cache
def _functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
