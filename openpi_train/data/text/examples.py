"""Examples of TRL's dataset types, recognised by the names of their columns.

    type                 columns                            standard            conversational
    prompt only          prompt                             a string            a conversation
    language modelling   text | messages                    text: a string      messages: a conversation
    prompt/completion    prompt, completion                 strings             conversations
    preference           [prompt,] chosen, rejected         strings             conversations
    unpaired preference  prompt, completion, label          strings; a boolean  conversations; a boolean

A conversation is a list of messages, objects with `role` and `content` (`message_content.py`), or as ShareGPT's files
have them, with `from` and `value`; there the column is `conversations`, the prompt beside `chosen` and `rejected`, and
`system` may be another one. After a prompt that is
one, a completion that is a string is the assistant's answer. Without a prompt, the beginning that `chosen` and
`rejected` share is the prompt. Further columns with a meaning: `tools` and `chat_template_kwargs` (variables of the
chat template), `margin` (of a preference), `ref_chosen_logps`, `ref_rejected_logps` and `reference_logps`
(log-probabilities of the completions under the reference model). All others are ignored.

Of several types that fit, the one furthest down the table is taken. Read next: `text_encoder.py`.
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from openpi_train.data.text.message_content import ROLES, text_of, with_calls
from openpi_train.data.text.text_columns import columns_in_words
from openpi_train.json_object import JsonObject

Kind = Literal["prompt only", "language modelling", "prompt/completion", "preference", "unpaired preference"]
Conversation = list[dict[str, Any]]
Text = str | Conversation
# The columns that are read.
COLUMNS = (
    *("text", "messages", "prompt", "completion", "chosen", "rejected", "label", "tools", "chat_template_kwargs"),
    *("conversations", "system", "margin", "ref_chosen_logps", "ref_rejected_logps", "reference_logps"),
)
_TEXTS = ("text", "messages", "prompt", "completion", "chosen", "rejected")

# Roles of ShareGPT's messages.
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}

# float32 holds no larger numbers.
_LARGEST = 3e38
# Variables of chat templates that no record may set.
_TAKEN = {"messages", "add_generation_prompt", "_generation_start", "_generation_end"}


@dataclasses.dataclass(frozen=True)
class ExampleType:
    """A dataset type: its kind, and whether its texts are conversations."""

    kind: Kind
    conversational: bool

    def __str__(self) -> str:
        return f"{self.kind}, {'conversational' if self.conversational else 'standard'}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One record of a dataset.

    `completions` are one text, or the chosen and the rejected one; without a `prompt` it is the whole text, and of a
    prompt alone there are none. `reference` has the log-probability of each completion under the reference model.
    `variables` are those of the chat template.
    """

    type: ExampleType
    prompt: Text | None
    completions: tuple[Text, ...]
    label: bool | None = None
    margin: float = 0.0
    reference: tuple[float, ...] | None = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class UnknownTypeError(ValueError):
    """The columns of a record are those of no type. `told` says so, `remedy` what to do."""

    def __init__(self, told: str, remedy: str):
        super().__init__(told, remedy)
        self.told, self.remedy = told, remedy

    def __str__(self) -> str:
        return f"{self.told}: {self.remedy}"


def example_of(record: JsonObject) -> Example:
    """The example in a record; entries that are None count as absent.

    Raises ValueError, saying what is wrong; UnknownTypeError if its columns are of no type.
    """
    given = _of_sharegpt({name: value for name, value in record.items() if value is not None})
    told: dict[str, Any] = {"variables": _variables(given)}
    if {"chosen", "rejected"} <= given.keys():
        return _preference(given, told)
    if {"prompt", "completion"} <= given.keys():
        prompt, completion = _texts(given, "prompt", "completion")
        # A record without its label is a bad one, not of another type.
        kind: Kind = "unpaired preference" if "label" in record else "prompt/completion"
        if kind == "unpaired preference":
            told |= {"label": _label(record["label"]), "reference": _reference(given, "reference_logps")}
        _require_content("completion", completion)
        return Example(type=_type(kind, prompt), prompt=prompt, completions=(completion,), **told)
    for name in ("messages", "text"):
        if name in given:
            (text,) = _texts(given, name)
            if isinstance(text, str) != (name == "text"):
                raise ValueError(f"{name} is {_what(text)}: `text` takes a string, `messages` a list of messages")
            _require_content(name, text)
            return Example(type=_type("language modelling", text), prompt=None, completions=(text,), **told)
    # A record without its completion is a bad one, not of another type.
    if "prompt" in given and record.keys().isdisjoint({"completion", "chosen", "rejected"}):
        (prompt,) = _texts(given, "prompt")
        _require_content("prompt", prompt)
        return Example(type=_type("prompt only", prompt), prompt=prompt, completions=(), **told)
    if empty := [name for name in _TEXTS if name in record and record[name] is None]:
        are = "is" if len(empty) == 1 else "are"
        raise ValueError(f"{' and '.join(empty)} {are} null; needed is a string, or a list of messages")
    raise UnknownTypeError(
        f"its columns {sorted(record)} are of no known type (`text`, `messages`, `prompt`, `prompt` and `completion`, "
        "or `chosen` and `rejected`)",
        columns_in_words(record),
    )


def _of_sharegpt(given: JsonObject) -> JsonObject:
    """The record with the columns of TRL's types, if it has those of ShareGPT."""
    if "conversations" not in given or "messages" in given:
        return given
    messages = _conversation("conversations", given["conversations"])
    if (
        isinstance(system := given.get("system"), str)
        and system
        and [one["role"] for one in messages[:1]] != ["system"]
    ):
        messages = [{"role": "system", "content": system}, *messages]
    rest = {name: value for name, value in given.items() if name not in ("conversations", "system")}
    return {**rest, ("prompt" if {"chosen", "rejected"} <= rest.keys() else "messages"): messages}


def _preference(given: JsonObject, told: dict[str, Any]) -> Example:
    is_talk = not isinstance(given.get("prompt", ""), str)
    *_, chosen, rejected = _texts(given, *(["prompt"] if is_talk else []), "chosen", "rejected")
    told["margin"] = _number(given, "margin") or 0.0
    told["reference"] = _reference(given, "ref_chosen_logps", "ref_rejected_logps")
    if chosen == rejected:
        raise ValueError("chosen and rejected are equal: there is nothing to compare")
    if "prompt" in given and (isinstance(chosen, str) or is_talk):
        prompt, *_ = _texts(given, "prompt", "chosen", "rejected")
    else:
        shared = _shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if "prompt" in given:
            _require_contained(given["prompt"], prompt)
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        _require_content(name, text)
    return Example(type=_type("preference", chosen), prompt=prompt, completions=(chosen, rejected), **told)


def _require_contained(prompt: str, shared: Any) -> None:
    """Raise ValueError if a prompt given as a string is not in the messages that both conversations begin with.

    Some datasets have such a prompt beside conversations that contain it.
    """
    texts = [text_of(message.get("content")) for message in shared]
    if " ".join(prompt.split()) not in " ".join(" ".join(texts).split()):
        raise ValueError(
            f"prompt is the string {prompt[:40]!r}, which is not in the messages that chosen and rejected share at "
            "their start, so it would be lost: make prompt a list of messages, put it into both conversations, or "
            "read them without it (--data.datasets.N.columns chosen=chosen rejected=rejected)"
        )


def _shared(one: Text, two: Text) -> int:
    """The number of leading messages that two conversations share, or of characters up to the space before a word."""
    same = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    if isinstance(one, str):
        while same and not one[same - 1].isspace():
            same -= 1
        return len(one[:same].rstrip())
    return same


def _type(kind: Kind, text: Text) -> ExampleType:
    return ExampleType(kind, not isinstance(text, str))


def _texts(given: JsonObject, *names: str) -> list[Any]:
    """The texts of these columns: all strings, or all conversations. A string after a conversation is its answer."""
    found = [value if isinstance(value := given[name], str) else _conversation(name, value) for name in names]
    if names[0] == "prompt" and not isinstance(found[0], str):
        answers = [[{"role": "assistant", "content": text}] if isinstance(text, str) else text for text in found[1:]]
        return [found[0], *answers]
    if len({isinstance(text, str) for text in found}) > 1:
        told = ", ".join(f"{name} is {_what(text)}" for name, text in zip(names, found, strict=True))
        raise ValueError(f"{told}: all texts of a record must be strings, or all conversations")
    return found


def _conversation(name: str, value: object) -> Conversation:
    if isinstance(value, Mapping) and ({"from", "value"} <= value.keys() or {"role", "content"} <= value.keys()):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise ValueError(f"{name} is {_what(value)}; allowed: a string, or a list of messages")
    value = [_message(one, f"message {number} of {name}") for number, one in enumerate(value)]
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"message {number} of {name} is {message!r:.80}; needed is an object with role and content"
            )
        if meant := _meant(message["role"]):
            raise ValueError(
                f"message {number} of {name} has the role {message['role']!r:.40}; known are {', '.join(ROLES)}. "
                f"Rename it to {meant}"
            )
        content, has_calls = message.get("content"), message.get("tool_calls") or message.get("function_call")
        if not (isinstance(content, str | list) or (content is None and has_calls)):
            raise ValueError(f"content of message {number} of {name} is {_what(content)}; needed is a string")
        text_of(content, f"the content of message {number} of {name}")
        try:
            with_calls(message)
        except ValueError as error:
            raise ValueError(f"message {number} of {name}: {error}") from error
    # Columns of parquet files give every message the entries that one of them has.
    return [{key: entry for key, entry in message.items() if entry is not None} for message in value]


def _meant(role: str) -> str | None:
    """The role that was probably meant by one that is nearly known; others may be those of a chat template."""
    if role in ROLES:
        return None
    return _SPEAKERS.get(role.strip().lower()) or next(iter(difflib.get_close_matches(role.lower(), ROLES, n=1)), None)


def _message(message: object, place: str) -> Any:
    """A message with `role` and `content`, if it has ShareGPT's `from` and `value`."""
    if not isinstance(message, Mapping) or "role" in message or not {"from", "value"} <= message.keys():
        return message
    speaker = message["from"]
    if speaker not in _SPEAKERS:
        raise ValueError(f"{place} is from {speaker!r:.40}; known are {', '.join(_SPEAKERS)}")
    return {"role": _SPEAKERS[speaker], "content": message["value"]}


def _require_content(name: str, text: Text) -> None:
    if isinstance(text, str):
        empty = not text
    else:
        empty = not any(
            text_of(message.get("content")) or message.get("tool_calls") or message.get("function_call")
            for message in text
        )
    if empty:
        raise ValueError(f"{name} is empty: there is nothing to learn from it")


def _variables(given: JsonObject) -> dict[str, Any]:
    extra = given.get("chat_template_kwargs", {})
    if not isinstance(extra, Mapping):
        raise ValueError(f"chat_template_kwargs is {_what(extra)}; needed is an object")
    if taken := sorted(extra.keys() & _TAKEN):
        raise ValueError(f"chat_template_kwargs has {', '.join(taken)}, which the run sets itself")
    found = dict(extra) | ({"tools": given["tools"]} if given.get("tools") else {})
    return found | ({"tools": _tools(found["tools"])} if "tools" in found else {})


def _tools(given: object) -> Any:
    """A list of objects, or JSON of one: tables whose columns have one type hold it as a string (TRL)."""
    needed = "needed is a list of objects, or JSON of such a list"
    tools = given
    if isinstance(given, str):
        try:
            tools = json.loads(given)
        except ValueError as error:
            raise ValueError(f"tools is a string that is no JSON ({error}); {needed}") from None
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"tools is {_what(tools)}; {needed}")
    if not all(isinstance(tool, Mapping) for tool in tools or ()):
        raise ValueError(f"tools is a list with other entries than objects; {needed}")
    return tools


def _label(value: object) -> bool:
    if value not in (True, False):
        raise ValueError(f"label is {value!r}; needed is true (desirable) or false, or no column label")
    return bool(value)


def _reference(given: JsonObject, *names: str) -> tuple[float, ...] | None:
    found = [_number(given, name) for name in names]
    return None if None in found else tuple(value for value in found if value is not None)


def _number(given: JsonObject, name: str) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        raise ValueError(f"{name} is {value!r:.80}; needed is a finite number")
    return float(value)


def _what(value: object) -> str:
    names = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number", bool: "a boolean"}
    if value is None:
        return "absent"
    return names.get(type(value), type(value).__name__)
