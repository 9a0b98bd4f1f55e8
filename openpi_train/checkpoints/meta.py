"""The files of a checkpoint other than arrays: `meta.json`, norm stats in `assets/`, more.

Read next: `checkpoint_store.py`.
"""

import pathlib
import time
from collections.abc import Mapping
from typing import Any

from openpi_train.checkpoints.layout import Leaves, describe
from openpi_train.data.core.files import write_bytes, write_json
from openpi_train.json_object import JsonObject
from openpi_train.runtime.versions import package_versions


def make_meta(
    step: int,
    items: Mapping[str, Leaves],
    data_position: JsonObject,
    experiment: JsonObject,
    extra: JsonObject | None,
) -> dict[str, Any]:
    """The content of `meta.json`; `extra` are further JSON values, such as the wandb run id."""
    return {
        "step": step,
        "versions": package_versions(),
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "leaves": describe(items),
        "data_position": dict(data_position),
        "experiment": dict(experiment),
        **(extra or {}),
    }


def check_asset_ids(norm_stats: JsonObject) -> None:
    """Raise ValueError if an asset id cannot name a folder in `assets/`."""
    for asset_id in norm_stats:
        path = pathlib.PurePosixPath(asset_id)
        if not asset_id or path.is_absolute() or ".." in path.parts:
            raise ValueError(
                f"asset id {asset_id!r} must be a relative path without '..': it names a folder in assets/"
            )


def write_beside(directory: pathlib.Path, meta: JsonObject, norm_stats: JsonObject, files: Mapping[str, bytes]) -> None:
    """Write each `assets/<asset_id>/norm_stats.json`, `files` by path and `meta.json` into a checkpoint's folder."""
    for asset_id, stats in norm_stats.items():
        write_json(directory / "assets" / asset_id / "norm_stats.json", stats)
    for path, content in files.items():
        write_bytes(directory / path, content)
    write_json(directory / "meta.json", meta)
