"""The tabletop world: initial states, and goals that judge honestly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_train.envs import tabletop_env
from openpi_train.envs import tabletop_scene as world
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.envs.tabletop_expert import demonstrate
from openpi_train.envs.tabletop_scene import Kind, Task

ENV = TabletopEnv()
# As in test_tabletop_expert.py, so that both compile the demonstration once.
PER_TASK = 20
tasks = np.tile(np.arange(len(ENV.tasks)), PER_TASK)
kinds = np.array([int(task.kind) for task in ENV.task_list])[tasks]


@pytest.fixture(scope="module")
def keys():
    return jax.random.split(jax.random.key(3), len(tasks))


@pytest.fixture(scope="module")
def starts(keys):
    return ENV.reset(keys, jnp.asarray(tasks))


@pytest.fixture(scope="module")
def ends(starts, keys):
    """The scenes in which the expert's success first shows, one per row."""
    _, _, after = demonstrate(starts, keys, num_steps=ENV.max_steps)
    success = np.asarray(after.goal_steps >= tabletop_env.HOLD_STEPS)
    assert success.any(0).all()
    return jax.tree.map(lambda leaf: leaf[success.argmax(0), np.arange(len(tasks))], after)


def goals(scenes):
    return np.asarray(jax.jit(jax.vmap(tabletop_env.goal_holds))(scenes))


def test_there_are_ten_tasks_and_more_each_with_its_own_name_and_words():
    assert len(ENV.tasks) >= 10
    words = [ENV.instruction(number) for number in range(len(ENV.tasks))]
    assert len(set(ENV.tasks)) == len(set(words)) == len(ENV.tasks)
    assert {task.kind for task in ENV.task_list} == set(Kind)
    assert Task(Kind.STACK, "red", "blue").instruction == "stack the red block on the blue block"


def test_a_task_with_an_unknown_or_unfitting_colour_is_refused():
    with pytest.raises(ValueError, match="unknown block colour 'pink'; colours are red, green"):
        Task(Kind.PICK, "pink")
    with pytest.raises(ValueError, match="second, different colour"):
        Task(Kind.STACK, "red", "red")
    with pytest.raises(ValueError, match="no second colour"):
        Task(Kind.BOWL, "red", "blue")


@pytest.mark.slow
def test_initial_states_are_apart_on_the_table_and_never_solved(starts):
    assert not goals(starts).any()
    assert not np.asarray(ENV.success(starts)).any()
    blocks = np.asarray(starts.blocks)
    places = np.concatenate(
        [blocks[..., :2], np.asarray(starts.bowl)[:, None], np.asarray(starts.plate)[:, None]], axis=1
    )
    assert np.abs(places).max() <= tabletop_env.SPAWN_HALF_M
    assert np.all(blocks[..., 2] == 0)
    distance = np.linalg.norm(places[:, :, None] - places[:, None], axis=-1)
    pairs = ~np.eye(5, dtype=bool)
    assert np.all(distance[:, pairs] >= np.asarray(tabletop_env.SPACING_M)[pairs])


def test_the_named_colours_are_present_and_distractors_vary(starts):
    colours = np.asarray(starts.colours)
    for row, number in enumerate(tasks):
        task = ENV.task_list[number]
        assert world.COLOURS[colours[row, 0]] == task.block
        assert task.reference is None or world.COLOURS[colours[row, 1]] == task.reference
        assert len(set(colours[row])) == world.NUM_BLOCKS
    distractors = {tuple(sorted(row[1:])) for row in colours[tasks == 0]}
    assert len(distractors) > 2


@pytest.mark.slow
def test_initial_states_are_functions_of_key_and_task_alone(keys, starts):
    again = ENV.reset(keys, jnp.asarray(tasks))
    reversed_rows = ENV.reset(keys[::-1], jnp.asarray(tasks[::-1]))
    one = jax.jit(tabletop_env.reset)
    for name in ("tip", "blocks", "bowl", "plate", "colours", "turn"):
        expected = np.asarray(getattr(starts, name))
        assert np.array_equal(expected, getattr(again, name))
        assert np.array_equal(expected, np.asarray(getattr(reversed_rows, name))[::-1])
        for row in (0, 5, 77):
            # Another program: jax 0.12 fuses `draw * width + low` there, which saves one rounding of a number below 1.
            np.testing.assert_allclose(getattr(one(keys[row], tasks[row]), name), expected[row], rtol=0, atol=2**-24)
    assert len(np.unique(np.asarray(starts.blocks)[:, 0, 0])) == len(tasks)


@pytest.mark.slow
def test_success_needs_the_goal_to_hold_for_several_steps(starts):
    row = int(np.flatnonzero(kinds == Kind.REACH)[0])
    scene = jax.tree.map(lambda leaf: leaf[row : row + 1], starts)
    above = scene.blocks[:, 0].at[:, 2].set(world.BLOCK_HEIGHT_M + 0.005)
    scene = dataclasses.replace(scene, tip=above)
    stay, away = jnp.zeros((1, 7)).at[:, 6].set(1.0), jnp.zeros((1, 7)).at[:, 2].set(0.03)
    seen = []
    for action in (stay, stay, away, stay, away, stay, stay):
        scene = ENV.step(scene, action)
        seen.append((int(scene.goal_steps[0]), bool(ENV.success(scene)[0])))
    assert seen[:3] == [(1, False), (2, False), (0, False)]
    scene = dataclasses.replace(scene, tip=above)
    seen = []
    for _ in range(4):
        scene = ENV.step(scene, stay)
        seen.append(bool(ENV.success(scene)[0]))
    assert seen == [False, False, True, True]


@pytest.mark.slow
def test_the_same_deed_with_another_block_is_no_success(ends):
    """Language matters: what was done to block 0 counts for nothing once another block carries the named colour."""
    assert goals(ends).all()
    order = np.array([2, 1, 0])
    held = np.asarray(ends.held)
    swapped = dataclasses.replace(
        ends,
        blocks=ends.blocks[:, order],
        starts=ends.starts[:, order],
        lifted=ends.lifted[:, order],
        held=jnp.asarray(np.where(held >= 0, order[np.maximum(held, 0)], -1)),
    )
    assert not goals(swapped).any()


def test_left_is_not_right(ends):
    for kind, other in ((Kind.PUSH_LEFT, Kind.PUSH_RIGHT), (Kind.LEFT_OF, Kind.RIGHT_OF)):
        turned = np.where(kinds == kind, other, np.where(kinds == other, kind, kinds))
        rows = (kinds == kind) | (kinds == other)
        assert not goals(dataclasses.replace(ends, kind=jnp.asarray(turned, jnp.int32)))[rows].any()


def test_what_is_still_held_is_not_yet_placed_and_what_was_carried_is_not_pushed(ends):
    placing = kinds >= Kind.PLATE
    assert not goals(dataclasses.replace(ends, held=jnp.zeros_like(ends.held)))[placing].any()
    pushing = (kinds == Kind.PUSH_LEFT) | (kinds == Kind.PUSH_RIGHT)
    assert not goals(dataclasses.replace(ends, lifted=jnp.ones_like(ends.lifted)))[pushing].any()


def test_moving_the_reference_block_instead_is_no_success(ends):
    named = kinds >= Kind.STACK
    shifted = dataclasses.replace(ends, starts=ends.starts.at[:, 1, 1].add(0.05))
    assert not goals(shifted)[named].any()


@pytest.mark.parametrize("gripper", [0.0, 1.0])
@pytest.mark.slow
def test_doing_nothing_or_moving_at_random_does_not_solve_tasks(starts, gripper):
    """A random walk must fail nearly always; pushing by accident is the likeliest and still rare."""

    def one_step(carry, key):
        scenes, ever = carry
        moves = jax.random.uniform(key, (len(tasks), 7), minval=-0.03, maxval=0.03).at[:, 6].set(gripper)
        scenes = jax.vmap(tabletop_env.step)(scenes, moves)
        return (scenes, ever | jax.vmap(tabletop_env.success)(scenes)), None

    run = jax.jit(lambda: jax.lax.scan(one_step, (starts, jnp.zeros(len(tasks), bool)), jax.random.split(
        jax.random.key(1), ENV.max_steps
    )))  # fmt: skip
    (_, ever), _ = run()
    assert float(ever.mean()) < 0.03
    still = starts
    for _ in range(4):
        still = ENV.step(still, jnp.zeros((len(tasks), 7)).at[:, 6].set(gripper))
    assert not np.asarray(ENV.success(still)).any()


@pytest.mark.slow
def test_observation_is_the_robots_own(starts):
    seen = ENV.observe(starts)
    assert set(seen.images) == set(ENV.cameras)
    for picture in seen.images.values():
        assert picture.shape == (len(tasks), 64, 64, 3)
        assert picture.dtype == jnp.uint8
    expected = np.concatenate([starts.tip, starts.turn, np.asarray(starts.opening)[:, None]], axis=1)
    assert np.array_equal(seen.state, expected)
    assert np.array_equal(seen.task, tasks)


def test_unusable_settings_are_refused():
    with pytest.raises(ValueError, match="image_size 8 is too small"):
        TabletopEnv(image_size=8)
    with pytest.raises(ValueError, match="task_list is empty"):
        TabletopEnv(task_list=())
