"""Flow matching on stored episodes, each chunk told whether it was better or worse than expected: RECAP's policy.

Physical Intelligence 2025, "pi*0.6: a VLA that learns from experience"; CFGRL (Frans et al. 2025). All rows are
imitated; what differs is what the velocity is told. A row's indicator comes with the data (`data/robot/labels.py`).
Read next: `indicator_flow.py`, the same on own rollouts; `sampling/indicator.py`, by which the policy acts.
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.objective import Metrics, Norms, Objective, augmented
from openpi_train.sampling.flow import FlowSampler
from openpi_train.sampling.indicator import BETTER, NONE, WORSE, check_drop, check_guidance, dropped
from openpi_train.types import ActionBatch, Network


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageConditionedFlow(Objective):
    """Flow matching with an indicator for each row, of which `drop` of the draws are told nothing."""

    needs: ClassVar[frozenset[str]] = frozenset({"velocity", "indicator"})
    label: ClassVar[Literal["return", "indicator"] | None] = "indicator"

    # The loss, and how images are changed.
    flow: FlowMatching = dataclasses.field(default_factory=FlowMatching)
    # How often nothing is told.
    drop: float = 0.3
    # Guidance in evaluations, and where the policy is served: 0 tells it nothing, 1 `better`, more goes beyond.
    guidance: float = 1.0

    def check(self) -> list[str]:
        """Invalid settings, as sentences that name the flag to change."""
        problems = check_guidance("--objective.guidance", self.guidance) + check_drop("--objective.drop", self.drop)
        if self.flow.max_delay:
            problems.append("--objective.flow.max-delay: prefixes and guidance by an indicator do not go together")
        return problems

    @property
    def draws_per_row(self) -> int:
        """The flow draws."""
        return self.flow.draws_per_row

    def norms(self, batch: ActionBatch) -> Norms:
        """Those of flow matching."""
        return self.flow.norms(batch)

    def loss(
        self, model: nnx.Module, batch: ActionBatch, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the mean squared velocity error, and of the rows that are better, or worse."""
        assert keys is not None, "flow matching draws noise: it needs one key per row"
        network: Network = model
        batch = augmented(batch, self.flow.used_augmentation, keys if train else None)
        assert batch.label is not None, "the experiment has checked that the data have an indicator"
        noise, time = self.flow.draw(batch, keys)
        noisy, wanted = self.flow.path(batch.actions, noise, time)
        known = batch.label.astype(jnp.int32)
        told = jnp.where(dropped(keys, self.flow.num_flow_draws, self.drop), NONE, known[:, None])  # b r
        loss, metrics = self.flow.loss_of(batch, norms, network.velocity(batch.observation, noisy, time, told), wanted)
        elements = self.flow.num_flow_draws * self.flow.element_mask(batch).sum(axis=(1, 2))
        shares = {"better": BETTER, "worse": WORSE}
        return loss, metrics | {
            name: ((known == value) * elements).sum() / norms["elements"] for name, value in shares.items()
        }

    @property
    def action_sampler(self) -> FlowSampler:
        return dataclasses.replace(self.flow.action_sampler, guidance=self.guidance)
