"""What a policy's action error says beside that of the mean action of the training data, in words.

The mean action is what a policy learns that ignores its input. Read next: `action_error.py`, `tools/open_loop.py`.
"""

import dataclasses
import math

# Factors below this are no difference.
_NOTABLE = 1.05


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A sentence's end, such as "worse than ...", and whether the policy has learned (None: the errors do not say)."""

    text: str
    has_learned: bool | None

    @property
    def words(self) -> str:
        """The sentence's end with the verdict, where it is a bad one."""
        return f"{self.text}: it has not learned" if self.has_learned is False else self.text


def against_mean_action(error: float, baseline: float) -> Comparison:
    """Compare a policy's root mean square error with that of the mean action of the training data, both at least 0."""
    mean = "the mean action of the training data"
    if not math.isfinite(error):
        return Comparison(f"not a number, so not to be compared with {mean}", False)
    if not (math.isfinite(baseline) and baseline > 0):
        return Comparison(f"not to be compared with {mean}, which is right everywhere in these episodes", None)
    if error == 0:
        return Comparison(f"better than {mean}: there is no error", True)
    factor = baseline / error
    if factor >= _NOTABLE:
        return Comparison(f"better than {mean} by a factor {_digits(factor)}", True)
    if factor > 1 / _NOTABLE:
        return Comparison(f"no better than {mean}", False)
    return Comparison(f"worse than {mean} by a factor {_digits(1 / factor)}", False)


def _digits(factor: float) -> str:
    """Two digits, and three from 100 on."""
    return f"{factor:.2f}" if factor < 2 else f"{factor:.1f}" if factor < 100 else f"{factor:.3g}"
