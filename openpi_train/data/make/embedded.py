"""Embedded datasets: tabletop episodes by the scripted expert, with a tokenizer, written at first use.

`data prepare` writes them too, and variants with other tasks. Read next: `envs/tabletop_expert.py` (the expert),
`formats/rlds/rlds_writer.py` (how episodes are stored).

The output is one folder (`written_folder.py`): the RLDS dataset and `tokenizer.model`.
"""

import dataclasses
import itertools
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from openpi_train.data.core import cache_folders
from openpi_train.data.formats.rlds.rlds_writer import write_rlds
from openpi_train.data.make import written_folder
from openpi_train.data.tokenizers.tokenizer import train_tokenizer
from openpi_train.envs import tabletop_env
from openpi_train.envs.tabletop_expert import demonstrate
from openpi_train.envs.tabletop_scene import DEFAULT_TASKS, Task
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import UsageError

logger = logging.getLogger(__name__)

NAME, VERSION = "tabletop", "1.0.0"
TOKENIZER = "tokenizer.model"
# Part of the fingerprint: increase it with every change of the environment, the expert or the written layout.
REVISION = 3
# Steps recorded after success, so that a policy learns to stay there.
TAIL_STEPS = 1
# Episodes of each task simulated at a time, and the number of such rounds without success that means a broken expert.
ROUND_SIZE = 8
MAX_ROUNDS_WITHOUT_SUCCESS = 4
# Pixels of one camera rendered at a time (256 pictures of 64x64): bounds the memory for larger pictures.
RENDER_PIXELS = 2**20
# Upper limit of the tokenizer: 256 bytes, 4 special pieces, the characters, and the instructions' words.
VOCAB_SIZE = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of an embedded dataset.

    Attributes:
        tasks: Names of tasks, such as `reach_red`; None for all of the environment's own.
        episodes_per_task: Successful episodes of each task in `train`; `val_episodes_per_task` in `val`, from other
            seeds.
        image_size: Height and width of both cameras' pictures.
    """

    tasks: Sequence[str] | None = None
    episodes_per_task: int = 24
    val_episodes_per_task: int = 4
    image_size: int = 64
    seed: int = 0


# The datasets that experiments in configs/ train on, by name. A run writes the ones it needs if they are missing.
RECIPES = {
    NAME: Recipe(),
    "tabletop_reach": Recipe(tasks=("reach_red", "reach_blue"), episodes_per_task=1_000),
    "tabletop_reach_few": Recipe(tasks=("reach_red", "reach_blue"), episodes_per_task=64),
    "tabletop_reach_red": Recipe(tasks=("reach_red",), episodes_per_task=1_000),
}


@dataclasses.dataclass(frozen=True)
class PreparedDataset:
    """Path and size of a prepared dataset: `num_episodes` and `num_steps` by split."""

    dataset: Path
    tokenizer: Path
    num_episodes: dict[str, int]
    num_steps: dict[str, int]


def write_missing(path: str | Path) -> None:
    """Write the embedded dataset that a path belongs to, if it is one and does not exist."""
    if name := missing(path):
        logger.info("%s does not exist yet: this embedded dataset is made", cache_folders.datasets() / name)
        prepare(name=name)


def missing(path: str | Path) -> str | None:
    """The name of the missing embedded dataset that a path belongs to; None for all other paths."""
    return written_folder.missing(path, RECIPES)


def prepare(directory: str | Path | None = None, *, name: str = NAME, **changes: object) -> PreparedDataset:
    """Write `<directory>/<name>/1.0.0` and `<directory>/<name>/tokenizer.model`, or reuse them if complete.

    The same arguments give the same bytes. Anything else at that path is moved aside, never deleted.

    Args:
        directory: The datasets' folder, `cache_folders.datasets()` if None.
        changes: Fields of the name's `Recipe` to replace.

    Raises:
        UsageError: A number is out of range, or the environment has no such task.
        RuntimeError: The expert keeps failing a task, which means that the environment is broken.
    """
    recipe = dataclasses.replace(RECIPES.get(name, Recipe()), **changes)
    counts = {"train": recipe.episodes_per_task, "val": recipe.val_episodes_per_task}
    if min(counts.values()) < 1:
        raise UsageError(
            f"episodes_per_task {counts['train']} and val_episodes_per_task {counts['val']} must be positive"
        )
    root = (cache_folders.datasets() if directory is None else Path(directory).expanduser()) / name
    env = tabletop_env.TabletopEnv(image_size=recipe.image_size, task_list=named_tasks(recipe.tasks))
    instructions = [env.instruction(task) for task in range(len(env.tasks))]
    arguments = {
        "revision": REVISION,
        "episodes": counts,
        "image_size": recipe.image_size,
        "seed": recipe.seed,
        "tasks": instructions,
    }
    manifest = written_folder.written(root, arguments, lambda draft: _write(draft, env, arguments))
    return PreparedDataset(
        dataset=root / VERSION,
        tokenizer=root / TOKENIZER,
        num_episodes=manifest["num_episodes"],
        num_steps=manifest["num_steps"],
    )


def named_tasks(names: Sequence[str] | None) -> tuple[Task, ...]:
    known = {task.name: task for task in DEFAULT_TASKS}
    names = tuple(known) if names is None else names
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"no task {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))


def _write(draft: Path, env: tabletop_env.TabletopEnv, arguments: JsonObject) -> dict[str, Any]:
    """Write the dataset and its tokenizer; returns the number of episodes and of steps by split."""
    counts, seed = arguments["episodes"], arguments["seed"]
    num_steps = dict.fromkeys(counts, 0)
    number = sum(counts.values()) * len(env.tasks)
    logger.info(
        "%d episodes of %d tasks, on the CPU; before the first the simulation is compiled", number, len(env.tasks)
    )

    def counted(split: str) -> Iterator[dict[str, Any]]:
        for episode in _episodes(env, split, counts[split], seed):
            num_steps[split] += len(episode["steps"]["is_first"])
            yield episode

    # write_rlds adds the dataset's name; the draft must hold the version and the tokenizer side by side.
    written = write_rlds(
        draft, name=NAME, version=VERSION, features=_features(env.image_size),
        splits={split: counted(split) for split in counts},
        description="Episodes of openpi_train's embedded tabletop environment, by its scripted expert.",
    )  # fmt: skip
    os.replace(written, draft / VERSION)
    written.parent.rmdir()
    train_tokenizer(_texts(arguments["tasks"]), draft / TOKENIZER, VOCAB_SIZE)
    return {"num_episodes": {split: count * len(env.tasks) for split, count in counts.items()}, "num_steps": num_steps}


def _episodes(env: tabletop_env.TabletopEnv, split: str, episodes_per_task: int, seed: int) -> Iterator[dict[str, Any]]:
    """Successful episodes, alternating between tasks."""
    missing = np.full(len(env.tasks), episodes_per_task)
    barren_rounds = 0
    for round_number in itertools.count():
        if not missing.any():
            return
        if barren_rounds == MAX_ROUNDS_WITHOUT_SUCCESS:
            failing = [name for name, count in zip(env.tasks, missing, strict=True) if count]
            raise RuntimeError(f"the expert failed {ROUND_SIZE * barren_rounds} times in a row at {failing}")
        tasks = np.tile(np.arange(len(env.tasks)), ROUND_SIZE)
        attempts = round_number * ROUND_SIZE + np.arange(ROUND_SIZE).repeat(len(env.tasks))
        seeds = [
            zlib.crc32(f"{seed}/{split}/{env.tasks[task]}/{attempt}".encode())
            for task, attempt in zip(tasks, attempts, strict=True)
        ]
        barren_rounds += 1
        for episode in _round(env, np.asarray(seeds, np.uint32), tasks, missing):
            barren_rounds = 0
            yield episode


def _round(env: tabletop_env.TabletopEnv, seeds: np.ndarray, tasks: np.ndarray, missing: np.ndarray) -> Iterator[dict]:
    """The successful episodes of a batch, at most `missing` of each task (which is counted down)."""
    # Always on the CPU: the dataset must not depend on the accelerator.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        keys = jax.vmap(jax.random.key)(seeds)
        before, commands, after = demonstrate(env.reset(keys, jnp.asarray(tasks)), keys, num_steps=env.max_steps)
        succeeded = np.asarray(after.goal_steps >= tabletop_env.HOLD_STEPS)
        # The first scene with success, numbered like the scenes before each step.
        reached = np.where(succeeded.any(0), succeeded.argmax(0) + 1, env.max_steps)
        kept = []
        for row in np.flatnonzero(reached + TAIL_STEPS < env.max_steps):
            if missing[tasks[row]]:
                missing[tasks[row]] -= 1
                kept.append(row)
        lengths = [int(reached[row]) + 1 + TAIL_STEPS for row in kept]
        if not kept:
            return
        steps = np.concatenate([np.arange(length) for length in lengths])
        scenes = jax.tree.map(lambda leaf: np.asarray(leaf)[steps, np.repeat(kept, lengths)], before)
        columns = _observed(env, scenes)
        columns["action"] = np.asarray(commands)[steps, np.repeat(kept, lengths)]
    for row, length, end in zip(kept, lengths, np.cumsum(lengths), strict=True):
        episode = jax.tree.map(lambda column, end=end, length=length: column[end - length : end], columns)
        yield _record(episode, env, int(tasks[row]), int(seeds[row]))


def _observed(env: tabletop_env.TabletopEnv, scenes: Any) -> dict[str, Any]:
    """Pictures and proprioception of a batch of scenes, rendered in pieces of one size (compiled once).

    Fewer scenes than a piece are rendered as the next power of two, so that not every number is compiled.
    """
    total = len(scenes.task)
    piece = min(max(1, RENDER_PIXELS // env.image_size**2), 1 << (total - 1).bit_length())
    pieces = []
    for start in range(0, total, piece):
        # The last piece is filled up with its first scenes.
        rows = np.resize(np.arange(start, min(start + piece, total)), piece)
        seen = env.observe(jax.tree.map(lambda leaf, rows=rows: leaf[rows], scenes))
        pieces.append(
            {"state": np.asarray(seen.state), **{name: np.asarray(seen.images[name]) for name in env.cameras}}
        )
    return {"observation": {name: np.concatenate([one[name] for one in pieces])[:total] for name in pieces[0]}}


def _record(columns: dict[str, Any], env: tabletop_env.TabletopEnv, task: int, seed: int) -> dict[str, Any]:
    """One episode in the form that the features describe."""
    length = len(columns["action"])
    last = np.arange(length) == length - 1
    steps = {
        **columns,
        "language_instruction": [env.instruction(task)] * length,
        "is_first": np.arange(length) == 0,
        "is_last": last,
        "is_terminal": last,
        "reward": last.astype(np.float32),
        "discount": (~last).astype(np.float32),
    }
    metadata = {"episode_id": f"{env.tasks[task]}/{seed:08x}", "task": env.tasks[task], "success": True, "seed": seed}
    return {"steps": steps, "episode_metadata": metadata}


def _features(image_size: int) -> Any:
    """The dataset's features: BridgeData V2's layout with two cameras."""
    from tensorflow_datasets import features

    picture = features.Image(shape=(image_size, image_size, 3), dtype=np.uint8, encoding_format="jpeg")
    vector = features.Tensor(shape=(7,), dtype=np.float32)
    step = {
        "observation": features.FeaturesDict({**dict.fromkeys(tabletop_env.CAMERAS, picture), "state": vector}),
        "action": vector,
        "language_instruction": features.Text(),
        **dict.fromkeys(("is_first", "is_last", "is_terminal"), features.Scalar(dtype=np.bool_)),
        **dict.fromkeys(("reward", "discount"), features.Scalar(dtype=np.float32)),
    }
    metadata = {
        "episode_id": features.Text(),
        "task": features.Text(),
        "success": features.Scalar(dtype=np.bool_),
        "seed": features.Scalar(dtype=np.int64),
    }
    return features.FeaturesDict({"steps": features.Dataset(step), "episode_metadata": features.FeaturesDict(metadata)})


def _texts(instructions: list[str]) -> Iterator[str]:
    """Training texts of the tokenizer: the instructions, and pi0.5's prompts with every state bin."""
    for repeat, instruction in itertools.product(range(8), instructions):
        bins = " ".join(str((repeat * 32 + number) % 256) for number in range(-1, 31))
        yield instruction
        yield f"Task: {instruction}, State: {bins};\nAction: "
