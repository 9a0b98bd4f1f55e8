"""The decay of the exponential moving average of the parameters. Read next: `parallel/update.py`."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmaWarmup:
    """A decay that grows from 0 to `ema_decay`: 1 - (1 + n / inv_gamma) ** -power after n + 1 averaged steps.

    diffusion_policy's (`model/diffusion/ema_model.py` at 5ba07ac): the first two updates keep nothing of the
    average. The decay depends only on the saved step, so it continues after a resume.
    """

    # 0.75 reaches 0.999 at 10,000 steps, 2/3 at 31,600; None: no warm-up, the decay is ema_decay from the start.
    power: float | None = None
    # Steps are divided by it.
    inv_gamma: float = 1.0
    # The average is the parameters themselves until this step.
    update_after_step: int = 0
    # The least decay, once it is not 0.
    min_decay: float = 0.0

    def check(self, most: float | None) -> list[str]:
        """What is wrong with these values given `--ema-decay` `most`, each with the flag to change."""
        problems = []
        if self.power is None and self != EmaWarmup():
            problems.append("--ema-warmup.inv-gamma and the like have no effect without --ema-warmup.power")
        if self.power is not None and most is None:
            problems.append("--ema-warmup.power with --ema-decay None: there is no average; leave one out")
        if (self.power is not None and not self.power > 0) or not self.inv_gamma > 0 or self.update_after_step < 0:
            problems.append(
                f"--ema-warmup.power {self.power} and --ema-warmup.inv-gamma {self.inv_gamma} must be above 0, "
                f"--ema-warmup.update-after-step {self.update_after_step} at least 0"
            )
        if most is not None and not 0 <= self.min_decay <= most:
            problems.append(f"--ema-warmup.min-decay {self.min_decay} must lie between 0 and --ema-decay {most}")
        return problems

    def decay(self, most: float, step: ArrayLike) -> Any:
        """The share of the average that the update of `step` (counted from 0) keeps, up to `most`, float32."""
        if self.power is None:
            return most
        count = jnp.maximum(jnp.asarray(step, jnp.float32) - (self.update_after_step + 1), 0.0)
        # expm1 and log1p: where the decay is near 1, the difference to 1 is what counts.
        value = -jnp.expm1(-self.power * jnp.log1p(count / self.inv_gamma))
        return jnp.where(count > 0, jnp.clip(value, self.min_decay, most), 0.0)
