"""Reads a YAML config strictly. Read next: `training_flags.py`.

Numbers are those of YAML 1.2: `5e-5` is one, although PyYAML, which follows YAML 1.1, reads it as a word. A key that
stands twice in a mapping is an error; PyYAML takes the last.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from openpi_train.runtime.exits import UsageError

_FLOAT, _TIMESTAMP = "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"
_FLOAT_FORM = re.compile(
    r"[-+]?(?:[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+|[0-9]+\.[0-9]*|\.[0-9]+(?:[eE][-+]?[0-9]+)?)$"  # no infinity, no NaN
)


class _StrictLoader(yaml.SafeLoader):
    """Plain values only: mappings, lists, words, numbers, booleans and null."""

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
        text = Path(path).expanduser().read_text(encoding="utf-8")
        config = _without_nulls(yaml.load(text, _StrictLoader))
    except OSError as error:
        raise UsageError(f"the config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no YAML config: {error}") from error
    if not isinstance(config, dict) or not config:
        raise UsageError(f"{path} is no YAML config: it must hold keys with values, such as `training:`")
    return config


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
