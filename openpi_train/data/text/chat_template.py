"""Chat templates: jinja programs that write a conversation as one text, with the dialect of transformers.

They come with a tokenizer (`tokenizers/text_tokenizer.py`) or from a file, and run in jinja's sandbox, in a process of
limited time and memory (`template_process.py`). Read next: `text_encoder.py`.
"""

import dataclasses
import datetime
import functools
import json
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.data.text import template_process
from openpi_train.data.text.message_content import Message, MessageForm

# Variables of a template by name. They are passed as one mapping, so that no name is also one of our arguments'.
Variables = Mapping[str, Any]
# Characters from and before another in a rendered conversation.
Span = tuple[int, int]

_NONE: Variables = types.MappingProxyType({})
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Noncharacters (Unicode 23.7), which no text for interchange contains, mark generation blocks while they are rendered.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# Names under which the reasoning of a message is stored. Templates read the first; gpt-oss' reads the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


# For a tokenizer without one: the form of Zephyr's, which needs no token but the one that ends a text.
_BUILT_IN = """
{%- for message in messages %}
    {%- if message.tool_calls or message.content is not string %}
        {{- raise_exception('it writes texts alone: give one for tool calls (--data.chat-template FILE)') }}
    {%- endif %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""


def built_in(begin: str) -> str:
    """The source of a template for a tokenizer without one, whose texts begin with the text of these tokens."""
    return f"{{{{- {json.dumps(begin)} }}}}{_BUILT_IN}"


class NotAPrefixError(ValueError):
    """The template writes the beginning of a conversation differently from the beginning of the whole."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template in jinja. Picklable.

    Args: `name` is for messages; `special_tokens` are variables of the template (`bos_token`, ...); `today` is the date
    that `strftime_now` writes, fixed so that the same conversation always gives the same text.

    It is compiled when it is first used, because only conversations need it.
    """

    source: str
    _: dataclasses.KW_ONLY
    name: str
    special_tokens: Mapping[str, str]
    today: datetime.date

    @classmethod
    def read(cls, path: str, *, special_tokens: Mapping[str, str], today: datetime.date) -> "ChatTemplate":
        """The template in a file. Raises FileNotFoundError, ValueError as `compiled`."""
        file = Path(path).expanduser()
        if not file.is_file():
            raise FileNotFoundError(f"no chat template at {path}: --data.chat-template takes a jinja file")
        try:
            source = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"the chat template {path} is not UTF-8 ({error}); save it as UTF-8") from error
        template = cls(source, name=path, special_tokens=special_tokens, today=today)
        template.compiled()
        return template

    def compiled(self) -> None:
        """Compile it. Raises ValueError if it is not valid jinja."""
        self._ask(None)

    def _ask(self, given: Variables | None) -> str:
        """The text with these variables; with None it is only compiled.

        Raises ValueError, or DataError if it takes too much time or memory.
        """
        try:
            kind, text = template_process.SHARED.ask(self.source, self.name, self.today, given)
        except RecursionError as error:  # while it is sent
            raise ValueError("the conversation is nested too deeply for a chat template") from error
        if kind != "text":
            raise ValueError(text)
        return text

    @property
    def has_generation_blocks(self) -> bool:
        """Whether the template marks what the assistant writes with `{% generation %}`."""
        return bool(_GENERATION.search(self.source))

    def render(
        self, messages: Sequence[Message], variables: Variables = _NONE, *, add_generation_prompt: bool = False
    ) -> str:
        """The conversation as one text; `add_generation_prompt` appends the header of an assistant's message.

        Messages may have their content in parts, and tool calls as OpenAI's API has them (`message_content.py`).

        Args: `variables` are further variables of the template, such as `tools`. Raises ValueError if it fails,
        DataError if it takes too much time or memory.
        """
        form = self.form
        return self._rendered([form.apply(one) for one in messages], variables, add_generation_prompt)

    @functools.cached_property
    def form(self) -> MessageForm:
        """What messages the template writes in full."""
        return MessageForm.of(self.source, lambda messages: self._rendered(messages, _NONE, False))

    def _rendered(self, messages: Sequence[Message], variables: Variables, add_generation_prompt: bool) -> str:
        given = {"tools": None, "documents": None, **self.special_tokens, **variables}
        given |= {
            "messages": [_with_reasoning(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        return self._ask(given)

    def with_assistant_spans(self, messages: Sequence[Message], variables: Variables = _NONE) -> tuple[str, list[Span]]:
        """The text of the conversation, and the spans of it that the assistant wrote.

        They are the template's generation blocks if it has any. Otherwise a message's span is what the text with the
        message has more than the text up to the header of the message.

        Raises ValueError as `render`, and NotAPrefixError if there are no such blocks and an earlier part of the
        conversation is not rendered as a prefix of the whole.
        """
        if self.has_generation_blocks:
            return self._by_blocks(messages, variables)
        whole, spans = self.render(messages, variables), []
        for number, message in enumerate(messages):
            if message.get("role") == "assistant":
                last = number == len(messages) - 1
                until = whole if last else self.render(messages[: number + 1], variables)
                start = self.prefix(messages[:number], whole, variables)
                if not whole.startswith(until):
                    raise _not_a_prefix(self.name, whole, until)
                spans.append((start, len(until)))
        return whole, spans

    def prefix(self, messages: Sequence[Message], whole: str, variables: Variables = _NONE) -> int:
        """The length of the text of `messages` and an assistant's header, with which `whole` must start.

        The header is left out if the last message is the assistant's. Raises NotAPrefixError if it is not a prefix.
        """
        open_header = not messages or messages[-1].get("role") != "assistant"
        text = self.render(messages, variables, add_generation_prompt=open_header)
        if not whole.startswith(text):
            raise _not_a_prefix(self.name, whole, text)
        return len(text)

    def _by_blocks(self, messages: Sequence[Message], variables: Variables) -> tuple[str, list[Span]]:
        used = json.dumps([list(messages), dict(variables)], ensure_ascii=False, default=str)
        free = [mark for mark in _MARKS if mark not in used]
        if len(free) < 2:
            raise ValueError("the conversation contains the Unicode noncharacters U+FDD0 to U+FDEF; remove them")
        start, end = free[:2]
        marked = self.render(messages, {**variables, "_generation_start": start, "_generation_end": end})
        pieces, spans, length, opened = [], [], 0, 0
        for piece in re.split(f"([{start}{end}])", marked):
            if piece == start:
                opened = length
            elif piece == end:
                spans.append((opened, length))
            else:
                pieces.append(piece)
                length += len(piece)
        return "".join(pieces), spans


def answer(source: str, name: str, today: datetime.date, given: Variables | None) -> tuple[str, str]:
    """The rendered text ("text"), or why there is none ("error"). For the process of limited time and memory."""
    import jinja2

    try:
        compiled = _compiled(source, name, today)
    except ValueError as error:
        return "error", str(error)
    if given is None:
        return "text", ""
    try:
        return "text", compiled.render(given)
    except RecursionError:
        return "error", (
            f"the chat template {name} calls itself without end, or too deeply, for the conversation: correct "
            "the template, or give another one"
        )
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        return "error", f"the chat template {name} refuses the conversation: {error}"


def _not_a_prefix(name: str, whole: str, part: str) -> NotAPrefixError:
    same = next((at for at, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b), min(len(whole), len(part)))
    return NotAPrefixError(
        f"the chat template {name} does not preserve prefixes: it writes a part of the conversation as "
        f"{part[max(0, same - 20) : same + 20]!r} where the whole conversation has "
        f"{whole[max(0, same - 20) : same + 20]!r}, so the assistant's tokens cannot be found by comparison"
    )


def _with_reasoning(message: Message) -> dict[str, Any]:
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return dict(message) if found is None else {"thinking": found, **message, "reasoning_content": found}


@functools.lru_cache
def _compiled(source: str, name: str, today: datetime.date) -> Any:
    """The jinja template, in an environment set up as transformers' is (`utils/chat_template_utils.py`)."""
    import jinja2
    from jinja2 import ext, nodes, sandbox

    class GenerationBlocks(ext.Extension):
        """`{% generation %}` ... `{% endgeneration %}`: the block between two variables, which may be undefined."""

        tags = {"generation"}  # noqa: RUF012, as jinja declares it

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            start, end = (
                nodes.Output([nodes.Name(variable, "load")]) for variable in ("_generation_start", "_generation_end")
            )
            return [node.set_lineno(line) for node in (start, nodes.Scope(body), end)]

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.combine(today, datetime.time()).strftime(form)

    def to_json(value: object, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # jinja's own filter escapes characters of HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ValueError(f"the chat template {name} is not valid jinja: {error}") from error
