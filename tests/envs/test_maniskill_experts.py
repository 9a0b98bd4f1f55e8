"""ManiSkill's scripted experts in a world without forces; `test_real_simulators.py` has the real one."""

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from openpi_train.envs import maniskill_experts as experts

DOWN = Rotation.from_quat([1, 0, 0, 0])


def pose(place, rotation):
    return np.concatenate([place, rotation.as_quat(scalar_first=True)])


def about_vertical(angle):
    return Rotation.from_euler("z", angle)


class World:
    """The gripper comes a third of the way that an action asks for, and a cube between closed fingers goes with it."""

    def __init__(self, **places):
        self.gripper, self.rotation, self.width = np.array([0.0, 0.0, 0.17]), DOWN, 0.08
        self.cubes = {name: np.array(place, float) for name, place in places.items()}

    def known(self):
        cubes = {name: pose(place, about_vertical(0.5)) for name, place in self.cubes.items()}
        return {**cubes, "tcp": pose(self.gripper, self.rotation), "fingers": np.full(2, self.width / 2)}

    def step(self, action):
        assert action.shape == (7,) and np.abs(action).max() <= 1
        move = action[:3] * 0.1 / 3
        near = [cube for cube in self.cubes.values() if np.linalg.norm(cube - self.gripper) < 0.015]
        self.width = 0.08 if action[6] > 0 else (0.04 if near else 0.0)
        for cube in near if self.width == 0.04 else ():
            cube += move
        self.gripper = self.gripper + move
        # A positive action turns against the vertical.
        self.rotation = about_vertical(-action[5] * 0.1 / 3) * self.rotation


@pytest.mark.parametrize("angle", [0.0, 0.3, 0.9, 2.5, -1.2])
def test_the_smallest_turn_makes_the_fingers_parallel_to_the_cubes_sides(angle):
    gripper = about_vertical(0.2) * DOWN
    turn = experts._quarter_turn(*(one.as_quat(scalar_first=True) for one in (about_vertical(angle), gripper)))
    assert abs(turn) <= np.pi / 4 + 1e-9
    fingers = (about_vertical(turn) * gripper).apply([0, 1, 0])
    sides = about_vertical(angle).apply([[1, 0, 0], [0, 1, 0]])
    np.testing.assert_allclose(np.abs(sides @ fingers).max(), 1, atol=1e-6)


def test_one_cube_is_let_go_upon_the_other():
    world = World(cubeA=[0.08, -0.1, 0.02], cubeB=[-0.05, 0.1, 0.02])
    for _ in range(80):
        world.step(experts.stack_cube(world.known()))
    # ManiSkill's success: within 5 mm of one side above the other, and not held.
    np.testing.assert_allclose(world.cubes["cubeA"], world.cubes["cubeB"] + [0, 0, 0.04], atol=0.0051)
    assert world.width == 0.08


def test_a_cube_is_approached_from_behind_with_closed_fingers():
    world = World(cube=[0.02, 0.05, 0.02], goal_region=[0.22, 0.05, 0.001])
    for _ in range(40):
        action = experts.push_cube(world.known())
        if action[0] > 0.5:  # it pushes
            break
        world.step(action)
    assert world.gripper[2] < 0.05 and world.width == 0
    assert world.gripper[0] < -0.03 and abs(world.gripper[1] - 0.05) < 0.02
