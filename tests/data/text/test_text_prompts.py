"""Prompts and references of held-out texts: what is before the first target, and what follows it."""

import json

import chats
import pytest

from openpi_train.data.core.interface import OpeningRequest
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.models.language import LanguageConfig
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.nn.decoder_sizes import DecoderSizes

SIZES = DecoderSizes(vocab_size=400, width=16, depth=1, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
MODEL = LanguageConfig(sizes=SIZES, dtype="float32", context_length=64)
EOS, IM_END = 2, 4


@pytest.fixture
def prompts(tmp_path):
    """The prompts of records, all of which are held out."""

    def make(records, model=MODEL, **given):
        tokenizer = chats.write(tmp_path / "tokenizer", template=chats.CHATML)
        path = tmp_path / "texts.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        config = TextData(
            datasets=(TextDataset(path=str(path), validation=str(path)),),
            tokenizer=str(tokenizer),
            cache_dir=str(tmp_path / "index"),
            **({"max_length": 64} | given),
        )
        data = config.open(OpeningRequest(model=model, seed=0, batch_size=4))
        return list(data.held_out_prompts())

    return make


RECORDS = [{"prompt": f"What is {n}?", "completion": f" It is {n}.\n#### {n}"} for n in range(20)]


@pytest.mark.parametrize("packing", [False, True])
def test_prompts_are_followed_by_their_references_in_the_order_of_the_rows(prompts, packing):
    found = prompts([*RECORDS, RECORDS[3]], packing=packing)  # one of them twice
    told = {one.text: one for one in found}
    assert len(told) == len(found) == 20
    tokenizer = chats.byte_level()
    for record in RECORDS:
        one = told["<s>" + record["prompt"]]
        assert list(one.tokens) == tokenizer.encode(record["prompt"]).ids
        assert one.reference == record["completion"] and one.end == EOS
    assert [one.place for one in found] == [one.place for one in prompts([*RECORDS, RECORDS[3]], packing=packing)]
    assert found[0].place.startswith("texts: texts.jsonl:")
    assert packing or [one.text for one in found] != sorted(told, key=list(told).index, reverse=True)


def test_long_texts_are_not_cut(prompts):
    record = {"prompt": "What is two?", "completion": " It is four." * 20}
    (found,) = prompts([record], max_length=16)
    assert found.reference == record["completion"]


def test_a_conversation_goes_up_to_the_header_of_the_first_answer_and_ends_as_its_messages_do(prompts):
    (found,) = prompts([{"messages": chats.TWO}], targets="assistant")
    assert found.text.endswith("<|im_start|>assistant\n") and "four" not in found.text
    assert found.reference.strip() == "It is four." and found.end == IM_END
    (split,) = prompts([{"prompt": chats.ONE[:1], "completion": chats.ONE[1:]}])
    assert split.text.endswith("two plus two?<|im_end|>\n<|im_start|>assistant\n")
    assert split.reference.strip() == "It is four." and split.end == IM_END


def test_texts_without_a_prompt_are_left_out(prompts):
    assert prompts([{"text": "It is four."}, {"text": "What is two?"}]) == []


def test_of_preferences_the_chosen_completion_is_the_reference(prompts):
    records = [
        {"prompt": "What is two?", "chosen": " It is 2", "rejected": " It is 3"},
        {"prompt": "What is two?", "chosen": " It is 2.", "rejected": " It is 4"},
    ]
    for model in (MODEL, ReferencedConfig(policy=MODEL), RewardConfig(language=MODEL)):
        (found,) = prompts(records, model=model, kind="preferences")
        assert found.reference in (" It is 2", " It is 2.")


def test_undesirable_completions_are_no_references(prompts):
    records = [
        {"prompt": "What is two?", "completion": " It is 3", "label": False},
        {"prompt": "What is two?", "completion": " It is 2", "label": True},
        {"prompt": "What is one?", "completion": " It is 4", "label": False},
    ]
    (found,) = prompts(records, kind="unpaired")
    assert found.reference == " It is 2"


def test_a_prompt_alone_has_no_reference(prompts):
    (found,) = prompts([{"prompt": chats.ONE[:1]}], kind="prompts")
    assert found.text.endswith("two plus two?<|im_end|>\n<|im_start|>assistant\n")
    assert (found.reference, found.end) == ("", None)
