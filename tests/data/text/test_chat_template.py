"""Rendered conversations and the assistant's spans, compared with transformers' apply_chat_template."""

import datetime
import pickle

import chats
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from openpi_train.data.text.chat_template import NotAPrefixError

ALL = [(name, chat) for name in chats.TEMPLATES for chat in chats.CONVERSATIONS]


@pytest.fixture
def theirs(monkeypatch):
    """transformers' rendering, on the day of ours."""

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 7, 26)

    monkeypatch.setattr(chat_template_utils, "datetime", Day)
    chat_template_utils._compile_jinja_template.cache_clear()
    return PreTrainedTokenizerFast(tokenizer_object=chats.byte_level(), bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(("name", "chat"), ALL)
@pytest.mark.parametrize("header", [False, True])
def test_text_is_that_of_transformers(theirs, name, chat, header):
    source, messages = chats.TEMPLATES[name], chats.CONVERSATIONS[chat]
    for extra in ({}, {"tools": chats.TOOLS}, {"date_string": "today"}):
        expected = theirs.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=header, **extra
        )
        assert chats.chat(source).render(messages, extra, add_generation_prompt=header) == expected


@pytest.mark.parametrize("chat", chats.CONVERSATIONS)
def test_generation_blocks_are_those_of_transformers(theirs, chat):
    messages = chats.CONVERSATIONS[chat]
    text, spans = chats.chat(chats.CHATML_MARKED).with_assistant_spans(messages)
    expected, (indices,) = chat_template_utils.render_jinja_template(
        [messages], chat_template=chats.CHATML_MARKED, return_assistant_tokens_mask=True
    )
    assert [text] == expected and spans == indices
    assert [text[a:b] for a, b in spans] == [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]


@pytest.mark.parametrize("name", ["chatml", "headed", "turns"])
@pytest.mark.parametrize("chat", chats.CONVERSATIONS)
def test_spans_without_blocks_are_the_answers_after_their_headers(name, chat):
    ends = {"chatml": "<|im_end|>\n", "headed": "<|eot|>", "turns": "</turn>\n"}
    contents = [m["content"] for m in chats.CONVERSATIONS[chat] if m["role"] == "assistant"]
    contents = [c if name == "chatml" else c.strip() for c in contents]
    text, spans = chats.chat(chats.TEMPLATES[name]).with_assistant_spans(chats.CONVERSATIONS[chat])
    assert text == chats.chat(chats.TEMPLATES[name]).render(chats.CONVERSATIONS[chat])
    assert [text[a:b] for a, b in spans] == [content + ends[name] for content in contents]


def test_a_template_that_does_not_preserve_prefixes_is_an_error():
    template = chats.chat(chats.FORGETFUL)
    _, spans = template.with_assistant_spans(chats.SYSTEM)  # one answer: nothing is forgotten
    assert len(spans) == 1
    for messages in (chats.TWO, chats.THOUGHT):
        with pytest.raises(NotAPrefixError, match=r"tiny does not preserve prefixes: it writes .* where the whole"):
            template.with_assistant_spans(messages)


def test_noncharacters_in_a_conversation_are_kept():
    strange = [{"role": "assistant", "content": "a\ufdd0b\ufdd1c"}]
    text, ((start, end),) = chats.chat(chats.CHATML_MARKED).with_assistant_spans(strange)
    assert text[start:end] == "a\ufdd0b\ufdd1c<|im_end|>"


def test_variables_set_in_a_block_end_with_it(theirs):
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    expected = theirs.apply_chat_template(chats.ONE, chat_template=source, tokenize=False)
    assert chats.chat(source).render(chats.ONE) == expected == "21"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "not valid jinja"),
        ("{{ raise_exception('no tools here') }}", "refuses the conversation: no tools here"),
        ("{{ messages[9].content }}", "refuses the conversation"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        (
            "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
            "template tiny calls itself without end",
        ),
        ("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", "not valid jinja"),
    ],
)
def test_a_template_that_fails_says_why(source, message):
    with pytest.raises(ValueError, match=message):
        chats.chat(source).render(chats.ONE)


def test_a_template_is_read_from_a_file_and_pickled(tmp_path):
    (tmp_path / "mine.jinja").write_text(chats.HEADED)
    read = chats.ChatTemplate.read(str(tmp_path / "mine.jinja"), special_tokens={"bos_token": "<s>"}, today=chats.TODAY)
    assert pickle.loads(pickle.dumps(read)).render(chats.ONE) == read.render(chats.ONE)
    assert "Today: 26 Jul 2024" in read.render(chats.ONE)
    with pytest.raises(FileNotFoundError, match="no chat template at"):
        chats.ChatTemplate.read(str(tmp_path / "none"), special_tokens={}, today=chats.TODAY)
    (tmp_path / "latin.jinja").write_bytes("ü".encode("latin-1"))
    with pytest.raises(ValueError, match=r"chat template .*latin\.jinja is not UTF-8 .*; save it as UTF-8"):
        chats.ChatTemplate.read(str(tmp_path / "latin.jinja"), special_tokens={}, today=chats.TODAY)


# Parameters of our functions, and of jinja's. `self` always is jinja's own within a template.
@pytest.mark.parametrize("name", ["self", "whole", "given", "variables", "args", "context", "ü"])
@pytest.mark.parametrize("source", [chats.CHATML, chats.CHATML_MARKED], ids=["chatml", "marked"])
def test_a_variable_may_have_any_name(name, source):
    template = chats.chat(source if name == "self" else "{{ " + name + " }}" + source)
    text, spans = template.with_assistant_spans(chats.ONE, {name: "its value"})
    assert text == ("" if name == "self" else "its value") + chats.chat(source).render(chats.ONE) and len(spans) == 1
    assert template.render(chats.ONE, {name: "its value"}) == text


def test_spans_mark_the_tokens_that_transformers_marks(theirs):
    from openpi_train.data.text.text_encoder import inside

    for messages in chats.CONVERSATIONS.values():
        found = theirs.apply_chat_template(
            messages, chat_template=chats.CHATML_MARKED, return_assistant_tokens_mask=True, return_dict=True
        )
        text, spans = chats.chat(chats.CHATML_MARKED).with_assistant_spans(messages)
        (pieces,) = chats.tiny().encode([text])
        assert pieces.tokens == found["input_ids"]
        np.testing.assert_array_equal(inside(pieces, spans), found["assistant_masks"])
