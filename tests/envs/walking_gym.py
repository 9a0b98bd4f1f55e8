"""Environments with Gymnasium's methods, for `GymEnv`: on a line, to the goal at 3."""

import types

import numpy as np

CLOSED: list["Line"] = []


class Line:
    """The observation is a dictionary: where it is, where it began, and a picture of the number of steps."""

    action_space = types.SimpleNamespace(low=np.array([-1.0]), high=np.array([1.0]))

    def __init__(self, told="is_success"):
        self.told = told

    def reset(self, seed):
        self.start = self.place = np.random.default_rng(seed).uniform(0, 1, 1)
        self.steps = 0
        return self.seen(), {}

    def step(self, action):
        self.place, self.steps = self.place + action, self.steps + 1
        return self.seen(), 7.0, bool(self.place[0] > 3), self.steps == 5, {self.told: self.place[0] > 3}

    def seen(self):
        return {"place": self.place, "begin": self.start, "eye": np.full((2, 2, 3), self.steps, np.uint8)}

    def close(self):
        CLOSED.append(self)


def line(told="is_success"):
    return Line(told)


class Arms(Line):
    """Nested pictures, as LeRobot's environments have them, and others; and what says more about the task."""

    action_space = types.SimpleNamespace(low=np.full(2, -1.0), high=np.ones(2))
    spec = types.SimpleNamespace(max_episode_steps=7)
    metadata = types.MappingProxyType({"render_fps": 25})
    task_description = "walk on"

    def seen(self):
        grey = np.full((2, 3), 9, np.uint8)
        return {
            "pixels": {"top": np.full((2, 3, 3), 7, np.uint8), "side": np.full((3, 2, 4), 0.2), "grey": grey},
            "agent": {"pos": self.place, "holds": np.bool_(True)},
            "goal": np.array([3.0]),
            "depth": np.ones((2, 3), np.float32) * 4,
        }


def arms():
    return Arms(told="success")


def silent():
    return Line(told="solved")


def blind():
    made = Line()
    made.seen = lambda: {"eye": np.zeros((2, 2, 3), np.uint8)}
    return made


def discrete():
    made = Line()
    made.action_space = types.SimpleNamespace(n=4)
    return made


class Stays(Line):
    """An episode that goes on where it has reached the goal."""

    def step(self, action):
        seen, reward, _, truncated, told = super().step(action)
        return seen, reward, False, truncated, told


def stays():
    return Stays()
