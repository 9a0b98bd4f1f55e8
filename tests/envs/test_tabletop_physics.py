"""How things move on the table: closed forms for single contacts, invariants under rough handling."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_train.envs import tabletop_env, tabletop_physics
from openpi_train.envs import tabletop_scene as world
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.envs.tabletop_expert import expert

ENV = TabletopEnv()
RADIUS, HEIGHT, FINGER = world.BLOCK_RADIUS_M, world.BLOCK_HEIGHT_M, world.FINGER_RADIUS_M
# What the world promises about overlaps, with room for the rounding of float32 sums of centimetres.
DEEPEST_M = tabletop_physics.SUPPORT_TOLERANCE_M + 1e-6
STEP = jax.jit(tabletop_physics.step)


@pytest.fixture(scope="module")
def scene():
    """Blocks in a row along y, bowl and plate in corners, the gripper upright above the middle."""
    start = tabletop_env.reset(jax.random.key(0), jnp.int32(0))
    return dataclasses.replace(
        start,
        tip=jnp.asarray([0.0, 0.0, 0.1]),
        turn=jnp.zeros(3),
        blocks=jnp.asarray([[0.0, 0.0, 0.0], [0.0, 0.12, 0.0], [0.0, -0.12, 0.0]]),
        bowl=jnp.asarray([-0.15, 0.15]),
        plate=jnp.asarray([0.15, 0.15]),
    )


def act(scene, *, move=(0, 0, 0), turn=(0, 0, 0), gripper=1.0, times=1):
    action = jnp.asarray([*move, *turn, gripper], jnp.float32)
    for _ in range(times):
        scene = STEP(scene, action)
    return scene


def place(scene, number, position):
    return dataclasses.replace(scene, blocks=scene.blocks.at[number].set(jnp.asarray(position)))


def grasped(scene):
    scene = act(scene, move=(0, 0, -0.03), times=3)
    scene = act(scene, gripper=0.0)
    assert int(scene.held) == 0
    return scene


@pytest.mark.slow
def test_actions_are_bounded(scene):
    after = act(scene, move=(1, -1, 1), turn=(1, -1, 1), gripper=-5.0)
    assert np.allclose(after.tip - scene.tip, [0.03, -0.03, 0.03], atol=1e-7)
    assert np.allclose(after.turn, [0.15, -0.15, 0.15])
    assert float(after.opening) == 0.5
    far = act(scene, move=(1, 1, 1), turn=(1, 1, 1), times=30)
    assert np.allclose(far.tip, world.GRIPPER_HIGH)
    assert np.allclose(far.turn, world.TURN_LIMITS_RAD)


def test_a_block_pushed_head_on_stays_in_contact_with_both_fingers(scene):
    """Closed fingers sit at +-FINGER along y, so that contact is at sqrt((R + r)^2 - r^2) along x."""
    scene = dataclasses.replace(scene, tip=jnp.asarray([-0.09, 0.0, 0.02]), opening=jnp.zeros(()))
    pushed = act(scene, move=(0.02, 0, 0), gripper=0.0, times=6)
    contact = np.sqrt((RADIUS + FINGER) ** 2 - FINGER**2)
    assert np.allclose(pushed.blocks[0, :2], [0.03 + contact, 0.0], atol=tabletop_physics.TOLERANCE_M)
    assert np.array_equal(pushed.blocks[1:], scene.blocks[1:])


def test_a_block_pushes_the_next_one(scene):
    scene = dataclasses.replace(scene, tip=jnp.asarray([-0.09, 0.0, 0.02]), opening=jnp.zeros(()))
    scene = place(scene, 1, [0.07, 0.0, 0.0])
    pushed = act(scene, move=(0.02, 0, 0), gripper=0.0, times=5)
    contact = np.sqrt((RADIUS + FINGER) ** 2 - FINGER**2)
    assert np.allclose(pushed.blocks[:2, 0], [0.01 + contact, 0.01 + contact + 2 * RADIUS], atol=2e-3)


def test_a_block_against_the_tables_edge_stops_the_gripper(scene):
    scene = place(scene, 0, [world.BLOCK_LIMIT_M, 0.0, 0.0])
    scene = dataclasses.replace(scene, tip=jnp.asarray([0.15, 0.0, 0.02]), opening=jnp.zeros(()))
    pushed = act(scene, move=(0.03, 0, 0), gripper=0.0, times=6)
    contact = np.sqrt((RADIUS + FINGER) ** 2 - FINGER**2)
    assert float(pushed.tip[0]) <= world.BLOCK_LIMIT_M - contact + DEEPEST_M
    assert np.allclose(pushed.blocks[0, :2], [world.BLOCK_LIMIT_M, 0.0], atol=DEEPEST_M)
    assert float(act(pushed, move=(-0.03, 0, 0), gripper=0.0).tip[0]) < float(pushed.tip[0]) - 0.02


def test_a_held_block_follows_the_gripper_and_falls_when_let_go(scene):
    held = grasped(scene)
    assert np.isclose(float(held.opening), world.HELD_OPENING)
    carried = act(held, move=(0.01, 0.02, 0.03), gripper=0.0, times=3)
    assert np.allclose(carried.blocks[0] - held.blocks[0], carried.tip - held.tip, atol=1e-6)
    assert float(carried.blocks[0, 2]) > HEIGHT
    dropped = act(carried)
    assert int(dropped.held) == -1
    assert np.allclose(dropped.blocks[0], [*carried.blocks[0, :2], 0.0], atol=1e-6)
    assert np.asarray(dropped.lifted).tolist() == [True, False, False]


def test_an_off_centre_block_is_centred_between_the_fingers_and_turns_with_them(scene):
    scene = place(scene, 0, [0.01, 0.01, 0.0])
    held = act(grasped(scene), move=(0, 0, 0.03), gripper=0.0)
    assert np.allclose(held.blocks[0, :2] - held.tip[:2], [0.01, 0.0], atol=1e-6)
    turned = act(held, turn=(0, 0, 0.15), gripper=0.0, times=4)
    angle = float(turned.turn[2])
    assert angle == pytest.approx(0.6, abs=1e-5)
    expected = [0.01 * np.cos(angle), 0.01 * np.sin(angle)]
    assert np.allclose(turned.blocks[0, :2] - turned.tip[:2], expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", ["too high", "beside", "tilted", "shut before", "covered"])
def test_a_grasp_needs_the_block_between_upright_open_fingers(scene, spoiled):
    scene = dataclasses.replace(scene, tip=jnp.asarray([0.0, 0.0, 0.03]))
    assert bool(tabletop_physics.can_grasp(scene)[0])
    if spoiled == "too high":
        scene = dataclasses.replace(scene, tip=scene.tip.at[2].set(0.055))
    elif spoiled == "beside":
        scene = dataclasses.replace(scene, tip=scene.tip.at[0].set(0.02))
    elif spoiled == "tilted":
        scene = dataclasses.replace(scene, turn=scene.turn.at[0].set(0.25))
    elif spoiled == "shut before":
        scene = dataclasses.replace(scene, opening=jnp.float32(0.5))
    else:
        scene = place(scene, 1, [0.0, 0.0, HEIGHT])
    assert not bool(tabletop_physics.can_grasp(scene)[0])


def test_fingers_stop_on_what_is_below_them(scene):
    """The left finger, open, stands above block 1 when the tip is half an open gripper away from it."""
    spread = world.GAP_M / 2 + FINGER
    scene = dataclasses.replace(scene, tip=jnp.asarray([0.0, 0.12 - spread, 0.1]))
    scene = place(scene, 0, [0.15, 0.0, 0.0])
    lowered = act(scene, move=(0, 0, -0.03), times=5)
    assert float(lowered.tip[2]) == pytest.approx(HEIGHT, abs=1e-6)
    empty = dataclasses.replace(scene, tip=jnp.asarray([0.1, 0.0, 0.1]))
    assert float(act(empty, move=(0, 0, -0.03), times=5).tip[2]) == pytest.approx(world.GRIPPER_LOW[2])


def test_a_block_can_be_stacked_and_stays(scene):
    held = act(grasped(scene), move=(0, 0, 0.03), gripper=0.0, times=3)
    over = act(held, move=(0, 0.03, 0), gripper=0.0, times=4)
    down = act(over, move=(0, 0, -0.03), gripper=0.0, times=4)
    assert float(down.blocks[0, 2]) == pytest.approx(HEIGHT, abs=1e-6)
    left = act(act(down), move=(0, 0, 0.03), times=3)
    assert np.allclose(left.blocks[0], [0.0, 0.12, HEIGHT], atol=1e-4)


def test_a_block_set_down_half_beside_another_slides_off_it(scene):
    scene = place(scene, 0, [0.04, 0.12, HEIGHT])
    scene = dataclasses.replace(scene, tip=jnp.asarray([-0.2, -0.2, 0.2]))
    settled = act(scene, times=4)
    assert float(settled.blocks[0, 2]) == 0.0
    assert np.linalg.norm(settled.blocks[0, :2] - settled.blocks[1, :2]) >= 2 * RADIUS - DEEPEST_M
    assert np.array_equal(settled.blocks[1], scene.blocks[1])


@pytest.mark.parametrize(("offset", "inside"), [(0.05, True), (0.08, False)])
def test_a_block_let_go_on_the_bowls_rim_slides_to_the_side_it_leans_to(scene, offset, inside):
    scene = place(scene, 0, [-0.15 + offset, 0.15, world.BOWL_RIM_M])
    scene = dataclasses.replace(scene, tip=jnp.asarray([0.2, -0.2, 0.2]))
    scene = place(scene, 1, [0.15, -0.1, 0.0])
    settled = act(scene, times=4)
    assert float(settled.blocks[0, 2]) == 0.0
    assert (float(jnp.linalg.norm(settled.blocks[0, :2] - settled.bowl)) < world.BOWL_RADIUS_M) == inside


def test_the_bowls_rim_keeps_blocks_out_and_in(scene):
    for start, direction in (([-0.15 - 0.066 + 0.0, 0.0, 0.0], 1.0), ([-0.15, 0.15, 0.0], -1.0)):
        pushed = place(scene, 0, start)
        pushed = place(pushed, 1, [0.15, -0.1, 0.0])
        behind = jnp.asarray([start[0], start[1] - direction * 0.05, 0.02])
        if direction > 0:
            pushed = dataclasses.replace(pushed, bowl=jnp.asarray([start[0], 0.13]))
        # Fingers side by side across the way.
        pushed = dataclasses.replace(
            pushed, tip=behind, turn=jnp.asarray([0.0, 0.0, world.TURN_LIMITS_RAD[2]]), opening=jnp.zeros(())
        )
        after = act(pushed, move=(0, direction * 0.02, 0), gripper=0.0, times=8)
        before_inside = float(jnp.linalg.norm(pushed.blocks[0, :2] - pushed.bowl)) < world.BOWL_RADIUS_M
        distance = float(jnp.linalg.norm(after.blocks[0, :2] - after.bowl))
        assert (distance < world.BOWL_RADIUS_M) == before_inside
        assert abs(distance - world.BOWL_RADIUS_M) >= RADIUS - DEEPEST_M


@pytest.fixture(scope="module")
def rough():
    """Scenes [steps, rows] under rough handling: half expert with strong noise, half hunting random blocks."""
    rows, steps = 280, 120
    keys = jax.random.split(jax.random.key(11), rows)
    scenes = ENV.reset(keys, jnp.arange(rows) % len(ENV.tasks))

    def rough_action(scene, key, number):
        now, spell = jax.random.fold_in(key, number), jax.random.fold_in(key, 10_000 + number // 12)
        block_key, height_key, gripper_key, mode_key = jax.random.split(spell, 4)
        heights = jnp.asarray([0.012, 0.03, 0.06, 0.1])
        block = scene.blocks[jax.random.randint(block_key, (), 0, world.NUM_BLOCKS)]
        hunt = block.at[2].set(jax.random.choice(height_key, heights)) - scene.tip
        noise = jax.random.normal(now, (7,))
        gripper = jax.random.bernoulli(gripper_key).astype(jnp.float32)
        hunting = jnp.concatenate([hunt, 0.1 * noise[3:6], gripper[None]])
        working = expert(scene) + noise * jnp.asarray([0.01] * 3 + [0.1] * 3 + [0.3])
        return jnp.where(jax.random.bernoulli(mode_key), hunting, working)

    def one_step(scenes, number):
        actions = jax.vmap(functools.partial(rough_action, number=number))(scenes, keys)
        scenes = jax.vmap(tabletop_physics.step)(scenes, actions)
        return scenes, (scenes, actions)

    return jax.tree.map(np.asarray, jax.jit(lambda: jax.lax.scan(one_step, scenes, jnp.arange(steps))[1])())


@pytest.mark.slow
def test_blocks_never_overlap_and_never_leave_the_table(rough):
    blocks = rough[0].blocks
    for i in range(world.NUM_BLOCKS):
        for j in range(i):
            sideways = 2 * RADIUS - np.linalg.norm(blocks[..., i, :2] - blocks[..., j, :2], axis=-1)
            upwards = HEIGHT - np.abs(blocks[..., i, 2] - blocks[..., j, 2])
            assert np.minimum(sideways, upwards).max() <= DEEPEST_M
    assert np.abs(blocks[..., :2]).max() <= world.BLOCK_LIMIT_M + DEEPEST_M
    assert blocks[..., 2].min() >= 0.0


def test_fingers_and_rim_never_enter_blocks(rough):
    scenes = rough[0]
    axis = np.stack([-np.sin(scenes.turn[..., 2]), np.cos(scenes.turn[..., 2])], axis=-1)
    spread = (scenes.opening * world.GAP_M / 2 + FINGER)[..., None]
    others = np.arange(world.NUM_BLOCKS) != scenes.held[..., None]
    depth_below_top = scenes.blocks[..., 2] + HEIGHT - scenes.tip[..., None, 2]
    for side in (1, -1):
        finger = (scenes.tip[..., :2] + side * spread * axis)[..., None, :]
        sideways = RADIUS + FINGER - np.linalg.norm(scenes.blocks[..., :2] - finger, axis=-1)
        assert np.minimum(sideways, depth_below_top)[others].max() <= DEEPEST_M
    distance = np.linalg.norm(scenes.blocks[..., :2] - scenes.bowl[..., None, :], axis=-1)
    into_rim = np.minimum(RADIUS - np.abs(distance - world.BOWL_RADIUS_M), world.BOWL_RIM_M - scenes.blocks[..., 2])
    assert into_rim.max() <= DEEPEST_M


def test_nothing_floats_and_what_is_held_is_between_the_fingers(rough):
    scenes = rough[0]
    blocks, held = scenes.blocks, scenes.held
    assert (held >= 0).mean() > 0.05, "the rough handling must grasp now and then for this to mean anything"
    assert (blocks[..., 2] > 0.04).sum() > 100
    for i in range(world.NUM_BLOCKS):
        stands = (np.abs(blocks[..., i, 2]) < 1e-6) | (np.abs(blocks[..., i, 2] - world.BOWL_RIM_M) < 1e-6)
        for j in range(world.NUM_BLOCKS):
            near = np.linalg.norm(blocks[..., i, :2] - blocks[..., j, :2], axis=-1) < 2 * RADIUS
            stands |= near & (np.abs(blocks[..., i, 2] - blocks[..., j, 2] - HEIGHT) < 1e-6)
        assert (stands | (held == i)).all()
    carried = np.take_along_axis(blocks, np.maximum(held, 0)[..., None, None], axis=2)[..., 0, :] - scenes.tip
    reach = np.hypot(tabletop_physics.GRASP_ALONG_M, tabletop_physics.GRASP_ACROSS_M)
    assert np.linalg.norm(carried[..., :2], axis=-1)[held >= 0].max() <= reach + 1e-6
    assert (-carried[..., 2])[held >= 0].max() <= tabletop_physics.GRASP_HIGHEST_M


@pytest.mark.slow
def test_the_batch_equals_the_loop_and_repeats_exactly(rough):
    """Bit for bit between repeats; between batch and single scene to the rounding of other instruction orders."""
    scenes, actions = rough
    batched = jax.jit(jax.vmap(tabletop_physics.step))
    for number in (0, 40, 100):
        rows = jax.tree.map(lambda leaf, number=number: jnp.asarray(leaf[number, :16]), scenes)
        first, second = batched(rows, actions[number + 1, :16]), batched(rows, actions[number + 1, :16])
        for row in range(16):
            alone = STEP(jax.tree.map(lambda leaf, row=row: leaf[row], rows), jnp.asarray(actions[number + 1, row]))
            for name in ("tip", "turn", "opening", "blocks", "held", "lifted"):
                assert np.array_equal(getattr(first, name)[row], getattr(second, name)[row])
                assert np.allclose(getattr(first, name)[row], getattr(alone, name), atol=1e-6)
