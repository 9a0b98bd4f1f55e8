"""What the attempts of an iteration of practice cost, whatever the devices. Read next: `iteration.py`, which forecasts.

`training/traced_practice.py` makes it, from traced programs.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSteps:
    """Tokens that are made one after the other, each for so many rows at a time.

    `bytes_per_step` is what a device, or each of a tensor group, reads for it.
    """

    rows: int
    steps_per_attempt: int
    bytes_per_step: float
    flops_per_row: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PracticeCost:
    """What the attempts of an iteration cost, all of them as long as is allowed.

    Attributes:
        num_attempts: those that an iteration learns from, in `num_steps` optimizer steps.
        most_waves: how often so many may be made for one iteration.
        acting_flops: of an attempt, without those of `tokens`.
        acting_bytes_per_row: on a device, of robots at one query, beside the parameters; 0 of texts.
        rows_at_a_time: attempts that a device, or a tensor group, makes at a time at most.
        scoring_flops: of an attempt: what policy, reference and critic say of it before it is learnt from.
        experience_bytes: of an attempt.
        is_local: whether attempts stay in the process that made them.
        control_steps: of an attempt, in an environment; 0 of texts.
    """

    num_attempts: int
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
        """Fields of `Memory`: a step's attempts on a device, and what acting needs beside the policy's copy.

        `groups` are the devices that have rows of their own: each, or every tensor group.
        """
        rows = min(self.rows_at_a_time, -(-self.num_attempts // groups))
        return {
            "experience": self.experience_bytes * batch_size // groups,
            "acting": int(self.acting_bytes_per_row * rows),
        }
