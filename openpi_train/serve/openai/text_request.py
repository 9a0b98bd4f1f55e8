"""A request for completions: OpenAI's fields, checked, as prompts and sampling settings.

What this server cannot do is refused, never ignored, unless it does not change the answer. Read next:
`text_server.py`.
"""

import dataclasses
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from openpi_train.generation.generator import NUM_TOP
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.json_object import JsonObject
from openpi_train.serve.openai.api_error import invalid
from openpi_train.serve.openai.request_fields import RequestFields, checked_text, is_integer

# What the API's documentation gives for a completion without max_tokens; a chat completion may fill the context.
_DEFAULT_MAX_TOKENS = 16
_MOST_CHOICES, _MOST_STOPS, _LONGEST_STOP = 128, 16, 1_000
_MOST_TOKENS, _SEEDS = 2**31 - 1, 2**32
_ROLES = ("system", "developer", "user", "assistant", "tool")
_VARIABLE = re.compile(r"[a-z][a-z0-9_]{0,63}")
# What templates get from the server itself.
_RESERVED = ("messages", "add_generation_prompt", "tools", "documents", "self")
_IGNORED = (
    *("user", "metadata", "store", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "service_tier"),
)

# vLLM's fields that this server has not, by the values that change nothing.
_WITHOUT_EFFECT = {
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "priority": (0,),
}
_NO_TOOLS = ": this server makes no tool calls"

# Contents are texts, or lists of parts that are texts, of which the chat template makes one.
Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A request. `prompts` are texts, tokens, or one conversation; each gets `num_choices` completions.

    `settings.max_new_tokens` is meaningless: `max_tokens` is what the client asked for, None: what the context has room
    for. `num_top` None: no log-probabilities; otherwise so many alternatives with each token.
    """

    model: str
    prompts: Sequence[Prompt]
    num_choices: int
    settings: SamplingSettings
    max_tokens: int | None
    num_top: int | None
    stream: bool
    include_usage: bool
    template_variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def completion_request(given: JsonObject) -> TextRequest:
    """The request of `POST /v1/completions`. Raises ApiError for what is invalid or not supported."""
    fields = RequestFields(given)
    prompts = _prompts(fields.get("prompt"))
    num_top = fields.integer("logprobs", 0, NUM_TOP)
    max_tokens = fields.integer("max_tokens", 1, _MOST_TOKENS)
    fields.only("echo", False)
    fields.only("suffix")
    fields.only("add_special_tokens", True)
    common = _common(fields)
    fields.only("best_of", 1, common["num_choices"], why=" unless it is n")
    fields.refuse_others()
    return TextRequest(
        prompts=prompts, num_top=num_top, max_tokens=_DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens, **common
    )


def chat_request(given: JsonObject) -> TextRequest:
    """The request of `POST /v1/chat/completions`. Raises ApiError for what is invalid or not supported."""
    fields = RequestFields(given)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.wrong("messages", "a list of messages, at least one")
    conversation = [_message(one, f"messages[{number}]") for number, one in enumerate(messages)]
    num_top = fields.integer("top_logprobs", 0, NUM_TOP)
    if not fields.flag("logprobs"):
        if num_top:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        num_top = None
    elif num_top is None:
        num_top = 0
    limits = [fields.integer(name, 1, _MOST_TOKENS) for name in ("max_completion_tokens", "max_tokens")]
    if None not in limits and limits[0] != limits[1]:
        raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    fields.only("add_generation_prompt", True)
    fields.only("continue_final_message", False)
    fields.only("echo", False)
    fields.only("add_special_tokens", False)
    _refuse_tools(fields)
    variables = _variables(fields)
    common = _common(fields)
    fields.refuse_others()
    return TextRequest(
        prompts=[conversation],
        num_top=num_top,
        max_tokens=next((limit for limit in limits if limit is not None), None),
        template_variables=variables,
        **common,
    )


def _common(fields: RequestFields) -> dict[str, Any]:
    """The fields that both kinds of requests have."""
    model = fields.text("model")
    if model is None:
        raise invalid("model is missing: name the model, as GET /v1/models has it", "model")
    stream = fields.flag("stream")
    options = fields.get("stream_options")
    include_usage = False
    if options is not None:
        if not stream or not isinstance(options, dict):
            raise invalid("stream_options must be an object, and needs stream: true", "stream_options")
        of_stream = RequestFields(options, "stream_options")
        include_usage = of_stream.flag("include_usage")
        of_stream.ignore("include_obfuscation")
        of_stream.refuse_others()
    for penalty in ("presence_penalty", "frequency_penalty"):
        fields.only(penalty, 0, 0.0)
    fields.only("logit_bias", {})
    for name, allowed in _WITHOUT_EFFECT.items():
        fields.only(name, *allowed)
    fields.ignore(*_IGNORED)
    return {
        "model": model,
        "num_choices": fields.integer("n", 1, _MOST_CHOICES) or 1,
        "settings": _settings(fields),
        "stream": stream,
        "include_usage": include_usage,
    }


def _settings(fields: RequestFields) -> SamplingSettings:
    seed = fields.integer("seed", -(2**63), 2**63 - 1)
    given = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1, above=True),
        "min_p": fields.number("min_p", 0, 1),
        "top_k": fields.integer("top_k", -1, _MOST_TOKENS),
        "stop": _stops(fields),
        "seed": secrets.randbelow(_SEEDS) if seed is None else seed % _SEEDS,
    }
    if given["top_k"] == -1:  # vLLM's word for all tokens
        given["top_k"] = 0
    return SamplingSettings(**{name: value for name, value in given.items() if value is not None})


def _stops(fields: RequestFields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = value if isinstance(value, list) else [value]
    if len(stops) > _MOST_STOPS:
        raise fields.wrong("stop", f"a text or a list of at most {_MOST_STOPS} texts")
    for stop in stops:
        if not 0 < len(checked_text(stop, "stop")) <= _LONGEST_STOP:
            raise invalid(f"stop has a text of {len(stop)} characters; allowed are 1 to {_LONGEST_STOP}", "stop")
    return tuple(stops)


def _prompts(value: object) -> list[str | list[int]]:
    """OpenAI's four forms: a text, texts, tokens, lists of tokens."""
    if isinstance(value, str):
        return [checked_text(value, "prompt")]
    if isinstance(value, list) and value:
        if is_integer(value[0]):
            return [_tokens(value, "prompt")]
        return [
            _tokens(one, f"prompt[{number}]") if isinstance(one, list) else checked_text(one, f"prompt[{number}]")
            for number, one in enumerate(value)
        ]
    raise invalid("prompt must be a text, a list of texts, a list of tokens, or a list of lists of tokens", "prompt")


def _tokens(value: list[Any], place: str) -> list[int]:
    if value and not (set(map(type, value)) == {int} and 0 <= min(value) <= max(value) <= _MOST_TOKENS):
        raise invalid(f"{place} must be a list of tokens, which are integers of at least 0", place)
    return value


def _message(value: object, place: str) -> Message:
    if not isinstance(value, dict):
        raise invalid(f"{place} must be an object with role and content", place)
    fields = RequestFields(value, place)
    role = fields.text("role")
    if role not in _ROLES:
        raise fields.wrong("role", f"one of {', '.join(_ROLES)}")
    for name, empty in (("tool_calls", []), ("function_call", None), ("audio", None)):
        fields.only(name, *([] if empty is None else [empty]), why="" if name == "audio" else _NO_TOOLS)
    found = {"role": role, "content": _content(fields)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (text := fields.text(name)) is not None:
            found[name] = text
    fields.ignore("refusal", "annotations")
    fields.refuse_others()
    return found


def _content(fields: RequestFields) -> str | list[Any]:
    """The content of a message: a text, or parts that are texts, as training data have them (`message_content.py`)."""
    value = fields.get("content")
    if not isinstance(value, list):
        if value is None:
            raise fields.wrong("content", "a text, or a list of parts with type and text")
        return checked_text(value, fields.place("content"))
    parts = []
    for number, part in enumerate(value):
        place = f"{fields.place('content')}[{number}]"
        if not isinstance(part, dict):
            raise invalid(f"{place} must be an object with type and text", place)
        of_part = RequestFields(part, place)
        of_part.only("type", "text")
        parts.append({"type": "text", "text": checked_text(of_part.get("text"), f"{place}.text")})
        of_part.refuse_others()
    return parts


def _refuse_tools(fields: RequestFields) -> None:
    """Refuse tools and other forms of answers; accept the values that mean none of them."""
    for name in ("tools", "functions"):
        fields.only(name, [], why=_NO_TOOLS)
    for name in ("tool_choice", "function_call"):
        fields.only(name, "none", "auto", why=_NO_TOOLS)
    fields.ignore("parallel_tool_calls")
    fields.only("response_format", {"type": "text"})
    fields.only("modalities", ["text"])


def _variables(fields: RequestFields) -> Mapping[str, Any]:
    """Further variables of the chat template, as in text data."""
    value = fields.get("chat_template_kwargs")
    if value is None:
        return {}
    is_valid = isinstance(value, dict) and all(
        _VARIABLE.fullmatch(name) and name not in _RESERVED and isinstance(one, bool | int | float | str | None)
        for name, one in value.items()
    )
    if not is_valid:
        raise fields.wrong("chat_template_kwargs", "an object of names (a-z, 0-9, _) with texts, numbers or booleans")
    for name, one in value.items():
        if isinstance(one, str):
            checked_text(one, f"chat_template_kwargs.{name}")
    return value
