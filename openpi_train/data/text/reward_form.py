"""How a reward function, or a score, of the user's is called, by the names of its parameters.

    f(prompt, completion, reference) -> number or None            once for each completion
    f(completions, **kwargs) -> list of numbers and None          once for all completions of a prompt

The second is the form of TRL's `GRPOTrainer` (trl 1.16, `_calculate_rewards`): arguments are given by name, each a list
with one entry for each completion: `prompts`, `completions`, `completion_ids`, and the columns of the dataset. Here a
call has the completions of one prompt, so that a reward may compare them, on any number of processes; and a function
gets only what it names, all columns with `**kwargs`. Must not import jax. Read next: `answer_scores.py`,
`rl/rewards/function_reward.py`.
"""

import ast
import dataclasses
import inspect
from collections.abc import Collection
from typing import Any

from openpi_train.json_object import JsonObject

# What is given beside columns of the dataset.
GIVEN = ("prompts", "completions", "completion_ids")
# Columns of the dataset that TRL does not give.
_NOT_GIVEN = ("prompt", "completion")
# What TRL's trainer gives of itself.
_OF_TRL = ("trainer_state", "log_extra", "log_metric", "environments")
NEEDED = (
    "needed is (prompt, completion, reference), which returns a number or None; or TRL's form, (completions, "
    "**kwargs), which returns a list of them, and may name prompts, completion_ids and columns of the dataset"
)


@dataclasses.dataclass(frozen=True)
class TrlForm:
    """The parameters of a function of TRL's form: all by name, those without a default, and whether it takes others."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_all: bool

    def problem(self, columns: Collection[str]) -> str | None:
        """Why a dataset with these columns does not do."""
        lacking = [name for name in self.required if name not in GIVEN]
        if own := [name for name in lacking if name in _OF_TRL]:
            return (
                f"it takes {', '.join(own)} of TRL's trainer, which is not here: give a default, such as {own[0]}=None"
            )
        if lacking := [name for name in lacking if name not in columns or name in _NOT_GIVEN]:
            there = ", ".join(sorted(columns))
            return f"it takes {', '.join(lacking)}, and the dataset has no such column: it has {there}"
        return None

    def arguments(self, given: JsonObject, columns: JsonObject) -> dict[str, Any]:
        """What it is called with: of `given` (named as `GIVEN`) and of columns what it takes."""
        others = {name: value for name, value in columns.items() if name not in (*GIVEN, *_NOT_GIVEN)}
        return {name: value for name, value in {**others, **given}.items() if self.takes_all or name in self.names}


def form_of(signature: inspect.Signature) -> TrlForm | None:
    """TRL's form, or None for a function of (prompt, completion, reference). Raises ValueError if it is neither."""
    parameters = signature.parameters.values()
    by_name = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    names = tuple(one.name for one in by_name)
    try:
        signature.bind("", "", "")
    except TypeError as error:
        if "completions" not in names and not takes_all:
            raise ValueError(f"{error}; {NEEDED}") from None
        if alone := [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY and one.default is one.empty]:
            raise ValueError(f"{', '.join(alone)} cannot be given by name; {NEEDED}") from None
    else:
        if "completions" not in names:
            return None
    return TrlForm(names, tuple(one.name for one in by_name if one.default is one.empty), takes_all)


def signature_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature | None:
    """The signature of a function that is not run; None where decorators may change it. Every default is None."""
    if function.decorator_list:
        return None
    given, kind = function.args, inspect.Parameter
    positional = [(one.arg, kind.POSITIONAL_ONLY) for one in given.posonlyargs]
    positional += [(one.arg, kind.POSITIONAL_OR_KEYWORD) for one in given.args]
    first_default = len(positional) - len(given.defaults)
    found = [
        kind(name, how, default=kind.empty if number < first_default else None)
        for number, (name, how) in enumerate(positional)
    ]
    found += [kind(given.vararg.arg, kind.VAR_POSITIONAL)] if given.vararg else []
    found += [
        kind(one.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None)
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    found += [kind(given.kwarg.arg, kind.VAR_KEYWORD)] if given.kwarg else []
    return inspect.Signature(found)
