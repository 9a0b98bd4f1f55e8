"""Ray-cast rendering of the tabletop in pure JAX: one ray per pixel against a dozen solids, the nearest hit wins.

Read next: `tabletop_scene.py` for the sizes. There are two cameras, with the datasets' names: `image_0` stands in front
of the table and looks down on it, `image_1` is mounted behind the gripper and turns with it. All arithmetic is on flat
arrays with one number per pixel, which XLA compiles to a few vectorised loops.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from openpi_train.envs import tabletop_scene as world
from openpi_train.envs.tabletop_scene import Scene

CAMERAS = ("image_0", "image_1")

# Materials of a pixel, as rows of the palette; the blocks come after these, in the scene's order.
FLOOR, TABLE, PLATE, BOWL, BOWL_EDGE, METAL, TIPS, WRIST, BLOCKS = range(9)
PALETTE = (
    (40, 43, 51),
    (204, 184, 153),
    (248, 248, 250),
    (115, 72, 41),
    (71, 41, 23),
    (77, 82, 92),
    (20, 20, 26),
    (115, 122, 138),
)
# Direction to the light in x and y; walls facing away from it keep the fraction AMBIENT of their colour.
LIGHT = (-0.37, -0.46)
AMBIENT = 0.55
SHADOW = 0.62
PLATE_EDGE = 0.82
# Brightness of a box's faces with normals along x, y and z.
BOX_FACES = (0.75, 0.6, 1.0)
RIM_HALF_WIDTH_M = 0.006
# The dark end of each finger.
TIP_M = 0.015

# Position and target of the base camera, and the tangent of both cameras' half angle of view.
BASE_EYE = (0.0, -0.44, 0.72)
BASE_TARGET = (0.0, 0.0, 0.02)
BASE_TANGENT = 0.335
# The wrist camera in the gripper's frame.
WRIST_EYE = (-0.10, 0.0, 0.12)
WRIST_TARGET = (-0.015, 0.0, 0.0)
WRIST_TANGENT = 0.75


Pixels = Float[Array, " p"]


class Rays(NamedTuple):
    """Camera position (three coordinates) and one direction per pixel (not normalised)."""

    eye: tuple[Array, Array, Array]
    x: Pixels
    y: Pixels
    z: Pixels


class Picture(NamedTuple):
    """The nearest hit so far: its distance along the ray, material (a row of the palette) and brightness."""

    distance: Pixels
    item: Int[Array, " p"]
    light: Pixels


def render(scene: Scene, camera: str, size: int = 64) -> UInt8[Array, "size size 3"]:
    """Render the scene from `camera` (one of CAMERAS), `size` pixels square."""
    if camera not in CAMERAS:
        raise ValueError(f"no camera {camera!r}; cameras are {', '.join(CAMERAS)}")
    turn = _rotation(scene.turn)
    if camera == "image_0":
        up = jnp.asarray([0.0, 0.0, 1.0])
        rays = _camera(jnp.asarray(BASE_EYE), jnp.asarray(BASE_TARGET), up, BASE_TANGENT, size)
    else:
        eye, target = (scene.tip + turn @ jnp.asarray(point) for point in (WRIST_EYE, WRIST_TARGET))
        rays = _camera(eye, target, turn @ jnp.asarray([1.0, 0.0, 0.0]), WRIST_TANGENT, size)
    picture = _bowl(_table(rays, scene), rays, scene)
    for number in range(world.NUM_BLOCKS):
        x, y, bottom = scene.blocks[number]
        top = bottom + world.BLOCK_HEIGHT_M
        picture = _wall(picture, rays, (x, y), world.BLOCK_RADIUS_M, bottom, top, BLOCKS + number)
        distance, across = _level(rays, top)
        picture = _paint(picture, distance, _within(across, (x, y), world.BLOCK_RADIUS_M), BLOCKS + number, 1.0)
    picture = _gripper(picture, rays, scene, turn)
    # Without the barrier XLA would trace every ray once for each colour channel.
    item, light = jax.lax.optimization_barrier((picture.item, picture.light))
    palette = jnp.concatenate([jnp.asarray(PALETTE), jnp.asarray(world.COLOUR_RGB)[scene.colours]]).astype(jnp.float32)
    colour = palette[item] * light[:, None]
    return (jnp.minimum(colour, 255.0) + 0.5).astype(jnp.uint8).reshape(size, size, 3)


def _camera(eye: Array, target: Array, up: Array, tangent: float, size: int) -> Rays:
    forward = (target - eye) / jnp.linalg.norm(target - eye)
    right = jnp.cross(forward, up)
    right = right / jnp.linalg.norm(right)
    above = jnp.cross(right, forward)
    ticks = ((np.arange(size) + 0.5) / size * 2.0 - 1.0).astype(np.float32) * tangent
    column, row = (jnp.asarray(axis.reshape(-1)) for axis in np.meshgrid(ticks, -ticks))
    x, y, z = (forward[axis] + column * right[axis] + row * above[axis] for axis in range(3))
    return Rays((eye[0], eye[1], eye[2]), x, y, z)


def _rotation(turn: Float[Array, "3"]) -> Float[Array, "3 3"]:
    """Roll about x, then pitch about y, then yaw about z, as one matrix (gripper frame to world)."""
    (cr, cp, cy), (sr, sp, sy) = jnp.cos(turn), jnp.sin(turn)
    return jnp.stack(
        [
            jnp.stack([cy * cp, cy * sp * sr - sy * cr, cy * sp * cr + sy * sr]),
            jnp.stack([sy * cp, sy * sp * sr + cy * cr, sy * sp * cr - cy * sr]),
            jnp.stack([-sp, cp * sr, cp * cr]),
        ]
    )


def _paint(picture: Picture, distance: Pixels, hit: Bool[Array, " p"], item: int, light: Array | float) -> Picture:
    nearer = hit & (distance > 1e-4) & (distance < picture.distance)
    return Picture(
        jnp.where(nearer, distance, picture.distance),
        jnp.where(nearer, item, picture.item),
        jnp.where(nearer, light, picture.light),
    )


def _level(rays: Rays, height: float | Array) -> tuple[Pixels, tuple[Pixels, Pixels]]:
    """Intersection of the rays with a horizontal plane: distance (negative if none), and x, y."""
    distance = (height - rays.eye[2]) / jnp.where(rays.z < -1e-6, rays.z, jnp.inf)
    distance = jnp.where(rays.z < -1e-6, distance, -1.0)
    return distance, (rays.eye[0] + distance * rays.x, rays.eye[1] + distance * rays.y)


def _within(points: tuple[Pixels, Pixels], centre: Any, radius: float) -> Bool[Array, " p"]:
    return (points[0] - centre[0]) ** 2 + (points[1] - centre[1]) ** 2 < radius**2


def _table(rays: Rays, scene: Scene) -> Picture:
    """Floor and table, with the plate and the bowl's inside painted on, and shadows straight below raised objects."""
    distance, points = _level(rays, 0.0)
    plate = _within(points, scene.plate, world.PLATE_RADIUS_M)
    item = jnp.where(plate, PLATE, jnp.where(_within(points, scene.bowl, world.BOWL_RADIUS_M), BOWL, TABLE))
    light = jnp.where(plate & ~_within(points, scene.plate, world.PLATE_RADIUS_M - 0.008), PLATE_EDGE, 1.0)
    shaded = _within(points, scene.tip, 0.022)
    for number in range(world.NUM_BLOCKS):
        shaded |= _within(points, scene.blocks[number], world.BLOCK_RADIUS_M)
    light = jnp.where(shaded, light * SHADOW, light)
    half = world.TABLE_HALF_M
    hit = (distance > 0) & (jnp.abs(points[0]) < half) & (jnp.abs(points[1]) < half)
    return Picture(jnp.where(hit, distance, jnp.inf), jnp.where(hit, item, FLOOR), jnp.where(hit, light, 1.0))


def _bowl(picture: Picture, rays: Rays, scene: Scene) -> Picture:
    outer, inner = world.BOWL_RADIUS_M + RIM_HALF_WIDTH_M, world.BOWL_RADIUS_M - RIM_HALF_WIDTH_M
    picture = _wall(picture, rays, scene.bowl, outer, 0.0, world.BOWL_RIM_M, BOWL_EDGE)
    distance, points = _level(rays, world.BOWL_RIM_M)
    ring = _within(points, scene.bowl, outer) & ~_within(points, scene.bowl, inner)
    return _paint(picture, distance, ring, BOWL_EDGE, 1.0)


def _wall(
    picture: Picture, rays: Rays, centre: Any, radius: float, low: Array | float, high: Array | float, item: int
) -> Picture:
    """The near wall of an upright cylinder."""
    x, y = rays.eye[0] - centre[0], rays.eye[1] - centre[1]
    a = jnp.maximum(rays.x**2 + rays.y**2, 1e-9)
    b = rays.x * x + rays.y * y
    root = b**2 - a * (x**2 + y**2 - radius**2)
    distance = (-b - jnp.sqrt(jnp.maximum(root, 0.0))) / a
    height = rays.eye[2] + distance * rays.z
    facing = ((x + distance * rays.x) * LIGHT[0] + (y + distance * rays.y) * LIGHT[1]) / radius
    light = AMBIENT + (1 - AMBIENT) * jnp.maximum(facing, 0.0)
    return _paint(picture, distance, (root > 0) & (height > low) & (height < high), item, light)


def _gripper(picture: Picture, rays: Rays, scene: Scene, turn: Float[Array, "3 3"]) -> Picture:
    """Two fingers with dark tips, the palm across them, and the wrist above, tilted with the gripper."""
    # Rays in the gripper's frame, so that its boxes are axis-aligned.
    eye = (jnp.stack(rays.eye) - scene.tip) @ turn
    x, y, z = (rays.x * turn[0, axis] + rays.y * turn[1, axis] + rays.z * turn[2, axis] for axis in range(3))
    local = Rays((eye[0], eye[1], eye[2]), x, y, z)
    spread = scene.opening * world.GAP_M / 2 + world.FINGER_RADIUS_M
    radius, length = world.FINGER_RADIUS_M, world.FINGER_LENGTH_M
    for side in (spread, -spread):
        picture = _box(picture, local, (0.0, side, TIP_M / 2), (radius, radius, TIP_M / 2), TIPS)
        half = (length - TIP_M) / 2
        picture = _box(picture, local, (0.0, side, TIP_M + half), (radius, radius, half), METAL)
    picture = _box(picture, local, (0.0, 0.0, length + 0.01), (0.016, 0.068, 0.01), METAL)
    return _box(picture, local, (0.0, 0.0, length + 0.05), (0.014, 0.014, 0.03), WRIST)


def _box(picture: Picture, rays: Rays, centre: tuple[Any, ...], half: tuple[float, ...], item: int) -> Picture:
    """A box aligned with the rays' frame, its faces shaded by the axis of their normals."""
    entry, leaving = [], []
    for axis, direction in enumerate((rays.x, rays.y, rays.z)):
        inverse = 1.0 / jnp.where(jnp.abs(direction) < 1e-6, 1e-6, direction)
        middle, reach = (centre[axis] - rays.eye[axis]) * inverse, jnp.abs(inverse) * half[axis]
        entry.append(middle - reach)
        leaving.append(middle + reach)
    distance = jnp.maximum(jnp.maximum(entry[0], entry[1]), entry[2])
    end = jnp.minimum(jnp.minimum(leaving[0], leaving[1]), leaving[2])
    light = jnp.where(distance == entry[2], BOX_FACES[2], jnp.where(distance == entry[0], BOX_FACES[0], BOX_FACES[1]))
    return _paint(picture, distance, distance < end, item, light)
