"""What the compiled training step computes and sends, read from the program itself: a run's `program.json`.

Read next: `planning/flops.py` and `planning/traffic.py`, which count; `recorder.py`, which makes rates of it.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax

from openpi_train.planning.flops import product_flops
from openpi_train.planning.traffic import collectives

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One optimizer step of the whole batch.

    `model_flops` are forward and backward, `executed_flops` also what is recomputed; products only, on all devices
    together. `sent_bytes` are those that one device sends, by kind of collective; None where the compiler does not
    know how often one runs. `compile_s` counts tracing, too.
    """

    model_flops: float
    executed_flops: float
    sent_bytes: Mapping[str, float] | None
    compile_s: float

    @classmethod
    def of(cls, jaxpr: Any, hlo: str, compile_s: float) -> "Program":
        """The account of a traced and compiled step."""
        return cls(
            model_flops=product_flops(jaxpr, recomputed=False),
            executed_flops=product_flops(jaxpr),
            sent_bytes=_sent_bytes(hlo),
            compile_s=compile_s,
        )

    def line(self) -> str:
        """For the log."""
        again = self.executed_flops / max(self.model_flops, 1.0)
        words = f"a step computes {self.model_flops / 1e9:,.1f} GFLOP, {again:.2f} times that with what is recomputed"
        if not self.sent_bytes:
            return words
        kinds = ", ".join(f"{kind} {size / 1e6:,.1f}" for kind, size in self.sent_bytes.items())
        return f"{words}; each device sends {sum(self.sent_bytes.values()) / 1e6:,.1f} MB ({kinds})"


def _sent_bytes(hlo: str) -> dict[str, float] | None:
    sent: dict[str, float] = {}
    try:
        for one in collectives(hlo, jax.device_count()):
            sent[one.kind] = sent.get(one.kind, 0.0) + one.sent_bytes
    except ValueError as error:
        logger.warning("how much a step sends is unknown: %s", error)
        return None
    return sent
