"""Knowledge insulation: flow matching trains only the action expert, action tokens the language model.

Driess et al. 2025, "Knowledge Insulating Vision-Language-Action Models": the expert attends to the language model's
keys and values, without a gradient through them. The language model is trained to predict the same chunk as FAST
tokens, which the expert does not see. Read next: `models/pi0/pi0_network.py`, which stops the gradient.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal

from flax import nnx
from jaxtyping import Array, Float, Key

from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.next_token import NextToken
from openpi_train.objectives.objective import Metrics, Norms, Objective, augmented
from openpi_train.sampling.flow import FlowSampler
from openpi_train.types import ActionBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class InsulatedFlow(Objective):
    """`flow_weight` x flow matching + `token_weight` x next-token prediction, in one pass over images and prompt.

    The two losses share no parameters, so weights of 1 usually work.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"velocity", "insulation"})

    # The loss of the action expert, and how images are changed for both.
    flow: FlowMatching = dataclasses.field(default_factory=FlowMatching)
    # How much the action expert's loss counts.
    flow_weight: float = 1.0
    # How much the language model's loss counts.
    token_weight: float = 1.0
    # In the language model's loss every row counts the same, or every token.
    mean_over: Literal["rows", "tokens"] = "rows"

    def __post_init__(self):
        if not (0 < self.flow_weight < math.inf and 0 < self.token_weight < math.inf):
            raise ValueError(
                f"flow_weight {self.flow_weight} and token_weight {self.token_weight} must both be above 0: without "
                "its loss the action expert, or the language model, is not trained"
            )

    @property
    def draws_per_row(self) -> int:
        """The flow draws."""
        return self.flow.draws_per_row

    @property
    def longest_prefix(self) -> int:
        """That of flow matching."""
        return self.flow.longest_prefix

    @property
    def tokens(self) -> NextToken:
        """The language model's loss."""
        return NextToken(mean_over=self.mean_over)

    def norms(self, batch: ActionBatch) -> Norms:
        """Those of both losses."""
        return {**self.flow.norms(batch), **self.tokens.norms(batch)}

    def loss(
        self, model: nnx.Module, batch: ActionBatch, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the weighted sum, and of its parts."""
        batch = augmented(batch, self.flow.used_augmentation, keys if train else None)
        noise, time = self.flow.draw(batch, keys)
        noisy, wanted = self.flow.path(batch.actions, noise, time)
        policy: Any = model
        velocity, log_probs, is_best = policy.velocity_and_log_probs(batch.observation, noisy, time)
        flow_loss, _ = self.flow.loss_of(batch, norms, velocity, wanted, time)
        token_loss, metrics = self.tokens.loss_of(batch, norms, log_probs, is_best)
        loss = self.flow_weight * flow_loss + self.token_weight * token_loss
        return loss, metrics | {"loss": loss, "flow_loss": flow_loss, "token_loss": token_loss}

    @property
    def action_sampler(self) -> FlowSampler:
        return self.flow.action_sampler
