"""The embedded environment: a small tabletop in pure JAX, with pictures, instructions, and more than ten tasks.

Read next: `tabletop_scene.py` (the objects), `tabletop_physics.py` (the dynamics), `tabletop_render.py` (the pictures),
`tabletop_expert.py` (the expert).

The functions here act on one scene and the class on batches; both can be jitted, and batching does not change results.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from openpi_train.envs import tabletop_physics as physics
from openpi_train.envs import tabletop_scene as world
from openpi_train.envs.env import Env, EnvObservation
from openpi_train.envs.tabletop_render import CAMERAS, render
from openpi_train.envs.tabletop_scene import DEFAULT_TASKS, Kind, Scene, Task

# Number of consecutive control steps that a goal must hold before the episode is a success.
HOLD_STEPS = 3
# Distances that goals require.
REACH_M = 0.02
PICK_HEIGHT_M = 0.05
PUSH_M = 0.08
PUSH_SIDEWAYS_M = 0.05
BESIDE_NEAREST_M = 0.07
BESIDE_FARTHEST_M = 0.14
BESIDE_ACROSS_M = 0.04
# Moving a reference block further than this makes the goals that name it fail.
REFERENCE_STAYS_M = 0.04
# Initial positions and minimum distances of objects: an open gripper fits around every block.
SPAWN_HALF_M = 0.18
SPACING_M = ((0.105,) * 3 + (0.115, 0.105),) * 3 + ((0.115,) * 3 + (0.0, 0.13), (0.105,) * 3 + (0.13, 0.0))
# Number of layouts drawn per round; the first that fits is used. About one in twenty does: one round mostly suffices.
NUM_CANDIDATES = 64


def goal_holds(scene: Scene) -> Bool[Array, ""]:
    """Whether the task's goal holds in the scene now."""
    block, reference = scene.blocks[0], scene.blocks[1]
    on_table = block[2] < physics.SUPPORT_TOLERANCE_M
    let_go = (scene.held != 0) & on_table
    moved = block[:2] - scene.starts[0, :2]
    pushed = (scene.held != 0) & ~scene.lifted[0] & (jnp.abs(moved[1]) < PUSH_SIDEWAYS_M)
    reached = jnp.linalg.norm(scene.tip[:2] - block[:2]) < REACH_M
    reached &= scene.tip[2] < block[2] + world.BLOCK_HEIGHT_M + REACH_M
    stays = jnp.linalg.norm(reference - scene.starts[1]) < REFERENCE_STAYS_M
    offset = block - reference
    stacked = (jnp.abs(offset[2] - world.BLOCK_HEIGHT_M) < physics.SUPPORT_TOLERANCE_M) & (scene.held != 0)
    stacked &= jnp.linalg.norm(offset[:2]) <= physics.STABLE_M
    beside = let_go & stays & (jnp.abs(offset[1]) < BESIDE_ACROSS_M)
    beside &= (jnp.abs(offset[0]) > BESIDE_NEAREST_M) & (jnp.abs(offset[0]) < BESIDE_FARTHEST_M)
    goals = {
        Kind.REACH: reached,
        Kind.PICK: (scene.held == 0) & (block[2] > PICK_HEIGHT_M),
        Kind.PUSH_LEFT: pushed & (moved[0] < -PUSH_M),
        Kind.PUSH_RIGHT: pushed & (moved[0] > PUSH_M),
        Kind.PLATE: let_go & (jnp.linalg.norm(block[:2] - scene.plate) < world.PLATE_RADIUS_M - REACH_M),
        Kind.BOWL: let_go & (jnp.linalg.norm(block[:2] - scene.bowl) < world.BOWL_RADIUS_M - REACH_M),
        Kind.STACK: stacked & stays,
        Kind.LEFT_OF: beside & (offset[0] < 0),
        Kind.RIGHT_OF: beside & (offset[0] > 0),
    }
    return jnp.stack([goals[kind] for kind in Kind])[scene.kind]


def success(scene: Scene) -> Bool[Array, ""]:
    """Whether the goal has held for the last HOLD_STEPS control steps."""
    return scene.goal_steps >= HOLD_STEPS


def step(scene: Scene, action: Float[Array, "7"]) -> Scene:
    """The scene one control step after an action (see `tabletop_physics.step` for its units and bounds)."""
    scene = physics.step(scene, action)
    return dataclasses.replace(scene, goal_steps=jnp.where(goal_holds(scene), scene.goal_steps + 1, 0))


def proprioception(scene: Scene) -> Float[Array, "7"]:
    """x, y, z [m] of the fingertips, roll, pitch, yaw [rad], and the opening (0 closed, 1 open)."""
    return jnp.concatenate([scene.tip, scene.turn, scene.opening[None]])


def reset(key: Key[Array, ""], task: Int[Array, ""], tasks: tuple[Task, ...] = DEFAULT_TASKS) -> Scene:
    """A new scene for `tasks[task]`: random positions and distractors, solvable, and not solved yet."""
    layout_key, colour_key, tip_key, turn_key = jax.random.split(key, 4)
    kind = jnp.asarray([int(one.kind) for one in tasks], jnp.int32)[task]
    layout = _layout(layout_key, kind)
    blocks = jnp.concatenate([layout[: world.NUM_BLOCKS], jnp.zeros((world.NUM_BLOCKS, 1))], axis=1)
    low, high = jnp.asarray([-SPAWN_HALF_M, -SPAWN_HALF_M, 0.1]), jnp.asarray([SPAWN_HALF_M, SPAWN_HALF_M, 0.2])
    spread = jnp.asarray([0.3, 0.3, 0.5])
    return Scene(
        tip=jax.random.uniform(tip_key, (3,), minval=low, maxval=high),
        turn=jax.random.uniform(turn_key, (3,), minval=-spread, maxval=spread),
        opening=jnp.ones(()),
        blocks=blocks,
        held=jnp.int32(-1),
        grip=jnp.zeros(2),
        bowl=layout[-2],
        plate=layout[-1],
        colours=_colours(colour_key, task, tasks),
        task=jnp.asarray(task, jnp.int32),
        kind=kind,
        starts=blocks,
        lifted=jnp.zeros(world.NUM_BLOCKS, bool),
        goal_steps=jnp.int32(0),
        num_steps=jnp.int32(0),
    )


def _colours(key: Key[Array, ""], task: Int[Array, ""], tasks: tuple[Task, ...]) -> Int[Array, " n"]:
    """The task's colours first, then distractors in random order; each colour appears once."""
    named = [(one.block, one.reference) for one in tasks]
    first = jnp.asarray([world.COLOURS.index(block) for block, _ in named])[task]
    second = jnp.asarray([-1 if other is None else world.COLOURS.index(other) for _, other in named])[task]
    colours = jnp.arange(len(world.COLOURS))
    rank = jax.random.uniform(key, (len(world.COLOURS),))
    rank = jnp.where(colours == first, -2.0, jnp.where(colours == second, -1.0, rank))
    return jnp.argsort(rank)[: world.NUM_BLOCKS].astype(jnp.int32)


def _layout(key: Key[Array, ""], kind: Int[Array, ""]) -> Float[Array, "5 2"]:
    """Positions of the blocks, the bowl and the plate, by rejection sampling."""

    def draw(carry):
        number, _, _ = carry
        places = jax.random.uniform(
            jax.random.fold_in(key, number), (NUM_CANDIDATES, 5, 2), minval=-SPAWN_HALF_M, maxval=SPAWN_HALF_M
        )
        fits = jax.vmap(_fits, in_axes=(0, None))(places, kind)
        return number + 1, fits.any(), places[jnp.argmax(fits)]

    return jax.lax.while_loop(lambda carry: ~carry[1], draw, (0, jnp.bool_(False), jnp.zeros((5, 2))))[2]


def _fits(places: Float[Array, "5 2"], kind: Int[Array, ""]) -> Bool[Array, ""]:
    """Whether objects are far enough apart, the goal is not reached yet, and there is room to reach it."""
    distance = jnp.linalg.norm(places[:, None] - places[None], axis=-1)
    apart = (distance >= jnp.asarray(SPACING_M)).all(where=~jnp.eye(5, dtype=bool))
    block, reference = places[0], places[1]
    sign = jnp.where((kind == Kind.PUSH_LEFT) | (kind == Kind.LEFT_OF), -1.0, 1.0)
    # A push needs a free path ahead of the block and room for the fingers behind it; the plate is flat.
    ahead = sign * (places[1:4, 0] - block[0])
    in_lane = (jnp.abs(places[1:4, 1] - block[1]) < 0.1) & (ahead < 0.21) & (ahead > -0.11)
    can_push = ~in_lane.any() & (jnp.abs(block[0] + sign * (PUSH_M + 0.04)) < world.BLOCK_LIMIT_M)
    # Beside the reference: the goal position must be free, and the block not already on that side.
    goal = reference + jnp.stack([sign * (BESIDE_NEAREST_M + BESIDE_FARTHEST_M) / 2, jnp.float32(0)])
    can_place = (jnp.abs(goal) < SPAWN_HALF_M).all() & (jnp.linalg.norm(places[2:4] - goal, axis=-1) > 0.11).all()
    can_place &= sign * (block[0] - reference[0]) < 0
    is_push = (kind == Kind.PUSH_LEFT) | (kind == Kind.PUSH_RIGHT)
    is_beside = (kind == Kind.LEFT_OF) | (kind == Kind.RIGHT_OF)
    return apart & (~is_push | can_push) & (~is_beside | can_place)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TabletopEnv(Env):
    """The tabletop as an environment: batches of episodes."""

    # Height and width of the pictures in pixels, at least 16.
    image_size: int = 64
    # The tasks.
    task_list: tuple[Task, ...] = DEFAULT_TASKS

    cameras: ClassVar[tuple[str, ...]] = CAMERAS
    action_dim: ClassVar[int] = 7
    state_dim: ClassVar[int] = 7
    control_hz: ClassVar[float] = 5.0
    max_steps: ClassVar[int] = 80
    has_expert: ClassVar[bool] = True

    def __post_init__(self):
        if self.image_size < 16:
            raise ValueError(f"image_size {self.image_size} is too small to distinguish blocks; use 64 or more")
        if not self.task_list:
            raise ValueError("task_list is empty; give at least one Task")

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names such as `stack_red_blue`."""
        return tuple(task.name for task in self.task_list)

    def instruction(self, task: int) -> str:
        return self.task_list[task].instruction

    def reset(self, keys: Key[Array, " b"], tasks: Int[Array | np.ndarray, " b"]) -> Scene:
        return _reset_batch(keys, jnp.asarray(tasks), self.task_list)

    def step(self, states: Scene, actions: Float[Array | np.ndarray, "b 7"]) -> Scene:
        return _step_batch(states, actions)

    def executed(self, actions: Float[Array | np.ndarray, "b 7"]) -> Float[np.ndarray, "b 7"]:
        """Within the bounds of a motion (`tabletop_physics.step`); the gripper's command stays."""
        most = np.array([world.MAX_MOVE_M] * 3 + [world.MAX_TURN_RAD] * 3 + [np.inf], np.float32)
        return np.clip(np.asarray(actions, np.float32), -most, most)

    def observe(self, states: Scene) -> EnvObservation:
        """Both cameras' pictures and the gripper's proprioception."""
        return _observe_batch(states, self.image_size)

    def success(self, states: Scene) -> Bool[Array, " b"]:
        return _success_batch(states)

    def pictures(self, states: Scene, rows: np.ndarray) -> Mapping[str, np.ndarray]:
        """Both cameras' pictures; only those of `rows` are rendered."""
        return super().pictures(jax.tree.map(lambda leaf: leaf[rows], states), np.arange(len(rows)))

    def demonstrate(self, states: Scene, keys: Key[Array, " b"]) -> tuple[Float[Array, "b 7"], Float[Array, "b 7"]]:
        """The scripted expert's commands, and the same with small noise and occasional large disturbances."""
        from openpi_train.envs.tabletop_expert import command  # which imports this module

        return command(states, keys)


@functools.partial(jax.jit, static_argnums=2)
def _reset_batch(keys: Key[Array, " b"], numbers: Int[Array, " b"], tasks: tuple[Task, ...]) -> Scene:
    return jax.vmap(functools.partial(reset, tasks=tasks))(keys, numbers)


_step_batch = jax.jit(jax.vmap(step))
_success_batch = jax.jit(jax.vmap(success))


@functools.partial(jax.jit, static_argnums=1)
def _observe_batch(states: Scene, size: int) -> EnvObservation:
    draw = {name: jax.vmap(functools.partial(render, camera=name, size=size)) for name in CAMERAS}
    return EnvObservation(
        images={name: one(states) for name, one in draw.items()},
        state=jax.vmap(proprioception)(states),
        task=states.task,
    )
