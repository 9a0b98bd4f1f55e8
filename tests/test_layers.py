"""The structure of the tree: who may import whom, what ships; and advice on long files."""

import ast
import re
import tomllib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "openpi_train"
# Low to high: a module imports only from strictly lower rows or from its own folder. "models" is what all families have
# in common, the files of that folder; "models/" are the folders in it, one for each family, which also exchange
# checkpoints with other projects.
ROWS = (
    {"json_object"},
    {"fields", "faults", "former_names"},
    {"types", "keys", "runtime", "launch"},
    {"command_line", "help_page", "optim", "robots", "envs"},
    {"parallel"},
    {"nn"},
    {"data", "sampling"},
    {"models"},
    {"interop"},
    {"models/"},
    {"objectives", "generation", "families"},
    {"evaluation", "checkpoints"},
    {"rl"},
    {"experiment"},
    {"choice"},
    {"registry", "planning", "elastic"},
    {"training"},
    {"policy"},
    {"tools", "serve"},
    {"doors"},
    {"experiment_flags"},
    {"train_verbs", "reproduce"},
    {"cli"},
    {"__main__"},
)
# The same within `data`: a wing imports only wings before it. An index also looks for faults when it is made.
WINGS = ("core", "formats", "tokenizers", "make", "text", "robot", "check")
ALSO = {("formats", "check")}
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py")
# Where a name of a class or a module stands for one thing.
NAMED = sorted(file for folder in (PACKAGE, ROOT / "configs") for file in folder.rglob("*.py"))
# In `doors`: what scripts start before jax may be there.
LAUNCHERS = ("posttraining_launch.py", "ript_launch.py", "vla_launch.py", "this_host.py", "guide_files.py")
# Advice: a longer file is told in pytest's summary. What is long and of one idea may stay.
LONG_FILE, LONG_LOOP = 500, 60
# How many parameters of functions have `Any` in their annotation. It only falls: what is known has a type, what is JSON
# is a `JsonObject`, a tree of arrays a `Tree`, what nobody looks into an `object`.
MOST_ANY = 207
# Parameters of these names have none: their type has a name.
TYPED = frozenset(
    "batch devices dtype is_frozen manifest mesh meta params record sharding states tokenizer trainer".split()
)


# The families of models, each of which imports only those before it: a network of its own may be made of theirs.
FAMILIES = ("language", "pi0", "paligemma", "pi0_fast", "act", "diffusion_policy", "smolvla")


def part(file: Path) -> str:
    return part_of(file.relative_to(PACKAGE).with_suffix("").parts)


def part_of(names: Sequence[str]) -> str:
    """The part of the package that a module, or something in it, belongs to, given the names of its path."""
    return "models/" if names[0] == "models" and names[1:] and names[1] in FAMILIES else names[0]


def row(name: str) -> int:
    return next(index for index, names in enumerate(ROWS) if name in names)


def imported_parts(file: Path) -> set[str]:
    """Names of the package's parts that a file imports."""
    return {part_of(name.split(".")[1:]) for name in imported_names(file) if name.startswith("openpi_train.")}


def imported_names(file: Path) -> set[str]:
    """What a file imports, anywhere in it (type-checking imports included), in full."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= set(names)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_module_imports_only_lower_rows_or_its_own_folder(file):
    own = part(file)
    others = imported_parts(file) - {own}
    if own == "launch":
        assert others <= {"faults"}, f"launch imports the standard library and the table of faults, not {others}"
        return
    if file.name in LAUNCHERS:
        assert others <= {"faults", "launch"}, f"a launcher imports what `launch` does, not {others}"
    wrong = {name for name in others if row(name) >= row(own)}
    assert not wrong, f"{own} (row {row(own)}) imports {wrong}"


def test_wings_of_the_data_import_only_those_before():
    for number, wing in enumerate(WINGS):
        found = set()
        for file in (PACKAGE / "data" / wing).rglob("*.py"):
            found |= {name.split(".")[2] for name in imported_names(file) if name.startswith("openpi_train.data.")}
        assert found <= {*WINGS[: number + 1], *(other for one, other in ALSO if one == wing)}, wing
    assert {*WINGS} == {file.relative_to(PACKAGE / "data").parts[0] for file in FILES if part(file) == "data"}


def test_families_import_only_those_before():
    for number, family in enumerate(FAMILIES):
        found = set()
        for file in (PACKAGE / "models" / family).glob("*.py"):
            found |= {name.split(".")[2] for name in imported_names(file) if name.startswith("openpi_train.models.")}
        assert not {*FAMILIES[number + 1 :]} & found, family
    assert {*FAMILIES} == {file.parent.name for file in FILES if file.is_relative_to(PACKAGE / "models")} - {"models"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_product_file_says_what_it_is(file):
    text = file.read_text()
    assert ast.get_docstring(ast.parse(text)), "no module docstring"
    lines, advised = text.count("\n"), LONG_LOOP if file == PACKAGE / "training" / "loop.py" else LONG_FILE
    if lines > advised:
        warnings.warn(f"{file.relative_to(ROOT)} has {lines} lines, {advised} are advised: one idea?", stacklevel=1)


def given_twice(places: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names among (name, place) that stand at several places, with all of them."""
    found = defaultdict(list)
    for name, place in places:
        found[name].append(place)
    return {name: all_places for name, all_places in found.items() if len(all_places) > 1}


def module_places(file: Path) -> list[tuple[str, str]]:
    return [] if file.stem in ("__init__", "__main__") else [(file.stem, str(file.relative_to(ROOT)))]


def class_places(file: Path) -> list[tuple[str, str]]:
    body = ast.parse(file.read_text()).body
    return [(node.name, f"{file.relative_to(ROOT)}:{node.lineno}") for node in body if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("places", [module_places, class_places])
def test_no_name_stands_for_two(places):
    assert not given_twice(place for file in NAMED for place in places(file))


def test_both_places_of_a_name_are_told():
    assert given_twice([("Arm", "a.py:3"), ("Hand", "a.py:9"), ("Arm", "b.py:1")]) == {"Arm": ["a.py:3", "b.py:1"]}


def vague_parameters(text: str) -> list[str]:
    """The names of the parameters, of all functions of a file, whose annotation has the word `Any`."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    given = [node for function in functions for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    return [one.arg for one in given if one.annotation and re.search(r"\bAny\b", ast.unparse(one.annotation))]


def test_parameters_have_types():
    found = {str(file.relative_to(ROOT)): vague_parameters(file.read_text()) for file in FILES}
    assert not {place: names for place, names in found.items() if TYPED & {*names}}
    assert sum(map(len, found.values())) <= MOST_ANY


def test_a_parameter_of_any_type_is_found_wherever_it_stands():
    text = "async def f(a: Any, /, b: 'list[Any]', *c: int, d: Many = 1, **e: dict[str, typing.Any]) -> Any: ..."
    assert vague_parameters(text) == ["a", "b", "e"]


def test_every_package_ships():
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(file.parent.relative_to(ROOT).parts) for file in PACKAGE.rglob("*.py")} | {
        "openpi_train_configs"
    }
    assert set(shipped) == folders


def test_configs_hold_values_only():
    for file in (ROOT / "configs").glob("*.py"):
        tree = ast.parse(file.read_text())
        code = ast.FunctionDef | ast.ClassDef | ast.Lambda
        assert not [node for node in ast.walk(tree) if isinstance(node, code)], file
        assert file.read_text().count("\n") <= 150
