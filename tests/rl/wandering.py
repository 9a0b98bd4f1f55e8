"""A run of RL in a world of a few numbers, whose picture is the number of control steps so far.

On the command line it is `WANDERING`, and its directory `runs/roaming/x`.
"""

import dataclasses
import os
import time
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
from openpi_train_configs.debug import debug

from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.envs.env import Env, EnvObservation
from openpi_train.experiment import EvalConfig
from openpi_train.models.diffusion_policy.diffusion_policy import DiffusionPolicyConfig, MlpSizes
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.optim import LRSchedule
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.robots.bridge import Bridge
from openpi_train.sampling.flow_distribution import FlowDistribution

WANDERING = f"{Path(__file__).resolve()}:roaming"
SIZE, DIMS = 16, 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wander(Env):
    """The state is the sum of the actions. Task k succeeds when its first dim is `distances[k]` from the start.

    A whole number is the number of control steps instead. A control step takes WANDERING_PAUSE_S of the environment, in
    which each process may have its own after a comma.
    """

    cameras: ClassVar[tuple[str, ...]] = ("image_0",)
    action_dim: ClassVar[int] = DIMS
    state_dim: ClassVar[int] = DIMS
    control_hz: ClassVar[float] = 5.0
    max_steps: ClassVar[int] = 5
    has_reward: ClassVar[bool] = True
    distances: tuple[float, ...] = (0.06, 0.08)

    @property
    def tasks(self):
        return tuple(f"away_{distance:g}" for distance in self.distances)

    def instruction(self, task):
        return f"go {self.distances[task]}"

    def reset(self, keys, tasks):
        start = np.asarray(jax.vmap(lambda key: jax.random.uniform(key, (DIMS,)))(keys))
        return start, start, np.asarray(tasks), 0

    def step(self, states, actions):
        position, start, tasks, steps = states
        pauses = os.environ.get("WANDERING_PAUSE_S", "0").split(",")
        time.sleep(float(pauses[jax.process_index() % len(pauses)]))
        return position + np.asarray(actions), start, tasks, steps + 1

    def observe(self, states):
        position, _, tasks, steps = states
        picture = np.full((len(tasks), SIZE, SIZE, 3), steps, np.uint8)
        return EnvObservation(images={"image_0": picture}, state=position.astype(np.float32), task=tasks)

    def reward(self, states):
        """The number of the control step."""
        return np.full(len(states[2]), float(states[3]))

    def success(self, states):
        position, start, tasks, steps = states
        wanted = np.asarray(self.distances)[tasks]
        return np.where(wanted < 1, np.abs(position - start)[:, 0] > wanted, steps >= wanted)


_DATA = FakeData(image_height=SIZE, image_width=SIZE)
_SMALL = GemmaOverrides(width=16, depth=1, mlp_dim=16, num_heads=2, head_dim=8)

wandering = dataclasses.replace(
    debug,
    model=dataclasses.replace(
        debug.model,
        language=_SMALL,
        action_expert=_SMALL,
        siglip=SiglipConfig(width=16, depth=1, mlp_dim=16, num_heads=2, patch_size=16),
        image_size=SIZE,
        action_dim=8,
        action_horizon=3,
        max_token_len=12,
        remat="none",
    ),
    objective=PolicyGradient(distribution=FlowDistribution(num_steps=2, noise=0.7), average="rollouts"),
    data=DataConfig(
        datasets=(Dataset(source=_DATA, robot=Bridge(), asset_id="fake"),),
        tokenizer="bytes",
        text_lengths=1,
    ),
    rl=RobotRL(env=Wander(), num_groups=4, group_size=4, execute=2, episodes_per_device=3, epochs=2),
    lr_schedule=LRSchedule(warmup_steps=0, peak_lr=1e-2, decay_steps=100, decay_lr=1e-2),
    ema_decay=None,
    batch_size=8,
    num_train_steps=8,
    save_interval=4,
    log_interval=1,
    eval=EvalConfig(
        interval=0, num_rows=8, num_sample_steps=2, closed_loop=ClosedLoop(env=Wander(), episodes_per_task=2)
    ),
)
"""A tiny pi0 that learns to go away from where it is."""

roaming = dataclasses.replace(
    wandering,
    # Slow enough that tasks are not all solved in the second iteration.
    lr_schedule=LRSchedule(warmup_steps=0, peak_lr=1e-3, decay_steps=100, decay_lr=1e-3),
    model=DiffusionPolicyConfig(
        action_dim=DIMS,
        action_horizon=3,
        n_obs_steps=1,
        n_action_steps=2,
        cameras=("base_0_rgb",),
        image_height=SIZE,
        image_width=SIZE,
        instructions=(*_DATA.prompts, *map(Wander().instruction, range(2))),
        encoder_widths=(16,),
        denoiser="mlp",
        mlp=MlpSizes(width=32, depth=1),
        diffusion_step_embed_dim=8,
    ),
)
"""The same with a policy that compiles in a fraction of pi0's time, for runs."""
