"""`serve` of a tiny real language model: its flags, and the API's answers beside those of the model itself."""

import dataclasses
import functools

import openai
import pytest
from command_line import serve
from text_models import write_model

from benchmarks import hostile_http
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.interop.stored_leaves import Stored
from openpi_train.policy import text_model
from openpi_train.policy.text_model import gives_texts, load_text_model
from openpi_train.registry import UnknownName, load
from openpi_train.runtime.exits import UsageError
from openpi_train.serve.openai import text_main

SETTINGS = SamplingSettings(max_new_tokens=12, seed=3)
FLAGS = ("--port=0", "--max-length=64", "--max-batch=8")
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is two plus two?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@functools.cache
def loaded(where, **given):
    """The model, compiled once for all tests: a server's is the same one."""
    return load_text_model(where, **given)


@pytest.fixture
def load_once(monkeypatch):
    asked = []

    def load(where, **given):
        asked.append(given)
        return loaded(where, num_rows=given["num_rows"], max_length=given["max_length"])

    monkeypatch.setattr(text_main, "load_text_model", load)
    return asked


def client_of(server, **given):
    url = f"{server.scheme}://127.0.0.1:{server.port}/v1"
    return openai.OpenAI(base_url=url, max_retries=0, timeout=60.0, **{"api_key": "any", **given})


@pytest.mark.slow
def test_answers_are_those_of_the_model(folder, load_once):
    def talk(server):
        said = next(line for line in server.log if "ready after" in line)
        assert "tiny (" in said and "context of 64 tokens" in said
        with client_of(server) as client:
            chosen = client.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=12, seed=3, n=2, logprobs=True, top_logprobs=3
            )
            stream = client.completions.create(model="tiny", prompt="What is", max_tokens=12, seed=3, stream=True)
            text = "".join(part.choices[0].text for part in stream)
            greedy = client.completions.create(model="tiny", prompt="What is", max_tokens=12, temperature=0)
            hostile_http.attack(server.port, "tiny", 60)
            again = client.completions.create(model="tiny", prompt="What is", max_tokens=12, seed=3)
        return chosen, text, greedy.choices[0].text, again.choices[0].text

    ended = serve(folder, *FLAGS, talk=talk)
    chosen, text, greedy, again = ended.talked
    assert ended.code == 0

    model = loaded(str(folder), num_rows=8, max_length=64)
    prompt, plain = model.prompt_of(MESSAGES), model.prompt_of("What is")
    expected = model.complete([prompt, prompt], SETTINGS)
    assert [choice.message.content for choice in chosen.choices] == [one.text for one in expected]
    for choice, one in zip(chosen.choices, expected, strict=True):
        assert choice.finish_reason == one.tokens.finish_reason
        assert [token.logprob for token in choice.logprobs.content] == pytest.approx(one.tokens.log_probs, abs=1e-6)
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob >= token.logprob
    assert text == again == model.complete([plain], SETTINGS)[0].text
    assert greedy == model.complete([plain], dataclasses.replace(SETTINGS, temperature=0.0))[0].text


@pytest.mark.slow
def test_no_request_waits_for_a_program(folder, load_once):
    def talk(server):
        programs = set(loaded(str(folder), num_rows=8, max_length=64).generator._programs)
        with client_of(server) as client:
            for prompt in ("a", "go on and on and on " * 2, ["What"] * 8):
                client.completions.create(model="tiny", prompt=prompt, max_tokens=3, logprobs=2)
                client.completions.create(model="tiny", prompt=prompt, max_tokens=3)
        return set(loaded(str(folder), num_rows=8, max_length=64).generator._programs) - programs

    assert serve(folder, *FLAGS, talk=talk).talked == set()


@pytest.mark.slow
def test_flags_reach_the_model_and_the_server(folder, load_once):
    flags = ("--model-name=mine", "--dtype=float32", "--no-average", "--no-merge-lora", "--tokenizer=t")
    flags += ("--experiment=e", "--chat-template=c")

    def talk(server):
        with client_of(server) as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client_of(server, api_key="s3cret") as client:
            return [one.id for one in client.models.list().data]

    assert serve(folder, *FLAGS, *flags[:-2], talk=talk, key="s3cret").talked == ["mine"]
    given = {"num_rows": 8, "max_length": 64, "dtype": "float32", "average": False, "merge_lora": False}
    assert load_once == [{**given, "tokenizer": "t", "experiment": None, "chat_template": None}]


def test_flags_of_the_other_kind_are_refused(folder, capsys):
    assert serve(folder, *FLAGS, "--prompt=go", "--seed=3").code == 2
    assert "is a language model, so it has no --prompt, --seed" in capsys.readouterr().err
    assert serve("run", "--port=0", "--max-length=64").code == 2
    assert "run is no language model, so it has no --max-length" in capsys.readouterr().err


def test_what_gives_texts_is_known_before_it_is_loaded(folder, tmp_path, monkeypatch):
    assert gives_texts(folder)
    assert not gives_texts(tmp_path / "nothing") and not gives_texts(tmp_path)
    with pytest.raises(UnknownName, match="no such experiment"):
        gives_texts(folder, "no such experiment")
    # A reward model's run gives none, and is no robot's policy: what loads texts says so.
    reward = load("arithmetic_reward")
    (tmp_path / "a").touch()
    monkeypatch.setattr(
        text_model, "open_run", lambda where, experiment: (Stored(where="x", format="ours", params={}), reward)
    )
    assert gives_texts(tmp_path)
    with pytest.raises(UsageError, match=r"x is a RewardConfig \(arithmetic_reward\), which gives no texts"):
        load_text_model(tmp_path)
