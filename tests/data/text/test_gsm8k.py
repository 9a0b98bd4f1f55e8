"""GSM8K, if the shared data are there: its numbers, as texts and as preferences made of right and wrong solutions."""

import json

import chats
import numpy as np
import pytest

from openpi_train.data.core.interface import OpeningRequest
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.models.language import LanguageConfig
from openpi_train.nn.decoder_sizes import DecoderSizes

SIZES = DecoderSizes(vocab_size=400, width=16, depth=1, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
MODEL = LanguageConfig(sizes=SIZES, context_length=4096)


@pytest.fixture
def opened(tmp_path):
    """Opens datasets with the tiny tokenizer."""
    tokenizer = str(chats.write(tmp_path / "tokenizer"))

    def make(dataset, **given):
        config = TextData(datasets=(dataset,), tokenizer=tokenizer, cache_dir=str(tmp_path / "index"), **given)
        return config.open(OpeningRequest(model=MODEL, seed=0, batch_size=8))

    return make


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_problems_and_answers(gsm8k, opened):
    columns = ("prompt=question", "completion=answer")
    dataset = TextDataset(path=str(gsm8k), columns=columns, validation="test")
    data = opened(dataset, max_length=2048)
    assert (data.num_samples, data.validation.num_samples) == (7473, 1319)
    tokenizer = chats.byte_level()
    records = lines(gsm8k / "test.jsonl")
    (member,) = data.validation.members
    for number in range(0, 1319, 7):
        tokens, targets = member.store.text(number)
        question, answer = (tokenizer.encode(records[number][name]).ids for name in ("question", "answer"))
        assert tokens.tolist() == [*question, *answer[1:], 2]  # the answer's own bos is left out
        assert targets.sum() == len(answer)
    packed = opened(dataset, max_length=2048, packing=True)
    assert sum(len(part.samples) for part in packed.train.members) == 7473
    fewest = int(np.ceil(sum(part.lengths.sum() for part in data.train.members) / 2048))
    assert fewest <= packed.num_samples <= 11 / 9 * fewest + 4  # the bound of best fit decreasing


@pytest.mark.slow
def test_right_and_wrong_solutions_are_preferences(gsm8k, opened, tmp_path):
    pairs = []
    for record in lines(gsm8k / "example_model_solutions.jsonl"):
        solutions = [value for value in record.values() if isinstance(value, dict)]
        right = [one["solution"] for one in solutions if one["is_correct"]]
        wrong = [one["solution"] for one in solutions if not one["is_correct"]]
        pairs += [{"prompt": record["question"], "chosen": a, "rejected": b} for a in right for b in wrong]
    assert len(pairs) == 2429
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = opened(
        TextDataset(path=str(tmp_path / "pairs.jsonl")), kind="preferences", max_length=2048, validation_fraction=0.1
    )
    train, held_out = data.train.members[0], data.validation.members[0]
    prompts = [np.unique(part.store.digests[part.samples]) for part in (train, held_out)]
    assert len(train) + len(held_out) == 2429 and sum(map(len, prompts)) == 731
    assert not np.intersect1d(*prompts).size
