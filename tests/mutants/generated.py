"""Small mistakes made from the syntax tree of what has changed since a commit, for `--since`.

A mistake changes one operator, comparison or constant, or drops one statement. Left alone is what no test should look
at: docstrings, annotations, texts, log lines. The tests that must notice it are those that mirror the file, and those
that import it. Not every mistake can be noticed (some change nothing that counts), so those that survive are listed to
be read. Read next: `__main__.py`, which tries them.
"""

import ast
import copy
import dataclasses
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from .catalogue import ROOT

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
# A file that many tests import would take minutes for each mistake.
_MOST_OTHERS = 4
_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
_LOGGED = re.compile(r"(logger|logging|warnings)\.\w+\(")


@dataclasses.dataclass(frozen=True)
class SmallMistake:
    """One change of one node; `line` is where it stands in the file, from 1."""

    file: str
    line: int
    before: str
    after: str
    start: int  # place in the file's bytes
    end: int
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """Where it is, and what becomes of the code there."""
        return f"{self.file}:{self.line}  {_short(self.before)}  ->  {_short(self.after)}"

    def applied(self, source: str) -> str:
        """The file's text with the mistake in it."""
        data = source.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()


def since(commit: str, most: int, seed: int) -> list[SmallMistake]:
    """At most so many mistakes, drawn evenly, of lines of the product that differ from those of the commit."""
    found = [
        mistake
        for file, lines in _changed(commit).items()
        if (tests := mirrors(file))
        for mistake in small_mistakes(file, (ROOT / file).read_text(encoding="utf-8"), lines, tests)
    ]
    drawn = random.Random(seed).sample(found, min(most, len(found)))
    return sorted(drawn, key=lambda mistake: (mistake.file, mistake.start))


def _changed(commit: str) -> dict[str, set[int]]:
    """Numbers of the new lines of each file of the product, compared with the working tree."""
    named = _git("diff", "--name-only", "--diff-filter=AMR", commit, "--", "openpi_train/*.py").split()
    found = {}
    for file in named:
        hunks = _HUNK.findall(_git("diff", "--unified=0", commit, "--", file))
        found[file] = {int(first) + offset for first, count in hunks for offset in range(int(count or 1))}
    return found


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def mirrors(file: str) -> tuple[str, ...]:
    """The test files that mirror a file of the product by their name, and some that import it, short ones first."""
    path = Path(file)
    module = ".".join(path.with_suffix("").parts)
    imported = re.compile(
        rf"^\s*(import {re.escape(module)}\b|from {re.escape(module)} import"
        rf"|from {re.escape(module.rpartition('.')[0])} import .*\b{path.stem}\b)",
        re.MULTILINE,
    )
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    named = [test for test in tests if test.stem == f"test_{path.stem}"]  # names are unique in the tree
    importing = [test for test in tests if test not in named and imported.search(test.read_text(encoding="utf-8"))]
    importing.sort(key=lambda test: (test.parent.name != path.parent.name, test.stat().st_size))
    return tuple(str(test.relative_to(ROOT)) for test in [*named, *importing[:_MOST_OTHERS]])


def small_mistakes(file: str, source: str, lines: set[int], tests: Sequence[str]) -> Iterator[SmallMistake]:
    """Every small mistake on these lines of a file."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, changed in _mistaken(ast.parse(source)):
        if node.lineno in lines:
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            before = source.encode()[start:end].decode()
            yield SmallMistake(file, node.lineno, before, changed, start, end, tuple(tests))


def _mistaken(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Nodes below this one, each with the code that takes its place."""
    if isinstance(node, ast.expr | ast.stmt):
        if _is_left_alone(node):
            return
        for other in _variants(node):
            yield node, other
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _mistaken(child)


def _is_left_alone(node: ast.expr | ast.stmt) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Raise | ast.Assert):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _LOGGED.match(ast.unparse(node)) is not None
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _variants(node: ast.expr | ast.stmt) -> Iterator[str]:
    """The code of each small mistake in this very node."""
    match node:
        case ast.Compare(ops=[operator]):
            yield _unparsed(node, ops=[COMPARISONS[type(operator)]()])
        case ast.BinOp(op=operator) if type(operator) in OPERATORS and not _is_text(node):
            yield _unparsed(node, op=OPERATORS[type(operator)]())
        case ast.BoolOp(op=operator):
            yield _unparsed(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield f"({value + 1})"
        case ast.Constant(value=float(value)):
            yield f"({value * 2 + 1})"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield "pass"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return None"
        case ast.Continue():
            yield "break"
        case ast.Break():
            yield "continue"
        case ast.IfExp():
            yield _unparsed(node, body=node.orelse, orelse=node.body)


def _unparsed(node: ast.expr, **changes: object) -> str:
    changed = copy.deepcopy(node)
    for name, value in changes.items():
        setattr(changed, name, value)
    return f"({ast.unparse(changed)})"


def _is_text(node: ast.BinOp) -> bool:
    """Whether this puts texts together."""
    parts = [part for part in ast.walk(node) if isinstance(part, ast.Constant | ast.JoinedStr)]
    return any(isinstance(part, ast.JoinedStr) or isinstance(part.value, str | bytes) for part in parts)


def _short(code: str) -> str:
    words = " ".join(code.split())
    return words if len(words) <= 60 else f"{words[:57]}..."
