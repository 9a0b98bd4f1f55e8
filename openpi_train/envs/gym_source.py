"""Gymnasium's environments by name: what makes a simulator, and what the environment says of itself.

Read next: `gym_env.py`.
"""

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.envs import maniskill
from openpi_train.envs.unattended import choose_renderer
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.own_file import import_file, told_of_file

# What the source of a task of ManiSkill begins with.
MANISKILL = "maniskill:"


@dataclasses.dataclass(frozen=True)
class GymSource:
    """Where an environment comes from.

    Args:
        name: an id that Gymnasium knows, `MODULE:ID` for one that is known once a module is imported, FILE.py:FUNCTION,
            or maniskill:ID.
        arguments: of the function, or of `gymnasium.make`, as NAME=VALUE; a value that is no Python literal is a text.
    """

    name: str
    arguments: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        """A short name of its task: the id without its namespace, or the file's name."""
        file, _, last = self.name.rpartition(":")
        return Path(file).stem if file.endswith(".py") else last.rpartition("/")[2]

    def make(self) -> Any:
        """A new simulator. It ends episodes as the task does, but not for time. Raises UsageError if there is none."""
        choose_renderer()
        given = keywords(self.arguments)
        if self.name.startswith(MANISKILL):
            return maniskill.simulator(self.name.removeprefix(MANISKILL), **given)
        file, _, function = self.name.rpartition(":")
        if file.endswith(".py"):
            self.require()
            made = getattr(import_file(Path(file), "the file of the environment"), function, None)
            if not callable(made):
                raise UsageError(f"gym:{self.name}: {file} has no function {function!r} that makes an environment")
            with told_of_file(Path(file), "the file of the environment"):
                return made(**given)
        gymnasium = _gymnasium(self.name)
        with self._told():
            # Time is counted by whoever acts, so that a longer limit than the environment's own is possible.
            return gymnasium.make(_id(self.name), max_episode_steps=-1, disable_env_checker=True, **given)

    def require(self) -> None:
        """Raise UsageError for a file, package or id that is not there."""
        file = self.name.rpartition(":")[0]
        if file.endswith(".py"):
            if not Path(file).is_file():
                raise UsageError(f"gym:{self.name}: there is no file {file} (looked in {Path.cwd()})")
            return
        package = "mani_skill" if self.name.startswith(MANISKILL) else "gymnasium"
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"gym:{self.name}: the run acts in it, and it is missing: pip install {package}")
        self.spec()

    def spec(self) -> Any:
        """What Gymnasium knows of it; None for a function of a file. Raises UsageError if it knows none."""
        if self.name.startswith(MANISKILL):
            return maniskill.spec(self.name.removeprefix(MANISKILL))
        if self.name.rpartition(":")[0].endswith(".py"):
            return None
        gymnasium = _gymnasium(self.name)
        with self._told():
            return gymnasium.spec(_id(self.name))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        import gymnasium

        try:
            yield
        except ModuleNotFoundError as error:
            raise UsageError(f"gym:{self.name}: {error}: pip install the package that has it") from error
        except gymnasium.error.Error as error:
            raise UsageError(
                f"gym:{self.name}: {error} If a package has it, give its module, too: gym:MODULE:ID"
            ) from error


def keywords(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Arguments NAME=VALUE as a dictionary. Raises UsageError for one without a name."""
    found = {}
    for one in arguments:
        name, equals, text = one.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--env.make {one}: it is NAME=VALUE, as in obs_type=pixels_agent_pos")
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found


def _gymnasium(name: str) -> Any:
    try:
        return importlib.import_module("gymnasium")
    except ImportError as error:
        raise UsageError(f"gym:{name}: Gymnasium is missing ({error}): pip install gymnasium") from error


def _id(name: str) -> str:
    """The id, after the module is imported that registers it: that before a colon, or by custom the id's namespace."""
    module, colon, own = name.rpartition(":")
    namespace = own.partition("/")[0] if "/" in own else ""
    if colon:
        importlib.import_module(module)
    elif namespace.isidentifier() and importlib.util.find_spec(namespace) is not None:
        importlib.import_module(namespace)
    return own
