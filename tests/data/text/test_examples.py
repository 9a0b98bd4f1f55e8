"""Which dataset type a record is, and what is wrong with records of none."""

import json

import chats
import pytest

from openpi_train.data.text.examples import Example, ExampleType, _conversation, example_of

USER, ANSWER = chats.ONE[:1], chats.ONE[1:]
OTHER = [{"role": "assistant", "content": "It is five."}]


@pytest.mark.parametrize(
    ("record", "kind", "conversational"),
    [
        ({"text": "a"}, "language modelling", False),
        ({"messages": chats.TWO}, "language modelling", True),
        ({"prompt": "a", "answer": "b"}, "prompt only", False),
        ({"prompt": USER, "label": None}, "prompt only", True),
        ({"prompt": "a", "completion": "b"}, "prompt/completion", False),
        ({"prompt": USER, "completion": ANSWER}, "prompt/completion", True),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", False),
        ({"prompt": USER, "chosen": ANSWER, "rejected": OTHER}, "preference", True),
        ({"chosen": "a b", "rejected": "a c"}, "preference", False),
        ({"chosen": [*USER, *ANSWER], "rejected": [*USER, *OTHER]}, "preference", True),
        ({"prompt": "a", "completion": "b", "label": False}, "unpaired preference", False),
        ({"prompt": USER, "completion": ANSWER, "label": True}, "unpaired preference", True),
        ({"prompt": "a", "messages": chats.ONE, "prompt_id": 3}, "language modelling", True),
        ({"text": "a", "label": None, "completion": None, "prompt": "b"}, "language modelling", False),
    ],
)
def test_types_are_recognised_by_their_columns(record, kind, conversational):
    assert example_of(record).type == ExampleType(kind, conversational)


HUMAN, GPT = {"from": "human", "value": "What is two plus two?"}, {"from": "gpt", "value": "It is four."}


@pytest.mark.parametrize(
    ("record", "same"),
    [
        ({"conversations": [HUMAN, GPT]}, {"messages": [*USER, *ANSWER]}),
        ({"messages": [HUMAN, GPT]}, {"messages": [*USER, *ANSWER]}),
        ({"conversations": [*USER, *ANSWER]}, {"messages": [*USER, *ANSWER]}),
        (
            {"conversations": [HUMAN, GPT], "system": "Be short."},
            {"messages": [{"role": "system", "content": "Be short."}, *USER, *ANSWER]},
        ),
        (
            {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "It is five."}},
            {"prompt": USER, "chosen": ANSWER, "rejected": OTHER},
        ),
        ({"text": "a", "system": "b"}, {"text": "a"}),
    ],
)
def test_what_sharegpts_files_hold_is_read_as_trls(record, same):
    assert example_of(record) == example_of(same)


def test_an_unknown_speaker_is_told():
    with pytest.raises(ValueError, match="message 1 of conversations is from 'narrator'; known are human, user, gpt"):
        example_of({"conversations": [HUMAN, {"from": "narrator", "value": "a"}]})


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Q: 2+2? A: four", "Q: 2+2? A: five", "Q: 2+2? A:"),
        ("Q: 2+2? A: four", "Q: 2+2? A: fourteen", "Q: 2+2? A:"),
        ("four", "five", ""),
        ([*USER, *ANSWER], [*USER, *OTHER], USER),
    ],
)
def test_an_implicit_prompt_is_what_both_share_in_whole_words_or_messages(chosen, rejected, prompt):
    found = example_of({"chosen": chosen, "rejected": rejected})
    assert found.prompt == prompt
    assert [prompt + completion for completion in found.completions] == [chosen, rejected]


def test_a_string_prompt_beside_whole_conversations_is_implicit():
    found = example_of({"prompt": " What is two  plus two?", "chosen": [*USER, *ANSWER], "rejected": [*USER, *OTHER]})
    assert (found.prompt, found.completions) == (USER, (ANSWER, OTHER))
    parts = [{"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "is?"}]}]
    found = example_of({"prompt": "What is?", "chosen": [*parts, *ANSWER], "rejected": [*parts, *OTHER]})
    assert (found.prompt, found.completions) == (parts, (ANSWER, OTHER))


def test_a_string_after_a_conversation_is_the_assistants_answer():
    found = example_of({"prompt": USER, "completion": "It is four."})
    assert (found.type, found.completions) == (ExampleType("prompt/completion", True), (ANSWER,))
    found = example_of({"prompt": USER, "chosen": "It is four.", "rejected": "It is five."})
    assert (found.type, found.prompt, found.completions) == (ExampleType("preference", True), USER, (ANSWER, OTHER))


def test_further_columns_have_their_meaning_and_others_none():
    found = example_of(
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2, "ref_chosen_logps": -1, "ref_rejected_logps": -2.5}
    )
    assert (found.margin, found.reference) == (2.0, (-1.0, -2.5))
    found = example_of({"messages": chats.ONE, "tools": chats.TOOLS, "chat_template_kwargs": {"x": 1}, "source": "web"})
    assert found.variables == {"x": 1, "tools": chats.TOOLS}
    # Tables hold them as JSON.
    assert example_of({"messages": chats.ONE, "tools": json.dumps(chats.TOOLS)}).variables == {"tools": chats.TOOLS}
    message = {"role": "user", "content": "a", "tool_calls": None}  # as parquet gives it
    assert example_of({"messages": [message]}).completions == ([{"role": "user", "content": "a"}],)
    found = example_of({"prompt": "a", "completion": "b", "label": 1, "reference_logps": -3})
    assert isinstance(found, Example) and (found.label, found.reference) == (True, (-3.0,))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "a", "answer": "b"}, r"\['answer', 'question'\] are of no known type.*--data.datasets.N.columns"),
        ({"prompt": "a", "completion": None}, "^completion is null; needed is a string, or a list of messages"),
        ({"prompt": None, "chosen": "a", "rejected": None}, "^prompt and rejected are null"),
        ({"prompt": "a", "chosen": "b"}, "of no known type"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": USER, "completion": []}, "completion is empty"),
        ({"prompt": USER, "completion": [{"role": "assistant", "content": ""}]}, "completion is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected is empty"),
        ({"chosen": "a b", "rejected": "a b"}, "chosen and rejected are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        (
            {"prompt": "Why?", "chosen": ANSWER, "rejected": OTHER},
            r"prompt is the string 'Why\?', which is not .* lost",
        ),
        ({"prompt": "is four", "chosen": [*USER, *ANSWER], "rejected": [*USER, *OTHER]}, "would be lost"),
        (
            {"prompt": "a", "completion": ANSWER},
            "prompt is a string, completion is a list: all texts of a record must be strings",
        ),
        ({"messages": chats.ONE, "tools": "[{]"}, "tools is a string that is no JSON"),
        (
            {"messages": chats.ONE, "tools": "{}"},
            "tools is an object; needed is a list of objects, or JSON of such a list",
        ),
        ({"messages": chats.ONE, "tools": ["{}"]}, "tools is a list with other entries than objects"),
        ({"messages": chats.ONE, "chat_template_kwargs": {"tools": "[1]"}}, "tools is a list with other entries"),
        ({"prompt": USER, "completion": 3}, "completion is a number; allowed: a string, or a list of messages"),
        ({"chosen": USER, "rejected": "c"}, "chosen is a list, rejected is a string"),
        ({"text": chats.ONE}, "text is a list"),
        ({"messages": "a"}, "messages is a string"),
        ({"messages": ["a"]}, "message 0 of messages"),
        ({"text": 3}, "text is a number"),
        (
            {"messages": [*USER, *ANSWER, *USER, {"role": "assistent", "content": "4"}]},
            "message 3 of messages has the role 'assistent'; known are system, developer, user, assistant, tool, "
            "function. Rename it to assistant",
        ),
        (
            {"prompt": [{"role": "human", "content": "a"}], "completion": "b"},
            "message 0 of prompt .* Rename it to user",
        ),
        (
            {"messages": [{"role": "Human", "content": "a"}]},
            "message 0 of messages has the role 'Human'; .*Rename it to user",
        ),
        ({"messages": [{"role": "user"}]}, "content of message 0 of messages is absent"),
        ({"messages": [{"role": "user", "content": 5}]}, "content of message 0 of messages is a number"),
        ({"text": "a", "chat_template_kwargs": {"messages": []}}, "has messages, which the run sets itself"),
        ({"chosen": "b", "rejected": "c", "margin": float("inf")}, "margin is inf; needed is a finite number"),
        ({"chosen": "b", "rejected": "c", "margin": 10**400}, "needed is a finite number"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "label is 'good'"),
        ({"prompt": "a", "completion": "b", "label": None}, r"label is None; needed .* or no column label"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}, "margin is 'big'"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(record, message):
    with pytest.raises(ValueError, match=message):
        example_of(record)


def test_roles_of_a_chat_template_are_left_to_it():
    """Granite's templates know `document`, Llama's `ipython`; neither is nearly another role."""
    for role in ("ipython", "document", "critic"):
        talk = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}, {"role": "assistant", "content": "c"}]
        assert [one["role"] for one in _conversation("messages", talk)] == ["user", role, "assistant"]
