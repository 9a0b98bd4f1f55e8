"""What is suspicious in one record of texts, as bits. Read next: `record_measures.py`, which keeps them."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from openpi_train.data.text.examples import Example, Text
from openpi_train.json_object import JsonObject

BLANK, NO_ASSISTANT, NO_LAST_ANSWER, DAMAGED, BLANK_PROMPT = 1, 2, 4, 8, 16
ECHO, BEGINS_WITH_PROMPT, ASSISTANT_FIRST, SAME_ROLE_TWICE, EQUAL_ANSWERS, SPECIAL = 32, 64, 128, 256, 512, 1024
# UTF-8 that was read as Latin-1 or Windows-1252, what stands where a character could not be read, and NUL.
_DAMAGED = re.compile("[ÃÂ][\u0080-\u00bf]|â€|ï»¿|\ufffd|\x00")
# An answer may well be as short a greeting as its question.
_ECHO_CHARACTERS = 12
# What tokenizers of published language models call special: ChatML's, Llama's, Mistral's, Gemma's, DeepSeek's.
_SPECIAL = r"<\|[a-z][a-z0-9_]*\|>|<｜[^｜<>]{1,40}｜>|\[/?INST\]|<</?SYS>>|</?s>|<(?:bos|eos)>|<(?:start|end)_of_turn>"


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The texts of special tokens: those of published models, and `own`, of the experiment's tokenizer.

    Strings that were rendered beforehand with the experiment's own tokens are read as that (`TextTokenizer.begun`);
    in messages, which the template surrounds, no special token belongs.
    """

    own: tuple[str, ...] = ()

    def written_in(self, example: Example) -> set[str]:
        """Those that an example has in its texts and should not."""
        texts = [flat(text) for text in (example.prompt, *example.completions) if text is not None]
        if example.type.conversational:
            return {token for text in texts for token in self._all.findall(text)}
        return {token for text in texts for token in _of_published().findall(text)} - set(self.own)

    @functools.cached_property
    def _all(self) -> re.Pattern[str]:
        return re.compile("|".join([*map(re.escape, sorted(self.own, key=len, reverse=True)), _SPECIAL]))


@functools.cache
def _of_published() -> re.Pattern[str]:
    return re.compile(_SPECIAL)


def flags_of(example: Example) -> int:
    """The bits of an example, without `SPECIAL`."""
    found, answers = 0, [flat(text) for text in example.completions]
    talk = [] if isinstance(example.prompt, str | None) else example.prompt
    for text, answer in zip(example.completions, answers, strict=True):
        if isinstance(text, str):
            found |= 0 if answer.strip() else BLANK
            continue
        spoken = [message for message in text if message.get("role") == "assistant"]
        if any(not (content_of(message).strip() or _calls(message)) for message in spoken):
            found |= BLANK
        if not spoken:
            found |= NO_ASSISTANT
        elif text[-1].get("role") not in ("assistant", "tool"):
            found |= NO_LAST_ANSWER
        found |= _order([*talk, *text])
    if len({" ".join(answer.split()) for answer in answers}) < len(answers):
        found |= EQUAL_ANSWERS
    if example.label is not False:  # a bad answer may be an echo
        found |= _echoes(example)
    asked = asked_in(example)
    if asked is not None and not asked.strip():
        found |= BLANK_PROMPT
    return found | (DAMAGED if _DAMAGED.search("\n".join([flat(example.prompt or ""), *answers])) else 0)


def asked_in(example: Example) -> str | None:
    """What the user says; None for a text that is no answer to anything."""
    if isinstance(example.prompt, str):
        return example.prompt
    talks = [text for text in (example.prompt, *example.completions[:1]) if not isinstance(text, str | None)]
    return "\n".join(said(text, "user") for text in talks) if talks else None


def said(text: Text, role: str) -> str:
    """A text, or of a conversation what this role says in it."""
    return text if isinstance(text, str) else flat([message for message in text if message.get("role") == role])


def flat(text: Text) -> str:
    """The contents of a text, one after the other."""
    return text if isinstance(text, str) else "\n".join(content_of(message) for message in text)


def content_of(message: JsonObject) -> str:
    """A message's text, that of its parts together."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _calls(message: JsonObject) -> bool:
    return bool(message.get("tool_calls") or message.get("function_call"))


def _order(messages: Sequence[JsonObject]) -> int:
    """Who speaks first, and whether the user or the assistant speaks twice in a row; calls are no speech."""
    roles = [message.get("role") for message in messages]
    first = next((role for role in roles if role not in ("system", "developer")), None)
    twice = any(
        one.get("role") == other.get("role") in ("user", "assistant") and not (_calls(one) or _calls(other))
        for one, other in itertools.pairwise(messages)
    )
    return (ASSISTANT_FIRST if first == "assistant" else 0) | (SAME_ROLE_TWICE if twice else 0)


def _echoes(example: Example) -> int:
    found = 0
    for question, answer in _exchanges(example):
        asked, given = (" ".join(text.casefold().split()) for text in (question, answer))
        if len(asked) >= _ECHO_CHARACTERS and given.startswith(asked):
            found |= ECHO if given == asked else BEGINS_WITH_PROMPT
    return found


def _exchanges(example: Example) -> Iterator[tuple[str, str]]:
    """Each thing that was asked with its answer; of a preference the chosen one."""
    if not example.completions:
        return
    prompt, completion = example.prompt, example.completions[0]
    if isinstance(completion, str):
        if isinstance(prompt, str):
            yield prompt, completion
        return
    messages = [*([] if isinstance(prompt, str | None) else prompt), *completion]
    for one, other in itertools.pairwise(messages):
        if (one.get("role"), other.get("role")) == ("user", "assistant"):
            yield content_of(one), content_of(other)
