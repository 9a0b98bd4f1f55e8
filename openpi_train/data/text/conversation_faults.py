"""Why a conversation cannot be encoded: a fault of its record, or of the chat template.

Read next: `text_encoder.py`.
"""

from openpi_train.data.text.chat_template import NotAPrefixError
from openpi_train.data.text.examples import Example

_OTHER_TEMPLATE = "Give a template that writes the prompt the same whatever follows it (--data.chat-template FILE)"


def fault_of(example: Example, number: int) -> str | None:
    """What is wrong with the messages of completion `number` after those of the prompt, and what to do; else None."""
    completion, prompt = example.completions[number], example.prompt
    if prompt is None or isinstance(prompt, str) or isinstance(completion, str) or not completion:
        return None
    is_preference = example.type.kind == "preference"
    name = ("chosen", "rejected")[number] if is_preference else "completion"
    if prompt and completion[: len(prompt)] == prompt:
        columns = "chosen=chosen rejected=rejected"
        without = f", or leave the column prompt out (--data.datasets.N.columns {columns})" if is_preference else ""
        return f"{name} begins with the messages of prompt, which are then there twice: leave them out of it{without}"
    before, first = prompt[-1]["role"] if prompt else None, completion[0]["role"]
    if before == "assistant" or first == "assistant":
        return None
    after = f"after a prompt that ends with one of the role {before}" if prompt else "without a prompt"
    share = "; without a column prompt, chosen and rejected must begin with the same messages" if is_preference else ""
    return (
        f"{name} begins with a message of the role {first}, {after}; needed is the assistant's answer: put the "
        f"messages before the answer into prompt{share}"
    )


def template_fault(error: ValueError, example: Example, targets: str) -> str:
    """The template's error, with what can be done about it for an example of this type under `--data.targets`."""
    if not isinstance(error, NotAPrefixError):
        return str(error)
    if example.prompt is None:
        advice = (
            "Give a template that marks the assistant's parts with {% generation %} (--data.chat-template FILE), use "
            "prompt/completion data, or train on all tokens (--data.targets all)"
        )
    elif example.type.kind != "prompt/completion":
        advice = f"{_OTHER_TEMPLATE}, or write prompt and answers as strings"
    elif targets == "assistant":
        advice = (
            "Give a template that marks the assistant's parts with {% generation %} and writes the prompt the same "
            "whatever follows it (--data.chat-template FILE), or set --data.targets completion or all"
        )
    else:
        advice = f"{_OTHER_TEMPLATE}, or train on all tokens (--data.targets all)"
    return f"{error}. {advice}"
