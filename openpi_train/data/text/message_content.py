"""Messages of conversations: their content in parts, and their tool calls, in the form that a chat template writes.

Training and serving render through `ChatTemplate`, which gives every template what it can write: texts or parts, and
arguments of tool calls as objects or as JSON. What it can write is found by trying it, as llama.cpp does. Read next:
`chat_template.py`.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openpi_train.json_object import JsonObject

Message = Mapping[str, Any]
# What renders messages; it raises ValueError where the template fails.
Render = Callable[[list[dict[str, Any]]], str]

# The types of parts that are texts: of OpenAI's chat completions, and of its responses.
_TEXT_TYPES = ("text", "input_text", "output_text")
# The roles of messages, as OpenAI's API has them.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# No template writes these by itself.
_ONE, _TWO = "Qfirstq", "Qsecondq"
_WRITTEN_AS_IS = re.compile(rf"""['"]text['"]\s*:\s*['"]{_ONE}""")
_FUNCTION_CALL = re.compile(r"\bfunction_call\b")


def text_parts(content: Sequence[object], name: str = "content") -> list[str]:
    """The texts of a content that is a list of parts. Raises ValueError, naming `name`, for a part that is no text."""
    found = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            found.append(part)
            continue
        needed = 'needed is {"type": "text", "text": ...}'
        if not isinstance(part, Mapping):
            raise ValueError(f"part {number} of {name} is {part!r:.60}; {needed}")
        kind = part.get("type", "text")
        if kind not in _TEXT_TYPES:
            raise ValueError(f"part {number} of {name} is of the type {kind!r:.40}: only texts are read; {needed}")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {number} of {name} has the text {part.get('text')!r:.40}; {needed}")
        found.append(part["text"])
    return found


def text_of(content: Any, name: str = "content") -> str:
    """The content as one text; the texts of parts are joined by line breaks, as vLLM does. Raises as `text_parts`."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(text_parts(content, name))


def with_calls(message: Message) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects.

    OpenAI writes them as JSON, which templates would escape once more; tables may hold all calls as one JSON text.
    An empty list of calls, and empty arguments, are read as vLLM reads them (`chat_utils.py`). A legacy `function_call`
    is read, too. Raises ValueError for arguments that are no JSON object.
    """
    found = dict(message)
    if found.get("function_call") is not None:
        if found.get("tool_calls"):
            raise ValueError("a message has both function_call and tool_calls; leave function_call out")
        found["function_call"] = _function(found["function_call"], "function_call")
    calls = found.get("tool_calls")
    if calls is None:
        return found
    if isinstance(calls, str):
        calls = _json(calls, "tool_calls", "a list of tool calls, or JSON of one")
    if not isinstance(calls, list | tuple):
        raise ValueError(f"tool_calls is {calls!r:.60}; needed is a list of tool calls, or JSON of one")
    del found["tool_calls"]
    return found | ({"tool_calls": [_call(one, f"tool_calls[{at}]") for at, one in enumerate(calls)]} if calls else {})


def _call(call: object, name: str) -> dict[str, Any]:
    """A tool call, with `function` or, as templates also take it, without."""
    if not isinstance(call, Mapping):
        raise ValueError(f"{name} is {call!r:.60}; needed is an object with function")
    if call.get("function") is None:
        return _function(call, name)
    return {**call, "function": _function(call["function"], f"{name}.function")}


def _function(function: object, name: str) -> dict[str, Any]:
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{name} is {function!r:.60}; needed is an object with name and arguments")
    needed = "an object, or JSON of one"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{name}.arguments", needed) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{name}.arguments is {arguments!r:.60}; needed is {needed}")
    return {**function, "arguments": dict(arguments)}


def _json(text: str, name: str, needed: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is {text!r:.60}, which is no JSON ({error}); needed is {needed}") from error
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply; needed is {needed}") from error


@dataclasses.dataclass(frozen=True)
class MessageForm:
    """What a template writes.

    Attributes:
        parts: Roles whose content it writes in full when that is a list of parts.
        texts: Roles whose content it writes when that is a text; a template of a vision model may know parts only.
        calls_in_json: Whether it writes arguments of tool calls only if they are JSON already, as DeepSeek's do.
        function_call: Whether it knows `function_call`.
        without_content: What it needs of a message of calls alone: nothing, as transformers gives it, or a `content`
            that is None or empty, without which it does not write the calls.
    """

    parts: frozenset[str]
    texts: frozenset[str]
    calls_in_json: bool
    function_call: bool
    without_content: Mapping[str, Any]

    @classmethod
    def of(cls, source: str, render: Render) -> "MessageForm":
        """The form of a template with this source."""
        parts, texts = (
            frozenset(role for role in ROLES if _writes(render, role, content))
            for content in ([{"type": "text", "text": _ONE}, {"type": "text", "text": _TWO}], f"{_ONE} {_TWO}")
        )
        for arguments in ({"Qnameq": _ONE}, f'{{"Qnameq": "{_ONE}"}}'):
            for entries in ({}, {"content": None}, {"content": ""}):
                if _writes_call(render, arguments, entries):
                    in_json = isinstance(arguments, str)
                    return cls(parts, texts, in_json, bool(_FUNCTION_CALL.search(source)), entries)
        return cls(parts, texts, False, bool(_FUNCTION_CALL.search(source)), {})

    def apply(self, message: Message) -> dict[str, Any]:
        """The message for the template. Raises ValueError for contents and tool calls that cannot be read."""
        found = with_calls(message)
        if "function_call" in found and not self.function_call:
            call = found.pop("function_call")
            found |= {} if call is None else {"tool_calls": [{"type": "function", "function": call}]}
        if self.calls_in_json:
            _write_arguments(found)
        if found.get("content") is None:
            found.pop("content", None)
            found |= self.without_content if found.get("tool_calls") or found.get("function_call") else {}
        content, role = found.get("content"), str(found.get("role"))
        as_parts = role in self.parts
        if isinstance(content, list | tuple):
            texts = text_parts(content)
            parts = [{"type": "text", "text": text} for text in texts]
            found["content"] = parts if as_parts else "\n".join(texts)
        elif isinstance(content, str) and as_parts and role not in self.texts:
            found["content"] = [{"type": "text", "text": content}]
        return found


def _write_arguments(message: dict[str, Any]) -> None:
    """Replace the arguments of all calls of a message from `with_calls` by JSON."""

    def written(function: JsonObject) -> dict[str, Any]:
        return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}

    if message.get("tool_calls"):
        message["tool_calls"] = [
            {**call, "function": written(call["function"])} if call.get("function") else written(call)
            for call in message["tool_calls"]
        ]
    if message.get("function_call"):
        message["function_call"] = written(message["function_call"])


def _writes(render: Render, role: str, content: object) -> bool:
    """Whether the template writes all texts of a content, and not as Python or JSON spell a list of parts."""
    message = {"role": role, "content": content}
    before = {"user": [], "system": [], "developer": []}.get(role, [{"role": "user", "content": "q"}])
    after = [{"role": "user", "content": "q"}] if role in ("system", "developer") else []
    try:
        text = render([*before, message, *after])
    except ValueError:
        return False
    return _ONE in text and _TWO in text and not _WRITTEN_AS_IS.search(text)


def _writes_call(render: Render, arguments: object, entries: JsonObject) -> bool:
    """Whether the template writes the arguments of a tool call, in a message with these entries, as JSON."""
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
    try:
        text = render([{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call], **entries}])
    except ValueError:
        return False
    return _ONE in text and "'Qnameq'" not in text and '\\"Qnameq' not in text
