"""The `optimizer` section of configs for torch: type, weight decay and betas as flags. Read next: `yaml_file.py`."""

from openpi_train.doors.config_file import ConfigFile
from openpi_train.doors.yaml_file import YamlFile
from openpi_train.runtime.exits import UsageError

_TYPE, _DECAY, _BETAS = "optimizer.type", "optimizer.weight_decay", "optimizer.betas"


def translate_optimizer(file: YamlFile, types: tuple[str, ...], *decays: str) -> None:
    """Record the flags of the type, which is one of `types`, and of the weight decay; `decays` are further keys of it.

    Raises UsageError for another type, and for Adam with a weight decay: torch adds that to the gradient.
    """
    kind, keys = file.word(_TYPE, types), (_DECAY, *decays)
    if kind == "adam" and (decay := file.agreed(YamlFile.number, *keys)):
        raise UsageError(f"{_TYPE} is Adam and the weight decay is {decay}: use AdamW, or 0")
    file.flag("optimizer", None if kind is None else "sgd" if kind == "sgd" else "adamw", _TYPE)
    file.spelled("optimizer.weight-decay", YamlFile.number, *keys)
    if kind == "adam":
        file.flag("optimizer.weight-decay", 0.0, _TYPE)


def translate_betas(file: ConfigFile) -> None:
    """Record the flags of the two betas. Raises UsageError if they are no two numbers."""
    if file.values.get(_BETAS) is not None:
        b1, b2 = file.pair(_BETAS, (0.9, 0.999))
        file.flag("optimizer.b1", b1, _BETAS)
        file.flag("optimizer.b2", b2, _BETAS)
