"""What the rollouts of an iteration of RL cost, whatever the devices. Read next: `iteration.py`, which forecasts.

`training/traced_rl.py` makes it, from traced programs.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSteps:
    """Tokens that are made one after the other, each for so many rows at a time.

    `bytes_per_step` is what a device, or each of a tensor group, reads for it.
    """

    rows: int
    steps_per_rollout: int
    bytes_per_step: float
    flops_per_row: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutCost:
    """What the rollouts of an iteration cost, all of them as long as is allowed.

    Attributes:
        num_rollouts: those that an iteration learns from, in `num_steps` optimizer steps.
        most_waves: how often so many may be made for one iteration.
        acting_flops: of a rollout, without those of `tokens`.
        acting_bytes_per_row: on a device, of robots at one query, beside the parameters; 0 of texts.
        rows_at_a_time: rollouts that a device, or a tensor group, makes at a time at most.
        scoring_flops: of a rollout: what policy, reference and critic say of it before it is learnt from.
        experience_bytes: of a rollout.
        is_local: whether rollouts stay in the process that made them.
        control_steps: of a rollout, in an environment; 0 of texts.
    """

    num_rollouts: int
    num_steps: int
    most_waves: int
    acting_flops: float
    acting_bytes_per_row: float
    rows_at_a_time: int
    scoring_flops: float
    experience_bytes: int
    is_local: bool
    control_steps: int
    tokens: TokenSteps | None = None

    def on_device(self, batch_size: int, groups: int) -> dict[str, int]:
        """Fields of `Memory`: a step's rollouts on a device, and what acting needs beside the policy's copy.

        `groups` are the devices that have rows of their own: each, or every tensor group.
        """
        rows = min(self.rows_at_a_time, -(-self.num_rollouts // groups))
        return {
            "experience": self.experience_bytes * batch_size // groups,
            "acting": int(self.acting_bytes_per_row * rows),
        }
