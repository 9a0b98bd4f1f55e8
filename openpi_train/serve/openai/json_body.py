"""The JSON object of a request's body, of which nothing is built before its parts are counted.

Read next: `request_fields.py`.
"""

import json
from typing import Any, NoReturn

from openpi_train.serve.openai.api_error import invalid

# A small object or list takes up to a hundred times its bytes, a text in quotes up to thirty times, a number ten times.
_MOST_NESTED, _MOST_COLONS, _MOST_QUOTES, _MOST_COMMAS = 20_000, 100_000, 400_000, 1_000_000
_DEEPEST = 32
_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))


def read_object(body: bytes) -> dict[str, Any]:
    """The object that `body` is, in UTF-8.

    Raises ApiError if it is not JSON (which has no NaN), not an object, more than 32 deep, or has more than 20,000
    objects and lists, 100,000 keys, 200,000 texts or a million commas.
    """
    _check_size(body)
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except ValueError as error:  # also a number of thousands of digits
        raise invalid(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise invalid("the body must be a JSON object")
    return found


def _check_size(body: bytes) -> None:
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > _MOST_QUOTES:
        raise invalid(f"the body has more than {_MOST_QUOTES // 2:,} texts and keys")
    outside = b"".join(unescaped.split(b'"')[::2])
    brackets = outside.translate(None, delete=_NOT_BRACKETS)
    if brackets.count(b"[") + brackets.count(b"{") > _MOST_NESTED:
        raise invalid(f"the body has more than {_MOST_NESTED:,} objects and lists")
    for sign, most, what in ((b":", _MOST_COLONS, "keys"), (b",", _MOST_COMMAS, "values")):
        if outside.count(sign) > most:
            raise invalid(f"the body has more than {most:,} {what}")
    depth = 0
    for bracket in brackets[: 2 * _MOST_NESTED]:  # more of them are not JSON
        depth += 1 if bracket in b"[{" else -1
        if depth > _DEEPEST:
            raise invalid(f"the body is nested more than {_DEEPEST} deep")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
