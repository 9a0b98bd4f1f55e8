"""Requests of OpenAI's API as prompts and settings, bodies by their size, tokens as texts: without a server."""

import json

import chats
import pytest

from openpi_train.data.text.examples import example_of
from openpi_train.data.text.text_encoder import TextEncoder
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.generation.text_generator import TextGenerator
from openpi_train.serve.openai.api_error import ApiError
from openpi_train.serve.openai.json_body import read_object
from openpi_train.serve.openai.request_fields import RequestFields, repr_of
from openpi_train.serve.openai.text_main import model_name
from openpi_train.serve.openai.text_request import chat_request, completion_request
from openpi_train.serve.openai.token_texts import TokenTexts

COMPLETION = {"model": "m", "prompt": "go on"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "go on"}]}


def test_fields_become_the_settings_of_the_same_meaning():
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": ["a", "b"]}
    found = completion_request({**COMPLETION, **given, "max_tokens": 9, "n": 2, "logprobs": 0, "stream": True})
    assert found.settings == SamplingSettings(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, stop=("a", "b"))
    assert (found.max_tokens, found.num_choices, found.num_top, found.stream) == (9, 2, 0, True)
    assert (found.model, found.prompts, found.include_usage) == ("m", ["go on"], False)


def test_what_is_not_given_or_null_has_the_default_of_the_api():
    nulls = dict.fromkeys(("temperature", "top_p", "stop", "n", "stream", "logprobs", "max_tokens", "seed", "user"))
    for extra in ({}, nulls):
        text, chat = completion_request(COMPLETION | extra), chat_request(CHAT | extra)
        assert (text.max_tokens, chat.max_tokens) == (16, None)
        for found in (text, chat):
            settings = found.settings
            assert (settings.temperature, settings.top_p, settings.top_k, settings.min_p) == (1.0, 1.0, 0, 0.0)
            assert (found.num_choices, found.stream, found.num_top, settings.stop) == (1, False, None, ())


def test_seeds_of_64_bits_are_taken_modulo_those_of_the_generator():
    seeds = (0, 1, -1, 2**32 + 5, -(2**63), 2**63 - 1)
    found = [completion_request({**COMPLETION, "seed": seed}).settings.seed for seed in seeds]
    assert found == [0, 1, 2**32 - 1, 5, 0, 2**32 - 1]
    assert len({completion_request(COMPLETION).settings.seed for _ in range(5)}) == 5


def test_log_probs_of_a_chat_need_both_words():
    def num_top(**given):
        return chat_request({**CHAT, **given}).num_top

    assert num_top() is None and num_top(logprobs=False) is None and num_top(logprobs=True) == 0
    assert num_top(logprobs=True, top_logprobs=20) == 20


def test_both_names_of_the_limit_of_a_chat_are_read():
    for given in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}):
        assert chat_request({**CHAT, **given}).max_tokens == 5


def test_messages_are_those_that_a_template_gets():
    message = {"role": "assistant", "content": "x", "name": "n", "reasoning_content": "r", "refusal": None}
    found = chat_request({**CHAT, "messages": [message, *CHAT["messages"]]})
    assert found.prompts == [
        [{"role": "assistant", "content": "x", "name": "n", "reasoning_content": "r"}, *CHAT["messages"]]
    ]
    variables = {"enable_thinking": False, "date_string": "today", "level": 3}
    assert chat_request({**CHAT, "chat_template_kwargs": variables}).template_variables == variables


@pytest.mark.parametrize("value", [1.1, 2, "1"])
def test_what_would_change_the_answer_is_refused_with_what_it_may_be(value):
    with pytest.raises(ApiError, match=r"repetition_penalty .* is not supported; it may be 1$"):
        completion_request({**COMPLETION, "repetition_penalty": value})


def test_parts_of_a_message_are_those_of_training_data():
    parts = [{"type": "text", "text": "go"}, {"type": "text", "text": "on"}]
    for template in (chats.CHATML, chats.TURNS):
        found = chat_request({**CHAT, "messages": [{"role": "user", "content": parts}]})
        of = TextEncoder(tokenizer=chats.tiny(), templates={"default": chats.chat(template)})
        (trained,) = of.encode(example_of({"prompt": [{"role": "user", "content": parts}]}))
        texts = TextGenerator(None, of.tokenizer, of.templates)  # it renders without a generator
        assert texts.prompt_of(found.prompts[0]) == trained.tokens.tolist()


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "_generation_start", "A", "", "a b"])
def test_variables_of_a_template_are_not_those_of_the_server(name):
    with pytest.raises(ApiError, match="chat_template_kwargs"):
        chat_request({**CHAT, "chat_template_kwargs": {name: 1}})


@pytest.mark.parametrize(("value", "is_taken"), [(0, True), (2, True), (1.5, True), (-0.1, False), (2.1, False)])
def test_ranges_hold_their_ends(value, is_taken):
    if is_taken:
        assert completion_request({**COMPLETION, "temperature": value}).settings.temperature == value
    else:
        with pytest.raises(ApiError, match=r"temperature .* must be a number from 0 to 2"):
            completion_request({**COMPLETION, "temperature": value})


@pytest.mark.parametrize("value", [True, "1", [1], {}, 10**400, float("nan"), float("inf"), 1.0])
def test_integers_are_integers(value):
    with pytest.raises(ApiError, match=r"n .* must be an integer from 1 to 128"):
        completion_request({**COMPLETION, "n": value})


def test_errors_show_values_shortly_and_in_ascii():
    assert repr_of("ä\ud800\n") == '"\\xe4\\ud800\\n"'
    assert len(repr_of("x" * 10_000)) < 70 and len(repr_of(10**4_000)) < 40
    assert repr_of([1, 2]) == "[1, 2]" and repr_of({"a": ["ä"]}) == '{"a": ["\\u00e4"]}'
    for large in ([{}] * 10_000, {"a" * 10_000: 1}, ["a" * 10_000]):
        assert repr_of(large).endswith("...") and len(repr_of(large)) < 70
    assert [repr_of(value) for value in (None, True, 1.5)] == ["null", "true", "1.5"]


def test_a_field_that_nobody_read_is_refused_by_its_place():
    fields = RequestFields({"a": 1, "b": None, "c": 2}, "options")
    assert fields.integer("a", 0, 5) == 1
    with pytest.raises(ApiError, match=r"options\.c is not supported") as told:
        fields.refuse_others()
    assert (told.value.status, told.value.param, told.value.code) == (400, "options.c", "unknown_parameter")


@pytest.mark.parametrize(
    "text", ['{"a": "\\\\"}', '{"a\\\\\\"b": "[[["}', '{"\\u00e4": "{\\"}"}', "{}", ' {"a": [1, {"b": 2}]} ']
)
def test_objects_are_what_json_says(text):
    assert read_object(text.encode()) == json.loads(text)


def counted(count, left="[", right="]"):
    """An object with so many more lists, or levels."""
    return f'{{"a": {left * count}{right * count}}}'.encode()


def test_sizes_are_told_before_anything_is_built():
    read_object(counted(31))
    with pytest.raises(ApiError, match="nested more than 32 deep"):
        read_object(counted(32))
    many = b'{"a": [' + b"[]," * 19_997 + b"[]]}"
    assert len(read_object(many)["a"]) == 19_998
    for more, says in (
        (many.replace(b"[[]", b"[[],[]"), "20,000 objects and lists"),
        (b'{"a": [' + b'"",' * 200_001 + b'""]}', "200,000 texts and keys"),
        (b'{"a": [' + b"1," * 1_000_001 + b"1]}", "1,000,000 values"),
        (b"{" + b"a:" * 100_001 + b"}", "100,000 keys"),
    ):
        with pytest.raises(ApiError, match=says):
            read_object(more)
    # Signs within texts are none of these.
    assert read_object(json.dumps({"a": "[{" * 50_000 + ",:" * 1_000_001}).encode())


@pytest.mark.parametrize("make", [chats.byte_level, chats.word_pieces])
def test_bytes_of_tokens_are_together_those_of_the_text(make):
    tokenizer = chats.tiny(tokenizer=make())
    tokens = TokenTexts(tokenizer)
    for text in ("It is four.", "Ünïcödé, 日本語 and 😀!", "a  b\n\nc"):
        ids = tokenizer.encode([text])[0].tokens
        joined = b"".join(tokens.bytes_of(token) for token in ids).decode()
        assert joined.removeprefix(" ") == text  # pieces with a sign for spaces begin with one
    special = tokenizer.encode(["<|im_end|>"])[0].tokens
    assert [tokens.text_of(token) for token in special] == ["<|im_end|>"]


def test_a_part_of_a_character_is_written_as_its_bytes():
    tokenizer = chats.tiny()
    tokens = TokenTexts(tokenizer)
    texts = [tokens.text_of(token) for token in tokenizer.encode(["🤖"])[0].tokens]
    assert len(texts) > 1 and all(text.startswith("bytes:\\x") for text in texts)
    assert "".join(text.removeprefix("bytes:") for text in texts) == "\\xf0\\x9f\\xa4\\x96"


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("checkpoints/sft_gsm8k/try3", "try3"),
        ("checkpoints/sft_gsm8k/try3/", "try3"),
        ("checkpoints/sft_gsm8k/try3/1000", "try3"),
        ("checkpoints/sft_gsm8k/try3/best", "try3"),
        ("checkpoints/sft_gsm8k/try3/latest", "try3"),
        ("./models/SmolLM2-135M", "SmolLM2-135M"),
        ("hub:Qwen/Qwen2.5-0.5B@main", "Qwen/Qwen2.5-0.5B"),
        ("gs://bucket/runs/x/500", "x"),
        ("..", "model"),
    ],
)
def test_a_model_has_the_name_of_its_run(checkpoint, name):
    assert model_name(checkpoint) == name
