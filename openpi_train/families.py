"""The families of models, each a folder of `models/`, and one line here that registers its exchange.

A family of your own is registered in your experiments' file (docs/howto/extend.md). Read next: `interop/exchange.py`.
"""

from openpi_train.interop.checkpoint_format import Format
from openpi_train.interop.exchange import Exchange
from openpi_train.models.act.act_exchange import ACT
from openpi_train.models.diffusion_policy.diffusion_policy_exchange import DIFFUSION_POLICY
from openpi_train.models.language.language_exchange import LANGUAGE
from openpi_train.models.model_config import ModelConfig
from openpi_train.models.paligemma.paligemma_exchange import PALIGEMMA
from openpi_train.models.pi0.pi0_exchange import PI0
from openpi_train.models.pi0_fast.pi0_fast_exchange import PI0_FAST
from openpi_train.models.smolvla.smolvla_exchange import SMOLVLA

# The names of formats for models of several families (`checkpoints/checkpoint_formats.py`).
COMMON_FORMATS = ("ours", "openpi", "lerobot", "openpi_torch")
_REGISTERED: dict[str, Exchange] = {}


def register(exchange: Exchange) -> None:
    """Add a family. What the same file registers again, being imported again, replaces the former.

    Raises ValueError if its name, or that of one of its formats, is another family's.
    """
    names = {one.name for one in exchange.formats}
    if taken := names & {*COMMON_FORMATS}:
        raise ValueError(f"{exchange.family} has a format {min(taken)!r}, which is one of all families; rename it")
    for other in _REGISTERED.values():
        if _classes(other) == _classes(exchange):
            continue
        if other.family == exchange.family:
            raise ValueError(f"the name of the family {exchange.family!r} is taken by {_classes(other)}; give another")
        if taken := names & {one.name for one in other.formats}:
            raise ValueError(f"{exchange.family} has a format {min(taken)!r}, as {other.family} has; give another name")
    _REGISTERED[exchange.family] = exchange


def _classes(exchange: Exchange) -> str:
    return ", ".join(f"{one.__module__}.{one.__qualname__}" for one in exchange.models)


def registered() -> tuple[Exchange, ...]:
    """All families, in the order in which they were registered."""
    return tuple(_REGISTERED.values())


def exchange_of(model: ModelConfig) -> Exchange:
    """The model's family, of several the one registered last; one that exchanges nothing if none has the model."""
    found = [one for one in registered() if isinstance(model, one.models)]
    return found[-1] if found else Exchange(family=type(model).__name__, models=(type(model),))


def formats() -> tuple[Format, ...]:
    """The formats of all families' own checkpoints."""
    return tuple(form for one in registered() for form in one.formats)


for _exchange in (PI0, PI0_FAST, ACT, SMOLVLA, DIFFUSION_POLICY, PALIGEMMA, LANGUAGE):
    register(_exchange)
