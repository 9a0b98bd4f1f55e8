"""Translation between openpi's `train_state` item and our training state: the same leaves under other names.

    step                              the number of updates
    opt_state/1/0/mu/<parameter>      optax's structure; a moment's name ends with that of a trained parameter
    params/<parameter>                all parameters, if the `params` item holds their average (EMA); else nothing

Ours differs in three ways: parameters have our paths; only trained ones are stored in addition to their average; it has
a float16 run's loss scale, which openpi lacks. `names` maps our path to the published name for all parameters.
Read next: `openpi.py`, `training/checkpoints/layout.py`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from openpi_train.interop.stored_leaves import Leaves, Stored, StoredLeaf
from openpi_train.nn.params import nested_params
from openpi_train.runtime.exits import CheckpointError

_PARAMS = "params/"


def published_state(ours: Leaves, params: Leaves, names: Mapping[str, str]) -> Leaves:
    """Our `train_state` leaves converted to openpi's; `params` are the published parameters beside them."""
    found = {_renamed(name, names): leaf for name, leaf in ours.items()}
    if any(name.startswith(_PARAMS) for name in found):  # an average: the frozen ones are in both
        found |= {f"{_PARAMS}{name}": leaf for name, leaf in params.items() if f"{_PARAMS}{name}" not in found}
    return found


def our_items(stored: Stored, names: Mapping[str, str]) -> tuple[Leaves, Leaves]:
    """The `params` and `train_state` items of our checkpoint with the content of `stored`.

    Our frozen parameters have one value. openpi averages them too, which may round them: the value used in training is
    kept. Raises CheckpointError if the checkpoint was made for inference alone.
    """
    if stored.train_state is None:
        raise CheckpointError(
            f"{stored.where} has no train_state: it was published for inference. To load only its parameters, omit "
            "--weight-loader.continue-training"
        )
    published = set(names.values())
    trained = {_parameter(name, published) for name in stored.train_state if not name.startswith(_PARAMS)}
    params, state = dict(stored.params), {}
    for name, leaf in stored.train_state.items():
        copied = name.removeprefix(_PARAMS) if name.startswith(_PARAMS) else None
        if copied in published and copied not in trained:
            params[copied] = leaf
        else:
            state[name] = leaf
    paths = {public: path for path, public in names.items()}
    return params, {_renamed(name, paths): leaf for name, leaf in state.items()}


def state_leaves(stored: Stored, names: Mapping[str, str]) -> dict[str, StoredLeaf]:
    """Every leaf of the training state under our names: `step`, `params/<path>`, `ema/<path>`, `opt_state/...`.

    Frozen parameters are among `params/`. Raises CheckpointError as `our_items`.
    """
    params, found = our_items(stored, names)
    paths = {public: path for path, public in names.items()}
    for name, leaf in params.items():
        path = paths.get(name, name)
        found = {**found, f"{'ema' if f'{_PARAMS}{path}' in found else 'params'}/{path}": leaf}
    return dict(found)


def nested_state(state: Leaves, published: Collection[str]) -> dict[str, Any]:
    """The `train_state` tree that openpi's trainer saves: optax's tuples, parameters in "value", no average."""
    leaves = {name if _parameter(name, published) is None else f"{name}/value": leaf for name, leaf in state.items()}
    return {"params": {}, **_with_tuples(nested_params(leaves)), "ema_params": None}


def _with_tuples(tree: Any) -> Any:
    """The tree with dicts keyed by numbers replaced by tuples; missing numbers are optax's empty states."""
    if not isinstance(tree, Mapping):
        return tree
    parts = {key: _with_tuples(value) for key, value in tree.items()}
    if not all(key.isdecimal() for key in parts):
        return parts
    return tuple(parts.get(str(number), ()) for number in range(max(map(int, parts)) + 1))


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """The name with the parameter at its end, if any, renamed by `names`."""
    parameter = _parameter(name, names)
    return name if parameter is None else name.removesuffix(parameter) + names[parameter]


def _parameter(name: str, known: Collection[str]) -> str | None:
    """The longest of the `known` parameters with which `name` ends; None if there is none."""
    parts = name.split("/")
    return next((end for begin in range(len(parts)) if (end := "/".join(parts[begin:])) in known), None)
