"""The models that a YAML config names: the one that trains, and those beside it. Read next: `training_flags.py`."""

from pathlib import Path

from openpi_train.doors.config_file import contradiction
from openpi_train.doors.posttraining.yaml_config import YamlConfig
from openpi_train.runtime.exits import UsageError

_MODEL, _BASE_MODEL = ("model.model_name_or_path", "model.name_or_path"), "model.name"
# What must be the start weights, and may be named again, by algorithm.
_REFERENCES = ("reference_model_path", "ref_model_path", "sft_model_path")
_CRITICS = ("value_model_path", "critic_model_path")
_AGAIN = {"dpo": _REFERENCES[:1], "ppo": (*_REFERENCES, *_CRITICS), "grpo": _REFERENCES}
# The key that an error names.
MODEL_KEY = _MODEL[0]


def start_model(file: YamlConfig) -> str | None:
    """The folder or the address of the model that trains; None if there is none. Raises UsageError."""
    path, base = file.agreed(YamlConfig.text, *_MODEL), file.text(_BASE_MODEL)
    found = path or base
    if found is None:
        return None
    model = model_place(found)
    file.note(f"weights, sizes and tokenizer of {model}", *(_MODEL if path else (_BASE_MODEL,)))
    if path:
        file.note("tokenizer and sizes are those of the weights", _BASE_MODEL)
    for name in _AGAIN.get(file.algorithm, ()):
        what = "the critic starts from" if name in _CRITICS else "the reference is"
        for key in file.own(name):
            other = file.text(key)
            if other is not None and address_of(other) != model:
                raise contradiction(f"{key} is {other} and the model is {found}; {what} the start weights")
            file.note("the start weights", key)
    return model


def model_place(name: str) -> str:
    """The folder of this name, or else the address of a model on the hub. Raises UsageError if it is neither."""
    place = address_of(name)
    if place == name and "://" not in name and not name.startswith("hub:") and not Path(name).expanduser().is_dir():
        raise UsageError(
            f"no model at {name}: give a folder (of Hugging Face's form, or one of our runs), or USER/NAME on the hub"
        )
    return place


def address_of(name: str) -> str:
    """The name, or the address on the hub if it is USER/NAME and there is no such folder."""
    is_address = not name.startswith((".", "/", "~", "hub:")) and "://" not in name and name.count("/") == 1
    return f"hub:{name}" if is_address and not Path(name).expanduser().is_dir() else name
