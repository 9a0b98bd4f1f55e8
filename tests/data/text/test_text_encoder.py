"""Tokens and targets of examples, compared with transformers' tokens of the same texts."""

import chats
import numpy as np
import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from openpi_train.data.text.examples import example_of
from openpi_train.data.text.text_encoder import TextEncoder, inside
from openpi_train.data.tokenizers.text_tokenizer import Pieces

USER, ANSWER = chats.ONE[:1], chats.ONE[1:]
OTHER = [{"role": "assistant", "content": "It is five."}]
LOOKING_AHEAD = "{{ messages | length }}" + chats.CHATML


def encoder(template=None, targets="auto", make=chats.byte_level, **config):
    templates = {} if template is None else {"default": chats.chat(template)}
    return TextEncoder(tokenizer=chats.tiny(tokenizer=make(), **config), templates=templates, targets=targets)


def ids(text, make=chats.byte_level):
    return PreTrainedTokenizerFast(tokenizer_object=make())(text)["input_ids"]


def target_text(of, encoded):
    return of.tokenizer.decode(encoded.tokens[encoded.targets])


def test_a_text_has_bos_and_eos_and_all_its_tokens_are_targets():
    (found,) = encoder().encode(example_of({"text": "It is four."}))
    assert found.tokens.tolist() == [*ids("It is four."), 2] and found.targets.all()
    (found,) = encoder().encode(example_of({"text": "It is four.</s>"}))
    assert found.tokens.tolist() == ids("It is four.</s>")  # ended already


def test_texts_that_were_rendered_beforehand_begin_and_end_once():
    rendered = "<s><|im_start|>user\nfour?<|im_end|>\n"
    of = encoder()
    for text, tokens in [
        ("<s>It is four.", [*ids("It is four."), 2]),
        ("<s>It is four.</s>", ids("It is four.</s>")),
        ("It is four.</s>\n", ids("It is four.</s>\n")),
        ("It is four.</s> \n\n", ids("It is four.</s> \n\n")),
        ("It is</s>\n four.", [*ids("It is</s>\n four."), 2]),
        (rendered, [*ids(rendered.removeprefix("<s>")), 2]),
    ]:
        (found,) = of.encode(example_of({"text": text}))
        assert (found.tokens.tolist(), found.targets.all()) == (tokens, True)
    prompt, answer = rendered + "<|im_start|>assistant\n", "It is four.</s>\n"
    (found,) = of.encode(example_of({"prompt": prompt, "completion": answer}))
    assert found.tokens.tolist() == ids(prompt.removeprefix("<s>") + answer)
    assert target_text(of, found) == answer
    (found,) = of.encode(example_of({"prompt": prompt}))
    assert found.tokens.tolist() == ids(prompt.removeprefix("<s>"))


def test_a_text_that_ends_as_the_models_turns_do_has_ended():
    files = chats.files() | {"generation_config.json": b'{"eos_token_id": [2, 4]}'}
    of = TextEncoder(tokenizer=chats.TextTokenizer(files, "tiny"), templates={})
    (found,) = of.encode(example_of({"text": "four.<|im_end|>\n"}))
    assert found.tokens.tolist() == ids("four.<|im_end|>\n")
    assert of.digest != encoder().digest


@pytest.mark.parametrize("make", [chats.byte_level, chats.word_pieces])
def test_the_completion_and_the_eos_token_are_targets_where_pad_is_eos(make):
    of = encoder(make=make)
    assert of.tokenizer.config["pad_token"] == of.tokenizer.config["eos_token"]
    (found,) = of.encode(example_of({"prompt": "What is two plus two?", "completion": " It is four."}))
    prompt = ids("What is two plus two?", make)
    assert found.tokens.tolist() == [*ids("What is two plus two? It is four.", make), of.tokenizer.eos]
    np.testing.assert_array_equal(found.targets, np.arange(len(found.tokens)) >= len(prompt))


@pytest.mark.parametrize("make", [chats.byte_level, chats.word_pieces])
def test_a_prompt_has_the_same_tokens_whatever_follows_it(make):
    of = encoder(make=make)
    assert ids("The capital", make)[: len(ids("The capi", make))] != ids("The capi", make)  # a token spans the border
    found = of.encode(example_of({"prompt": "The capi", "chosen": "tal of France", "rejected": "x"}))
    for one in found:
        assert one.tokens[~one.targets].tolist() == ids("The capi", make)
    assert of.tokenizer.decode(found[0].tokens[found[0].targets]).strip() == "tal of France</s>"


def test_all_tokens_of_prompt_and_completion_are_targets_if_asked():
    (found,) = encoder(targets="all").encode(example_of({"prompt": "a", "completion": "b"}))
    assert found.targets.all()


@pytest.mark.parametrize("template", chats.TEMPLATES.values(), ids=chats.TEMPLATES)
def test_the_completion_of_a_conversation_follows_the_assistants_header(template):
    of = encoder(template)
    theirs = PreTrainedTokenizerFast(tokenizer_object=chats.byte_level(), bos_token="<s>", eos_token="</s>")
    for prompt in (USER, [*chats.SYSTEM, USER[0]]):
        (found,) = of.encode(example_of({"prompt": prompt, "completion": ANSWER}))
        given = {"chat_template": template, "date_string": "26 Jul 2024"}
        header = theirs.apply_chat_template(prompt, **given, add_generation_prompt=True)["input_ids"]
        assert found.tokens[~found.targets].tolist() == header
        assert "It is four." in target_text(of, found)
    if template is not chats.FORGETFUL:
        whole = theirs.apply_chat_template([*prompt, *ANSWER], **given)["input_ids"]
        assert found.tokens.tolist() == whole


def test_a_conversation_has_only_the_bos_token_of_its_template():
    (found,) = encoder(chats.HEADED).encode(example_of({"messages": chats.ONE}))
    assert (found.tokens == 1).sum() == 1 and found.targets.all()
    (found,) = encoder(chats.CHATML).encode(example_of({"messages": chats.ONE}))
    assert (found.tokens == 1).sum() == 0


def test_only_the_assistants_tokens_are_targets_if_asked():
    for template, end in ((chats.CHATML, "<|im_end|>\n"), (chats.CHATML_MARKED, "<|im_end|>")):
        of = encoder(template, "assistant")
        (found,) = of.encode(example_of({"messages": chats.TWO}))
        assert target_text(of, found) == f"It is four.{end}Ünïcödé\n\n42 {end}"
        (found,) = of.encode(example_of({"prompt": chats.TWO[:-1], "completion": chats.TWO[-1:]}))
        assert target_text(of, found) == f"Ünïcödé\n\n42 {end}"


def test_a_preference_has_two_texts_with_one_prompt():
    of = encoder(chats.CHATML)
    one, two = of.encode(example_of({"prompt": USER, "chosen": ANSWER, "rejected": OTHER}))
    assert one.tokens[~one.targets].tolist() == two.tokens[~two.targets].tolist()
    assert [target_text(of, text) for text in (one, two)] == ["It is four.<|im_end|>\n", "It is five.<|im_end|>\n"]
    implicit = of.encode(example_of({"chosen": [*USER, *ANSWER], "rejected": [*USER, *OTHER]}))
    for text, other in zip((one, two), implicit, strict=True):
        np.testing.assert_array_equal(text.tokens, other.tokens)
        np.testing.assert_array_equal(text.targets, other.targets)


def test_a_prompt_alone_is_what_an_answer_is_generated_from():
    (found,) = encoder().encode(example_of({"prompt": "What is two plus two?"}))
    assert found.tokens.tolist() == ids("What is two plus two?") and not found.targets.any()
    for template in (chats.CHATML, chats.HEADED, chats.TURNS):
        (found,) = encoder(template).encode(example_of({"prompt": USER}))
        (whole,) = encoder(template).encode(example_of({"prompt": USER, "completion": ANSWER}))
        assert found.tokens.tolist() == whole.tokens[~whole.targets].tolist() and not found.targets.any()


def test_tools_go_to_the_template_made_for_them():
    templates = {"default": chats.chat("no tools"), "tool_use": chats.chat("{{ tools | tojson }}")}
    of = TextEncoder(tokenizer=chats.tiny(), templates=templates)
    (found,) = of.encode(example_of({"messages": chats.ONE, "tools": chats.TOOLS}))
    assert '"description": "a < b & ü"' in of.tokenizer.decode(found.tokens)
    (found,) = of.encode(example_of({"messages": chats.ONE}))
    assert of.tokenizer.decode(found.tokens) == "no tools"


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        ([(2, 4)], [0, 0, 0, 1, 1, 1, 0, 0]),
        ([(0, 2)], [1, 1, 1, 0, 0, 0, 0, 0]),
        ([(4, 6)], [0, 0, 0, 0, 0, 0, 1, 1]),  # the last token has no characters, and starts at the end of all
        ([(0, 1), (3, 4)], [1, 1, 0, 0, 0, 1, 0, 0]),
        ([(5, 6)], [0, 0, 0, 0, 0, 0, 1, 1]),  # a token that spans the border stands for a character in it, too
        ([(1, 5)], [0, 0, 1, 1, 1, 1, 1, 0]),
        ([], [0] * 8),
        ([(2, 2)], [0] * 8),
    ],
)
def test_a_token_without_characters_is_where_it_starts(spans, found):
    pieces = Pieces(list(range(8)), [(0, 0), (0, 1), (1, 2), (2, 2), (2, 3), (3, 4), (4, 6), (5, 5)])
    assert inside(pieces, spans).tolist() == [bool(one) for one in found]


# As in GLM's and Llama 2's: what the assistant writes begins right after a special token, or after a space.
TIGHT = (
    "{% for m in messages %}{{ '<|head|>' if m.role == 'user' else '<turn>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"
    "{% endif %}{{ '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>' }}{% endif %}"
)


def signs():
    """Llama 2's: a sign for a space is put before every stretch of text, and stands for no character."""
    tokenizer = chats.word_pieces()
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


@pytest.mark.parametrize("make", [chats.byte_level, chats.word_pieces, signs])
@pytest.mark.parametrize("content", ["It is four.", "日本語 😀", " four", "4", "Ünïcödé\n\n42"])
def test_every_token_between_the_assistants_header_and_the_end_is_a_target(make, content):
    of = encoder(TIGHT, "assistant", make)
    messages = [*USER, {"role": "assistant", "content": content}, *USER, {"role": "assistant", "content": content}]
    (found,) = of.encode(example_of({"messages": messages}))
    header, end = (of.tokenizer.encode([text])[0].tokens for text in ("<turn>", "<|eot|>"))
    expected, is_open = [], False
    for token in found.tokens.tolist():
        is_open = is_open and token != end[-1]
        expected.append(is_open)
        is_open = is_open or token == header[-1]
    assert sum(expected) >= 2 and found.targets.tolist() == expected


@pytest.mark.parametrize(
    ("template", "targets", "record", "message"),
    [
        (None, "auto", {"messages": chats.ONE}, "no chat template.*--data.chat-template"),
        (None, "assistant", {"text": "a"}, "assistant needs conversations"),
        (chats.CHATML, "completion", {"messages": chats.ONE}, "needs a prompt and a completion"),
        (None, "all", {"prompt": "a"}, "--data.targets all: prompts have no targets"),
        (None, "all", {"prompt": "a", "chosen": "b", "rejected": "c"}, "targets of preferences"),
        (chats.CHATML, "assistant", {"messages": USER}, "no token of the conversation is the assistant's"),
        (
            chats.FORGETFUL, "assistant", {"messages": chats.TWO},
            r"does not preserve prefixes.*% generation %.*, use prompt/completion data, .*--data\.targets all",
        ),
        (
            chats.FORGETFUL, "assistant", {"prompt": chats.TWO[:-1], "completion": chats.TWO[-1:]},
            r"does not preserve prefixes.*% generation %.*or set --data\.targets completion or all$",
        ),
        (
            LOOKING_AHEAD, "auto", {"prompt": USER, "completion": ANSWER},
            r"does not preserve prefixes.*\(--data\.chat-template FILE\), or train on all .*\(--data\.targets all\)$",
        ),
        (
            LOOKING_AHEAD, "auto", {"prompt": USER, "chosen": ANSWER, "rejected": OTHER},
            r"does not preserve prefixes.*\(--data\.chat-template FILE\), or write prompt and answers as strings$",
        ),
        (
            chats.CHATML, "auto", {"prompt": chats.SYSTEM[:1], "completion": chats.ONE},
            "^completion begins with a message of the role user, after a prompt that ends with one of the role system",
        ),
        (
            chats.CHATML, "auto", {"prompt": USER, "chosen": ANSWER, "rejected": [*USER, *OTHER]},
            "^rejected begins with the messages of prompt, .* leave the column prompt out .*chosen=chosen rejected=rej",
        ),
        (
            chats.TURNS, "auto", {"prompt": USER, "completion": chats.ONE},
            "^completion begins with the messages of prompt, which are then there twice: leave them out of it$",
        ),
        (
            chats.CHATML, "auto", {"chosen": chats.ONE, "rejected": [{"role": "user", "content": "Why?"}, *OTHER]},
            "^chosen begins with a message of the role user, without a prompt; .* must begin with the same messages",
        ),
        (chats.TURNS, "auto", {"messages": ANSWER}, "roles must alternate"),
        (None, "auto", {"prompt": "a", "completion": "\ud800"}, "surrogates not allowed"),
    ],
)  # fmt: skip
def test_what_cannot_be_encoded_says_what_to_do(template, targets, record, message):
    with pytest.raises(ValueError, match=message):
        encoder(template, targets).encode(example_of(record))


def test_a_tokenizer_without_eos_is_an_error():
    with pytest.raises(ValueError, match="names no eos_token"):
        encoder(eos_token=None).encode(example_of({"text": "a"}))


def test_the_digest_covers_tokenizer_templates_and_targets():
    digests = {
        encoder().digest,
        encoder(chats.CHATML).digest,
        encoder(chats.HEADED).digest,
        encoder(targets="all").digest,
        encoder(make=chats.word_pieces).digest,
        encoder(eos_token="<|eot|>").digest,
    }
    assert len(digests) == 6
