"""What a dry run and `launch` find out about text data, without reading the texts or asking the hub."""

import dataclasses
import json

import chats
import pytest

from openpi_train.data.core import cache_folders
from openpi_train.data.core.interface import OpeningRequest
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.models.language import LanguageConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.runtime.exits import DataError

SIZES = DecoderSizes(vocab_size=400, width=16, depth=1, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
MODEL = LanguageConfig(sizes=SIZES, context_length=64)


@pytest.fixture
def data(tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    tokenizer = str(chats.write(tmp_path / "tokenizer", template=chats.CHATML))
    return TextData(datasets=(TextDataset(path=str(tmp_path), split="train"),), tokenizer=tokenizer, max_length=64)


def changed(data, **fields):
    return dataclasses.replace(data, datasets=(dataclasses.replace(data.datasets[0], **fields),))


def test_data_that_are_there_are_told_to_be_unread(data, tmp_path):
    assert data.examine(MODEL) == [f"{tmp_path}: its texts; a start reads them, and `data check` does so now"]
    assert len(changed(data, validation="test").examine(MODEL)) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "/nowhere/texts.jsonl"}, "there is no file or folder /nowhere/texts.jsonl: check the path"),
        ({"split": "validation"}, "no file of the split validation"),
        ({"validation": "/nowhere/held_out.jsonl"}, "there is no file or folder /nowhere/held_out.jsonl"),
        ({"validation": "dev"}, "no file of the split dev"),
    ],
)
def test_files_that_are_not_there_are_refused(data, fields, message):
    with pytest.raises(DataError, match=message):
        changed(data, **fields).examine(MODEL)


@pytest.mark.parametrize(
    ("kind", "takes", "columns"),
    [
        ("preferences", "preference", "chosen=COLUMN rejected=COLUMN"),
        ("unpaired", "unpaired preference", "label=COLUMN"),
        ("prompts", "prompt only", "prompt=COLUMN"),
    ],
)
def test_records_of_another_type_than_the_run_takes_are_refused_with_the_words_of_a_start(
    data, kind, takes, columns, tmp_path
):
    other = dataclasses.replace(data, kind=kind)
    words = f"a dataset of language modelling; this run takes {takes}: train lm_sft on it, or name .*{columns}"
    with pytest.raises(DataError, match=words):
        other.examine(MODEL)
    with pytest.raises(ValueError, match=words):
        other.open(OpeningRequest(model=MODEL, seed=0, batch_size=1, assets_dir=tmp_path))


def test_a_first_record_that_cannot_be_read_is_refused_unless_bad_ones_are_left_out(data, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "?"}\n')
    words = (
        r"train.jsonl:1: its columns \['question'\] are of no known type.*--data\.datasets\.0\.columns text=question$"
    )
    with pytest.raises(DataError, match=words):
        data.examine(MODEL)
    (tmp_path / "train.jsonl").write_text('{"question": "?"}\n{"text": "one"}\n')
    words = r"train.jsonl:1: its columns \['question'\] are of no known type.*--data.on-bad-record skip"
    with pytest.raises(DataError, match=words):
        data.examine(MODEL)
    assert dataclasses.replace(data, on_bad_record="skip").examine(MODEL)


def test_a_tokenizer_that_is_not_there_or_too_large_for_the_model_is_refused(data):
    with pytest.raises(DataError, match=r"no tokenizer\.json in /nowhere"):
        dataclasses.replace(data, tokenizer="/nowhere").examine(MODEL)
    small = dataclasses.replace(MODEL, sizes=dataclasses.replace(SIZES, vocab_size=5))
    with pytest.raises(DataError, match=r"the model 5 \(sizes.vocab_size\)"):
        data.examine(small)


def test_what_is_on_the_hub_or_embedded_is_told_and_not_fetched(data, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENPI_TRAIN_HOME", str(tmp_path / "home"))
    far = dataclasses.replace(changed(data, path="hub:someone/texts"), tokenizer="hub:someone/model")
    assert [note.partition(":")[2].partition(":")[0] for note in far.examine(MODEL)] == [
        "someone/texts",
        "someone/model",
    ]
    folder = cache_folders.datasets() / "arithmetic"
    embedded = dataclasses.replace(changed(data, path=str(folder / "sft")), tokenizer=str(folder))
    (note,) = embedded.examine(MODEL)
    assert "not written yet" in note and not folder.exists()


def test_all_that_is_missing_is_told_at_once(data):
    gone = dataclasses.replace(data.datasets[0], path="/nowhere/first.jsonl")
    other = dataclasses.replace(gone, path="/nowhere/second.jsonl")
    with pytest.raises(DataError, match=r"(?s)first\.jsonl.*second\.jsonl.*no tokenizer\.json in /nowhere"):
        dataclasses.replace(data, datasets=(gone, other), tokenizer="/nowhere").examine(MODEL)
