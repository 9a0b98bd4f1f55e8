"""A YAML config, read strictly, and during its translation: several spellings of a key, values that contradict.

Keys of `training` are named without it: `training.seed` and a `seed` at the top are the same key. Read next:
`config_file.py`, `posttraining/training_flags.py`, `ript/ript_flags.py`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from openpi_train.doors import guide_files
from openpi_train.doors.config_file import ConfigFile, as_json, contradiction, flatten
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import UsageError

_TRAINING = "training"
_FLOAT, _TIMESTAMP = "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"
_FLOAT_FORM = re.compile(
    r"[-+]?(?:[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+|[0-9]+\.[0-9]*|\.[0-9]+(?:[eE][-+]?[0-9]+)?)$"  # no infinity, no NaN
)


class YamlFile(ConfigFile):
    """The keys of a YAML config.

    Args: `unmapped` and `owner` as in `ConfigFile`; `given` are values by key that were given on the command line: they
    replace those of the file.

    Raises UsageError if a key stands in `training` and at the top with two values.
    """

    def __init__(self, config: JsonObject, unmapped: Mapping[str, str], owner: str, given: JsonObject):
        super().__init__(_one_level({**config}), unmapped, owner, open_word=None)
        inside = config.get(_TRAINING, {})
        self._in_training = {key for key, _ in flatten(inside) if key not in given}
        self.values.update(given)

    def shown(self, key: str) -> str:
        """The key where it stands in the file."""
        return f"{_TRAINING}.{key}" if key in self._in_training else key

    def entries(self, key: str) -> Any:
        """A list; None if the key is absent."""
        return self._get(key, None, list, "a list")

    def word(self, key: str, allowed: tuple[str, ...]) -> str | None:
        """A word among `allowed`, in any case; None if the key is absent."""
        value = self.text(key)
        if value is not None and value.lower() not in allowed:
            raise UsageError(f"{self.shown(key)} is {value!r}; allowed: {', '.join(allowed)}")
        return None if value is None else value.lower()


def _one_level(config: dict[str, Any]) -> dict[str, Any]:
    """All entries by dotted key, those of `training` without it."""
    training = config.pop(_TRAINING, {})
    if not isinstance(training, Mapping):
        raise UsageError(f"{_TRAINING} is {as_json(training)}; it must hold keys, such as `seed: 42`")
    found = dict(flatten(config))
    for key, value in flatten(training):
        if key in found and found[key] != value:
            raise contradiction(f"{_TRAINING}.{key} is {as_json(value)} and {key} is {as_json(found[key])}")
        found[key] = value
    return found


class _StrictLoader(yaml.SafeLoader):
    """Plain values only: mappings, lists, words, numbers, booleans and null.

    Numbers are those of YAML 1.2: `5e-5` is one, although PyYAML, which follows YAML 1.1, reads it as a word. A key
    that stands twice in a mapping is an error; PyYAML takes the last.
    """

    # Forms of words that are not read as strings, by their first character; dates stay strings.
    yaml_implicit_resolvers = {  # noqa: RUF012, as PyYAML declares it
        first: [(tag, form) for tag, form in forms if tag not in (_FLOAT, _TIMESTAMP)]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """The mapping. Raises ValueError if a key of it is no word, or stands twice."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"line {key.start_mark.line + 1}: a key must be a word")
            if key.value in seen:
                raise ValueError(f"line {key.start_mark.line + 1}: {key.value} stands twice; keep one of them")
            seen.add(key.value)
        return {str(key): value for key, value in super().construct_mapping(node, deep=deep).items()}


_StrictLoader.add_implicit_resolver(_FLOAT, _FLOAT_FORM, list("-+0123456789."))


def read_yaml(path: str | Path) -> Mapping[str, Any]:
    """The mapping in a YAML file, without entries that are null. Raises UsageError if it cannot be read."""
    try:
        text = Path(guide_files.found(path)).expanduser().read_text(encoding="utf-8")
        config = _without_nulls(yaml.load(text, _StrictLoader))
    except OSError as error:
        place = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        raise UsageError(f"the config {path} cannot be read: {error.strerror}{place}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        hint = "; YAML is indented by spaces, not tabs" if "'\\t'" in str(error) else ""
        raise UsageError(f"{path} is no YAML config: {error}{hint}") from error
    if not isinstance(config, dict) or not config:
        raise UsageError(f"{path} is no YAML config: it must hold keys with values, such as `training:`")
    return config


def _without_nulls(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
