"""Contents in parts and tool calls, in templates of the forms that published models have, as transformers has them."""

import json

import chats
import pytest
from transformers import PreTrainedTokenizerFast

from openpi_train.data.text.examples import example_of
from openpi_train.data.text.message_content import text_of, with_calls
from openpi_train.data.text.text_encoder import TextEncoder

HEAD = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
TAIL = "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
EACH = "{%- for part in m.content %}{%- if part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}"
CALL = "{%- for c in m.tool_calls or [] %}{%- if c.function is defined %}{%- set c = c.function %}{%- endif %}{{- "
CALLED = " }}{%- endfor %}"
AS_JSON = CALL + "c.name + ': ' + c.arguments | tojson" + CALLED

# A text is written as it is; what comes of a list of parts depends on jinja.
PLAIN = HEAD + "{{- m.content | trim }}" + TAIL
STRICT = HEAD + "{{- m.content + '' }}" + TAIL
# As Qwen3: what is no string is left out.
FORGETS = HEAD + "{%- if m.content is string %}{{- m.content }}{%- endif %}" + TAIL
# As Qwen2-VL.
EITHER = HEAD + "{%- if m.content is string %}{{- m.content }}{%- else %}" + EACH + "{%- endif %}" + TAIL
# As SmolVLM: of a text it would go through the characters, and write none.
PARTS_ONLY = HEAD + EACH + TAIL
# As Mistral Small 3.1: all parts of the user, the first one of the others.
FIRST_ONLY = (
    HEAD + "{%- if m.content is string %}{{- m.content }}{%- elif m.role == 'user' %}" + EACH
    + "{%- else %}{{- m.content[0]['text'] }}{%- endif %}" + TAIL
)  # fmt: skip
SPELLED = HEAD + "{{- m.content | tojson if m.content is not string else m.content }}" + TAIL

OBJECTS = HEAD + "{{- m.content or '' }}" + AS_JSON + TAIL
# As DeepSeek's: arguments are joined to a text.
STRINGS = HEAD + "{{- m.content or '' }}" + CALL + "c.name + ': ' + c.arguments" + CALLED + TAIL
# And as its first ones: calls are written only where the content is none, which transformers 5 leaves out.
IF_NONE = (
    HEAD + "{%- if m.content is none %}" + CALL + "c.name + ': ' + c.arguments" + CALLED
    + "{%- else %}{{- m.content }}{%- endif %}" + TAIL
)  # fmt: skip
# As Kimi K2's.
EITHER_CALL = (
    HEAD + "{{- m.content or '' }}"
    + CALL + "c.name + ': ' + (c.arguments if c.arguments is string else c.arguments | tojson)" + CALLED + TAIL
)  # fmt: skip
SPELLED_CALL = HEAD + "{{- m.content or '' }}" + CALL + "c.name ~ ': ' ~ c.arguments" + CALLED + TAIL

ARGUMENTS = {"a": 1, "of": ["ä", None, 0.5], "deep": {"b": "}"}}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def theirs(template, messages, **given):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=chats.byte_level(), bos_token="<s>", eos_token="</s>")
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **given)


def called(arguments, **more):
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": None, "tool_calls": [call], **more}]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("template", "roles_with_parts"),
    [
        (PLAIN, ()),
        (STRICT, ()),
        (FORGETS, ()),
        (SPELLED, ()),
        (EITHER, ("system", "user", "assistant", "tool")),
        (PARTS_ONLY, ("system", "user", "assistant", "tool")),
        (FIRST_ONLY, ("user",)),
    ],
)
def test_parts_are_given_to_templates_that_write_all_of_them_and_joined_for_others(template, roles_with_parts, role):
    messages = [{"role": role, "content": parts("one {", "two")}]
    joined = "one {two" if role in roles_with_parts else "one {\ntwo"
    expected = theirs(EITHER, [{"role": role, "content": joined}])
    assert chats.chat(template).render(messages) == expected
    if role in roles_with_parts:
        assert expected == theirs(template, messages)


@pytest.mark.parametrize("template", [PLAIN, STRICT, FORGETS, EITHER, PARTS_ONLY, FIRST_ONLY, SPELLED])
def test_texts_are_written_by_templates_of_parts_too(template):
    assert chats.chat(template).render(chats.SYSTEM) == theirs(EITHER if template != PLAIN else PLAIN, chats.SYSTEM)


@pytest.mark.parametrize("template", [PLAIN, FORGETS, PARTS_ONLY, FIRST_ONLY])
def test_no_target_has_the_spelling_of_a_list(template):
    of = TextEncoder(tokenizer=chats.tiny(), templates={"default": chats.chat(template)})
    record = {"prompt": [{"role": "user", "content": parts("q")}]}
    (found,) = of.encode(example_of(record | {"completion": [{"role": "assistant", "content": parts("an", "swer")}]}))
    assert of.tokenizer.decode(found.tokens[found.targets]).replace("\n", "") == "answer<|im_end|>"
    (found,) = of.encode(example_of(record))
    assert of.tokenizer.decode(found.tokens) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("given", [ARGUMENTS, json.dumps(ARGUMENTS), json.dumps(ARGUMENTS, indent=1)])
@pytest.mark.parametrize(
    ("template", "taken"),
    [
        (OBJECTS, ARGUMENTS),
        (EITHER_CALL, ARGUMENTS),
        (STRINGS, json.dumps(ARGUMENTS, ensure_ascii=False)),
        (SPELLED_CALL, json.dumps(ARGUMENTS, ensure_ascii=False)),
    ],
)
def test_arguments_are_objects_where_templates_write_objects_and_json_where_they_write_texts(template, taken, given):
    expected = theirs(template, called(taken))
    assert 'add: {"a": 1, "of": ["ä", null, 0.5], "deep": {"b": "}"}}' in expected
    assert chats.chat(template).render(called(given)) == expected
    (example,) = example_of({"messages": called(given)}).completions  # as tables have it: without the null
    assert "content" not in example[1] and chats.chat(template).render(example) == expected
    if template is STRINGS:
        assert chats.chat(IF_NONE).render(called(given)) == expected


def test_other_spellings_of_calls_are_the_same_calls():
    expected = chats.chat(OBJECTS).render(called(ARGUMENTS))
    (user, answer), template = called(json.dumps(ARGUMENTS)), chats.chat(OBJECTS)
    legacy = {"role": "assistant", "content": None, "function_call": answer["tool_calls"][0]["function"]}
    bare = {"role": "assistant", "content": None, "tool_calls": [answer["tool_calls"][0]["function"]]}
    table = {"role": "assistant", "content": "", "tool_calls": json.dumps(answer["tool_calls"])}
    assert [template.render([user, one]) for one in (legacy, bare, table)] == [expected] * 3
    knows = chats.chat(HEAD + "{{- m.content or '' }}{{- m.function_call.arguments | tojson }}" + TAIL)
    assert '"deep": {"b": "}"}' in knows.render([legacy])


def test_empty_calls_are_read_as_vllm_reads_them():
    for empty in ("", None, {}, " "):
        assert with_calls(called(empty)[1])["tool_calls"][0]["function"]["arguments"] == {}
    assert "tool_calls" not in with_calls({"role": "assistant", "content": "a", "tool_calls": []})


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (called('{"a": 1')[1], r"tool_calls\[0\]\.function\.arguments is '\{\"a\": 1', which is no JSON \(Expecting"),
        (called('"{}"')[1], r"arguments is '\{\}'; needed is an object, or JSON of one"),
        (called([1])[1], r"arguments is \[1\]; needed is an object"),
        ({"role": "assistant", "content": None, "tool_calls": ["add"]}, r"tool_calls\[0\] is 'add'; needed is an obj"),
        ({"role": "assistant", "content": None, "tool_calls": "add"}, "tool_calls is 'add', which is no JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}, "needed is an object with name and"),
        (called({}, function_call={"name": "f"})[1], "both function_call and tool_calls"),
        ({"role": "user", "content": [*parts("a"), {"type": "image_url", "image_url": {}}]},
         "part 1 of the content of message 0 of messages is of the type 'image_url': only texts are read"),
        ({"role": "user", "content": [{"type": "input_audio", "text": None}]}, "of the type 'input_audio'"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "part 0 of .* has the text None"),
        ({"role": "user", "content": [3]}, "part 0 of the content of message 0 of messages is 3; needed is"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said_by_its_place(message, told):
    with pytest.raises(ValueError, match=told) as raised:
        example_of({"messages": [message]})
    assert "message 0 of messages" in str(raised.value)


def test_texts_of_parts_are_joined_by_line_breaks():
    assert text_of([*parts("a"), "b", {"type": "input_text", "text": "c"}]) == "a\nb\nc"
    assert (text_of(None), text_of("a"), text_of([])) == ("", "a", "")
