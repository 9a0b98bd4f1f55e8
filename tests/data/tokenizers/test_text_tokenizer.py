"""The tokenizer of a folder, compared with transformers' reading of the same folder."""

import json
import pickle

import chats
import pytest
from transformers import PreTrainedTokenizerFast

from openpi_train.data.tokenizers.text_tokenizer import TextTokenizer, load_text_tokenizer

TEXTS = (*chats.SENTENCES, "", " ", "\n\n", "a</s>b<|im_end|>", " leading and trailing ", "e\u0301\u200b")


def theirs(folder):
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("make", [chats.byte_level, chats.word_pieces])
def test_tokens_and_text_are_those_of_transformers(make, tmp_path):
    folder = chats.write(tmp_path, tokenizer=make())
    ours, other = load_text_tokenizer(str(folder)), theirs(folder)
    for text, found in zip(TEXTS, ours.encode(TEXTS), strict=True):
        assert found.tokens == other(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(found.tokens) == other.decode(found.tokens, clean_up_tokenization_spaces=False)
    assert ours.num_tokens == len(other)
    assert (ours.eos, ours.special_tokens) == (other.eos_token_id, dict(other.special_tokens_map))


@pytest.mark.parametrize("make", [chats.byte_level, chats.word_pieces])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_bos_is_put_before_a_text_where_transformers_does(make, config, tmp_path):
    folder = chats.write(tmp_path, tokenizer=make(), **config)
    ours, other = load_text_tokenizer(str(folder)), theirs(folder)
    whole, plain = other("It is four.")["input_ids"], other("It is four.", add_special_tokens=False)["input_ids"]
    assert whole == [*ours.begin, *plain]


def test_settings_of_the_authors_last_call_are_ignored():
    tokenizer = chats.byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    (found,) = chats.tiny(tokenizer=tokenizer).encode([chats.SENTENCES[0]])
    assert found.tokens == chats.byte_level().encode(chats.SENTENCES[0], add_special_tokens=False).ids


def test_digests_tell_tokenizers_apart():
    one, two = chats.tiny(), chats.tiny(tokenizer=chats.word_pieces())
    assert one.fingerprint != two.fingerprint and one.digest != two.digest
    without = chats.tiny(eos_token="<|eot|>")
    assert without.fingerprint == one.fingerprint and without.digest != one.digest
    copy = pickle.loads(pickle.dumps(one))
    assert (copy.fingerprint, copy.digest) == (one.fingerprint, one.digest)


def test_chat_templates_are_found_in_all_forms():
    assert chats.tiny().chat_templates == {}
    assert chats.tiny(template="x").chat_templates == {"default": "x"}
    assert chats.tiny(chat_template="y").chat_templates == {"default": "y"}
    named = [{"name": "default", "template": "y"}, {"name": "tool_use", "template": "z"}]
    assert chats.tiny(chat_template=named).chat_templates == {"default": "y", "tool_use": "z"}
    old = {**chats.files(), "chat_template.json": json.dumps({"chat_template": "w"}).encode()}
    assert TextTokenizer(old, "tiny").chat_templates == {"default": "w"}


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in .*--data\.tokenizer"):
        load_text_tokenizer(str(tmp_path))
    folder = chats.write(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not JSON"):
        load_text_tokenizer(str(folder))
    (folder / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_text_tokenizer(str(folder))
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8 .*; save it as UTF-8"):
        _ = TextTokenizer({**chats.files(), "chat_template.jinja": b"\xff"}, "tiny").chat_templates
    for wrong in (5, [{"name": "default"}], ["x"], [{"name": "default", "template": None}]):
        with pytest.raises(ValueError, match=r"chat_template is .*; needed is a text, or a list of objects"):
            _ = chats.tiny(chat_template=wrong).chat_templates
    with pytest.raises(ValueError, match=r"eos_token '<none>' .* is not in the vocabulary"):
        _ = chats.tiny(eos_token="<none>").eos


def test_files_that_belong_to_the_model_are_kept_and_stay_in_the_main_process(tmp_path):
    folder = chats.write(tmp_path / "tiny")
    for name in ("generation_config.json", "vocab.json", "config.json", "model.safetensors"):
        (folder / name).write_bytes(b"{}")
    found = load_text_tokenizer(str(folder))
    read = {"tokenizer.json", "tokenizer_config.json"}
    assert found.files.keys() == read | {"generation_config.json", "vocab.json", "config.json"}
    assert pickle.loads(pickle.dumps(found)).files.keys() == read
