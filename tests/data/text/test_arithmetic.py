"""The embedded arithmetic task: its problems, answers and mistakes, its tokenizer, and who writes it."""

import collections
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from openpi_train.data.core.interface import OpeningRequest
from openpi_train.data.make.written_folder import MANIFEST
from openpi_train.data.text import arithmetic
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.data.tokenizers.text_tokenizer import load_text_tokenizer
from openpi_train.models.language import LanguageConfig
from openpi_train.nn.decoder_sizes import DecoderSizes

ROOT = Path(__file__).resolve().parents[3]
SIZES = DecoderSizes(vocab_size=16, width=8, depth=1, mlp_dim=8, num_heads=1, num_kv_heads=1, head_dim=8)
# Of the manifest's checksums: another one means other data, under which recorded results are no longer valid.
CONTENT = "53ec48b8bda40e98"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return arithmetic.prepare(tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module")
def records(root):
    """The records of each file, by dataset and split."""
    return {
        (name, split): [json.loads(line) for line in (root / name / f"{split}.jsonl").read_text().splitlines()]
        for name in ("demonstrations", "preferences", "prompts")
        for split in ("train", "test")
    }


def numbers(record):
    first, second = record["prompt"].removesuffix("=").split("+")
    return int(first), int(second)


def is_right(record, answer):
    return int(answer[::-1]) == sum(numbers(record)) and len(answer) == len(str(sum(numbers(record))))


def forgets_the_carry(record, answer):
    a, b = numbers(record)
    return answer == f"{(a + b) % 10}{(a // 10 + b // 10) % 10}"


def test_every_problem_is_in_one_part(records):
    parts = [{record["prompt"] for record in found} for found in records.values()]
    demonstrated, held_out, fresh, *others = parts
    assert [len(part) for part in parts] == [3000, 1100, 4000, 1100, 4000, 1100]
    assert others == [held_out, fresh, held_out]
    everything = {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}
    assert demonstrated | fresh | held_out == everything and len(everything) == 8100


def test_demonstrations_are_right_or_forget_the_carry(records):
    told = collections.Counter()
    for record in records["demonstrations", "train"]:
        right, forgetful = is_right(record, record["completion"]), forgets_the_carry(record, record["completion"])
        assert right or forgetful
        told["right" if right else "wrong"] += 1
    # 59 % are told to forget it, and about a quarter of the sums have none: exactly as many by this seed.
    assert told["wrong"] == 1332 and arithmetic.NUM_FORGETFUL / 3000 == 0.59
    assert all(is_right(record, record["completion"]) for record in records["demonstrations", "test"])


def test_pairs_are_of_a_right_and_a_wrong_answer(records):
    kinds = collections.Counter()
    for record in records["preferences", "train"] + records["preferences", "test"]:
        chosen, rejected = record["chosen"], record["rejected"]
        assert is_right(record, chosen) and not is_right(record, rejected)
        if forgets_the_carry(record, rejected):
            kinds["carry"] += 1
        else:
            assert sum(a != b for a, b in zip(chosen, rejected, strict=True)) == 1
            kinds["digit"] += 1
    assert kinds["carry"] / kinds.total() == pytest.approx(0.75 * 0.755, abs=0.02)
    assert all(is_right(task, task["answer"]) for task in records["prompts", "train"])


def test_the_seed_decides_the_bytes(root, tmp_path):
    files = json.loads((root / MANIFEST).read_text())["files"]
    assert sorted(files)[-2:] == ["tokenizer.json", "tokenizer_config.json"] and len(files) == 8
    assert hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16] == CONTENT
    other = json.loads((arithmetic.prepare(tmp_path, seed=1) / MANIFEST).read_text())["files"]
    assert [name for name in files if other[name] == files[name]] == ["tokenizer.json", "tokenizer_config.json"]


def test_the_tokenizer_gives_back_every_text_and_is_that_of_transformers(root, records):
    tokenizer, theirs = load_text_tokenizer(str(root)), PreTrainedTokenizerFast.from_pretrained(str(root))
    assert (tokenizer.num_tokens, tokenizer.begin, tokenizer.eos) == (16, (1,), 2)
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)
    texts = [record["prompt"] + record["chosen"] for record in records["preferences", "train"]]
    for text, pieces in zip(texts, tokenizer.encode(texts), strict=True):
        assert len(pieces.tokens) == len(text) and 3 not in pieces.tokens
        assert tokenizer.decode([1, *pieces.tokens, 2], skip_special_tokens=True) == text
    assert theirs(texts[0])["input_ids"] == [1, *tokenizer.encode(texts[:1])[0].tokens]
    assert tokenizer.encode(["4x\n"])[0].tokens == [8, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "counts"),
    [
        ("demonstrations", "texts", (3000, 1100)),
        ("preferences", "preferences", (4000, 1100)),
        ("prompts", "prompts", (4000, 1100)),
    ],
)
def test_a_run_opens_each_dataset(root, tmp_path, name, kind, counts):
    dataset = TextDataset(path=str(root / name), validation="test")
    config = TextData(datasets=(dataset,), tokenizer=str(root), kind=kind, max_length=16, cache_dir=str(tmp_path))
    model = LanguageConfig(sizes=SIZES, context_length=16)
    opened = config.open(OpeningRequest(model=model, seed=0, batch_size=8))
    assert (opened.num_samples, opened.validation.num_samples) == counts
    (member,) = opened.train.members
    assert member.lengths.max() <= 2 * 11


@pytest.mark.multiprocess
def test_the_first_runs_to_miss_it_write_it_once(root, tmp_path):
    """Three processes at once: one writes, the others wait; all have the same bytes as this process."""
    program = (
        "import logging\n"
        "from openpi_train.data.core import cache_folders\n"
        "from openpi_train.data.text import arithmetic\n"
        "logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "arithmetic.write_missing(cache_folders.datasets() / 'arithmetic' / 'prompts')\n"
    )
    environment = os.environ | {"OPENPI_TRAIN_HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    started = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    assert sum(" written: 3000 demonstrations" in text for text in said) == 1, said
    made = tmp_path / "datasets" / "arithmetic"
    assert [path.name for path in made.parent.iterdir()] == ["arithmetic"]
    for path in root.rglob("*"):
        assert not path.is_file() or path.read_bytes() == (made / path.relative_to(root)).read_bytes()


def test_other_folders_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENPI_TRAIN_HOME", str(tmp_path))
    for path in ("hub:openai/gsm8k", tmp_path / "datasets" / "mine", tmp_path / "arithmetic"):
        arithmetic.write_missing(path)
    assert list(tmp_path.iterdir()) == []
