"""Episodes of a small arm, sound or with faults, in memory and written in every format of robots' data."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from openpi_train.data.core.image import encode
from openpi_train.data.core.source import Source
from openpi_train.data.formats.lerobot.lerobot_writer import LeRobotWriter
from openpi_train.data.formats.rlds.rlds_writer import write_rlds
from openpi_train.data.formats.zarr.store import Store
from openpi_train.robots.arm import Arm

FPS, SIZE, DIMS = 10, (8, 8), 4
STATE, ACTION, CAMERA = "observation/state", "action", "observation/images/front"


@dataclasses.dataclass
class Made:
    """One episode: `state`, `action` [n, 4], whose last dim is a gripper; `success` bool, `time` [n]; `frames`."""

    state: np.ndarray
    action: np.ndarray
    time: np.ndarray
    success: np.ndarray
    frames: np.ndarray
    prompt: str = "push the red block"


def sound(number: int = 16, length: int = 30, seed: int = 0) -> list[Made]:
    """Episodes without a fault, of `length` and up to 4 more steps."""
    random = np.random.default_rng(seed)
    found = []
    for episode in range(number):
        steps = length + episode % 5
        action = random.normal(0, 0.02, (steps, DIMS)).astype(np.float32)
        state = (random.normal(0, 0.1, DIMS) + np.cumsum(action, axis=0)).astype(np.float32)
        # A hand that takes its time to close and stays so.
        closing = np.clip((np.arange(steps) - random.integers(5, 20)) / 4, 0, 1).astype(np.float32)
        state[:, -1], action[:, -1] = 1 - closing, closing == 0
        success = np.arange(steps) == steps - 1
        frames = random.integers(0, 256, (steps, *SIZE, 3), np.uint8)
        found.append(Made(state, action, np.arange(steps) / FPS, success, frames))
    return found


class Hand(Arm):
    """The robot of these episodes."""

    control_hz = 10.0
    delta_mask = None

    @property
    def state_names(self):
        return ("x_m", "y_m", "z_m", "gripper_fraction")

    @property
    def action_names(self):
        return ("delta_x_m", "delta_y_m", "delta_z_m", "gripper_fraction")


class InMemory(Source):
    """Episodes that were never written."""

    def __init__(self, episodes: list[Made]):
        self.episodes = episodes
        self.fingerprint = "made"
        self.episode_ends = np.cumsum([len(one.state) for one in episodes])
        self.episode_ids = [one.state.tobytes().hex() + one.frames.tobytes().hex() for one in episodes]
        self.columns = {
            STATE: np.concatenate([one.state for one in episodes]),
            ACTION: np.concatenate([one.action for one in episodes]),
            "next/success": np.concatenate([one.success for one in episodes]),
            "timestamp": np.concatenate([one.time for one in episodes]),
        }
        self.prompts = list(dict.fromkeys(one.prompt for one in episodes))
        self.prompt_index = np.repeat(
            [self.prompts.index(one.prompt) for one in episodes], [len(one.state) for one in episodes]
        ).astype(np.int32)
        self.cameras = (CAMERA,)
        self._frames = np.concatenate([one.frames for one in episodes])

    def frames(self, steps, camera):
        return self._frames[steps]

    def describe(self, step):
        return self.place_of(step)


def write_in_rlds(folder: Path, episodes: list[Made]) -> Path:
    from tensorflow_datasets import features

    step = {
        "observation": {
            "state": features.Tensor(shape=(DIMS,), dtype=np.float32),
            "images": {"front": features.Image(shape=(*SIZE, 3), dtype=np.uint8, encoding_format="png")},
        },
        "action": features.Tensor(shape=(DIMS,), dtype=np.float32),
        "success": features.Scalar(dtype=np.bool_),
        "timestamp": features.Scalar(dtype=np.float64),
        "language_instruction": features.Text(),
    }
    rows = (
        {
            "steps": {
                "observation": {"state": one.state, "images": {"front": one.frames}},
                "action": one.action,
                "success": one.success,
                "timestamp": one.time,
                "language_instruction": [one.prompt] * len(one.state),
            }
        }
        for one in episodes
    )
    described = features.FeaturesDict({"steps": features.Dataset(step)})
    return write_rlds(folder, name="made", version="1.0.0", features=described, splits={"train": rows})


def write_in_lerobot(folder: Path, episodes: list[Made]) -> Path:
    """The writer refuses NaN and has time stamps of its own, so numbers are put into its files afterwards."""
    names = ["x", "y", "z", "gripper"]
    writer = LeRobotWriter(
        folder,
        fps=FPS,
        features={
            "observation.state": {"dtype": "float32", "shape": (DIMS,), "names": names},
            "action": {"dtype": "float32", "shape": (DIMS,), "names": names},
            "next.success": {"dtype": "bool", "shape": (1,), "names": None},
            "observation.images.front": {
                "dtype": "image",
                "shape": (*SIZE, 3),
                "names": ["height", "width", "channels"],
            },
        },
    )
    for one in episodes:
        columns = {"observation.state": np.nan_to_num(one.state), "action": one.action, "next.success": one.success}
        writer.add_episode(columns, {"observation.images.front": one.frames}, task=one.prompt)
    writer.finish()
    (path,) = folder.glob("data/*/*.parquet")
    table = parquet.read_table(path)
    for name, values in (
        ("observation.state", np.concatenate([one.state for one in episodes]).tolist()),
        ("timestamp", np.concatenate([one.time for one in episodes])),
    ):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(name), pa.array(values, table.schema.field(name).type))
    parquet.write_table(table, path)
    return folder


def write_in_zarr(folder: Path, episodes: list[Made]) -> Path:
    import zarr

    path = folder.with_suffix(".zarr")
    root = zarr.open_group(str(path), mode="w", zarr_format=2)
    data, meta = root.create_group("data"), root.create_group("meta")
    arrays = {
        "front": np.concatenate([one.frames for one in episodes]),
        "state": np.concatenate([one.state for one in episodes]),
        "action": np.concatenate([one.action for one in episodes]),
        "success": np.concatenate([one.success for one in episodes]).astype(np.uint8),
        "timestamp": np.concatenate([one.time for one in episodes]),
        "task_id": np.concatenate([np.full(len(one.state), _prompts(episodes).index(one.prompt)) for one in episodes]),
    }
    for name, values in arrays.items():
        chunks = (200, *values.shape[1:])
        written = data.create_array(
            name, shape=values.shape, dtype=values.dtype, chunks=chunks, config={"write_empty_chunks": True}
        )
        written[:] = values
    ends = np.cumsum([len(one.state) for one in episodes])
    meta.create_array("episode_ends", shape=ends.shape, dtype=ends.dtype, chunks=ends.shape)[:] = ends
    root.attrs["tasks"] = [{"name": f"task {n}", "prompt": text} for n, text in enumerate(_prompts(episodes))]
    assert Store(path).arrays
    return path


def write_in_parquet(folder: Path, episodes: list[Made]) -> Path:
    folder.mkdir(parents=True)
    for number in (0, 1):
        mine = episodes[number * len(episodes) // 2 : (number + 1) * len(episodes) // 2]
        columns = {
            "front": [encode(frame, "png") for one in mine for frame in one.frames],
            "state": [row.tolist() for one in mine for row in one.state],
            "action": [row.tolist() for one in mine for row in one.action],
            "success": np.concatenate([one.success for one in mine]).astype(np.int64),
            "timestamp": np.concatenate([one.time for one in mine]),
            "is_first": [step == 0 for one in mine for step in range(len(one.state))],
            "prompt": [one.prompt for one in mine for _ in one.state],
        }
        parquet.write_table(pa.table(columns), folder / f"{number}.parquet")
    return folder


def _prompts(episodes: list[Made]) -> list[str]:
    return list(dict.fromkeys(one.prompt for one in episodes))


WRITERS = {
    "rlds": write_in_rlds,
    "lerobot": write_in_lerobot,
    "zarr": write_in_zarr,
    "parquet": write_in_parquet,
}
