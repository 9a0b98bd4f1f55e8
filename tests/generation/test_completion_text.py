"""Texts of completions while their tokens come, whatever steps they come in."""

import chats
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from openpi_train.data.tokenizers.text_tokenizer import TextTokenizer
from openpi_train.generation.completion_text import CompletionText, whole
from openpi_train.generation.generator import NewTokens, joined
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.generation.text_generator import TextGenerator

TEXT = "Grüße, 世界! 🤖 and so on; the end\n\nmore"


def of_bytes():
    """A token per byte, as parts of words are in byte-level tokenizers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer({"tokenizer.json": tokenizer.to_str().encode()}, "bytes")


def of_words():
    """A token per word, whose decoder leaves out the space of a text's first word, as sentencepiece's does."""
    words = {f"▁{word}": number for number, word in enumerate(("the", "end", "of", "it", "all"))}
    tokenizer = Tokenizer(models.WordLevel(words, "▁the"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return TextTokenizer({"tokenizer.json": tokenizer.to_str().encode()}, "words")


def told(tokenizer, prompt, tokens, sizes, stops=(), reason="length"):
    """What is told of these tokens in steps of these sizes."""
    text, start, found = CompletionText(tokenizer, prompt, stops), 0, []
    for size in sizes:
        part = tokens[start : start + size]
        start += size
        finish = reason if start >= len(tokens) else None
        probs = [-float(token) for token in part]
        found.append(
            text.add(NewTokens(id=0, tokens=part, log_probs=probs, top=[[] for _ in part], finish_reason=finish))
        )
        if found[-1].tokens.finish_reason:
            break
    return found


def sizes_of(total, seed):
    random = np.random.default_rng(seed)
    return [*random.integers(0, 6, total), total]


@pytest.mark.parametrize("sizes", [[99], [3] * 33, [1] * 99])
def test_tokens_that_were_made_are_counted_up_to_what_ends_the_completion(sizes):
    tokenizer = of_bytes()
    tokens = tokenizer.encode(["the end. More"])[0].tokens
    assert sum(one.num_made for one in told(tokenizer, [], tokens, sizes)) == len(tokens)
    stopped = told(tokenizer, [], tokens, sizes, stops=["end."])
    assert whole(stopped).text == "the " and whole(stopped).num_made == len("the end.")
    ended = CompletionText(tokenizer, [], ()).add(
        NewTokens(id=0, tokens=[], log_probs=[], top=[], finish_reason="stop", ending=(2, -0.5))
    )
    assert (ended.num_made, ended.text, ended.tokens.tokens) == (1, "", [])


@pytest.mark.parametrize("seed", range(5))
def test_parts_are_whole_characters_and_together_the_text(seed):
    tokenizer = of_bytes()
    tokens = tokenizer.encode([TEXT])[0].tokens
    found = told(tokenizer, [], tokens, sizes_of(len(tokens), seed))
    assert "".join(one.text for one in found) == TEXT
    assert all("\ufffd" not in one.text for one in found)
    whole = joined([one.tokens for one in found])
    assert whole.tokens == tokens and whole.log_probs == [-float(token) for token in tokens]
    assert whole.finish_reason == "length"


def test_a_character_that_stays_incomplete_is_told_at_the_end():
    tokenizer = of_bytes()
    tokens = tokenizer.encode(["ab世"])[0].tokens[:-1]
    for sizes in ([4], [1, 1, 1, 1, 0], [3, 1]):
        found = told(tokenizer, [], tokens, sizes)
        assert "".join(one.text for one in found) == "ab\ufffd"
        assert joined([one.tokens for one in found]).tokens == tokens
    # Its last step brings no token, as where the token that ends a completion is not part of it.
    text = CompletionText(tokenizer, [], ())
    first = text.add(NewTokens(id=0, tokens=tokens, log_probs=[0.0] * 4, top=[[]] * 4))
    last = text.add(NewTokens(id=0, tokens=[], log_probs=[], top=[], finish_reason="stop", ending=(7, -1.0)))
    assert (first.text, last.text) == ("ab", "\ufffd") and len(first.tokens.tokens) + len(last.tokens.tokens) == 4


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (("so on",), "Grüße, 世界! 🤖 and "),
        (("\n\n", "end"), "Grüße, 世界! 🤖 and so on; the "),
        (("界! ", "世界"), "Grüße, "),
        (("G",), ""),
        (("moreover", "endless"), TEXT),
    ],
)
def test_a_completion_ends_before_the_first_stop(stops, expected, seed):
    tokenizer = of_bytes()
    tokens = tokenizer.encode([TEXT])[0].tokens
    found = told(tokenizer, [], tokens, sizes_of(len(tokens), seed), stops)
    assert "".join(one.text for one in found) == expected
    whole = joined([one.tokens for one in found])
    assert whole.tokens == tokens[: len(expected.encode())]
    assert whole.finish_reason == ("length" if expected == TEXT else "stop")


def test_what_may_become_a_stop_is_told_only_once_it_is_none():
    tokenizer = of_bytes()
    tokens = tokenizer.encode(["a##b"])[0].tokens
    found = told(tokenizer, [], tokens, [1, 1, 1, 1], ("##!",))
    assert [one.text for one in found] == ["a", "", "", "##b"]
    assert [len(one.tokens.tokens) for one in found] == [1, 0, 0, 3]


def test_the_space_before_a_completion_is_part_of_it():
    tokenizer = of_words()
    prompt, tokens = [0, 1], [2, 3, 4]
    assert tokenizer.decode(tokens) == "of it all"
    for sizes in ([3], [1, 1, 1], [2, 1]):
        assert "".join(one.text for one in told(tokenizer, prompt, tokens, sizes)) == " of it all"
    assert "".join(one.text for one in told(tokenizer, [], tokens, [1, 2])) == "of it all"


class Submitted:
    """In place of a `Generator`: keeps the requests."""

    def __init__(self):
        self.requests = []

    def check(self, prompt, settings):
        return settings.check()

    def submit(self, request):
        self.requests.append(request)


def test_a_stop_that_is_a_special_token_ends_by_its_token():
    tokenizer, generator = chats.tiny(eos_token="<|im_end|>"), Submitted()
    texts = TextGenerator(generator, tokenizer, {})
    start, end = (tokenizer.encode([text])[0].tokens[0] for text in ("<|im_start|>", "<|im_end|>"))
    settings = SamplingSettings(stop=("<|im_end|>", "four", "<|im_start|>"), stop_ids=(5, end))
    texts.submit("it", [1], settings)
    (request,) = generator.requests
    assert request.settings == SamplingSettings(stop=("four",), stop_ids=(5, end, start))
    assert texts.check([1], settings) == []
    # They share the places of tokens; within another text a special token is never seen.
    assert texts.check([1], SamplingSettings(stop=("<|im_end|>",), stop_ids=tuple(range(100, 108)))) == [
        "stop_ids has 9 tokens; the most are 8"
    ]
    (problem,) = texts.check([1], SamplingSettings(stop=("so<|im_end|>", "\n", " ", "\ud800")))
    assert problem.startswith("stop 'so<|im_end|>' has the special token '<|im_end|>' in it")
