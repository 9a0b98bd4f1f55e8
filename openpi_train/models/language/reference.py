"""A language model beside a frozen copy of it, for objectives that hold a policy to where it started.

A policy with an adapter needs no copy: its reference is itself without the adapter (`nn/decoder.py`).
Read next: `accompanied.py`, `objectives/preference_pairs.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from flax import nnx

from openpi_train.models.language.accompanied import POLICY, REFERENCE, AccompaniedConfig, AccompaniedPolicy
from openpi_train.models.language.language import LanguageConfig
from openpi_train.models.model_config import Base
from openpi_train.parallel.params import ParamLeaves


class PolicyAndReference(AccompaniedPolicy):
    """A policy, and the reference that it was copied to. To all else it is the policy."""

    def __init__(self, config: LanguageConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.reference = nnx.clone(self.policy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferencedConfig(AccompaniedConfig):
    """A language model that trains (`policy/`), and a frozen copy of its first state (`reference/`).

    No frozen parameter is rounded: policy and reference are equal at first, bit for bit.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"token_scores", "reference"})

    @property
    def smaller_runs(self) -> Sequence[str]:
        return (
            "train low-rank adapters only, which need no copy as a reference: a LanguageConfig with an adapter",
            "precompute what the reference says: a LanguageConfig with --objective.reference precomputed",
            *super().smaller_runs,
        )

    def build(self, rngs: nnx.Rngs) -> PolicyAndReference:
        return PolicyAndReference(self.policy, rngs)

    @property
    def base(self) -> Base:
        """The policy's model: policy and reference start from the same."""

        def start(params: ParamLeaves) -> dict[str, Any]:
            return {part + path: leaf for part in (POLICY, REFERENCE) for path, leaf in params.items()}

        return Base(model=self.policy, start=start)
