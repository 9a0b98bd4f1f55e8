"""Which columns of a file of texts are probably which of a type. Read next: `text_kinds.py`."""

from collections.abc import Sequence

from openpi_train.data.check.record_measures import ExaminedTexts
from openpi_train.data.text.examples import COLUMNS

# Names in public datasets, the likeliest first.
_PROMPTS = ("prompt", "question", "instruction", "query", "problem", "input", "source", "user")
_ANSWERS = ("completion", "answer", "output", "response", "solution", "target", "assistant")
_CHOSEN, _REJECTED = ("chosen", "preferred", "response_chosen"), ("rejected", "dispreferred", "response_rejected")
_TALKS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
_TEXTS = ("text", "content", "document", "article", "body")


def columns_in_words(names: Sequence[str], data: ExaminedTexts) -> str:
    """Which flag names the columns of a record that is of no known type; empty where its columns are not the fault."""
    if not names or data.columns or set(names) & set(COLUMNS) - {"prompt", "completion", "label", "tools", "margin"}:
        return ""
    lower = {name.lower(): name for name in names}

    def first(wanted: Sequence[str]) -> str | None:
        return next((lower[name] for name in wanted if name in lower), None)

    prompt, answer, chosen, rejected = map(first, (_PROMPTS, _ANSWERS, _CHOSEN, _REJECTED))
    flag = data.columns_flag
    if (prompt, answer) == ("prompt", "completion"):
        return ""
    if prompt is not None and chosen is not None and rejected is not None:
        return f"Name the columns: {flag} prompt={prompt} chosen={chosen} rejected={rejected}"
    if prompt is not None and answer is not None:
        # Alpaca's.
        beside = lower.get("input") if prompt != lower.get("input") else None
        more = f". This leaves out {beside}: where that is part of the question, join both first" if beside else ""
        return f"Name the columns: {flag} prompt={prompt} completion={answer}{more}"
    if (talk := first(_TALKS)) is not None:
        return (
            f"Name the column: {flag} messages={talk}. Its messages need role (user, assistant) and content: of "
            "ShareGPT's, rename from and value so, and human and gpt"
        )
    if (text := first(_TEXTS)) is not None:
        return f"Name the column: {flag} text={text}"
    return (
        f"Name the columns: {flag} prompt=COLUMN completion=COLUMN, or text=COLUMN; the first such record has "
        f"{', '.join(names[:12])}"
    )
