"""Fake data generated in memory: random walks with random pictures, for the `debug` experiment and for tests.

Read next: `core/source.py` for the interface of a dataset.
"""

import dataclasses
import hashlib

import numpy as np

from openpi_train.data.core.source import BadRecord, Source, SourceConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeData(SourceConfig):
    """Episodes of a 7-dim arm: the state is a random walk, the action the next state difference, as in BridgeData."""

    # Episodes in the dataset.
    num_episodes: int = 20
    # Mean control steps of an episode; lengths vary by a third.
    episode_length: int = 30
    # Pixels.
    image_height: int = 224
    # Pixels of a row.
    image_width: int = 224
    # Image features.
    cameras: tuple[str, ...] = ("observation/image_0",)
    # Dims of state and action.
    state_dim: int = 7
    # Instructions to draw from.
    prompts: tuple[str, ...] = ("pick up the red cube", "put the cup on the plate", "close the drawer")
    # Seed of all generated values.
    seed: int = 0
    # Control steps whose frames raise BadRecord, to test how a run handles them.
    bad_steps: tuple[int, ...] = ()

    def open(self) -> Source:
        return _FakeSource(self)


class _FakeSource(Source):
    def __init__(self, config: FakeData):
        self.config, self.cameras, self.prompts = config, config.cameras, config.prompts
        self.fingerprint = hashlib.sha256(repr(dataclasses.replace(config, bad_steps=())).encode()).hexdigest()
        random = np.random.default_rng(config.seed)
        spread = config.episode_length // 3
        lengths = random.integers(
            config.episode_length - spread, config.episode_length + spread + 1, config.num_episodes
        )
        self.episode_ends = np.cumsum(lengths).astype(np.int64)
        self.episode_ids = [f"{self.fingerprint[:16]}-{number}" for number in range(config.num_episodes)]
        self.prompt_index = np.repeat(random.integers(len(config.prompts), size=config.num_episodes), lengths)
        self.prompt_index = self.prompt_index.astype(np.int32)
        self.columns = _walks(lengths, config.state_dim, random)

    def frames(self, steps: np.ndarray, camera: str) -> np.ndarray:
        if camera not in self.cameras:
            raise KeyError(f"no camera {camera!r}; there are {self.cameras}")
        number, shape = self.cameras.index(camera), (self.config.image_height, self.config.image_width, 3)
        frames = np.empty((len(steps), *shape), np.uint8)
        for frame, step in zip(frames, np.asarray(steps).tolist(), strict=True):
            if step in self.config.bad_steps:
                raise BadRecord(f"{self.describe(step)}, {camera}: made unreadable on purpose")
            random = np.random.default_rng((self.config.seed, number, step))
            frame[...] = random.integers(0, 256, shape, np.uint8)
        return frames

    def describe(self, step: int) -> str:
        return f"fake data (seed {self.config.seed}), record {self.episode_of(step)}, {self.place_of(step)}"


def _walks(lengths: np.ndarray, dims: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    """A bounded random walk per episode; the last dim is a gripper between 0 and 1."""
    states, actions = [], []
    for length in lengths:
        moves = random.normal(0.0, 0.02, (length, dims)).astype(np.float32)
        walk = np.cumsum(moves, axis=0, dtype=np.float32)
        gripper = (np.sin(np.arange(length + 1) / 5 + random.uniform(0, 6)) > 0).astype(np.float32)
        walk[:, -1] = gripper[:-1]
        action = np.concatenate([moves[1:], random.normal(0.0, 0.02, (1, dims)).astype(np.float32)])
        action[:, -1] = gripper[1:]
        states.append(walk)
        actions.append(action)
    return {"observation/state": np.concatenate(states), "action": np.concatenate(actions)}
