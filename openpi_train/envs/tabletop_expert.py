"""Scripted expert for every tabletop task: a function from scene to action, so it recovers from disturbances.

Read next: `data/make/embedded.py`, which records it. It has no memory: the same scene always gets the same action, so a
policy can learn it from pictures.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from openpi_train.envs import tabletop_env as env
from openpi_train.envs import tabletop_physics as physics
from openpi_train.envs import tabletop_scene as world
from openpi_train.envs.tabletop_scene import Kind, Scene

# Fingertip heights: above blocks on the table (empty, or holding a block), and while pushing.
TRAVEL_M = 0.10
PUSH_HEIGHT_M = 0.025
# Fingertips above a block's bottom when grasping it.
GRASP_M = 0.02
# Horizontal error at which lowering starts: for grasps and stacks, and for goals with more room. Once low, it may grow
# by ALIGNED_SLACK_M before the gripper is raised again.
ALIGNED_M = 0.01
ALIGNED_ROOMY_M = 0.02
ALIGNED_SLACK_M = 0.005
# How far behind the block the closed fingers come down before pushing, and how fast they push.
BEHIND_M = 0.065
PUSH_STEP_M = 0.02
# Noise on demonstrated motions: small at every step, large at one step in twenty. Rotations get hardly any noise:
# otherwise their actions would only correct noise, which a policy cannot learn to predict.
NOISE = (0.003, 0.003, 0.003, 0.002, 0.002, 0.002, 0.0)
SHOVE = (0.02, 0.02, 0.015, 0.0, 0.0, 0.0, 0.0)
SHOVE_PROBABILITY = 0.05
# Fraction of the tilt that one step corrects: a lasting motion instead of a jerk at the start.
TURN_GAIN = 0.25


@functools.partial(jax.jit, static_argnames="num_steps")
def demonstrate(
    scenes: Scene, keys: Key[Array, " b"], *, num_steps: int
) -> tuple[Scene, Float[Array, "steps b 7"], Scene]:
    """Run the expert for `num_steps` control steps in a batch of scenes.

    The executed action is the expert's plus a disturbance drawn from each scene's key, so the recorded commands show
    how to recover from states to which a policy's own errors lead.

    Returns the scenes before each step [steps, b, ...], the expert's undisturbed commands, and the scenes after it.
    """

    def one_step(now: Scene, number: Array) -> tuple[Scene, tuple[Scene, Array, Scene]]:
        commands, carried_out = command(now, jax.vmap(jax.random.fold_in, (0, None))(keys, number))
        after = jax.vmap(env.step)(now, carried_out)
        return after, (now, commands, after)

    return jax.lax.scan(one_step, scenes, jnp.arange(num_steps))[1]


@jax.jit
def command(scenes: Scene, keys: Key[Array, " b"]) -> tuple[Float[Array, "b 7"], Float[Array, "b 7"]]:
    """The expert's commands in a batch of scenes at one control step, and the same with noise from the keys."""
    commands = jax.vmap(expert)(scenes)
    return commands, commands + jax.vmap(_disturbance)(keys)


def _disturbance(key: Key[Array, ""]) -> Float[Array, "7"]:
    noise_key, shove_key, when_key = jax.random.split(key, 3)
    noise = jax.random.normal(noise_key, (7,)) * jnp.asarray(NOISE)
    shove = jax.random.normal(shove_key, (7,)) * jnp.asarray(SHOVE)
    return noise + jnp.where(jax.random.bernoulli(when_key, SHOVE_PROBABILITY), shove, 0.0)


def expert(scene: Scene) -> Float[Array, "7"]:
    """The expert's action (metres, radians, gripper) in a scene, within the action bounds."""
    place = jnp.where(scene.held == 0, _place(scene), _grasp(scene))
    # When the goal holds, the open gripper rises and leaves it alone.
    placed = env.goal_holds(scene) & (scene.kind >= Kind.PLATE)
    place = jnp.where(placed, _move(scene, scene.tip + jnp.asarray([0.0, 0.0, 0.05]), 1.0), place)
    lifted = jnp.concatenate([scene.tip[:2], jnp.asarray([TRAVEL_M + 0.02])])
    pick = jnp.where(scene.held == 0, _move(scene, lifted, 0.0), _grasp(scene))
    action = jnp.where(scene.kind == Kind.PICK, pick, place)
    action = jnp.where(scene.kind == Kind.REACH, _reach(scene), action)
    return jnp.where((scene.kind == Kind.PUSH_LEFT) | (scene.kind == Kind.PUSH_RIGHT), _push(scene), action)


def _move(scene: Scene, target: Float[Array, "3"], gripper: Array | float) -> Float[Array, "7"]:
    """Move straight towards `target` while turning upright."""
    move = jnp.clip(target - scene.tip, -world.MAX_MOVE_M, world.MAX_MOVE_M)
    turn = jnp.clip(-TURN_GAIN * scene.turn, -world.MAX_TURN_RAD, world.MAX_TURN_RAD)
    return jnp.concatenate([move, turn, jnp.asarray(gripper, jnp.float32)[None]])


def _over_then_down(
    scene: Scene,
    error: Float[Array, "2"],
    low: Array,
    travel: Array,
    gripper: Array | float,
    aligned_m: Array | float = ALIGNED_M,
) -> Float[Array, "7"]:
    """Rise to the height `travel`, move until `error` (target minus position) is small, then lower to `low`."""
    slack = jnp.where(scene.tip[2] < travel - 0.02, ALIGNED_SLACK_M, 0.0)
    aligned = jnp.linalg.norm(error) < aligned_m + slack
    across = aligned | (scene.tip[2] > travel - 0.02)
    sideways = scene.tip[:2] + jnp.where(across, error, 0.0)
    return _move(scene, jnp.concatenate([sideways, jnp.where(aligned, low, travel)[None]]), gripper)


def _reach(scene: Scene) -> Float[Array, "7"]:
    block = scene.blocks[0]
    low = block[2] + world.BLOCK_HEIGHT_M + 0.005
    return _over_then_down(scene, block[:2] - scene.tip[:2], low, block[2] + TRAVEL_M, 1.0)


def _grasp(scene: Scene) -> Float[Array, "7"]:
    block = scene.blocks[0]
    low = block[2] + GRASP_M
    ready = physics.can_grasp(scene)[0] & (scene.tip[2] < low + 0.008)
    gripper = jnp.where(ready, 0.0, 1.0)
    return _over_then_down(scene, block[:2] - scene.tip[:2], low, block[2] + TRAVEL_M, gripper)


def _place(scene: Scene) -> Float[Array, "7"]:
    """Carry the held block over the task's goal, lower and release it."""
    reference = scene.blocks[1]
    beside = (env.BESIDE_NEAREST_M + env.BESIDE_FARTHEST_M) / 2
    sign = jnp.where(scene.kind == Kind.LEFT_OF, -1.0, 1.0)
    goal = reference[:2] + jnp.stack([sign * beside, jnp.zeros(())])
    goal = jnp.where(scene.kind == Kind.STACK, reference[:2], goal)
    goal = jnp.where(scene.kind == Kind.PLATE, scene.plate, jnp.where(scene.kind == Kind.BOWL, scene.bowl, goal))
    support = jnp.where(scene.kind == Kind.STACK, reference[2] + world.BLOCK_HEIGHT_M, 0.0)
    low = support - scene.grip[1]
    error = goal - scene.blocks[0, :2]
    aligned_m = jnp.where(scene.kind == Kind.STACK, ALIGNED_M, ALIGNED_ROOMY_M)
    release = (jnp.linalg.norm(error) < aligned_m + ALIGNED_SLACK_M) & (scene.tip[2] < low + 0.008)
    gripper = jnp.where(release, 1.0, 0.0)
    return _over_then_down(scene, error, low, support + TRAVEL_M, gripper, aligned_m)


def _push(scene: Scene) -> Float[Array, "7"]:
    """Lower the closed fingers behind the block, then push until it has moved far enough."""
    sign = jnp.where(scene.kind == Kind.PUSH_LEFT, -1.0, 1.0)
    block, tip = scene.blocks[0], scene.tip
    behind = block[:2] - jnp.stack([sign * BEHIND_M, jnp.zeros(())])
    approach = _over_then_down(scene, behind - tip[:2], jnp.asarray(PUSH_HEIGHT_M), jnp.asarray(TRAVEL_M), 0.0)
    gap = sign * (block[0] - tip[0])
    in_line = (jnp.abs(block[1] - tip[1]) < 0.02) & (gap > 0.03) & (gap < BEHIND_M + 0.02)
    forward = jnp.stack([tip[0] + sign * PUSH_STEP_M, block[1], jnp.asarray(PUSH_HEIGHT_M)])
    action = jnp.where(in_line & (tip[2] < PUSH_HEIGHT_M + 0.012), _move(scene, forward, 0.0), approach)
    return jnp.where(env.goal_holds(scene), _move(scene, tip, 0.0), action)
