"""`TextGenerator`: completions as texts, of texts or conversations. Read next: `generator.py`, `completion_text.py`."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from openpi_train.data.text.chat_template import ChatTemplate, Message, Variables
from openpi_train.data.tokenizers.text_tokenizer import TextTokenizer
from openpi_train.generation.completion_text import CompletionText, NewText, whole
from openpi_train.generation.generator import GenerationRequest, Generator
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.runtime.exits import UsageError


class TextGenerator:
    """A `Generator` with the tokenizer and the chat templates of its model.

    Args: `templates` are chat templates by name; conversations need the one called `default`. Not thread-safe.
    """

    def __init__(self, generator: Generator, tokenizer: TextTokenizer, templates: Mapping[str, ChatTemplate]):
        self.generator, self.tokenizer, self.templates = generator, tokenizer, dict(templates)
        self._texts: dict[Hashable, CompletionText] = {}

    def prompt_of(self, given: str | Sequence[Message], variables: Variables | None = None) -> list[int]:
        """The tokens of a text, or of a conversation up to the header of the assistant's next message.

        Args: `variables` are further variables of the chat template, such as `tools`.

        Raises ValueError if the template refuses the conversation, UsageError if there is no template.
        """
        if isinstance(given, str):
            return self.tokenizer.begun(self.tokenizer.encode([given])[0].tokens)
        self.check_conversations()
        variables = variables or {}
        named = "tool_use" if variables.get("tools") and "tool_use" in self.templates else "default"
        template = self.templates.get(named) or next(iter(self.templates.values()))
        return self.tokenizer.encode([template.render(given, variables, add_generation_prompt=True)])[0].tokens

    def check_conversations(self) -> None:
        """Raise UsageError if there is no chat template, which conversations need."""
        if not self.templates:
            raise UsageError(
                f"the tokenizer {self.tokenizer.name} has no chat template, which conversations need: give plain "
                "texts, or put a chat_template.jinja beside its tokenizer.json"
            )

    def check(self, prompt: Sequence[int], settings: SamplingSettings) -> list[str]:
        """Why a prompt cannot be completed, as sentences."""
        problems = self.generator.check(prompt, self._by_token(settings))
        for stop in settings.stop:
            inner = [self.tokenizer.piece(token) for token in self._special_tokens(stop)]
            if inner and inner != [stop]:
                problems.append(
                    f"stop {stop!r} has the special token {inner[0]!r} in it, which the texts of completions leave "
                    f"out: give {inner[0]!r} by itself, or a text without it"
                )
        return problems

    def _by_token(self, settings: SamplingSettings) -> SamplingSettings:
        """The settings with each stop that is a special token among `stop_ids`: no text of a completion has it."""
        texts, ids = [], list(settings.stop_ids)
        for stop in settings.stop:
            inner = self._special_tokens(stop)
            if len(inner) == 1 and self.tokenizer.piece(inner[0]) == stop:
                ids += inner
            else:
                texts.append(stop)
        return dataclasses.replace(settings, stop=tuple(texts), stop_ids=tuple(dict.fromkeys(ids)))

    def _special_tokens(self, text: str) -> list[int]:
        """The special tokens in a text."""
        try:
            tokens = self.tokenizer.encode([text])[0].tokens
        except UnicodeEncodeError:  # half of a surrogate pair, which is in no completion
            return []
        decode = self.tokenizer.decode
        return [token for token in tokens if decode([token]) and not decode([token], skip_special_tokens=True)]

    def submit(
        self, id: Hashable, prompt: Sequence[int], settings: SamplingSettings, *, row: int = 0, num_top: int = 0
    ) -> None:
        """Complete this prompt (from `prompt_of`). Arguments and errors are those of `Generator.submit`."""
        settings = self._by_token(settings)
        self.generator.submit(GenerationRequest(id=id, prompt=prompt, settings=settings, row=row, num_top=num_top))
        self._texts[id] = CompletionText(self.tokenizer, prompt, settings.stop)

    def cancel(self, id: Hashable) -> None:
        """Forget a request; what is unknown or finished is ignored."""
        self.generator.cancel(id)
        self._texts.pop(id, None)

    def step(self) -> list[NewText]:
        """A step of the generator; the texts that are new. A stop ends a completion and frees its row."""
        found = []
        for event in self.generator.step():
            told = self._texts[event.id].add(event)
            if told.tokens.finish_reason is not None:
                self.cancel(event.id)
            found.append(told)
        return found

    def stream(
        self, prompt: Sequence[int], settings: SamplingSettings, *, row: int = 0, num_top: int = 0
    ) -> Iterator[NewText]:
        """The completion of one prompt as its text comes. One that is not read to its end is cancelled."""
        id = object()
        self.submit(id, prompt, settings, row=row, num_top=num_top)
        try:
            while id in self._texts:
                yield from (one for one in self.step() if one.tokens.id is id)
        finally:
            self.cancel(id)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        settings: SamplingSettings,
        *,
        rows: Sequence[int] | None = None,
        after_step: Callable[[], None] = lambda: None,
    ) -> list[NewText]:
        """The whole completions, in the order of the prompts. Prompt i has row number `rows[i]`; None: i.

        `after_step` is called after every step. If it raises, so does this, and the generator cannot be used again.
        """
        parts: dict[Hashable, list[NewText]] = {number: [] for number in range(len(prompts))}
        for number, prompt in enumerate(prompts):
            self.submit(number, prompt, settings, row=number if rows is None else rows[number])
        while self._texts:
            for one in self.step():
                parts[one.tokens.id].append(one)
            after_step()
        return [whole(own) for own in parts.values()]
