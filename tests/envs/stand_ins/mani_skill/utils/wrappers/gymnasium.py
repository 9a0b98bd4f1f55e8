"""Stands in for ManiSkill's wrapper: values without the axis of the batch."""

import jax


class CPUGymWrapper:
    def __init__(self, env):
        self.env, self.action_space = env, env.action_space

    def reset(self, *, seed=None, options=None):
        return _first(self.env.reset(seed=seed, options=options))

    def step(self, action):
        return _first(self.env.step(action))


def _first(tree):
    return jax.tree.map(lambda one: one[0] if hasattr(one, "shape") and one.shape else one, tree)
