"""Reader and writer of openpi's checkpoints, by step directory.

    <step>/params/                       {"params": tree}; the trainer appends "value" to every path, releases do not
    <step>/train_state/                  the training state; releases have none
        step                             the number of updates
        opt_state/1/0/mu/<parameter>     optax's structure; a moment's name ends with that of a trained parameter
        params/<parameter>               all parameters, if the `params` item holds their average (EMA); else nothing
    <step>/assets/<asset_id>/norm_stats.json

Our training state (`checkpoints/layout.py`) has the same leaves under other names: parameters have our paths;
only trained ones are stored in addition to their average; it has a float16 run's loss scale, which openpi lacks. Below,
`names` maps our path to the published name for all parameters. Read next: `models/pi0/pi0_names.py` for the names.
"""

import dataclasses
import functools
import logging
import os
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from openpi_train.data.core.files import write_json
from openpi_train.interop.orbax_item import METADATA, open_item, save_item
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, Stored, StoredLeaf
from openpi_train.json_object import JsonObject
from openpi_train.models.model_config import ModelConfig
from openpi_train.parallel.params import module_params, nested_params
from openpi_train.runtime.exits import CheckpointError

logger = logging.getLogger(__name__)

_PARAMS, _VALUE = "params/", "/value"


def cached(where: str) -> str:
    """The path of openpi's cached copy of the address `where`; `where` itself if there is none.

    Any downloaded part of a checkpoint counts.
    """
    copy = cache_folder(where)
    if copy is None or not copy.is_dir():
        return where
    logger.info("%s is read from openpi's cached copy, %s", where, copy)
    return str(copy)


def cache_folder(where: str) -> Path | None:
    """Where openpi keeps its copy of the address `where`, there or not; None for what it does not download.

    The cache is laid out by its `shared/download.py`: below OPENPI_DATA_HOME, or else ~/.cache/openpi.
    """
    scheme, _, name = where.partition("://")
    if scheme != "gs":
        return None
    return Path(os.environ.get("OPENPI_DATA_HOME", "~/.cache/openpi")).expanduser() / name.strip("/")


def recognises(place: Place) -> bool:
    """Whether the place is a step's directory, or the `params` directory in one."""
    return any(folder.has(METADATA) for folder in (place / "params", place))


def has_training_state(place: Place) -> bool:
    """Whether the place is a step's directory with the training state of openpi's trainer."""
    return recognises(place) and (place / "train_state").has(METADATA)


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """Open a step's directory, or the `params` directory in one. Raises CheckpointError if it is neither or damaged."""
    del model  # its names are the published ones
    step = place if (place / "params").has(METADATA) else place.parent
    item = step / "params" if step is place else place
    return Stored(
        where=str(place),
        format="openpi",
        params=read_params(item),
        train_state=without_value(open_item(step / "train_state")) if has_training_state(place) else None,
        norm_stats=read_norm_stats(step) if (step / "params").url == item.url else {},
    )


def read_params(item: Place) -> Leaves:
    """The parameters of a `params` item by published name."""
    leaves = open_item(item)
    others = [name for name in leaves if not name.startswith(_PARAMS)]
    if others or not leaves:
        tops = sorted({name.partition("/")[0] for name in leaves})
        raise CheckpointError(
            f"{item} is not in openpi's format: it holds {tops or 'nothing'} at the top, not 'params'"
        )
    return without_value({name.removeprefix(_PARAMS): leaf for name, leaf in leaves.items()})


def without_value(leaves: Leaves) -> Leaves:
    """The leaves without the suffix "value" that openpi's trainer appends to every parameter's path."""
    return {name.removesuffix(_VALUE): leaf for name, leaf in leaves.items()}


def read_norm_stats(step: Place) -> dict[str, Any]:
    """The content of each `assets/<asset_id>/norm_stats.json` of a checkpoint, by asset id."""
    found = {}
    if step.url.startswith("http"):
        return found  # plain web servers list nothing
    for name in step.names("assets/"):
        folder, _, file = name.removeprefix("assets/").rpartition("/")
        if file == "norm_stats.json":
            found[folder] = step.json(name)
    return found


def write(directory: Path, stored: Stored) -> None:
    """Write a checkpoint for openpi's `restore_params` and `restore_state`. Call it in one process."""
    published = {f"{name}{_VALUE}": leaf for name, leaf in stored.params.items()}
    save_item(directory / "params", {"params": nested_params(published)})
    if stored.train_state is not None:
        save_item(directory / "train_state", nested_state(stored.train_state, stored.params))
    write_norm_stats(directory, stored.norm_stats)


def kept(stored: Stored, model: ModelConfig) -> Stored:
    """The checkpoint without a float16 run's loss scale, which openpi's trainer does not have and would refuse."""
    del model
    state = {name: leaf for name, leaf in (stored.train_state or {}).items() if not name.startswith("scale/")}
    return dataclasses.replace(stored, train_state=state)


def write_norm_stats(directory: Path, norm_stats: JsonObject) -> None:
    """Write each `assets/<asset_id>/norm_stats.json`."""
    for asset_id, content in norm_stats.items():
        write_json(directory / "assets" / asset_id / "norm_stats.json", content)


def parameter_names(model: ModelConfig) -> dict[str, str]:
    """The published name of every parameter of `model` by our path. Raises ValueError if two share one."""
    names = {path: model.param_rules.public_name(path) for path in abstract_params(model)}
    if len(set(names.values())) < len(names):
        raise ValueError(
            f"{len(names)} parameters are published under {len(set(names.values()))} names; each needs its own"
        )
    return names


def published_params(model: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and type of every parameter of `model` by published name."""
    return {name: abstract_params(model)[path] for path, name in parameter_names(model).items()}


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of `model` by our path."""
    return {path: tuple(leaf.shape) for path, leaf in abstract_params(model).items()}


# Tracing a model's construction takes seconds, and opening a checkpoint needs its result several times.
@functools.lru_cache(maxsize=8)
def abstract_params(model: ModelConfig) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shape and type of every parameter of `model` by our path; nothing is allocated."""
    module = nnx.eval_shape(lambda: model.build(nnx.Rngs(0)))
    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in module_params(module).items()}
    return types.MappingProxyType(shapes)


def published_state(ours: Leaves, params: Leaves, names: Mapping[str, str]) -> Leaves:
    """Our `train_state` leaves converted to openpi's; `params` are the published parameters beside them."""
    found = {_renamed(name, names): leaf for name, leaf in ours.items()}
    if any(name.startswith(_PARAMS) for name in found):  # an average: the frozen ones are in both
        found |= {f"{_PARAMS}{name}": leaf for name, leaf in params.items() if f"{_PARAMS}{name}" not in found}
    return found


def our_items(stored: Stored, names: Mapping[str, str]) -> tuple[Leaves, Leaves]:
    """The `params` and `train_state` items of our checkpoint with the content of `stored`.

    Our frozen parameters have one value. openpi averages them too, which may round them: the value used in training is
    kept. Raises CheckpointError if the checkpoint has none: it was made for inference alone, or by another library.
    """
    if stored.train_state is None:
        raise CheckpointError(
            f"{stored.where} has no train_state: it was published for inference, or saved by a trainer whose optimizer "
            "state is not read, as those in PyTorch. To load only its parameters, omit "
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
    params, state = our_items(stored, names)
    found = dict(state)
    paths = {public: path for path, public in names.items()}
    for name, leaf in params.items():
        path = paths.get(name, name)
        found |= {f"{'ema' if f'{_PARAMS}{path}' in found else 'params'}/{path}": leaf}
    return found


def nested_state(state: Leaves, published: Collection[str]) -> dict[str, Any]:
    """The `train_state` tree that openpi's trainer saves: optax's tuples, parameters in "value", no average."""
    leaves = {name if _parameter(name, published) is None else f"{name}/value": leaf for name, leaf in state.items()}
    return {"params": {}, **_with_tuples(nested_params(leaves)), "ema_params": None}


def _with_tuples(tree: object) -> Any:
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
