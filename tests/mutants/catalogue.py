"""The kept list of deliberate mistakes: reading it, checking it, and which parts of the product it must cover.

A mutation is a table `[[mutation]]` in a TOML file of this folder:

    name         what is wrong, in a few words with hyphens; unique
    holds        the groups it belongs to, e.g. ["promise 3", "objective Diffusion"]; `GROUPS` lists them
    file         from the checkout's root
    text         what is replaced; it occurs exactly once in the file
    replacement  what stands there instead
    tests        the tests that must fail, as pytest names them; a file stands for any test in it

Read next: `__main__.py`, which runs them.
"""

import ast
import dataclasses
import functools
import importlib
import pkgutil
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent

# Every group needs at least so many mutations.
MUTATIONS_PER_GROUP = 4
SAMPLERS = ("flow", "real-time chunking", "ensembling", "ddpm", "ddim", "tokens", "text")
MODELS = ("pi0", "pi05", "pi0_fast", "paligemma", "diffusion_policy", "act", "smolvla", "language")
FORMATS = ("rlds", "lerobot", "zarr", "parquet")
CHECKPOINT_PATHS = ("save", "restore", "local tier", "start weights", "openpi", "torch")
SERVERS = ("texts",)
LAUNCHERS = ("local", "manual", "ssh", "slurm", "kubernetes", "supervisor")
MEASURES = ("texts", "gpu programs")
NUM_PROMISES = 10


class CatalogueError(Exception):
    """The list of mutations does not fit the tree; the message names every mutation that is wrong, and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutation:
    """One deliberate mistake, and the tests that must notice it."""

    name: str
    holds: tuple[str, ...]
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """The file's text with the mistake in it."""
        return source.replace(self.text, self.replacement)


@functools.cache
def groups() -> frozenset[str]:
    """Every promise, objective, sampler, model family, optimizer, data format, measure, checkpoint path, launcher
    and flag.

    Objectives, optimizers and serving flags are read from the product: a new one needs its mutations.
    """
    from openpi_train import objectives
    from openpi_train.objectives.objective import Objective
    from openpi_train.optim import OptimizerConfig
    from openpi_train.serve.request import ServeRequest

    for module in pkgutil.iter_modules(objectives.__path__):
        importlib.import_module(f"{objectives.__name__}.{module.name}")
    # As they are given: a field that is true is one that can be said no to.
    flags = [
        f"--{'no-' if field.default is True else ''}{field.name.replace('_', '-')}"
        for field in dataclasses.fields(ServeRequest)
        if field.default is not dataclasses.MISSING
    ]
    return frozenset(
        [
            *(f"promise {number}" for number in range(1, NUM_PROMISES + 1)),
            *(f"objective {cls.__name__}" for cls in _leaves(Objective) if _ours(cls)),
            *(f"sampler {name}" for name in SAMPLERS),
            *(f"model {name}" for name in MODELS),
            *(f"optimizer {cls.__name__}" for cls in _leaves(OptimizerConfig) if _ours(cls)),
            *(f"format {name}" for name in FORMATS),
            *(f"measure {name}" for name in MEASURES),
            *(f"checkpoint {name}" for name in CHECKPOINT_PATHS),
            *(f"launcher {name}" for name in LAUNCHERS),
            *(f"server {name}" for name in SERVERS),
            *(f"serve {flag}" for flag in flags),
        ]
    )


def _leaves(cls: type) -> Iterator[type]:
    yield from (leaf for derived in cls.__subclasses__() for leaf in (derived, *_leaves(derived)))


def _ours(cls: type) -> bool:
    return cls.__module__.startswith("openpi_train.")


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
    if not mutation.tests:
        yield "it names no test"
    for test in mutation.tests:
        if not _exists(test, root):
            yield f"there is no test {test}"
    if not mutation.holds:
        yield "it belongs to no group"
    for group in mutation.holds:
        if group not in groups():
            yield f"there is no group {group!r}; groups are {', '.join(sorted(groups()))}"


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


def too_few(mutations: Sequence[Mutation]) -> dict[str, int]:
    """Groups with fewer than `MUTATIONS_PER_GROUP` mutations, and how many they have."""
    counts = {group: sum(group in mutation.holds for mutation in mutations) for group in sorted(groups())}
    return {group: count for group, count in counts.items() if count < MUTATIONS_PER_GROUP}
