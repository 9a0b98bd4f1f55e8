"""The cache of tokens: what is in it, when it is built again, and what an interrupted encoding leaves."""

import concurrent.futures
import json
import logging
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import chats
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from openpi_train.data.core.source import BadRecord
from openpi_train.data.text import encoded_parts
from openpi_train.data.text.examples import example_of
from openpi_train.data.text.text_encoder import TextEncoder
from openpi_train.data.text.text_files import find_files
from openpi_train.data.text.token_cache import TokenCache

TESTS = Path(__file__).resolve().parent.parent.parent
PYTHONPATH = f"{TESTS.parent}:{TESTS}"
SUMS = [{"prompt": f"What is {n} plus two?", "completion": f" It is {n + 2}."} for n in range(25)]
PAIRS = [
    {"prompt": f"{n}?", "chosen": f"{n}", "rejected": f"not {n}", "margin": n / 4, "ref_chosen_logps": -n,
     "ref_rejected_logps": -2.0 * n}
    for n in range(5)
]  # fmt: skip


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def cache(root, **given):
    given = {"encoder": TextEncoder(tokenizer=chats.tiny(), templates={"default": chats.chat(chats.CHATML)})} | given
    return TokenCache(
        name="sums", where=str(root), files=find_files(str(root)), cache_dir=str(root.parent / "index"), **given
    )


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "sums" / "train-0.jsonl", SUMS[:15])
    write(tmp_path / "sums" / "train-1.jsonl", SUMS[15:])
    return tmp_path / "sums"


@pytest.fixture
def encoded(monkeypatch):
    """The examples that were encoded, in parts of 4 records."""
    found, encode = [], TextEncoder.encode
    monkeypatch.setattr(encoded_parts, "PART_RECORDS", 4)
    monkeypatch.setattr(TextEncoder, "encode", lambda self, example: found.append(example) or encode(self, example))
    return found


def test_it_holds_what_the_encoder_gives_and_where_it_comes_from(folder, encoded):
    of = cache(folder)
    store = of.open()
    assert len(store) == 25 and store.kind == "prompt/completion" and len(encoded) == 25
    for number, record in enumerate(SUMS):
        (text,) = of.encoder.encode(example_of(record))
        tokens, targets = store.text(number)
        np.testing.assert_array_equal(tokens, text.tokens)
        np.testing.assert_array_equal(targets, text.targets)
        assert store.first_target[number] == np.flatnonzero(targets)[0]
        assert store.last_target[number] == len(tokens) - 1
    assert (store.place(0), store.place(24)) == ("train-0.jsonl:1", "train-1.jsonl:10")
    copy = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(copy.tokens, store.tokens)
    assert len(pickle.dumps(store)) < 1000  # the arrays are mapped, not copied


def test_preferences_have_two_texts_margins_and_references(tmp_path):
    write(tmp_path / "sums" / "a.jsonl", PAIRS)
    store = cache(tmp_path / "sums").open()
    assert (len(store), len(store.text_ends), store.texts_per_sample) == (5, 10, 2)
    assert store.margins.tolist() == [n / 4 for n in range(5)]
    assert store.references.tolist() == [[-n, -2.0 * n] for n in range(5)]
    judged = [{"prompt": "a", "completion": "b", "label": n % 2 == 0, "reference_logps": -n} for n in range(3)]
    write(tmp_path / "sums" / "a.jsonl", judged)
    store = cache(tmp_path / "sums").open()
    assert store.labels.tolist() == [1, 0, 1]
    np.testing.assert_array_equal(store.references, [[0, np.nan], [np.nan, -1], [-2, np.nan]])


def test_it_is_built_once_also_for_files_that_were_copied(folder, encoded):
    first = cache(folder).open()
    os.utime(folder / "train-0.jsonl", (0, 0))
    assert cache(folder).open().fingerprint == first.fingerprint and len(encoded) == 25


def test_processes_that_open_it_at_the_same_time_build_it_once(folder, encoded):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        stores = list(pool.map(lambda _: cache(folder).open(), range(3)))
    assert len(encoded) == 25 and len({store.fingerprint for store in stores}) == 1


def test_changed_files_are_encoded_again(folder, encoded, caplog):
    caplog.set_level(logging.INFO)
    before = cache(folder).open()
    write(folder / "train-1.jsonl", [*SUMS[15:-1], {"prompt": "What is 24 plus two?", "completion": " It is 27."}])
    after = cache(folder).open()
    assert len(encoded) == 50 and after.fingerprint != before.fingerprint
    assert "train-1.jsonl changed since it was encoded" in caplog.text
    with pytest.raises(ValueError, match="built again while a run was using them"):
        pickle.loads(pickle.dumps(before))


def test_every_setting_that_tokens_depend_on_has_its_own_cache(folder):
    other = TextEncoder(tokenizer=chats.tiny(tokenizer=chats.word_pieces()), templates={})
    template = TextEncoder(tokenizer=chats.tiny(), templates={"default": chats.chat(chats.HEADED)})
    targets = TextEncoder(tokenizer=chats.tiny(), templates={"default": chats.chat(chats.CHATML)}, targets="all")
    columns = {"text": "completion"}
    caches = [
        cache(folder),
        *(cache(folder, encoder=one) for one in (other, template, targets)),
        cache(folder, columns=columns),
    ]
    assert len({one.place for one in caches}) == 5
    assert len({one.open().fingerprint for one in caches}) == 4  # a template changes nothing in these texts


def test_an_interrupted_encoding_is_continued(folder, encoded, monkeypatch, caplog):
    """Whatever ends the process: a part is written whole or not at all, and the manifest last."""
    caplog.set_level(logging.INFO)
    write_npz = encoded_parts.files.write_npz
    written = []

    def fails_at_the_third(path, arrays):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path)
        write_npz(path, arrays)

    monkeypatch.setattr(encoded_parts.files, "write_npz", fails_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        cache(folder).open()
    monkeypatch.setattr(encoded_parts.files, "write_npz", write_npz)
    written[1].write_bytes(written[1].read_bytes()[:-100])  # a damaged part is noticed, too
    del encoded[:]
    store = cache(folder).open()
    assert len(encoded) == 25 - 2 * 4
    assert "2 of 7 parts were encoded before" in caplog.text and "is damaged" in caplog.text
    assert not list(cache(folder).place.glob(".tables*"))
    fresh = cache(folder, encoder=TextEncoder(tokenizer=chats.tiny(), templates={})).open()
    assert fresh.fingerprint == store.fingerprint


SLOW = """
import sys, time
from data.text import test_token_cache as tests
from openpi_train.data.text import encoded_parts

encoded_parts.PART_RECORDS, encode = 4, tests.TextEncoder.encode
tests.TextEncoder.encode = lambda self, example: (time.sleep(0.05), encode(self, example))[1]
tests.cache(tests.Path(sys.argv[1])).open()
"""


@pytest.mark.slow
def test_what_a_killed_process_encoded_is_kept(folder, encoded):
    process = subprocess.Popen([sys.executable, "-c", SLOW, folder], env={**os.environ, "PYTHONPATH": PYTHONPATH})
    place = cache(folder).place
    deadline = time.monotonic() + 60
    while not list(place.glob(".tables.parts-*/00000[1-9].npz")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    finished = len(list(place.glob(".tables.parts-*/[0-9]*.npz")))
    assert finished < 7 and not (place / "manifest.json").exists()
    store = cache(folder).open()
    assert len(store) == 25 and len(encoded) == 25 - 4 * finished


def test_a_half_written_cache_is_not_used(folder, encoded):
    of = cache(folder)
    store = of.open()
    (of.place / "manifest.json").unlink()
    assert of.open().fingerprint == store.fingerprint and len(encoded) == 50
    manifest = json.loads((of.place / "manifest.json").read_text())
    del manifest["kind"]
    (of.place / "manifest.json").write_text(json.dumps(manifest))
    assert of.open().fingerprint == store.fingerprint and len(encoded) == 75


@pytest.mark.parametrize("name", ["tokens.npy", "targets.npy", "lines.npy"])
def test_a_damaged_cache_is_named_and_built_again(folder, encoded, caplog, name):
    of = cache(folder)
    store = of.open()
    (path,) = of.place.glob(f"tables-*/{name}")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert of.open().fingerprint == store.fingerprint and len(encoded) == 50
    assert name in caplog.text and "is damaged" in caplog.text


def test_a_bad_line_is_named_by_file_and_line_or_left_out(folder, caplog):
    lines = (folder / "train-1.jsonl").read_text().splitlines()
    lines[3] = '{"prompt": '
    lines[5] = json.dumps({"prompt": "a", "completion": ""})
    (folder / "train-1.jsonl").write_text("\n".join(lines))
    with pytest.raises(BadRecord, match=r"sums, train-1\.jsonl:4: not JSON.*--data\.on-bad-record skip"):
        cache(folder).open()
    store = cache(folder, on_bad_record="skip").open()
    assert len(store) == 23 and "2 bad records are left out; the first: sums, train-1.jsonl:4" in caplog.text
    assert store.place(18) == "train-1.jsonl:5"
    lines[3] = lines[4]
    (folder / "train-1.jsonl").write_text("\n".join(lines))
    with pytest.raises(BadRecord, match=r"train-1\.jsonl:6: completion is empty"):
        cache(folder).open()


@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
@pytest.mark.parametrize(
    "record", [{"text": "a"}, {"prompt": chats.ONE[:1], "completion": chats.ONE[1:]}, {"chosen": "a", "rejected": "b"}]
)
def test_mixed_types_are_an_error(folder, encoded, record, on_bad_record):
    with (folder / "train-1.jsonl").open("a") as file:
        file.write(json.dumps(record))
    with pytest.raises(
        ValueError, match=r"mixes types: train-0\.jsonl:1 is prompt/completion, standard, train-1\.jsonl:11 is"
    ):
        cache(folder, on_bad_record=on_bad_record).open()


# As GLM's, which ends an answer by the next message's role.
ENDLESS = (
    "{% for m in messages %}<|{{ 'im_start' if m.role == 'user' else 'head' }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|head|>{% endif %}"
)
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("template", "eos", "targets", "record", "endless"),
    [
        (ENDLESS, "<|im_start|>", "assistant", {"messages": TALK * 2}, 3),
        (ENDLESS, "<|im_start|>", "auto", {"prompt": TALK[:1], "completion": TALK[1:]}, 3),
        # The first token of a text is a target that is never predicted.
        (ENDLESS, "<|im_start|>", "all", {"messages": TALK}, 3),
        (ENDLESS, "<|im_start|>", "all", {"messages": TALK * 2}, 0),
        (chats.CHATML, "<|im_end|>", "assistant", {"messages": TALK * 2}, 0),
        # The tokenizer's eos token is that of documents, as Gemma's.
        (chats.CHATML, "</s>", "assistant", {"messages": TALK * 2}, 3),
        (chats.CHATML, "</s>", "auto", {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": "c"}, 6),
        (chats.CHATML, "</s>", "auto", {"prompt": "a", "completion": "b"}, 0),
        (chats.CHATML, "</s>", "auto", {"prompt": "a"}, 0),
    ],
)
def test_texts_without_a_stop_token_among_their_targets_are_a_finding(
    tmp_path, template, eos, targets, record, endless
):
    tokenizer = chats.tiny(eos_token=eos)
    of = TextEncoder(tokenizer=tokenizer, templates={"default": chats.chat(template)}, targets=targets)
    store = cache(write(tmp_path / "talk.jsonl", [record] * 3), encoder=of).open()
    again = cache(tmp_path / "talk.jsonl", encoder=of).open()
    assert again.findings == store.findings and len(store.findings) == bool(endless)
    for finding in store.findings:
        assert (finding.kind, finding.count, finding.total) == (
            "no stop token is a target",
            endless,
            len(store.text_ends),
        )
        assert (finding.where, finding.what) == ("talk.jsonl:1", f"tokens that end a completion: '{eos}'")


def test_the_models_own_end_of_a_turn_is_a_stop_token(tmp_path):
    files = chats.files(template=chats.CHATML) | {"generation_config.json": b'{"eos_token_id": [2, 4]}'}
    of = TextEncoder(tokenizer=chats.TextTokenizer(files, "tiny"), templates={"default": chats.chat(chats.CHATML)})
    assert not cache(write(tmp_path / "talk.jsonl", [{"messages": TALK}]), encoder=of).open().findings


# A row of examples/data_preprocess/gsm8k.py of verl, which writes parquet.
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}
ANSWERS = {"prompt": "prompt", "completion": "reward_model.ground_truth"}


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "json text", "dotted"])
def test_an_entry_of_a_column_is_a_column(tmp_path, ending):
    record = VERL | ({"reward_model": json.dumps(VERL["reward_model"])} if ending == "json text" else {})
    if ending == "dotted":
        record |= {"reward_model": "x", "reward_model.ground_truth": "2"}
    path = tmp_path / ("verl.jsonl" if ending == "jsonl" else "verl.parquet")
    if ending == "jsonl":
        write(path, [record])
    else:
        parquet.write_table(pa.Table.from_pylist([record]), path)
    of = cache(path, columns=ANSWERS)
    store = of.open()
    assert store.kind == "prompt/completion"
    tokens, targets = store.text(0)
    assert of.encoder.tokenizer.decode(tokens[targets]) == "2<|im_end|>\n"


def test_an_entry_that_a_column_lacks_is_said(tmp_path):
    path = write(tmp_path / "verl.jsonl", [VERL])
    for column, told in [
        ("reward_model.answer", r"has no reward_model\.answer,.*reward_model has \['ground_truth', 'style'\]"),
        ("ability.answer", r"has no ability\.answer"),
        (
            "answer.x",
            r"no answer\.x, which --data\.datasets\.N\.columns names; it has \['ability', 'data_source'",
        ),
        ("reward_model", "completion is an object; allowed: a string, or a list of messages"),
    ]:
        with pytest.raises(BadRecord, match=told):
            cache(path, columns=ANSWERS | {"completion": column}).open()


def test_what_a_run_cannot_use_or_find_is_said(folder, tmp_path):
    with pytest.raises(ValueError, match=r"prompt/completion; .*preference: train lm_sft on it, or name"):
        cache(folder, kinds=["preference"]).open()
    with pytest.raises(BadRecord, match=r"has no answer, which --data\.datasets\.N\.columns names; it has"):
        cache(folder, columns={"completion": "answer"}).open()
    with pytest.raises(BadRecord, match=r"sums .*25 records .*sums, train-0\.jsonl:1"):
        cache(folder, columns={"completion": "answer"}, on_bad_record="skip").open()
    write(folder / "train-0.jsonl", [])
    (folder / "train-1.jsonl").unlink()
    with pytest.raises(BadRecord, match="it is empty"):
        cache(folder).open()
