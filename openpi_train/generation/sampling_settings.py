"""How completions are sampled, and where they end: the settings of one request. Read next: `token_choice.py`."""

import dataclasses

from openpi_train.fields import at_least

# Programs hold this many end tokens per row.
MAX_STOP_IDS = 8
_SEEDS = 2**32
# Programs hold tokens and top-k as int32.
LARGEST_INT32 = 2**31 - 1
# Logits divided by less could overflow float32.
LEAST_TEMPERATURE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """The settings of a completion. With the same settings, row number and model, a prompt has the same completion.

    The limits apply in this order, as in transformers: temperature, top-k, top-p, min-p.
    """

    # Divisor of the logits; 0 always takes the most probable token.
    temperature: float = at_least(0, 1.0)
    # Only the k most probable tokens; 0: all.
    top_k: int = at_least(0, 0)
    # Only the most probable tokens that together have this probability.
    top_p: float = 1.0
    # Only tokens with at least this share of the most probable one's probability.
    min_p: float = at_least(0, 0.0)
    # A completion has at most this many tokens.
    max_new_tokens: int = at_least(1, 256)
    # Texts at which a completion ends; they are not part of it.
    stop: tuple[str, ...] = ()
    # Tokens at which it ends, besides the tokenizer's own.
    stop_ids: tuple[int, ...] = ()
    # Seed of the random numbers.
    seed: int = at_least(0, 0)

    def check(self) -> list[str]:
        """Invalid values, as sentences that name the field."""
        # Not a number is in no range.
        ranges = {
            "temperature": (self.temperature, 0, float("inf")),
            "top_k": (self.top_k, 0, LARGEST_INT32),
            "min_p": (self.min_p, 0, 1),
            "max_new_tokens": (self.max_new_tokens, 1, float("inf")),
            "seed": (self.seed, 0, _SEEDS - 1),
        }
        problems = [
            f"{name} {value} must be from {low} to {high}"
            if high < float("inf")
            else f"{name} {value} must be at least {low} and finite"
            for name, (value, low, high) in ranges.items()
            if not (low <= value <= high and value < float("inf"))
        ]
        if 0 < self.temperature < LEAST_TEMPERATURE:
            problems.append(
                f"temperature {self.temperature} must be 0, which takes the most probable token, or at least "
                f"{LEAST_TEMPERATURE}"
            )
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p {self.top_p} must be above 0 and at most 1")
        if len(self.stop_ids) > MAX_STOP_IDS:
            problems.append(f"stop_ids has {len(self.stop_ids)} tokens; the most are {MAX_STOP_IDS}")
        if not all(0 <= token <= LARGEST_INT32 for token in self.stop_ids):
            problems.append(f"stop_ids {list(self.stop_ids)} must be tokens, which are from 0 to {LARGEST_INT32}")
        if "" in self.stop:
            problems.append("stop has an empty text, at which every completion would end before its first token")
        return problems
