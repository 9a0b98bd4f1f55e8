"""Control steps per second of the embedded environment, by the number of scenes simulated at once, random actions.

Measured with pictures, as a policy in closed loop needs, and without. Read next: `openpi_train/envs/tabletop_env.py`.
"""

import argparse
import time
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks.report import Spread, Table
from openpi_train.envs.tabletop_env import TabletopEnv

NUM_ROUNDS = 7
# A sample has as many control steps as take this long.
SAMPLE_S = 0.25
COLUMNS = ("scenes", "steps/s without pictures", "steps/s with pictures", "steps/s with pictures vs first row")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks tabletop", description=__doc__)
    parser.add_argument("--scenes", type=int, nargs="+", default=(1, 16, 128), help="scenes at once")
    parser.add_argument("--image-size", type=int, default=64, help="pixels of both cameras' pictures")
    parser.add_argument("--quick", action="store_true", help="two short rounds of small batches, to check that it runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its tables."""
    flags = parse(argv)
    env = TabletopEnv(image_size=flags.image_size)
    sizes = (1, 2) if flags.quick else flags.scenes
    worlds = [_World(env, size) for size in sizes]
    rounds = [[world.measure(flags.quick) for world in worlds] for _ in range(2 if flags.quick else NUM_ROUNDS)]
    blind, seeing = (
        [Spread(tuple(pair[kind] for pair in passes)) for passes in zip(*rounds, strict=True)] for kind in (0, 1)
    )
    rows = [[size, a, b, b.over(seeing[0])] for size, a, b in zip(sizes, blind, seeing, strict=True)]
    title = f"Tabletop: control steps/s over all scenes, two pictures of {flags.image_size} px per step"
    return [Table(title, COLUMNS, rows)]


class _World:
    """Scenes that cycle through all tasks, and actions for them."""

    def __init__(self, env: TabletopEnv, num_scenes: int):
        self.env, self.num_scenes = env, num_scenes
        keys = jax.random.split(jax.random.key(0), num_scenes)
        self.states = env.reset(keys, jax.numpy.arange(num_scenes) % len(env.tasks))
        self.actions = np.random.default_rng(0).uniform(-0.02, 0.02, (num_scenes, env.action_dim)).astype(np.float32)
        self._run(1, pictures=True)  # compiles

    def measure(self, quick: bool) -> tuple[float, float]:
        """Steps per second over all scenes, without and with pictures."""
        return self._rate(quick, pictures=False), self._rate(quick, pictures=True)

    def _rate(self, quick: bool, pictures: bool) -> float:
        count = 1 if quick else max(1, round(SAMPLE_S / self._run(1, pictures)))
        return count * self.num_scenes / self._run(count, pictures)

    def _run(self, count: int, pictures: bool) -> float:
        """Seconds for `count` control steps. The host waits for each, as in closed loop."""
        started = time.perf_counter()
        for _ in range(count):
            self.states = self.env.step(self.states, self.actions)
            jax.block_until_ready(self.env.observe(self.states) if pictures else self.states)
        return time.perf_counter() - started
