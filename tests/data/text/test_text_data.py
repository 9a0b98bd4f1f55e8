"""Opened text data: rows, packing, truncation, splits, batches, and the same batches in every process."""

import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import pickle
import re
import subprocess
import sys

import chats
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from openpi_train.data.core.interface import OpeningRequest
from openpi_train.data.core.source import BadRecord
from openpi_train.data.core.workers import LocalBatches
from openpi_train.data.text import arithmetic
from openpi_train.data.text.examples import example_of
from openpi_train.data.text.opened_texts import lengths_of_batches
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.data.text.text_encoder import TextEncoder, templates_of
from openpi_train.data.tokenizers.text_tokenizer import TextTokenizer, load_text_tokenizer
from openpi_train.experiment import Experiment
from openpi_train.models.language import LanguageConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.objectives.judged_completions import JudgedCompletions
from openpi_train.objectives.preference_pairs import PreferencePairs
from openpi_train.objectives.reward_pairs import RewardPairs
from openpi_train.runtime.exits import DataError
from openpi_train.types import PreferenceBatch, TextBatch

SIZES = DecoderSizes(vocab_size=400, width=16, depth=1, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
MODEL = LanguageConfig(sizes=SIZES, dtype="float32", context_length=64)
BATCH = 8
WORDS = " ".join(chats.SENTENCES[:3]).split()


def sums(number):
    """A prompt, and a completion of some other length."""
    return {"prompt": f"{number}: {WORDS[number % 7]}", "completion": " " + " ".join(WORDS[: 1 + number * 7 % 11])}


SUMS = [sums(number) for number in range(60)]
PAIRS = [
    {"prompt": f"{n} plus?", "chosen": " It is" + " four" * (1 + n % 5), "rejected": " five", "margin": n / 8}
    for n in range(40)
]
LABELLED = [
    {"prompt": f"{n} plus?", "completion": " It is four", "label": n % 3 == 0, "reference_logps": -float(n)}
    for n in range(40)
]


@pytest.fixture
def made(tmp_path):
    """Opens text data of records that are written to files."""
    tokenizer = str(chats.write(tmp_path / "tokenizer", template=chats.CHATML))

    def make(*datasets, model=MODEL, seed=0, batch_size=BATCH, weights=None, about=None, **given):
        paths = []
        for number, records in enumerate(datasets):
            paths.append(tmp_path / f"set{number}.jsonl")
            paths[-1].write_text("".join(json.dumps(record) + "\n" for record in records))
        config = TextData(
            datasets=tuple(
                TextDataset(path=str(path), weight=weight, **(about or {}))
                for path, weight in zip(paths, weights or [1.0] * len(paths), strict=True)
            ),
            cache_dir=str(tmp_path / "index"),
            **({"tokenizer": tokenizer, "max_length": 64} | given),
        )
        return config, config.open(OpeningRequest(model=model, seed=seed, batch_size=batch_size))

    return make


def rows_of(rows):
    """Every row of the first epoch."""
    columns, skipped = rows.batch(np.arange(rows.num_samples))
    assert not skipped
    return columns


def texts_in(columns):
    """Each text's tokens, positions and weights, whatever row it is in, sorted."""
    found = []
    for tokens, segments, positions, weights in zip(
        *(columns[name] for name in ("tokens", "segments", "positions", "weights")), strict=True
    ):
        assert (np.diff(segments[segments > 0]) >= 0).all() and (segments[np.count_nonzero(segments) :] == 0).all()
        for segment in range(1, segments.max() + 1):
            mine = segments == segment
            found.append((tuple(tokens[mine]), tuple(positions[mine]), tuple(weights[mine])))
    return sorted(found)


def sharding(devices=1):
    mesh = jax.make_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices])
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))


def test_a_row_is_its_text_with_positions_and_targets(made):
    _, data = made(SUMS, validation_fraction=0.0)
    encoder = TextEncoder(tokenizer=chats.tiny(), templates={})
    expected = []
    for record in SUMS:
        (text,) = encoder.encode(example_of(record))
        weights = np.where(np.arange(len(text.tokens)) > 0, text.targets, False).astype(np.float32)
        expected.append((tuple(text.tokens), tuple(range(len(text.tokens))), tuple(weights)))
    assert texts_in(rows_of(data.train)) == sorted(expected)
    assert data.num_samples == 60 and data.text_length % 8 == 0


def test_the_eos_token_is_a_target_where_it_is_also_the_pad_token(made):
    _, data = made(SUMS, validation_fraction=0.0)
    columns = rows_of(data.train)
    last = np.count_nonzero(columns["segments"], axis=1) - 1
    rows = np.arange(len(last))
    assert (columns["tokens"][rows, last] == 2).all() and (columns["weights"][rows, last] == 1).all()
    assert (columns["weights"][columns["segments"] == 0] == 0).all()


def test_the_first_token_of_a_text_is_never_a_target(made):
    _, data = made([{"text": record["completion"]} for record in SUMS], packing=True)
    columns = rows_of(data.train)
    assert (columns["weights"][columns["positions"] == 0] == 0).all()
    assert (columns["weights"][(columns["segments"] > 0) & (columns["positions"] > 0)] == 1).all()


def test_packing_puts_the_same_texts_into_fewer_rows(made):
    _, alone = made(SUMS)
    _, packed = made(SUMS, packing=True)
    assert texts_in(rows_of(alone.train)) == texts_in(rows_of(packed.train))
    assert texts_in(rows_of(alone.validation)) == texts_in(rows_of(packed.validation))
    assert packed.num_samples < alone.num_samples / 2 and packed.text_length <= 64
    described = packed.train.describe(np.arange(packed.num_samples))
    assert all(line.startswith("set0: set0.jsonl:") and line.endswith("(epoch 0)") for line in described)
    assert any(" and 1 more (" in line for line in described)


@pytest.mark.slow
def test_the_loss_of_packed_texts_is_that_of_the_texts(made):
    model = MODEL.build(nnx.Rngs(0))

    def loss(data):
        columns = {name: jnp.asarray(column) for name, column in rows_of(data.train).items()}
        x = model(columns["tokens"], columns["positions"], columns["segments"])
        found = model.scores(x[:, :-1], columns["tokens"][:, 1:])
        weights = columns["weights"][:, 1:]
        return -(found.log_prob * weights).sum() / weights.sum()

    _, alone = made(SUMS)
    _, packed = made(SUMS, packing=True)
    np.testing.assert_allclose(loss(packed), loss(alone), rtol=1e-5)  # sums of another order


def test_batches_have_few_lengths_and_lose_no_token(made):
    records = [{"text": "a"}] * 200 + [{"text": " ".join(WORDS[:20])}]
    _, data = made(records, batch_size=2, validation_fraction=0.0)
    specs = data.batch_specs(2)
    lengths = [spec.tokens.shape[1] for spec in specs]
    assert 1 < len(lengths) <= 3 and lengths == sorted(lengths) and lengths[-1] == data.text_length
    seen = set()
    for step in range(101):
        positions = step * 2 + np.arange(2)
        columns, _ = data.train.batch(positions)
        cut = data.train.cut(columns, positions)
        seen.add(cut["tokens"].shape[1])
        assert cut["segments"].sum() == columns["segments"].sum() and cut["weights"].sum() == columns["weights"].sum()
    assert seen <= set(lengths) and min(lengths) in seen
    _, data = made(records, batch_size=2, text_lengths=1)
    assert len(data.batch_specs(2)) == 1


def test_a_few_long_texts_are_cut_without_a_warning(made, caplog):
    caplog.set_level(logging.INFO)
    texts = ["a", "a", "a", "a b c d e f g h i j k l m n"]
    made([{"text": text + f" {number}"} for number, text in enumerate(texts)], max_length=8, validation_fraction=0.0)
    assert "; 1 of the texts (25 %) are cut" in caplog.text and "hold 95" not in caplog.text


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end", "drop"])
def test_long_texts_are_cut_or_dropped(made, truncation, caplog):
    caplog.set_level(logging.INFO)
    records = [{"text": record["completion"]} for record in SUMS]
    _, whole = made(records, validation_fraction=0.0)
    _, data = made(records, max_length=6, truncation=truncation, validation_fraction=0.0)
    expected = []
    for tokens, *_ in texts_in(rows_of(whole.train)):
        if len(tokens) > 6 and truncation == "drop":
            continue
        tokens = tokens[-6:] if truncation == "keep_end" else tokens[:6]
        expected.append((tokens, tuple(range(len(tokens))), (0.0, *[1.0] * (len(tokens) - 1))))
    assert texts_in(rows_of(data.train)) == sorted(expected)
    cut = [line for line in caplog.messages if line.startswith("data: set0, ") and "cut to" in line]
    over = sum(len(tokens) > 6 for tokens, *_ in texts_in(rows_of(whole.train)))
    assert len(cut) == (truncation != "drop")
    if cut:
        assert f"; {over} of the texts ({100 * over / 60:.2g} %) are cut to --data.max-length 6" in cut[0]
        lengths = sorted(len(tokens) for tokens, *_ in texts_in(rows_of(whole.train)))
        (told,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING" and "hold 95" in one.msg]
        end = "beginning" if truncation == "keep_end" else "end"
        assert f"{100 * over / 60:.0f} % of the texts" in told and f"lose their {end}; {lengths[57]} tokens" in told
    if truncation == "drop":
        dropped = 60 - len(expected)
        assert re.search(rf"6 tokens, .*dropped: {dropped} of 60; .*set0\.jsonl:", caplog.text)


def test_a_text_without_targets_is_an_error_or_dropped(made, caplog):
    long = {"prompt": " ".join(WORDS), "completion": " four"}
    with pytest.raises(
        ValueError,
        match=r"set0, set0\.jsonl:61: .*--data\.max-length 24 "
        r"\(samples without targets: 1\)\. Raise .*--data\.truncation keep_end.*--data\.on-no-targets drop",
    ):
        made([*SUMS, long], max_length=24, validation_fraction=0.0)
    _, data = made([*SUMS, long], max_length=24, on_no_targets="drop", validation_fraction=0.0)
    assert (
        data.num_samples == 60
        and "without targets, which are dropped: 1; the first: set0, set0.jsonl:61" in caplog.text
    )
    _, data = made([*SUMS, long], max_length=24, truncation="keep_end", validation_fraction=0.0)
    assert data.num_samples == 61
    talk = [{"messages": [*chats.ONE, {"role": "user", "content": " ".join(WORDS)}]}]
    with pytest.raises(ValueError, match="all its targets are cut off"):
        made(talk, max_length=16, truncation="keep_end", targets="assistant", validation_fraction=0.0)


def test_a_preference_is_one_row_with_two_texts(made):
    config, data = made(PAIRS, kind="preferences", max_length=32, validation_fraction=0.0)
    columns = rows_of(data.train)
    assert sorted(columns["margin"].tolist()) == [n / 8 for n in range(40)]
    encoder = TextEncoder(tokenizer=chats.tiny(), templates={})
    by_margin = {record["margin"]: encoder.encode(example_of(record)) for record in PAIRS}
    for row in range(40):
        for segment, text in zip((1, 2), by_margin[float(columns["margin"][row])], strict=True):
            mine = columns["segments"][row] == segment
            np.testing.assert_array_equal(columns["tokens"][row, mine], text.tokens)
            np.testing.assert_array_equal(columns["positions"][row, mine], np.arange(len(text.tokens)))
            np.testing.assert_array_equal(columns["weights"][row, mine], text.targets)
    assert config.batch_spec(MODEL, 4).texts.tokens.shape == (4, 64)
    (batch,) = data.held_out(4, 4, sharding()) or [None]
    assert batch is None
    feed = data.feed(batch_size=BATCH, sharding=sharding(), num_workers=0, cores=None)
    batch = feed.next()
    feed.close()
    assert isinstance(batch, PreferenceBatch) and batch.reference_log_probs is None


@pytest.mark.parametrize("objective", [RewardPairs(), PreferencePairs(reference="precomputed"), JudgedCompletions()])
def test_margins_are_refused_where_the_loss_has_none(made, objective):
    config, _ = made(PAIRS, kind="preferences", max_length=32)
    names = ("prompt=prompt", "chosen=chosen", "rejected=rejected")
    for columns, refused in (((), not isinstance(objective, RewardPairs)), (names, False)):
        dataset = dataclasses.replace(config.datasets[0], columns=columns)
        data = dataclasses.replace(config, datasets=(dataset,))
        run = Experiment(model=LanguageConfig(sizes=SIZES, context_length=64), data=data, objective=objective)
        message = r"set0, set0\.jsonl:2: this preference has a margin \(0\.125\), .*columns prompt=prompt chosen=chosen"
        with pytest.raises(DataError, match=message) if refused else contextlib.nullcontext():
            run.open_data()


@pytest.mark.parametrize("kind", ["texts", "prompts", "preferences"])
def test_rows_that_only_fill_the_last_held_out_batch_have_no_text(made, kind):
    records = {"texts": SUMS, "prompts": [{"prompt": record["prompt"]} for record in SUMS], "preferences": PAIRS}[kind]
    _, data = made(records, kind=kind, validation_fraction=0.5)
    num_rows = data.validation.num_samples
    batches = data.held_out(100, BATCH, sharding())
    found = [getattr(batch, "texts", batch) for batch in batches]
    real = np.concatenate([np.asarray(texts.segments).any(1) for texts in found])
    assert num_rows % BATCH and len(real) % BATCH == 0
    assert real.tolist() == [True] * num_rows + [False] * (len(real) - num_rows)
    assert not any(np.asarray(texts.weights)[~np.asarray(texts.segments).any(1)].any() for texts in found)


def test_a_labelled_completion_is_one_text_with_its_label_as_segment(made):
    _, data = made(LABELLED, kind="unpaired", reference_log_probs=True, validation_fraction=0.0)
    columns = rows_of(data.train)
    numbers = -columns["reference_log_probs"].sum(1)
    assert sorted(numbers.tolist()) == list(range(40))
    for number, segments, references in zip(
        numbers.astype(int).tolist(), columns["segments"], columns["reference_log_probs"], strict=True
    ):
        segment = 1 if number % 3 == 0 else 2
        assert set(segments.tolist()) == {0, segment} and references[2 - segment] == 0


def test_a_prompt_is_one_text_without_targets_whose_end_is_kept(made):
    prompts = [{"prompt": record["prompt"], "answer": number} for number, record in enumerate(SUMS)]
    config, data = made(prompts, kind="prompts", validation_fraction=0.0)
    tokenizer = chats.tiny()
    expected = [(*tokenizer.begin, *tokenizer.encode([record["prompt"]])[0].tokens) for record in SUMS]
    assert [tokens for tokens, *_ in texts_in(rows_of(data.train))] == sorted(expected)
    assert not rows_of(data.train)["weights"].any() and not config.check()
    long = {"prompt": " ".join(WORDS)}
    with pytest.raises(ValueError, match=r"set0\.jsonl:61: its prompt has \d+ tokens, which leaves no .* 24"):
        made([*prompts, long], kind="prompts", max_length=24)
    _, data = made([*prompts, long], kind="prompts", max_length=24, truncation="keep_end", validation_fraction=0.0)
    ends = [tokens[-24:] for tokens in [*expected, (*tokenizer.begin, *tokenizer.encode([long["prompt"]])[0].tokens)]]
    assert [tokens for tokens, *_ in texts_in(rows_of(data.train))] == sorted(ends)
    with pytest.raises(ValueError, match=r"dataset of prompt only; this run takes language modelling or prompt/com"):
        made(prompts)
    for given in ({"packing": True}, {"targets": "all"}, {"reference_log_probs": True}):
        assert len(dataclasses.replace(config, **given).check()) == 1


def test_conversations_and_texts_mix_by_weight(made):
    talks = [{"messages": chats.TWO}, {"messages": chats.SYSTEM}, {"messages": chats.ONE}]
    _, data = made(SUMS, talks, weights=[3.0, 1.0], validation_fraction=0.0)
    assert data.train.proportions(4096) == {"0_set0": 0.75, "1_set1": 0.25}
    described = data.train.describe(np.arange(64))
    assert sum(line.startswith("set1: set1.jsonl:") for line in described) > 4


def test_held_out_texts_are_chosen_by_their_prompts(made):
    doubled = [{**record, "completion": record["completion"] + suffix} for record in SUMS for suffix in ("", " x")]
    _, data = made(doubled, validation_fraction=0.3)

    def prompts(rows):
        return {t for text in texts_in(rows_of(rows)) for t in [text[0][: text[2].index(1.0)]]}

    train, held_out = prompts(data.train), prompts(data.validation)
    assert not train & held_out and len(train) + len(held_out) == 60 and 5 < len(held_out) < 35
    _, again = made(doubled[::-1], validation_fraction=0.3, seed=5)
    assert prompts(again.validation) == held_out
    _, data = made(SUMS, validation_fraction=0.0)
    assert data.validation is None and data.held_out(4, 4, sharding()) == []


def test_a_split_or_a_file_can_be_held_out(made, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(SUMS[3]) + "\n")
    _, data = made(SUMS, about={"validation": str(other)})
    assert (data.num_samples, data.validation.num_samples) == (60, 1)
    (tmp_path / "folder").mkdir()
    for name, records in (("train", SUMS[:9]), ("test", SUMS[9:11])):
        (tmp_path / "folder" / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config, _ = made(SUMS)
    folder = TextDataset(path=str(tmp_path / "folder"), validation="test")
    data = dataclasses.replace(config, datasets=(folder,)).open(OpeningRequest(model=MODEL, seed=0, batch_size=BATCH))
    assert (data.num_samples, data.validation.num_samples) == (9, 2)


@pytest.mark.parametrize(
    ("path", "split", "validation", "message"),
    [
        (
            "set0.jsonl",
            "train",
            "test",
            r"\.validation test: the single file .*set0\.jsonl has no split test; .*None",
        ),
        ("set0.jsonl", "test", "test", r"the single file .*set0\.jsonl has no split test"),
        ("folder", None, "test", r"--data\.datasets\.0\.validation test: test\.jsonl of .*folder would be trained on"),
        ("folder", "train", "dev", "no file of the split dev"),
    ],
)
def test_no_text_is_trained_on_and_held_out(made, tmp_path, path, split, validation, message):
    config, _ = made(SUMS)
    (tmp_path / "folder").mkdir()
    for name in ("train", "test"):
        (tmp_path / "folder" / f"{name}.jsonl").write_text(json.dumps(SUMS[0]) + "\n")
    dataset = TextDataset(path=str(tmp_path / path), split=split, validation=validation)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        dataclasses.replace(config, datasets=(dataset,)).open(OpeningRequest(model=MODEL, seed=0, batch_size=BATCH))


def test_filler_rows_of_held_out_batches_have_no_targets(made):
    _, data = made(SUMS, validation_fraction=0.3)
    number = data.validation.num_samples
    batches = data.held_out(1000, 4, sharding())
    weights = np.concatenate([np.asarray(batch.weights) for batch in batches])
    assert number % 4 and len(weights) == -(-number // 4) * 4
    assert (weights[:number].sum(1) > 0).all() and (weights[number:] == 0).all()


@pytest.mark.parametrize("packing", [False, True])
def test_rows_are_the_same_for_every_number_of_processes_and_workers(made, packing):
    _, data = made(SUMS, packing=packing)
    rows = pickle.loads(pickle.dumps(data.train))  # a worker's copy
    for step in range(6):
        whole = LocalBatches(data.train, BATCH, np.arange(BATCH))[step]["columns"]
        parts = [LocalBatches(rows, BATCH, np.arange(4) + first)[step]["columns"] for first in (0, 4)]
        for name, column in whole.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), column)


def test_batches_are_the_same_on_any_number_of_devices_and_after_seeking(made):
    _, data = made(SUMS)

    def batches(devices, num_workers=0):
        feed = data.feed(batch_size=BATCH, sharding=sharding(devices), num_workers=num_workers, cores=None)
        found = [jax.tree.map(np.asarray, feed.next()) for _ in range(3)]
        position = feed.position()
        found.append(jax.tree.map(np.asarray, feed.next()))
        feed.seek(position)
        again = jax.tree.map(np.asarray, feed.next())
        feed.close()
        jax.tree.map(np.testing.assert_array_equal, again, found[-1])
        return found

    one, four = batches(1), batches(4)
    assert all(isinstance(batch, TextBatch) for batch in one)
    jax.tree.map(np.testing.assert_array_equal, one, four)
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), spec) for spec in data.batch_specs(BATCH)]
    assert all(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch) in shapes for batch in one)


@pytest.mark.parametrize("packing", [False, True])
def test_another_batch_size_goes_on_behind_the_texts_that_were_seen(made, packing):
    _, data = made(SUMS, packing=packing)
    found, position = [], None
    for batch_size, num_steps in ((BATCH, 2), (4, 1), (2 * BATCH, 1)):
        feed = data.feed(batch_size=batch_size, sharding=sharding(), num_workers=0, cores=None)
        if position is not None:
            feed.seek(position)
        found += [np.asarray(feed.next().tokens) for _ in range(num_steps)]
        position = json.loads(json.dumps(feed.position()))
        feed.close()
    expected = data.train.batch(np.arange(4 * BATCH + 4))[0]["tokens"]
    assert position["rows"] == len(expected)
    for number, row in enumerate(row for batch in found for row in batch):  # batches differ in their length
        np.testing.assert_array_equal(row, expected[number, : len(row)])
        assert not expected[number, len(row) :].any()


def test_a_run_that_goes_on_names_the_files_that_changed(made, tmp_path):
    config, _ = made(SUMS)
    folder = tmp_path / "folder"
    folder.mkdir()

    def feed(**files):
        for name, records in files.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        data = dataclasses.replace(config, datasets=(TextDataset(path=str(folder)),))
        opened = data.open(OpeningRequest(model=MODEL, seed=0, batch_size=BATCH))
        return opened.feed(batch_size=BATCH, sharding=sharding(), num_workers=0, cores=None)

    position = json.loads(json.dumps(feed(a=SUMS[:20], b=SUMS[20:40]).position()))
    feed().seek(position)
    with pytest.raises(
        ValueError,
        match=r"other data(.|\n)*\.texts: then (.|\n)*files that are of other content than then: "
        r"dataset 0 \(folder\): b\.jsonl\n  files that are new: dataset 0 \(folder\): c\.jsonl\n",
    ):
        feed(b=SUMS[20:41], c=SUMS[41:42]).seek(position)
    del position["files"]  # as runs had it before
    with pytest.raises(ValueError, match=r"belongs to other data") as told:
        feed().seek(position)
    assert "files that" not in str(told.value)


def test_openings_at_the_same_time_and_of_moved_files_are_equal(made, tmp_path):
    config, data = made(SUMS)
    moved = tmp_path / "elsewhere" / "set0.jsonl"
    moved.parent.mkdir()
    moved.write_bytes((tmp_path / "set0.jsonl").read_bytes())
    other = dataclasses.replace(config, datasets=(TextDataset(path=str(moved)),), cache_dir=str(tmp_path / "two"))
    request = OpeningRequest(model=MODEL, seed=0, batch_size=BATCH)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        opened = list(pool.map(lambda _: other.open(request), range(3)))
    assert {one.fingerprint for one in opened} == {data.fingerprint}
    for change in ({"max_length": 32}, {"packing": True}, {"truncation": "keep_end"}, {"validation_fraction": 0.3}):
        assert dataclasses.replace(config, **change).open(request).fingerprint != data.fingerprint


def test_checkpoints_get_the_tokenizer_and_its_template(made, tmp_path):
    _, data = made(SUMS)
    assert data.tokenizer == chats.tiny().fingerprint
    assert set(data.token_files) == {f"tokenizer/{name}" for name in
                                     ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")}  # fmt: skip
    (tmp_path / "mine.jinja").write_text(chats.HEADED)
    _, data = made([{"messages": chats.ONE}] * 3, chat_template=str(tmp_path / "mine.jinja"))
    assert data.token_files["tokenizer/chat_template.jinja"].decode() == chats.HEADED
    text = chats.tiny().decode(rows_of(data.train)["tokens"][0])
    assert "Today: 26 Jul 2024" in text


def test_conversations_have_the_built_in_template_where_the_tokenizer_has_none(made, tmp_path, caplog):
    bare = chats.write(tmp_path / "bare", template=None, eos_token="</s>")
    with caplog.at_level("INFO"):
        _, data = made([{"messages": chats.ONE}] * 3, tokenizer=str(bare))
    assert caplog.text.count("has no chat template, so the built-in one is used") == 1
    own = load_text_tokenizer(str(bare))
    question, answer = (message["content"] for message in chats.ONE)
    written = f"<|user|>\n{question}</s>\n<|assistant|>\n{answer}</s>\n"
    tokens = rows_of(data.train)["tokens"][0]
    assert own.decode([*own.begin, *tokens[tokens > 0]]).endswith(written) and own.eos in tokens
    # Who opens the checkpoint writes conversations in the same way.
    saved = {name.partition("/")[2]: content for name, content in data.token_files.items()}
    template = templates_of(TextTokenizer(saved, "saved"), None, "2024-07-26")["default"]
    assert template.render(chats.ONE).endswith(written)
    assert template.render(chats.ONE[:1], add_generation_prompt=True).endswith("</s>\n<|assistant|>\n")
    with pytest.raises(DataError, match="it writes texts alone: give one for tool calls"):
        calls = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
        made([{"messages": [chats.ONE[0], calls]}] * 3, tokenizer=str(bare))
    # The answer and the token that ends it are the targets, and not the question.
    _, data = made([{"messages": chats.ONE}] * 3, tokenizer=str(bare), targets="assistant")
    row = rows_of(data.train)
    assert own.decode(row["tokens"][0][row["weights"][0] > 0]) == f"{answer}</s>"


def test_plain_texts_get_no_built_in_template(made, tmp_path, caplog):
    bare = chats.write(tmp_path / "bare", template=None, eos_token="</s>")
    with caplog.at_level("INFO"):
        _, data = made(SUMS, tokenizer=str(bare))
    assert "built-in" not in caplog.text and not any("template" in name for name in data.token_files)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_length": 65}, r"--data\.max-length 65 is more than the 64 tokens of the model's context"),
        ({"model": dataclasses.replace(MODEL, sizes=dataclasses.replace(SIZES, vocab_size=300))},
         r"has 383 tokens, the model 300 .*give the tokenizer that belongs to the model"),
        ({"model": "pi0"}, "str reads no texts"),
        ({"kind": "preferences"}, r"set0 is a dataset of prompt/completion; this run takes preference"),
        ({"targets": "assistant"}, "assistant needs conversations"),
        ({"validation_fraction": 1.0}, r"must lie in \[0, 1\)"),
        ({"kind": "preferences", "packing": True}, "--data.packing is for texts"),
        ({"kind": "unpaired", "targets": "all"}, "--data.targets all is for texts"),
        ({"reference_log_probs": True}, "--data.reference-log-probs is for"),
        ({"today": "July"}, "--data.today July is no date"),
        ({"weights": [0.0]}, r"--data\.datasets\.0\.weight 0\.0 must be above 0"),
        ({"about": {"columns": ("answer",)}}, r"columns answer: needed is TYPE=COLUMN"),
        ({"about": {"columns": ("completion=answer",)}}, "has no answer"),
        ({"tokenizer": "/nowhere"}, r"no tokenizer\.json in /nowhere"),
        ({"chat_template": "/nowhere"}, "no chat template at /nowhere"),
        ({"max_length": 2, "truncation": "drop"}, "no training texts in set0"),
    ],
)  # fmt: skip
def test_bad_settings_say_what_to_do(made, given, message):
    config, _ = made(SUMS)
    if "tokenizer" in given:
        with pytest.raises(FileNotFoundError, match=message):
            dataclasses.replace(config, **given).open(OpeningRequest(model=MODEL, seed=0, batch_size=BATCH))
        return
    with pytest.raises((ValueError, BadRecord, FileNotFoundError), match=message):
        made(SUMS, **given)


def test_added_tokens_that_the_model_lacks_are_refused_only_where_a_text_has_them(made, tmp_path):
    tokenizer = chats.byte_level()
    tokenizer.add_special_tokens(["<image>"])
    folder = str(chats.write(tmp_path / "images", tokenizer=tokenizer))
    model = dataclasses.replace(MODEL, sizes=dataclasses.replace(SIZES, vocab_size=383))
    config, _ = made(SUMS, model=model)
    dataclasses.replace(config, tokenizer=folder).open(OpeningRequest(model=model, seed=0, batch_size=BATCH))
    config, _ = made([*SUMS, {"prompt": "a", "completion": "<image>"}], model=model)
    with pytest.raises(ValueError, match=r"set0\.jsonl:61: .* gives the token 383 \('<image>'\), the model has 383"):
        dataclasses.replace(config, tokenizer=folder).open(OpeningRequest(model=model, seed=0, batch_size=BATCH))


@pytest.mark.parametrize("longest", [70, 4000])
def test_choosing_lengths_takes_no_longer_for_long_texts(longest):
    """All pairs of candidate lengths are compared: there must be few of them."""
    length = -(-longest // 8) * 8
    found = lengths_of_batches([np.arange(1, longest + 1)], [1.0], length, batch_size=1, most=3)
    assert found[-1] == length and all(number % 8 == 0 for number in found) and len(found) == 3


def test_settings_that_fit_no_record_are_an_error_also_where_bad_records_are_skipped(made):
    with pytest.raises(ValueError, match=r"set0\.jsonl:1: --data\.targets assistant needs conversations") as caught:
        made(SUMS, targets="assistant", on_bad_record="skip")
    assert "on-bad-record" not in str(caught.value)


def test_a_worker_imports_no_library_of_devices_or_files():
    modules = "('jax', 'pyarrow', 'jinja2', 'tokenizers', 'tensorflow_datasets')"
    code = f"import sys, openpi_train.data.text.text_rows; print([name for name in {modules} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_reference_log_probs_are_named(made):
    with pytest.raises(ValueError, match=r"set0, set0\.jsonl:1: no log-probabilities of the reference model"):
        made(PAIRS, kind="preferences", reference_log_probs=True, max_length=32)
    _, data = made(
        [{**pair, "ref_chosen_logps": -1.5, "ref_rejected_logps": -2.5} for pair in PAIRS],
        kind="preferences", reference_log_probs=True, max_length=32,
    )  # fmt: skip
    assert (rows_of(data.train)["reference_log_probs"] == [-1.5, -2.5]).all()


def test_a_finding_is_told_once_of_a_dataset_at_every_opening(made, tmp_path, caplog):
    """The tokenizer's eos token is not the one that ends a turn of the template."""
    talks = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "2"}]} for n in range(9)
    ]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(talks[0]) + "\n")
    for _ in range(2):
        caplog.clear()
        made(talks, about={"validation": str(held_out)})
        told = [line for line in caplog.messages if "no stop token is a target" in line]
        assert len(told) == 1 and told[0].startswith("set0: no stop token is a target: 9 of 9 texts")
        assert "the first: set0.jsonl:1" in told[0] and "generation_config.json" in told[0]


def test_texts_that_the_tokenizer_does_not_know_are_told_and_refused_if_most_are(made, tmp_path, caplog):
    """Of the sum's tokens all are known; of "wo" none. The begin and the end of a text are tokens, too."""
    files = tmp_path / "digits"
    files.mkdir()
    for name, content in arithmetic.tokenizer_files().items():
        (files / name).write_text(json.dumps(content))
    given = {"tokenizer": str(files), "validation_fraction": 0.0, "model": MODEL}
    made([{"text": "12+34=46"}], **given)
    assert "unknown tokens" not in caplog.text
    made([{"text": "12+34=46"}, {"text": "two plus"}], **given)
    (told,) = [line for line in caplog.messages if "unknown tokens" in line]
    assert told.startswith("set0: unknown tokens: 8 of 20 tokens (0.4 of all, read as '<unk>' by the tokenizer ")
    assert "the first: set0.jsonl:2" in told
    with pytest.raises(ValueError, match=r"set0: 80% of the tokens stand for what .* --model\.path"):
        made([{"text": "two plus"}], **given)
