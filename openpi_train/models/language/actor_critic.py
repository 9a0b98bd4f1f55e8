"""A language model that acts, beside a critic of its own that says what it will earn, for PPO.

Read next: `accompanied.py`, `reward.py`, `objectives/policy_gradient.py`.
"""

import dataclasses
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float, Int

from openpi_train.models.language.accompanied import CRITIC, POLICY, REFERENCE, AccompaniedConfig, AccompaniedPolicy
from openpi_train.models.language.reward import RewardConfig, RewardModel
from openpi_train.models.model_config import Base
from openpi_train.models.param_rules import ParamRules
from openpi_train.parallel.params import ParamLeaves


class ActorAndCritic(AccompaniedPolicy):
    """A policy; a critic, which is a network of its own; and a frozen reference if asked for."""

    def __init__(self, config: "ActorCriticConfig", rngs: nnx.Rngs):
        super().__init__(config.policy, rngs)
        self.critic = RewardModel(config.critic.decoder, rngs)
        if config.with_reference:
            self.reference = nnx.clone(self.policy)

    def values(
        self, tokens: Int[Array, "b t"], positions: Int[Array, "b t"], segments: Int[Array, "b t"]
    ) -> Float[Array, "b t"]:
        """What the critic expects after each token."""
        return self.critic.score(self.critic.decoder(tokens, positions, segments))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(AccompaniedConfig):
    """A language model that trains (`policy/`), and its critic (`critic/`), which trains too.

    Both start from the same weights; the critic's head is zero at first. With `with_reference` there is a frozen copy
    of the policy's first state (`reference/`).
    """

    provides: ClassVar[frozenset[str]] = frozenset({"token_scores", "value", "reference"})

    # Keep a copy of the policy's first state, for objectives that hold the policy to it.
    with_reference: bool = False

    @property
    def critic(self) -> RewardConfig:
        """The critic's network: the policy's without a table that scores tokens, and a head."""
        return RewardConfig(language=self.policy)

    def build(self, rngs: nnx.Rngs) -> ActorAndCritic:
        return ActorAndCritic(self, rngs)

    def check_objective(self, name: str, needs: frozenset[str]) -> list[str]:
        problems = super().check_objective(name, needs)
        if "reference" in needs and not self.with_reference:
            problems.append(f"objective {name} compares with a reference: give --model.with-reference")
        return problems

    @property
    def rules_of_parts(self) -> dict[str, ParamRules]:
        """Those of a policy, its reference and a reward model, which is the group `critic`."""
        critic = dataclasses.replace(self.critic.param_rules.published_below(CRITIC), groups={"critic": ".*"})
        return {**super().rules_of_parts, CRITIC: critic}

    @property
    def base(self) -> Base:
        """The policy's model: all parts start from the same, but for the critic's head, which is newly made."""
        parts = (POLICY, REFERENCE) if self.with_reference else (POLICY,)

        def start(params: ParamLeaves) -> dict[str, Any]:
            found = {part + path: leaf for part in parts for path, leaf in params.items()}
            return found | {CRITIC + path: leaf for path, leaf in self.critic.base.start(params).items()}

        return Base(model=self.policy, start=start)
