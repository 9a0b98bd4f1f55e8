"""The prompts of a split's texts, each with the text that follows it there. Read next: `evaluation/completer.py`."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from openpi_train.data.text.text_rows import RowMember, TextRows
from openpi_train.data.tokenizers.text_tokenizer import TextTokenizer

_AT_ONCE = 256
_UNDESIRABLE = 0  # the label of a completion that is no reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextPrompt:
    """A text up to its first target.

    `reference` is the text of the targets that follow, without special tokens; empty if there are none. `end` is the
    special token that ends it, which is not always the tokenizer's own (in conversations, that of a message); None if
    there is none. `text` is that of the prompt's tokens, with special tokens. `place` names its file and line;
    `member` and `sample` are its dataset's number among the rows' members, and its own there.
    """

    tokens: tuple[int, ...]
    text: str
    reference: str
    end: int | None
    place: str
    member: int = 0
    sample: int = 0


def prompts_of(rows: TextRows, tokenizer: TextTokenizer) -> Iterator[TextPrompt]:
    """The prompts in the order of the rows' first pass; equal ones once, those of undesirable completions never.

    Of a preference the chosen completion is the reference. A text that starts with a target has no prompt and is left
    out. Texts are whole: they are not cut to the length of rows. The order is the same in every process.
    """
    seen = set()
    for start in range(0, rows.num_samples, _AT_ONCE):
        members, _, numbers = rows.mixture.locate(np.arange(start, min(start + _AT_ONCE, rows.num_samples)))
        for member, row in zip(members.tolist(), numbers.tolist(), strict=True):
            store = rows.members[member].store
            for sample in rows.members[member].samples_of(row).tolist():
                tokens, targets = store.text(sample * store.texts_per_sample)
                prompt, _ = _cut(tokens, targets)
                if not prompt or prompt in seen or store.labels[sample] == _UNDESIRABLE:
                    continue
                seen.add(prompt)
                found = prompt_of(rows.members[member], sample, tokenizer)
                yield dataclasses.replace(found, member=member, sample=sample)


def prompt_of(member: RowMember, sample: int, tokenizer: TextTokenizer) -> TextPrompt:
    """The prompt of a sample, and what follows it there."""
    tokens, targets = member.store.text(sample * member.store.texts_per_sample)
    prompt, reference = _cut(tokens, targets)
    return TextPrompt(
        tokens=prompt,
        text=tokenizer.decode(prompt),
        reference=tokenizer.decode(reference, skip_special_tokens=True),
        end=_end(reference, tokenizer),
        place=f"{member.name}: {member.store.place(sample)}",
    )


def _cut(tokens: np.ndarray, targets: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens before the first target, and the targets that follow each other from there."""
    if not targets.any():
        return tuple(tokens.tolist()), ()
    start = int(np.argmax(targets))
    length = int(np.argmin(targets[start:])) or len(targets) - start
    return tuple(tokens[:start].tolist()), tuple(tokens[start : start + length].tolist())


def _end(tokens: Sequence[int], tokenizer: TextTokenizer) -> int | None:
    """The last special token, if only white space follows it."""
    for token in reversed(tokens):
        shown = tokenizer.decode([token])
        if shown and not tokenizer.decode([token], skip_special_tokens=True):
            return token
        if shown.strip():
            return None
    return None
