"""Quasi-static physics of the tabletop: one control step of one scene (`vmap` for many).

Read next: `tabletop_scene.py` for the sizes, `tabletop_env.py` for resets and success.

There is no momentum. A control step turns the gripper and moves it sideways (contact pushes blocks along), then up or
down (it stops on objects below), then unsupported blocks fall straight down, and those whose centre is not above their
support slide off it. A sideways motion that would press objects into each other is refused, so no two solids ever
overlap by more than SUPPORT_TOLERANCE_M. Contact treats the gripper as upright: roll and pitch only move the wrist
camera and, when large, prevent a grasp.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from openpi_train.envs import tabletop_scene as world
from openpi_train.envs.tabletop_scene import Scene
from openpi_train.types import pytree

# Sideways overlap left by a resolved contact, and the larger overlap that support requires: a resolved contact can then
# never become support.
TOLERANCE_M = 0.001
SUPPORT_TOLERANCE_M = 0.002
# A block at most this far from the centre of its support stays there; others slide by SLIDE_M per control step.
STABLE_M = 0.9 * world.BLOCK_RADIUS_M
SLIDE_M = 0.015
# Sideways motion is split into substeps so short that no finger can jump past a block's centre.
NUM_SUBSTEPS = 3
NUM_CONTACT_SWEEPS = 8
# Maximum offset of a block from the midpoint between the fingers, along and across them, and tilt, for a grasp to hold.
GRASP_ALONG_M = 0.016
GRASP_ACROSS_M = 0.016
GRASP_TILT_RAD = 0.2
GRASP_LOWEST_M = 0.008
GRASP_HIGHEST_M = 0.04


@pytree
class Pushers:
    """The upright cylinders that push free blocks: two fingers, the palm, and the held block (inactive if none)."""

    centre: Float[Array, "4 2"]
    radius: Float[Array, "4"]
    low: Float[Array, "4"]
    high: Float[Array, "4"]
    active: Bool[Array, "4"]


def step(scene: Scene, action: Float[Array, "7"]) -> Scene:
    """The scene one control step after `action` (dx, dy, dz, droll, dpitch, dyaw, gripper), clipped to its bounds.

    Args: action in metres and radians; gripper below 0.5 closes, otherwise opens. `goal_steps` is not changed.
    """
    move = jnp.clip(action[:3], -world.MAX_MOVE_M, world.MAX_MOVE_M)
    turn = jnp.clip(action[3:6], -world.MAX_TURN_RAD, world.MAX_TURN_RAD)
    limits = jnp.asarray(world.TURN_LIMITS_RAD)
    scene = _grasp_or_release(scene, action[6] < 0.5)
    before = scene.blocks[:, 2]
    scene = dataclasses.replace(scene, turn=scene.turn.at[:2].set(jnp.clip(scene.turn + turn, -limits, limits)[:2]))
    yaw = jnp.clip(scene.turn[2] + turn[2], -limits[2], limits[2])
    target = jnp.clip(scene.tip + move, jnp.asarray(world.GRIPPER_LOW), jnp.asarray(world.GRIPPER_HIGH))
    scene = _move_sideways(scene, target[:2], yaw, _opening_goal(scene, action[6] < 0.5))
    scene = _move_vertically(scene, target[2])
    scene = _slide(scene, before)
    scene = dataclasses.replace(scene, blocks=_drop(scene, scene.blocks, before))
    lifted = scene.lifted | (scene.blocks[:, 2] > SUPPORT_TOLERANCE_M)
    return dataclasses.replace(scene, lifted=lifted, num_steps=scene.num_steps + 1)


def can_grasp(scene: Scene) -> Bool[Array, " n"]:
    """For each block, whether closing the gripper now would hold it."""
    offset = scene.blocks[:, :2] - scene.tip[:2]
    along = jnp.abs(offset @ world.finger_axis(scene.turn[2]))
    across = jnp.abs(offset @ world.forward_axis(scene.turn[2]))
    height = scene.tip[2] - scene.blocks[:, 2]
    on_top = _overlap(scene.blocks) & _above(scene.blocks[:, 2])
    inner_gap = scene.opening * world.GAP_M
    return (
        (along < GRASP_ALONG_M)
        & (across < GRASP_ACROSS_M)
        & (height > GRASP_LOWEST_M)
        & (height < GRASP_HIGHEST_M)
        & (inner_gap >= 2 * world.BLOCK_RADIUS_M - TOLERANCE_M)
        & (jnp.max(jnp.abs(scene.turn[:2])) < GRASP_TILT_RAD)
        & ~on_top.any(axis=0)
    )


def _grasp_or_release(scene: Scene, close: Bool[Array, ""]) -> Scene:
    possible = can_grasp(scene)
    grasped = jnp.where(possible.any(), jnp.argmax(possible), -1).astype(jnp.int32)
    new = close & (scene.held < 0) & (grasped >= 0)
    block = scene.blocks[grasped]
    across = (block[:2] - scene.tip[:2]) @ world.forward_axis(scene.turn[2])
    grip = jnp.where(new, jnp.stack([across, block[2] - scene.tip[2]]), scene.grip)
    held = jnp.where(close, jnp.where(new, grasped, scene.held), -1)
    return dataclasses.replace(scene, held=held, grip=grip)


def _opening_goal(scene: Scene, close: Bool[Array, ""]) -> Float[Array, ""]:
    goal = jnp.where(close, jnp.where(scene.held >= 0, world.HELD_OPENING, 0.0), 1.0)
    return scene.opening + jnp.clip(goal - scene.opening, -world.MAX_OPENING_CHANGE, world.MAX_OPENING_CHANGE)


def _pushers(scene: Scene) -> Pushers:
    spread = scene.opening * world.GAP_M / 2 + world.FINGER_RADIUS_M
    axis = world.finger_axis(scene.turn[2])
    tip = scene.tip[:2]
    held = scene.blocks[scene.held]
    low = jnp.stack([scene.tip[2], scene.tip[2], scene.tip[2] + world.FINGER_LENGTH_M, held[2]])
    return Pushers(
        centre=jnp.stack([tip + spread * axis, tip - spread * axis, tip, held[:2]]),
        radius=jnp.asarray([world.FINGER_RADIUS_M] * 2 + [world.PALM_RADIUS_M, world.BLOCK_RADIUS_M]),
        low=low,
        high=jnp.concatenate([jnp.full(3, jnp.inf), low[3:] + world.BLOCK_HEIGHT_M]),
        active=jnp.asarray([True, True, True, False]).at[3].set(scene.held >= 0),
    )


def _free(scene: Scene) -> Bool[Array, " n"]:
    return jnp.arange(world.NUM_BLOCKS) != scene.held


def _move_sideways(scene: Scene, target: Float[Array, "2"], yaw: Float[Array, ""], opening: Float[Array, ""]) -> Scene:
    start = (scene.tip[:2], scene.turn[2], scene.opening, scene.blocks[scene.held, :2])
    carried = target + scene.grip[0] * world.forward_axis(yaw)
    end = (target, yaw, opening, carried)
    for number in range(1, NUM_SUBSTEPS + 1):
        part = number / NUM_SUBSTEPS
        tip, turn, gap, block = jax.tree.map(lambda a, b, part=part: a + part * (b - a), start, end)
        moved_blocks = jnp.where(_free(scene)[:, None], scene.blocks[:, :2], block)
        trial = dataclasses.replace(
            scene,
            tip=scene.tip.at[:2].set(tip),
            turn=scene.turn.at[2].set(turn),
            opening=gap,
            blocks=scene.blocks.at[:, :2].set(moved_blocks),
        )
        scene = _resolve_contacts(scene, trial)
    return scene


def _resolve_contacts(scene: Scene, trial: Scene) -> Scene:
    """`trial` with its free blocks pushed out of everything solid, or `scene` if that is impossible."""
    pushers = _pushers(trial)

    def sweep(blocks, _):
        push, _ = contacts(blocks, trial, pushers)
        moved = jnp.clip(blocks[:, :2] + push, -world.BLOCK_LIMIT_M, world.BLOCK_LIMIT_M)
        return blocks.at[:, :2].set(jnp.where(_free(trial)[:, None], moved, blocks[:, :2])), None

    blocks, _ = jax.lax.scan(sweep, trial.blocks, None, length=NUM_CONTACT_SWEEPS)
    _, depth = contacts(blocks, trial, pushers)
    solved = dataclasses.replace(trial, blocks=blocks)
    return jax.tree.map(lambda new, old: jnp.where(depth <= TOLERANCE_M, new, old), solved, scene)


def contacts(
    blocks: Float[Array, "n 3"], scene: Scene, pushers: Pushers
) -> tuple[Float[Array, "n 2"], Float[Array, ""]]:
    """Sideways displacement that moves each block out of its overlaps, and the deepest overlap of all [m]."""
    low, high = blocks[:, 2], blocks[:, 2] + world.BLOCK_HEIGHT_M
    free = _free(scene)
    # Gripper and blocks [n, 4]: the gripper never yields.
    touching = free[:, None] & pushers.active & _spans_meet(low[:, None], high[:, None], pushers.low, pushers.high)
    away, distance = _directions(blocks[:, None, :2] - pushers.centre)
    pusher_depth = jnp.where(touching, jnp.maximum(pushers.radius + world.BLOCK_RADIUS_M - distance, 0.0), 0.0)
    # The mean over a block's contacts: two adjacent fingers must not push twice as far.
    push = (pusher_depth[..., None] * away).sum(1) / jnp.maximum((pusher_depth > 0).sum(1), 1)[:, None]
    # Pairs of blocks [n, n]: each yields half. The held block is a pusher.
    pairs = free[:, None] & free & ~jnp.eye(world.NUM_BLOCKS, dtype=bool)
    pairs &= _spans_meet(low[:, None], high[:, None], low, high)
    away, distance = _directions(blocks[:, None, :2] - blocks[None, :, :2])
    pair_depth = jnp.where(pairs, jnp.maximum(2 * world.BLOCK_RADIUS_M - distance, 0.0), 0.0)
    push += 0.5 * (pair_depth[..., None] * away).sum(1)
    # The bowl's rim and blocks lower than it, from outside and from inside.
    away, distance = _directions(blocks[:, :2] - scene.bowl)
    rim_depth = jnp.maximum(world.BLOCK_RADIUS_M - jnp.abs(distance - world.BOWL_RADIUS_M), 0.0)
    rim_depth = jnp.where(low < world.BOWL_RIM_M - SUPPORT_TOLERANCE_M, rim_depth, 0.0)
    push += jnp.where(distance > world.BOWL_RADIUS_M, rim_depth, -rim_depth)[:, None] * away
    edge_depth = jnp.maximum(jnp.abs(blocks[:, :2]) - world.BLOCK_LIMIT_M, 0.0)
    depth = jnp.max(jnp.stack([pusher_depth.max(), pair_depth.max(), rim_depth.max(), edge_depth.max()]))
    return push, depth


def _move_vertically(scene: Scene, target: Float[Array, ""]) -> Scene:
    """Raise the gripper, or lower it until a finger, the palm or the held block rests on something."""
    pushers = _pushers(scene)
    tops = scene.blocks[:, 2] + world.BLOCK_HEIGHT_M
    distance = jnp.linalg.norm(scene.blocks[:, None, :2] - pushers.centre, axis=-1)
    over = distance < pushers.radius + world.BLOCK_RADIUS_M - SUPPORT_TOLERANCE_M
    over &= (tops[:, None] <= pushers.low + SUPPORT_TOLERANCE_M) & pushers.active & _free(scene)[:, None]
    # The lower limit of each part, as a height of the tip.
    floor = jnp.where(over, tops[:, None] - (pushers.low - scene.tip[2]), -jnp.inf).max()
    held = scene.blocks[scene.held]
    floor_held = _rim_height(scene, held[:2]) - scene.grip[1]
    floor = jnp.maximum(floor, jnp.where(scene.held >= 0, floor_held, -jnp.inf))
    height = jnp.where(target < scene.tip[2], jnp.maximum(target, jnp.minimum(scene.tip[2], floor)), target)
    carried = scene.blocks.at[scene.held, 2].set(height + scene.grip[1])
    blocks = jnp.where(scene.held >= 0, carried, scene.blocks)
    return dataclasses.replace(scene, tip=scene.tip.at[2].set(height), blocks=blocks)


def _drop(scene: Scene, blocks: Float[Array, "n 3"], before: Float[Array, " n"]) -> Float[Array, "n 3"]:
    """Lower free blocks, or raise them with a held one, onto the highest support; `before` has earlier heights."""
    below = _overlap(blocks) & _above(before)
    rim = jax.vmap(_rim_height, in_axes=(None, 0))(scene, blocks[:, :2])
    heights = blocks[:, 2]
    for _ in range(world.NUM_BLOCKS):
        standing = jnp.where(below, heights[None, :] + world.BLOCK_HEIGHT_M, 0.0).max(1)
        heights = jnp.where(_free(scene), jnp.maximum(standing, rim), heights)
    return blocks.at[:, 2].set(heights)


def _slide(scene: Scene, before: Float[Array, " n"]) -> Scene:
    """Move blocks whose centre is not above their support a little off it, unless they would hit something."""
    blocks = _drop(scene, scene.blocks, before)
    away, distance = _directions(blocks[:, None, :2] - blocks[None, :, :2])
    supporters = _overlap(blocks) & _above(before)
    supporters &= blocks[:, None, 2] <= blocks[None, :, 2] + world.BLOCK_HEIGHT_M + SUPPORT_TOLERANCE_M
    stable = (supporters & (distance <= STABLE_M)).any(1)
    direction = (supporters[..., None] * away).sum(1)
    rim_away, rim_distance = _directions(blocks[:, :2] - scene.bowl)
    on_rim = jax.vmap(_rim_height, in_axes=(None, 0))(scene, blocks[:, :2]) > 0
    on_rim &= blocks[:, 2] <= world.BOWL_RIM_M + SUPPORT_TOLERANCE_M
    outwards = jnp.where(rim_distance > world.BOWL_RADIUS_M, 1.0, -1.0)[:, None] * rim_away
    direction = jnp.where(on_rim[:, None] & ~supporters.any(1)[:, None], outwards, direction)
    unit, length = _directions(direction)
    slides = _free(scene) & ~stable & (length > 0.3)
    moved = jnp.where(slides[:, None], blocks[:, :2] + SLIDE_M * unit, blocks[:, :2])
    slid = blocks.at[:, :2].set(moved)
    _, depth = contacts(slid, scene, _pushers(scene))
    return dataclasses.replace(scene, blocks=jnp.where(depth <= TOLERANCE_M, slid, scene.blocks))


def _rim_height(scene: Scene, position: Float[Array, "2"]) -> Float[Array, ""]:
    """Height of a block centred here due to the bowl: on its rim, or on the table inside or outside of it."""
    distance = jnp.linalg.norm(position - scene.bowl)
    clear = jnp.abs(distance - world.BOWL_RADIUS_M) >= world.BLOCK_RADIUS_M - SUPPORT_TOLERANCE_M
    return jnp.where(clear, 0.0, world.BOWL_RIM_M)


def _overlap(blocks: Float[Array, "n 3"]) -> Bool[Array, "n n"]:
    """Which pairs of blocks overlap as seen from above."""
    distance = jnp.linalg.norm(blocks[:, None, :2] - blocks[None, :, :2], axis=-1)
    apart = distance >= 2 * world.BLOCK_RADIUS_M - SUPPORT_TOLERANCE_M
    return ~apart & ~jnp.eye(blocks.shape[0], dtype=bool)


def _above(heights: Float[Array, " n"]) -> Bool[Array, "n n"]:
    """[i, j]: whether block i's bottom is at or above block j's top."""
    return heights[:, None] >= heights[None, :] + world.BLOCK_HEIGHT_M - SUPPORT_TOLERANCE_M


def _spans_meet(low: Array, high: Array, other_low: Array, other_high: Array) -> Bool[Array, "..."]:
    return (low < other_high - SUPPORT_TOLERANCE_M) & (high > other_low + SUPPORT_TOLERANCE_M)


def _directions(offset: Float[Array, "*n 2"]) -> tuple[Float[Array, "*n 2"], Float[Array, "*n"]]:
    """Unit vectors and lengths; a zero offset points along x, so that coinciding objects still separate."""
    length = jnp.linalg.norm(offset, axis=-1)
    unit = jnp.where(length[..., None] > 1e-9, offset / jnp.maximum(length, 1e-9)[..., None], jnp.asarray([1.0, 0.0]))
    return unit, length
