"""Kinds of faults of texts, judged by measures of every record. Read next: `record_measures.py`."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from openpi_train.data.check import record_flags
from openpi_train.data.check.record_measures import ExaminedTexts
from openpi_train.data.check.scripts import shares_in_words
from openpi_train.data.core.findings import Finding
from openpi_train.data.text.text_columns import FLAG

# A text is very long if it has more characters than both.
_MEDIANS, _LONG = 50, 20_000
# Special tokens that this share of the records has in its texts, and at least two, were not written by chance.
_SPECIAL_SHARE = 0.01
# Answers that begin with their prompt are a fault of the file where this share does.
_BEGIN_SHARE = 0.5


def unreadable(data: ExaminedTexts) -> Iterator[Finding]:
    """Records that cannot be read, or are of no known type."""
    for measures in (data.measures, data.held_out_measures):
        if measures.bad:
            remedy = (measures.bad_remedy or "repair or remove these records").replace(FLAG, data.columns_flag)
            yield Finding(
                kind="unreadable records",
                count=measures.bad,
                total=measures.bad + len(measures),
                unit="records",
                where=measures.first_bad.replace(FLAG, data.columns_flag),
                training="a run ends at the first one"
                + (", or leaves them out (--data.on-bad-record skip)" if len(measures) else ""),
                remedy=remedy[:1].upper() + remedy[1:],
            )


def no_records(data: ExaminedTexts) -> Iterator[Finding]:
    """Files without any record."""
    if not len(data.measures) and not data.measures.bad and not data.measures.equal:
        yield Finding(
            kind="no records",
            count=0,
            unit="records",
            training="a run is refused",
            remedy="Give the files that hold the texts",
        )


def types_mixed(data: ExaminedTexts) -> Iterator[Finding]:
    """Records of several types."""
    counts = data.measures.counts
    if len(counts) > 1:
        (usual, most), *others = sorted(counts.items(), key=lambda pair: -pair[1])
        yield Finding(
            kind="types mixed",
            count=sum(count for _, count in others),
            total=len(data.measures),
            unit="records",
            where=data.measures.types[others[0][0]],
            what=", ".join(f"{kind}: {count}" for kind, count in ((usual, most), *others)),
            training="the dataset is refused",
            remedy=f"Split it into a dataset for each type, or name the columns ({data.columns_flag})",
        )


def copies(data: ExaminedTexts) -> Iterator[Finding]:
    """Records that are there twice, but for case and white space."""
    texts = data.measures["texts"]
    _, first, inverse = np.unique(texts, return_index=True, return_inverse=True)
    # `first` is the first place of each distinct text.
    yield from _finding(
        data,
        first[inverse] != np.arange(len(texts)),
        kind="copies of texts",
        what="equal to an earlier record but for case and white space",
        training="they count as often as they are there",
        remedy="Remove the copies, unless they are meant as a weight",
    )


def held_out_too(data: ExaminedTexts) -> Iterator[Finding]:
    """Training records whose prompt is held out, too."""
    if not data.held_out:
        return
    yield from _finding(
        data,
        np.isin(data.measures["prompts"], data.held_out_measures["prompts"]),
        kind="held-out texts in training",
        what="the prompt, or the text where there is none, is held out, too",
        training="the held-out loss and scores are too good",
        remedy="Remove them from one of the two",
    )


def blank(data: ExaminedTexts) -> Iterator[Finding]:
    """Answers without a visible character."""
    yield from _flagged(
        data,
        record_flags.BLANK,
        kind="blank answers",
        what="an answer of white space, or an empty turn of the assistant",
        training="the model learns to answer nothing",
        remedy="Remove these records",
    )


def blank_prompts(data: ExaminedTexts) -> Iterator[Finding]:
    """Prompts without a visible character."""
    yield from _flagged(
        data,
        record_flags.BLANK_PROMPT,
        kind="blank prompts",
        what="a prompt of white space, or a conversation whose user says nothing",
        training="the model learns to answer a question that it cannot see",
        remedy="Remove these records, or name the column of the prompts",
    )


def no_assistant(data: ExaminedTexts) -> Iterator[Finding]:
    """Conversations without a turn of the assistant."""
    yield from _flagged(
        data,
        record_flags.NO_ASSISTANT,
        kind="no assistant turn",
        what="no message has the role assistant",
        training="with --data.targets assistant they are bad records, else the user's words are learned",
        remedy="Rename the roles, or remove these records",
    )


def no_last_answer(data: ExaminedTexts) -> Iterator[Finding]:
    """Conversations that end without an answer."""
    yield from _flagged(
        data,
        record_flags.NO_LAST_ANSWER,
        kind="no last answer",
        what="the last message is not the assistant's",
        training="the last question is learned as text, or has no targets",
        remedy="Cut the last message off, or add its answer",
    )


def assistant_first(data: ExaminedTexts) -> Iterator[Finding]:
    """Conversations in which the assistant speaks first."""
    yield from _flagged(
        data,
        record_flags.ASSISTANT_FIRST,
        kind="assistant speaks first",
        what="the first message, but for the system's, is the assistant's",
        training="templates of published models refuse it, or the model learns to begin by itself",
        remedy="Cut that message off, or look whether the roles are exchanged",
    )


def same_role_twice(data: ExaminedTexts) -> Iterator[Finding]:
    """Conversations in which the user or the assistant speaks twice in a row."""
    yield from _flagged(
        data,
        record_flags.SAME_ROLE_TWICE,
        kind="one role twice in a row",
        what="two messages of the user, or of the assistant, follow each other",
        training="templates of published models refuse it, or write turns that no conversation has",
        remedy="Join the two messages, or look whether one was lost between them",
    )


def echoes(data: ExaminedTexts) -> Iterator[Finding]:
    """Answers that are their prompt, or, in most records, begin with it."""
    yield from _flagged(
        data,
        record_flags.ECHO,
        kind="answers that repeat their prompt",
        what="the answer is its prompt",
        training="the model learns to repeat what it is asked",
        remedy="Look whether a column was taken twice; remove these records",
    )
    begin = (data.measures["flags"] & record_flags.BEGINS_WITH_PROMPT) > 0
    if begin.mean() >= _BEGIN_SHARE if len(begin) else False:
        yield from _finding(
            data,
            begin,
            kind="answers that repeat their prompt",
            what="the answer begins with the whole prompt, which is then there twice",
            training="the model learns to repeat what it is asked, and answers then",
            remedy=f"Cut the prompt off the answers, or read them as texts ({data.columns_flag} text=COLUMN)",
        )


def contradictions(data: ExaminedTexts) -> Iterator[Finding]:
    """Preferences, and labelled answers, of which another record says the opposite."""
    measures = data.measures
    verdicts, opposites = measures["verdicts"], measures["opposites"]
    # Equal answers say their own opposite, and are another kind.
    which = (verdicts != opposites) & np.isin(verdicts, opposites)
    if which.any():
        one = int(np.argmax(which))
        other = int(np.flatnonzero(verdicts == opposites[one])[0])
        yield Finding(
            kind="contradicting preferences",
            count=int(which.sum()),
            total=len(which),
            unit="records",
            where=f"{measures.place(other)} (against {measures.place(one)})",
            what="of the same prompt, the same answers are judged the other way round",
            training="they cancel each other",
            remedy="Keep what most judges said of each pair; look whether the columns were exchanged in a part",
        )


def equal_answers(data: ExaminedTexts) -> Iterator[Finding]:
    """Preferences whose two answers are equal, but for white space."""
    measures = data.measures
    nearly = (measures["flags"] & record_flags.EQUAL_ANSWERS) > 0
    if measures.equal or nearly.any():
        yield Finding(
            kind="chosen equals rejected",
            count=measures.equal + int(nearly.sum()),
            total=measures.equal + len(measures),
            unit="records",
            where=measures.first_equal or measures.place(int(np.argmax(nearly))),
            what=f"{measures.equal} to the last character, the others but for white space",
            training="there is nothing to compare; those that are wholly equal end a run, or are left out "
            "(--data.on-bad-record skip)",
            remedy="Remove these records",
        )


def special_tokens(data: ExaminedTexts) -> Iterator[Finding]:
    """Special tokens that are written in texts."""
    which = (data.measures["flags"] & record_flags.SPECIAL) > 0
    if which.sum() >= max(2, _SPECIAL_SHARE * len(which)):
        tokens = sorted(data.measures.tokens.items(), key=lambda pair: -pair[1])
        yield from _finding(
            data,
            which,
            kind="special tokens in texts",
            what=", ".join(f"{token} in {count}" for token, count in tokens[:6]),
            training="they are encoded as they stand: as special tokens where the tokenizer has them, so that a text "
            "ends or changes its speaker on the way, else letter by letter",
            remedy="Take the texts from before a template was put around them; strings that were rendered beforehand "
            "need the tokenizer of that template",
        )


def damaged_characters(data: ExaminedTexts) -> Iterator[Finding]:
    """Texts that were read in the wrong encoding once, or hold characters that stand for lost ones."""
    yield from _flagged(
        data,
        record_flags.DAMAGED,
        kind="damaged characters",
        what="UTF-8 that was read as Latin-1, U+FFFD, or NUL",
        training="the model learns to write them",
        remedy="Decode the original again as UTF-8",
    )


def mixed_scripts(data: ExaminedTexts) -> Iterator[Finding]:
    """Texts in another script than most texts of their field."""
    measures = data.measures
    for field in ("prompt", "answer"):
        numbers = measures[f"{field}_scripts"]
        counts = np.bincount(numbers[numbers >= 0], minlength=len(measures.scripts))
        if np.count_nonzero(counts) < 2:
            continue
        order: list[int] = np.argsort(-counts, kind="stable").tolist()
        told = [(measures.scripts[number], int(counts[number])) for number in order if counts[number]]
        yield from _finding(
            data,
            (numbers >= 0) & (numbers != order[0]),
            kind="languages mixed",
            what=f"{field}s by script: {shares_in_words(told)}",
            training="all are trained on as they are",
            is_note=True,
            remedy="Leave the others out, or make a dataset of each, unless all are meant",
        )


def very_long(data: ExaminedTexts) -> Iterator[Finding]:
    """Texts that are much longer than most."""
    characters = data.measures["characters"]
    if len(characters):
        yield from _finding(
            data,
            (characters > _MEDIANS * np.median(characters)) & (characters > _LONG),
            kind="very long texts",
            what=f"up to {int(characters.max())} characters, where half of the records have at most "
            f"{int(np.median(characters))}",
            training="they are cut to --data.max-length, or fill rows of their own",
            remedy="Look whether several records run together",
        )


@dataclasses.dataclass(frozen=True)
class TextFaultKind:
    """A kind of fault of texts: what looks for it, and `Finding.kind` of what it tells."""

    find: Callable[[ExaminedTexts], Iterator[Finding]]
    name: str

    @property
    def about(self) -> str:
        """What it is, in one sentence."""
        return (self.find.__doc__ or "").partition("\n")[0]


TEXT_KINDS = (
    TextFaultKind(unreadable, "unreadable records"),
    TextFaultKind(no_records, "no records"),
    TextFaultKind(types_mixed, "types mixed"),
    TextFaultKind(blank, "blank answers"),
    TextFaultKind(blank_prompts, "blank prompts"),
    TextFaultKind(no_assistant, "no assistant turn"),
    TextFaultKind(no_last_answer, "no last answer"),
    TextFaultKind(assistant_first, "assistant speaks first"),
    TextFaultKind(same_role_twice, "one role twice in a row"),
    TextFaultKind(echoes, "answers that repeat their prompt"),
    TextFaultKind(equal_answers, "chosen equals rejected"),
    TextFaultKind(contradictions, "contradicting preferences"),
    TextFaultKind(special_tokens, "special tokens in texts"),
    TextFaultKind(copies, "copies of texts"),
    TextFaultKind(held_out_too, "held-out texts in training"),
    TextFaultKind(damaged_characters, "damaged characters"),
    TextFaultKind(mixed_scripts, "languages mixed"),
    TextFaultKind(very_long, "very long texts"),
)


def examine_texts(data: ExaminedTexts) -> list[Finding]:
    """The findings of all kinds, after those that opening the texts told."""
    return [*data.findings, *(finding for kind in TEXT_KINDS for finding in kind.find(data))]


def _flagged(data: ExaminedTexts, flag: int, **told: Any) -> Iterator[Finding]:
    yield from _finding(data, (data.measures["flags"] & flag) > 0, **told)


def _finding(
    data: ExaminedTexts, which: np.ndarray, *, kind: str, what: str, training: str, remedy: str, is_note: bool = False
) -> Iterator[Finding]:
    """A finding on the records that a mask chooses, if there are any."""
    if which.any():
        yield Finding(
            kind=kind,
            count=int(which.sum()),
            total=len(which),
            unit="records",
            where=data.measures.place(int(np.argmax(which))),
            what=what,
            training=training,
            remedy=remedy,
            is_note=is_note,
        )
