"""Behaviour cloning from the state: the config of a family that is no part of the package. Read next: the network."""

import dataclasses
from typing import ClassVar

from cloning_network import Cloning

from openpi_train.fields import at_least
from openpi_train.models.exact_policy import ExactPolicyConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloningConfig(ExactPolicyConfig):
    """A network with one hidden layer from the robot's state to a chunk."""

    # What objectives may ask of the module: `chunk`, and that evaluations and servers can sample.
    provides: ClassVar[frozenset[str]] = frozenset({"chunk", "sample"})

    # Steps of a chunk.
    action_horizon: int = 4
    # Units of the hidden layer.
    width: int = at_least(1, 32)

    def build(self, rngs):
        return Cloning(self.used_state_dim, self.width, (self.action_horizon, self.action_dim), rngs)
