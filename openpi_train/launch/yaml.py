"""Writes plain values as YAML without a library. Read next: `kubernetes.py`, whose manifests it writes."""

import json
import re
from collections.abc import Iterator, Sequence

# Words that some YAML readers, including old ones, do not read as strings.
_NOT_STRINGS = re.compile(r"(?i:y|n|yes|no|on|off|true|false|null)")
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")


def dump_all(documents: Sequence[object]) -> str:
    """Dictionaries (string keys, in their order), lists, strings, whole numbers and booleans as YAML documents."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: object) -> Iterator[str]:
    """The lines of a value in block style, without indentation."""
    if isinstance(value, dict) and value:
        for key, entry in value.items():
            yield from _entry(f"{_scalar(key)}:", entry, indent="  " if isinstance(entry, dict) else "")
    elif isinstance(value, list) and value:
        for entry in value:
            first, *rest = _lines(entry)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _entry(key: str, value: object, indent: str) -> Iterator[str]:
    if isinstance(value, dict | list) and value:
        yield key
        yield from (indent + line for line in _lines(value))
    else:
        yield f"{key} {_scalar(value)}"


def _scalar(value: object) -> str:
    assert isinstance(value, str | int | dict | list), f"{type(value).__name__} is not written"
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and not _NOT_STRINGS.fullmatch(value):
        return value
    # A JSON string is a YAML one, but for characters that YAML wants escaped in its own way.
    quoted = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[^\x20-\x7e]", lambda found: f"\\U{ord(found[0]):08x}", quoted)
