"""Find experiments by name in `configs/`, or as `file.py:name`. Listing parses the files without running them.

An experiment is a top-level assignment in a config file; the string below it is its description:

    pi0_bridge_traj = Experiment(model=..., ...)
    '''Full pi0 on BridgeData V2. Command, hardware, time, result.'''

Several that differ in one value may share an assignment, `a, b = (... for ...)`, and the description, in which NAME
stands for the name of each.
"""

import ast
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openpi_train.runtime.own_file import import_file

if TYPE_CHECKING:
    from openpi_train.data.core.source import SourceConfig
    from openpi_train.experiment import Experiment

logger = logging.getLogger(__name__)

CONFIGS = "openpi_train_configs"
# The file whose experiments stand first.
_FIRST = "own_data"
# The word that each experiment was loaded by, by the experiment's name.
_TYPED: dict[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One named experiment: its file and description."""

    name: str
    file: Path
    description: str

    @property
    def summary(self) -> str:
        """The description's first sentence, in one line."""
        paragraph = " ".join(self.description.strip().split("\n\n")[0].split())
        return re.split(r"(?<=[^.]\.) (?=[A-Z])", paragraph)[0]


class UnknownName(ValueError):
    """An unknown name; the message gives the closest ones."""


def entries() -> dict[str, Entry]:
    """Every experiment in `configs/`, by name, in file order; those for one's own data first."""
    found: dict[str, Entry] = {}
    for file in sorted(_configs_directory().glob("*.py"), key=lambda file: (file.stem != _FIRST, file)):
        for entry in read_entries(file):
            if entry.name in found:
                raise ValueError(f"experiment {entry.name!r} is defined twice: in {found[entry.name].file} and {file}")
            found[entry.name] = entry
    return found


def title(file: Path) -> str:
    """What a config file's experiments are: the first line of its description, up to the colon or full stop."""
    first = (ast.get_docstring(ast.parse(file.read_text())) or file.stem).splitlines()[0]
    return re.split(r"[:.(](?: |$)| \(", first)[0]


def read_entries(file: Path) -> list[Entry]:
    """The described top-level assignments of a config file. The file is parsed, not run.

    Raises ValueError if it does not parse.
    """
    return list(_entries_of(file, file.read_text()))


@functools.cache
def _entries_of(file: Path, text: str) -> tuple[Entry, ...]:
    try:
        body = ast.parse(text, filename=str(file)).body
    except SyntaxError as error:
        line = "" if error.lineno is None else f" line {error.lineno}"
        raise ValueError(f"{file}{line} does not parse: {error.msg}") from error
    result = []
    for node, following in zip(body, [*body[1:], None], strict=True):
        match node, following:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str() as text)):
                result.append(Entry(name, file, text))
            case ast.Assign(targets=[ast.Tuple(elts=names)]), ast.Expr(value=ast.Constant(value=str() as text)):
                known = [one.id for one in names if isinstance(one, ast.Name)]
                result += [Entry(name, file, text.replace("NAME", name)) for name in known]
    return tuple(result)


def load(name: str, on: "Callable[[SourceConfig], SourceConfig] | None" = None, any_dims: bool = False) -> "Experiment":
    """The experiment of this name, or of `path/to/file.py:name`.

    If the name stands for several (`choice.py`), returns the one for their dataset, after applying `on`; with
    `any_dims` the first of them, which has the fields of all, under the given name.

    Raises UnknownName with the closest names, FileNotFoundError, DataError if no experiment fits the dataset, or
    ValueError if it is not an Experiment.
    """
    from openpi_train.choice import ByActionDim
    from openpi_train.experiment import Experiment

    module, experiment, short = _found(name)
    if isinstance(experiment, ByActionDim):
        if any_dims:
            return dataclasses.replace(next(iter(experiment.experiments.values())), name=short)
        dims, chosen = experiment.choose(name, on)
        names = [key for key, value in vars(module).items() if value is chosen]
        short = names[0] if names else f"{short}_{dims}"
        logger.info("%s: the dataset has %d action dims, so this is %s", name, dims, short)
        experiment = chosen
    if not isinstance(experiment, Experiment):
        raise ValueError(f"{name!r} is a {type(experiment).__name__}, not an Experiment")
    _TYPED[short] = name
    return dataclasses.replace(experiment, name=short)


def typed(name: str) -> str:
    """The word that a command line has for the experiment `name` that was loaded last: itself, or `file.py:name`."""
    return _TYPED.get(name, name)


def _found(name: str) -> tuple[Any, Any, str]:
    """The module, what it has under this name, and the name in it."""
    if ".py" in name:
        file, _, attribute = name.partition(":")
        _configs_package()  # the file may build upon `openpi_train_configs`
        # A file alone may be any program: it is not run.
        module = import_file(Path(file), "experiment file") if attribute or not Path(file).is_file() else None
        experiment = getattr(module, attribute, None)
        if experiment is None:
            names = ", ".join(entry.name for entry in read_entries(Path(file))) or "none with a description below it"
            raise UnknownName(f"{name!r}: give the experiment as file.py:name; {file} has {names}")
        short = attribute
    else:
        known = entries()
        if name not in known:
            raise UnknownName(unknown(name, known, "experiment"))
        module = importlib.import_module(f"{_configs_package()}.{known[name].file.stem}")
        experiment, short = getattr(module, name), name
    return module, experiment, short


def alternatives(name: str) -> list[str]:
    """The experiments that a name stands for, as file.py:name; none if it stands for itself, or is unknown."""
    from openpi_train.choice import ByActionDim

    if ".py" not in name and name not in entries():
        return []
    module, experiment, _ = _found(name)
    if not isinstance(experiment, ByActionDim):
        return []
    several = list(experiment.experiments.values())
    return [f"{module.__file__}:{key}" for key, value in vars(module).items() if any(value is one for one in several)]


def of_other_dims(name: str) -> dict[int, str]:
    """The experiments among which a dataset's action dims choose (`ByActionDim`), by these dims, if `name` is one of
    them: the words that a command line has for them; else none.
    """
    from openpi_train.choice import ByActionDim

    try:
        module, experiment, short = _found(name)
    except UnknownName:  # built by a door
        return {}
    names = {id(value): key for key, value in vars(module).items()}
    for choice in vars(module).values():
        if isinstance(choice, ByActionDim) and any(one is experiment for one in choice.experiments.values()):
            file = name.removesuffix(short)
            return {dims: file + names[id(one)] for dims, one in choice.experiments.items() if id(one) in names}
    return {}


def description(name: str) -> str:
    """The description of an experiment; empty if it has none."""
    if ".py" in name:
        file, _, attribute = name.partition(":")
        return next((entry.description for entry in read_entries(Path(file)) if entry.name == attribute), "")
    return entries()[name].description


def unknown(name: str, known, what: str) -> str:
    """The message for an unknown name: the closest names, or what a flag or a folder in its place is given to."""
    if name.startswith("-"):
        return (
            f"{name} stands where the {what} does: name that first, its flags follow (all: python -m openpi_train "
            "list). YAML configs of other tools are given to posttrain, ript and vla (docs/reference/cli.md)"
        )
    if Path(name).is_dir():
        return (
            f"{name} is a folder, and needed is the name of an {what}. The folder of a run is given to eval, serve, "
            "convert, report and runs, that of a dataset to an experiment, with --dataset"
        )
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    guess = f"; did you mean {' or '.join(close)}?" if close else ", and no folder of that name here"
    return f"unknown {what} {name!r}{guess} (all: python -m openpi_train list)"


def _configs_directory() -> Path:
    spec = importlib.util.find_spec(_configs_package())
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def _configs_package() -> str:
    """`openpi_train_configs` if the project is installed, else the checkout's `configs/` under that name."""
    if CONFIGS not in sys.modules and importlib.util.find_spec(CONFIGS) is None:
        init = Path(__file__).resolve().parent.parent / "configs" / "__init__.py"
        spec = importlib.util.spec_from_file_location(CONFIGS, init, submodule_search_locations=[str(init.parent)])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[CONFIGS] = module
        spec.loader.exec_module(module)
    return CONFIGS
