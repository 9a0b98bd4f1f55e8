"""OpenAI's API as its own client sees it: answers, streams, log-probabilities, errors; the generator is a rule."""

import contextlib
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest
from text_stub import CHUNK, NAME, TOKENIZER, log_prob, rule_texts, serving

from openpi_train.serve.openai.token_texts import TokenTexts

USER = {"role": "user", "content": "say It is four."}


@pytest.fixture(scope="module")
def server():
    with serving() as found:
        yield found


@contextlib.contextmanager
def client_of(server, key="any", **options):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, **{"max_retries": 0, "timeout": 20.0, **options}
    ) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as found:
        yield found


def complete(client, prompt, **given):
    return client.completions.create(model=NAME, prompt=prompt, **given)


def chat(client, *messages, **given):
    return client.chat.completions.create(model=NAME, messages=list(messages), **given)


def get(server, path):
    with urllib.request.urlopen(f"{server.url}{path}", timeout=10) as response:
        return response.read().decode()


def wait_for(condition, seconds=15):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_model_is_listed_and_found_by_its_name(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "openpi_train")
    assert client.models.retrieve(NAME).max_model_len == 256
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not served here") as told:
        client.models.retrieve("other")
    assert told.value.code == "model_not_found"


def test_a_completion_has_text_reason_and_usage(client):
    found = complete(client, "say Grüße, 世界! 🤖", max_tokens=100)
    assert found.object == "text_completion" and found.model == NAME and found.id.startswith("cmpl-")
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == ("Grüße, 世界! 🤖", "stop", 0, None)
    prompt = len(TOKENIZER.begin) + len(TOKENIZER.encode(["say Grüße, 世界! 🤖"])[0].tokens)
    made = len(TOKENIZER.encode(["Grüße, 世界! 🤖"])[0].tokens) + 1  # and the one that ended it, as vLLM counts
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, made, prompt + made)


def test_a_completion_has_sixteen_tokens_where_none_are_asked_for_and_a_chat_all_that_fit(client):
    short, long = complete(client, "go on"), chat(client, {"role": "user", "content": "go on"})
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (16, "length")
    assert (long.usage.total_tokens, long.choices[0].finish_reason) == (256, "length")


def test_a_conversation_is_answered_by_the_models_template(client):
    found = chat(client, {"role": "system", "content": "Be short."}, USER)
    assert found.object == "chat.completion" and found.id.startswith("chatcmpl-")
    message = found.choices[0].message
    assert (message.role, message.content, message.refusal) == ("assistant", "It is four.", None)
    prompt = (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nsay It is four.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert found.usage.prompt_tokens == len(TOKENIZER.encode([prompt])[0].tokens)


def test_a_message_may_have_parts_and_an_answer_can_be_sent_back(client):
    parts = {"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "text", "text": "say yes"}]}
    first = chat(client, parts)
    assert first.choices[0].message.content == "yes"
    answer = first.choices[0].message.model_dump()
    assert chat(client, parts, answer, USER).choices[0].message.content == "It is four."


def test_all_forms_of_prompts_are_completed_in_their_order(client):
    tokens = TOKENIZER.encode(["say two"])[0].tokens
    assert [choice.text for choice in complete(client, ["say one", "say two"]).choices] == ["one", "two"]
    assert complete(client, tokens).choices[0].text == "two"
    assert [choice.text for choice in complete(client, [tokens, tokens]).choices] == ["two", "two"]


def test_a_stream_is_the_same_text_in_parts(client):
    whole = complete(client, "go on", max_tokens=50, seed=3).choices[0].text
    parts = list(complete(client, "go on", max_tokens=50, seed=3, stream=True))
    assert len(parts) >= 50 // CHUNK and {part.object for part in parts} == {"text_completion"}
    assert "".join(part.choices[0].text for part in parts) == whole
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert len({part.id for part in parts}) == 1 and all(part.usage is None for part in parts)


def test_a_chat_streams_its_role_its_text_and_in_the_end_its_usage(client):
    parts = list(chat(client, USER, stream=True, stream_options={"include_usage": True}))
    *said, usage = parts
    assert {part.object for part in parts} == {"chat.completion.chunk"}
    assert (said[0].choices[0].delta.role, said[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(part.choices[0].delta.content or "" for part in said) == "It is four."
    assert said[-1].choices[0].finish_reason == "stop" and all(part.usage is None for part in said)
    assert usage.choices == [] and usage.usage == chat(client, USER).usage


def test_characters_of_several_tokens_are_never_cut_in_a_stream(client):
    text = "🤖世界" * 5
    parts = [part.choices[0].text for part in complete(client, f"say {text}", max_tokens=99, stream=True)]
    assert "".join(parts) == text and not any("\ufffd" in part for part in parts)


def test_choices_differ_and_come_mixed_in_a_stream(client):
    whole = complete(client, "go on", n=3, seed=7, max_tokens=20)
    texts = [choice.text for choice in whole.choices]
    assert len(set(texts)) == 3 and [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.completion_tokens == 60
    streamed = ["", "", ""]
    for part in complete(client, "go on", n=3, seed=7, max_tokens=20, stream=True):
        streamed[part.choices[0].index] += part.choices[0].text
    assert streamed == texts
    assert complete(client, "go on", n=2, best_of=2, seed=7, max_tokens=20).choices[1].text == texts[1]


def test_a_seed_repeats_an_answer_and_without_one_answers_differ(client):
    def text(**given):
        return complete(client, "go on", **given).choices[0].text

    assert text(seed=5) == text(seed=5) != text(seed=6)
    assert text(seed=-1) == text(seed=-1) == text(seed=2**32 - 1)
    assert text() != text()
    assert text(temperature=0) == text(temperature=0)


def test_equal_prompts_of_a_request_have_their_own_completions(client):
    choices = complete(client, ["go on", "and on", "go on"], n=2, seed=1).choices
    texts = [choice.text for choice in choices]
    assert len(set(texts)) == 6 and [choice.index for choice in choices] == list(range(6))
    # The first prompt's are those that it has alone, and a seed repeats all of them.
    assert [choice.text for choice in complete(client, "go on", n=2, seed=1).choices] == texts[:2]
    assert [choice.text for choice in complete(client, ["go on", "and on", "go on"], n=2, seed=1).choices] == texts


def test_an_answer_ends_before_a_stop(client):
    for stop in (" four", ["five", " four"]):
        (choice,) = complete(client, "say It is four.", stop=stop).choices
        assert (choice.text, choice.finish_reason) == ("It is", "stop")
        parts = [part.choices[0].text for part in complete(client, "say It is four.", stop=stop, stream=True)]
        assert "".join(parts) == "It is"


def test_log_probs_of_a_chat_are_those_of_its_tokens(client):
    text = "So ü 🤖"
    tokens = TOKENIZER.encode([text])[0].tokens
    found = chat(client, {"role": "user", "content": f"say {text}"}, logprobs=True, top_logprobs=2)
    content = found.choices[0].logprobs.content
    assert [one.logprob for one in content] == pytest.approx([log_prob(token) for token in tokens])
    assert b"".join(bytes(one.bytes) for one in content) == text.encode()
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].token == one.token for one in content)
    assert content[0].token.startswith("S") and content[-1].token.startswith("bytes:\\x")
    without = chat(client, {"role": "user", "content": f"say {text}"}, logprobs=True).choices[0].logprobs.content
    assert [one.top_logprobs for one in without] == [[]] * len(tokens)
    parts = list(chat(client, {"role": "user", "content": f"say {text}"}, logprobs=True, top_logprobs=2, stream=True))
    streamed = [one for part in parts if part.choices[0].logprobs for one in part.choices[0].logprobs.content]
    assert streamed == content


def test_log_probs_of_a_completion_say_where_each_token_begins(client):
    text = "So ü 🤖 is"
    tokens = TOKENIZER.encode([text])[0].tokens
    found = complete(client, f"say {text}", logprobs=2, max_tokens=50).choices[0].logprobs
    assert found.token_logprobs == pytest.approx([log_prob(token) for token in tokens])
    assert all(found.tokens[place] in top and len(top) == 2 for place, top in enumerate(found.top_logprobs))
    for place, token in enumerate(found.tokens):
        if not token.startswith("bytes:"):
            assert text[found.text_offset[place] :].startswith(token)
    spelled = TokenTexts(TOKENIZER)
    before = [b"".join(spelled.bytes_of(token) for token in tokens[:place]) for place in range(len(tokens))]
    assert found.text_offset == [len(part.decode(errors="ignore")) for part in before]
    assert len(set(found.text_offset)) < len(tokens), "a character of several tokens"
    offsets = []
    for part in complete(client, f"say {text}", logprobs=0, max_tokens=50, stream=True):
        offsets += part.choices[0].logprobs.text_offset
        assert part.choices[0].logprobs.top_logprobs is None
    assert offsets == found.text_offset


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"echo": True}, "echo true is not supported"),
        ({"suffix": "end"}, 'suffix "end" is not supported'),
        ({"best_of": 3}, "best_of 3 is not supported unless it is n; it may be 1"),
        ({"logit_bias": {"5": 1}}, 'logit_bias {"5": 1} is not supported; it may be {}'),
        ({"presence_penalty": 0.5}, "presence_penalty 0.5 is not supported; it may be 0"),
        ({"n": 0}, "n 0 is not valid: it must be an integer from 1 to 128"),
        ({"n": 65}, "asks for 65 completions; the most are 64"),
        ({"temperature": 2.5}, "temperature 2.5 is not valid: it must be a number from 0 to 2"),
        ({"top_p": 0}, "top_p 0 is not valid: it must be a number above 0 and at most 1"),
        ({"max_tokens": 0}, "max_tokens 0 is not valid"),
        ({"logprobs": 21}, "logprobs 21 is not valid"),
        ({"stop": ""}, "stop has a text of 0 characters"),
        ({"stream_options": {"include_usage": True}}, "stream_options must be an object, and needs stream: true"),
        ({"extra_body": {"guided_json": {}}}, "guided_json is not supported by this server; leave it out"),
        ({"extra_body": {"top_k": 1.5}}, "top_k 1.5 is not valid"),
    ],
)
def test_what_the_server_does_not_do_is_refused_with_the_field(client, given, says):
    with pytest.raises(openai.BadRequestError) as told:
        complete(client, "go on", **given)
    assert says in told.value.message and told.value.type == "invalid_request_error"
    assert told.value.param == next(iter(given.get("extra_body", given)))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "is not supported: this server makes no tool calls",
        ),
        (
            {"response_format": {"type": "json_object"}},
            'response_format {"type": "json_object"} is not supported; it may be {"type": "text"}',
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
            '"json_schema": {"name": "x", "schema... is not supported; it may be {"type": "text"}',
        ),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs: true"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens and max_completion_tokens differ"),
        ({"reasoning_effort": "low"}, "reasoning_effort is not supported"),
        ({"extra_body": {"chat_template_kwargs": {"messages": "x"}}}, "chat_template_kwargs"),
    ],
)
def test_chats_refuse_what_is_only_theirs(client, given, says):
    with pytest.raises(openai.BadRequestError) as told:
        chat(client, USER, **given)
    assert says in told.value.message


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "judge", "content": "x"}, 'messages[0].role "judge" is not valid'),
        ({"role": "user"}, "messages[0].content null is not valid"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            'messages[0].tool_calls [{"id": "1"}] is not supported: this server makes no tool calls',
        ),
        ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, "no tool calls"),
        ({"role": "user", "content": "x", "weight": 1}, "messages[0].weight is not supported"),
    ],
)
def test_messages_of_other_kinds_are_refused_by_their_place(client, message, says):
    with pytest.raises(openai.BadRequestError) as told:
        chat(client, message)
    assert says in told.value.message


def test_what_changes_no_answer_is_accepted(client):
    extra = {"safety_identifier": "x", "prompt_cache_key": "y", "service_tier": "auto", "unknown": None}
    given = {"user": "me", "metadata": {"a": "b"}, "store": False, "tools": [], "tool_choice": "none"}
    given |= {"response_format": {"type": "text"}, "presence_penalty": 0, "logit_bias": {}, "n": 1}
    assert chat(client, USER, **given, extra_body=extra).choices[0].message.content == "It is four."
    of_vllm = {"repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False, "skip_special_tokens": True}
    assert chat(client, USER, extra_body=of_vllm | {"add_generation_prompt": True}).choices[0].finish_reason == "stop"
    more = {"top_k": -1, "min_p": 0.1, "chat_template_kwargs": {"enable_thinking": False, "given": "x"}}
    assert chat(client, USER, extra_body=more, max_completion_tokens=99).choices[0].finish_reason == "stop"


def test_what_is_longer_than_the_context_is_told_by_its_code(client):
    for given in (
        {"prompt": "go on", "max_tokens": 300},
        {"prompt": "on and " * 300},
        {"prompt": "long " * 100_000},
        {"prompt": [5] * 256},
    ):
        with pytest.raises(openai.BadRequestError, match="context has 256 tokens") as told:
            complete(client, **given)
        assert told.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="context has 256 tokens"):
        chat(client, {"role": "user", "content": "on and " * 300})


def test_more_log_probs_than_fit_into_memory_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="200,000"):
        complete(client, "go on", n=60, max_tokens=200, logprobs=20)


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="'other' is not served here") as told:
        client.completions.create(model="other", prompt="x")
    assert told.value.code == "model_not_found"


def test_only_who_has_the_key_is_answered():
    with serving(api_key="s3cret") as server:
        for wrong in ("s3cre", "s3cret2", "S3CRET"):
            with client_of(server, wrong) as client, pytest.raises(openai.AuthenticationError) as told:
                complete(client, "say x")
            assert told.value.code == "invalid_api_key"
        with client_of(server, "s3cret") as client:
            assert complete(client, "say x").choices[0].text == "x"
        assert get(server, "/healthz") == "OK\n"
        assert 'requests_total{outcome="unauthorized"} 3.0' in get(server, "/metrics")


def test_no_page_of_a_browser_is_answered(server):
    for path in ("/v1/models", "/healthz"):
        asked = urllib.request.Request(f"{server.url}{path}", headers={"Origin": "http://evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(asked, timeout=10)


def test_health_and_metrics_tell_of_requests_and_tokens():
    texts = rule_texts()
    with serving(texts) as server, client_of(server) as client:
        complete(client, "say yes", n=2)
        list(chat(client, USER, stream=True))
        with pytest.raises(openai.BadRequestError):
            complete(client, "x", n=0)
        text = get(server, "/metrics")
    assert 'openpi_train_requests_total{outcome="answered"} 2.0' in text
    assert 'openpi_train_requests_total{outcome="refused"} 1.0' in text
    made = 2 * len(TOKENIZER.encode(["yes"])[0].tokens) + len(TOKENIZER.encode(["It is four."])[0].tokens)
    made += 3  # those that ended the three completions
    assert f'openpi_train_tokens_total{{of="completion"}} {made}.0' in text
    assert "openpi_train_first_text_seconds_count 2.0" in text and "openpi_train_running_completions 0.0" in text


def together(*calls):
    """Run the calls in threads; their results or errors, in order."""
    found = [None] * len(calls)

    def run(number, call):
        try:
            found[number] = call()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=one) for one in enumerate(calls)]
    for thread in threads:
        thread.start()
    return threads, found


def finish(threads):
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_requests_share_the_rows_and_each_gets_its_own():
    texts = rule_texts(num_rows=4)
    with serving(texts) as server, client_of(server) as client:
        texts.generator.gate.clear()
        words = [f"word{number}" for number in range(12)]
        threads, found = together(
            *(lambda word=word: complete(client, f"say {word}").choices[0].text for word in words)
        )
        wait_for(lambda: "openpi_train_queue_requests 8.0" in get(server, "/metrics"))
        texts.generator.gate.set()
        finish(threads)
    assert found == words and texts.generator.most_running == 4


def test_a_full_queue_is_told_with_when_to_come_again():
    texts = rule_texts(num_rows=1)
    with serving(texts, limits={"max_queue": 2}) as server, client_of(server) as client:
        texts.generator.gate.clear()
        threads, found = together(*[lambda: complete(client, "say x").choices[0].text] * 3)
        wait_for(lambda: "openpi_train_queue_requests 2.0" in get(server, "/metrics"))
        with pytest.raises(openai.RateLimitError, match="busy: 2 completions are waiting") as told:
            complete(client, "say y")
        assert told.value.response.headers["retry-after"] == "1" and told.value.code == "rate_limit_exceeded"
        with client_of(server, max_retries=5) as patient:  # the client waits as it is told
            later, answer = together(lambda: complete(patient, "say y").choices[0].text)
            time.sleep(0.2)
            texts.generator.gate.set()
            finish([*threads, *later])
    assert found == ["x"] * 3 and answer == ["y"]


def test_a_client_that_leaves_frees_its_rows():
    texts = rule_texts(num_rows=2, max_length=100_000, seconds=0.01)
    with serving(texts) as server, client_of(server) as client:
        stream = complete(client, "go on", max_tokens=50_000, n=2, stream=True)
        next(iter(stream))
        assert texts.generator.num_running == 2
        stream.close()
        wait_for(lambda: texts.generator.num_running == 0)
        with pytest.raises(openai.APITimeoutError):
            complete(client, "go on", max_tokens=50_000, timeout=0.3)
        wait_for(lambda: texts.generator.num_running == 0)
        assert complete(client, "say x").choices[0].text == "x"
        wait_for(lambda: "openpi_train_clients 0.0" in get(server, "/metrics"))


def test_a_request_takes_no_longer_than_it_may():
    texts = rule_texts(num_rows=1, max_length=100_000, seconds=0.01)
    with serving(texts, limits={"request_s": 0.4}) as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match=r"took more than 0.4 s") as told:
            complete(client, "go on", max_tokens=50_000)
        assert told.value.status_code == 503 and told.value.code == "timeout"
        with pytest.raises(openai.APIError, match=r"took more than 0.4 s"):
            list(complete(client, "go on", max_tokens=50_000, stream=True))
        wait_for(lambda: texts.generator.num_running == 0)
        assert complete(client, "say x").choices[0].text == "x"


def test_a_stop_finishes_what_runs_and_takes_nothing_new():
    texts = rule_texts()
    with serving(texts) as server, client_of(server) as client:
        texts.generator.gate.clear()
        threads, found = together(lambda: chat(client, USER).choices[0].message.content)
        wait_for(lambda: "openpi_train_running_completions 1.0" in get(server, "/metrics"))
        server.stop()
        time.sleep(0.1)
        with client_of(server) as late, pytest.raises(openai.APIConnectionError):
            complete(late, "say x")
        texts.generator.gate.set()
        finish(threads)
        server.thread.join(10)
    assert found == ["It is four."] and server.finished is True


def test_a_stop_does_not_wait_for_ever_and_says_so_to_those_who_wait():
    texts = rule_texts(max_length=100_000, seconds=0.01)
    with serving(texts, limits={"drain_s": 0.3}) as server, client_of(server) as client:
        threads, found = together(
            lambda: complete(client, "go on", max_tokens=50_000),
            lambda: list(complete(client, "go on", max_tokens=50_000, stream=True)),
        )
        wait_for(lambda: texts.generator.num_running == 2)
        server.stop()
        finish(threads)
        server.thread.join(10)
    assert server.finished is False
    assert [type(one) for one in found] == [openai.InternalServerError, openai.APIError]
    assert all("the server is stopping" in one.message for one in found)


def test_a_generator_that_fails_ends_the_server_and_tells_no_secrets():
    texts = rule_texts()
    with serving(texts) as server, client_of(server) as client:
        texts.generator.broken = True
        with pytest.raises(openai.InternalServerError) as told:
            complete(client, "say x")
        assert told.value.status_code == 500 and "secret" not in told.value.message
        server.thread.join(10)
    assert server.finished is False


def test_an_error_of_ours_fails_that_request_alone(monkeypatch):
    texts = rule_texts()
    with serving(texts) as server, client_of(server) as client:
        with monkeypatch.context() as patch:
            patch.setattr(texts, "prompt_of", lambda *_, **__: 1 / 0)
            with pytest.raises(openai.InternalServerError, match="internal error") as told:
                complete(client, "say x")
        assert "division" not in str(told.value.body)
        assert complete(client, "say x").choices[0].text == "x"


def test_a_model_without_a_chat_template_completes_texts_alone():
    texts = rule_texts()
    texts.templates.clear()
    with serving(texts) as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            chat(client, USER)
        assert complete(client, "say x").choices[0].text == "x"
