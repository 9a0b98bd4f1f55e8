"""FAST tokens: the published processor's arithmetic and files, fitting, and decoding on devices byte by byte."""

import json
import pickle

import jax
import numpy as np
import pytest
import scipy.fft
import tokenizers

from openpi_train.data.robot.action_prompt import TokenizeActionPrompt, check_vocabulary, vocabulary_token
from openpi_train.data.tokenizers.fast_tokenizer import FastTokenizer, fit_fast, load_fast
from openpi_train.data.tokenizers.tokenizer import load_tokenizer
from openpi_train.models.pi0_fast.action_tokens import ActionTokens, decode_chunks

HORIZON, DIMS = 8, 3


def smooth_chunks(count, seed=0, horizon=HORIZON, dims=DIMS):
    """Random walks within about [-1, 1], as normalised actions are."""
    steps = np.random.default_rng(seed).normal(scale=0.25, size=(count, horizon, dims))
    return np.clip(np.cumsum(steps, axis=1), -1.5, 1.5).astype(np.float32)


def published_like(low=-60, high=300):
    """A tokenizer made as the published one was: words split by GPT-2's rule, an alphabet of plain characters."""
    bpe = tokenizers.ByteLevelBPETokenizer()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        min_frequency=2,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=[chr(number) for number in range(high - low + 1)],
        max_token_length=10_000,
    )
    rounded = np.around(scipy.fft.dct(smooth_chunks(200), axis=1, norm="ortho") * 10).astype(int) - low
    # Characters of two bytes too, in every pairing of their bytes.
    texts = ["".join(map(chr, chunk.flat)) for chunk in rounded] + [chr(number) for number in range(0x800)]
    bpe._tokenizer.train_from_iterator(texts, trainer=trainer)  # as the published `fit` calls it
    return FastTokenizer(bpe._tokenizer.to_str(), scale=10, min_token=low, name="like the published one")


@pytest.fixture(scope="module", params=["ours", "published"])
def fast(request):
    return fit_fast(smooth_chunks(300), vocab_size=400) if request.param == "ours" else published_like()


def test_chunks_come_back_but_for_rounding_and_tokens_are_those_of_the_published_formula(fast):
    for chunk in smooth_chunks(20, seed=1):
        tokens = fast.encode(chunk)
        # The published `__call__` and `decode`, step by step.
        coefficients = np.around(scipy.fft.dct(chunk, axis=0, norm="ortho") * fast.scale)
        text = "".join(map(chr, np.maximum(coefficients.flatten() - fast.min_token, 0).astype(int)))
        bpe = tokenizers.Tokenizer.from_str(fast._json)
        assert tokens == bpe.encode(text).ids
        numbers = np.array(list(map(ord, bpe.decode(tokens)))) + fast.min_token
        expected = scipy.fft.idct(numbers.reshape(HORIZON, DIMS) / fast.scale, axis=0, norm="ortho")
        decoded = fast.decode(tokens, HORIZON, DIMS)
        np.testing.assert_allclose(decoded, expected, rtol=1e-12)
        assert len(tokens) < chunk.size
        if coefficients.min() >= fast.min_token:
            # The transform keeps lengths: an error of at most half a unit in each coefficient.
            assert np.linalg.norm(decoded - chunk) <= 0.5 / fast.scale * np.sqrt(chunk.size) + 1e-6


def test_tokens_of_no_chunk_are_none_and_unknown_coefficients_are_refused(fast):
    tokens = fast.encode(smooth_chunks(1)[0])
    assert fast.decode(tokens, HORIZON + 1, DIMS) is None and fast.decode(tokens[:-1], HORIZON, DIMS) is None
    assert fast.decode([], HORIZON, DIMS) is None
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        fast.encode(np.full((HORIZON, DIMS), np.nan))


def test_devices_decode_what_the_host_decodes_from_any_tokens(fast):
    rng = np.random.default_rng(0)
    rows = [fast.encode(chunk) for chunk in smooth_chunks(40, seed=2)]
    # Broken ones: cut, changed, of bytes that are half a character, of nothing but random tokens.
    rows += [row[:-1] for row in rows[:5]] + [[*row[:-1], int(rng.integers(fast.vocab_size))] for row in rows[:40]]
    single = [token for token, piece in enumerate(fast.pieces) if len(piece) == 1]
    rows += [rng.choice(single, HORIZON * DIMS).tolist() for _ in range(200)]
    two = [token for token in single if 0xC2 <= fast.pieces[token][0] < 0xE0]
    three = [token for token in single if 0xE0 <= fast.pieces[token][0] < 0xF0]
    middle = [token for token in single if 0x80 <= fast.pieces[token][0] < 0xC0]
    for _ in range(100):
        characters = [[rng.choice(two), rng.choice(middle)] for _ in range(HORIZON * DIMS)]
        if three:
            characters[int(rng.integers(len(characters)))] = [rng.choice(three), rng.choice(middle), rng.choice(middle)]
        rows.append([int(token) for character in characters for token in character])
        rows.append([*rows[-1][1:], int(rng.choice(two))])  # the first byte is in the middle of a character
    width = max(map(len, rows))
    padded = np.array([[*row, *[-1] * (width - len(row))] for row in rows])
    ours = np.asarray(jax.jit(lambda tokens: decode_chunks(fast, tokens, HORIZON, DIMS))(padded))
    expected = [fast.decode(row, HORIZON, DIMS) for row in rows]
    assert 50 < sum(chunk is not None for chunk in expected) < len(rows) - 50
    for row, (chunk, wanted) in enumerate(zip(ours, expected, strict=True)):
        wanted = np.zeros((HORIZON, DIMS)) if wanted is None else wanted
        np.testing.assert_allclose(chunk, wanted, rtol=1e-5, atol=1e-4 * max(1, np.abs(wanted).max()), err_msg=str(row))


def test_a_saved_tokenizer_is_the_same_and_has_the_published_files(tmp_path, fast):
    directory = fast.save(tmp_path / "fast")
    config = json.loads((directory / "processor_config.json").read_text())
    assert {config[name] for name in ("action_dim", "time_horizon")} == {None}
    assert (config["scale"], config["min_token"], config["vocab_size"]) == (10, fast.min_token, fast.vocab_size)
    chunks = smooth_chunks(5, seed=3)
    for again in (load_fast(str(directory)), pickle.loads(pickle.dumps(fast))):
        assert [again.encode(chunk) for chunk in chunks] == [fast.encode(chunk) for chunk in chunks]


def test_transformers_reads_a_saved_tokenizer(tmp_path, fast):
    transformers = pytest.importorskip("transformers", reason="the published processor is made of transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(fast.save(tmp_path / "fast")))
    chunk = smooth_chunks(1, seed=4)[0]
    text = fast._text(chunk)
    assert theirs(text)["input_ids"] == fast.encode(chunk)
    assert theirs.decode(fast.encode(chunk)) == text


def test_fitting_says_what_it_cannot_do():
    with pytest.raises(ValueError, match="vocab_size 256 leaves no tokens besides the 256 bytes"):
        fit_fast(smooth_chunks(3), vocab_size=256)
    with pytest.raises(ValueError, match=r"chunks of shape \(0, 8, 3\)"):
        fit_fast(smooth_chunks(0))
    with pytest.raises(ValueError, match="scale 0 must be above 0"):
        fit_fast(smooth_chunks(3), scale=0)


def test_what_is_no_processor_is_refused_with_what_to_do(tmp_path, fast, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"it lacks .*processor_config.json and .*tokenizer.json: give the dir"):
        load_fast(str(tmp_path / "empty"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"FAST processor some/where .*data fit-fast"):
        load_fast("some/where")
    with pytest.raises(FileNotFoundError, match="no FAST processor at nowhere: give the directory"):
        load_fast("nowhere")
    for name, text, problem in (
        ("processor_config.json", "{}", "is not a FAST processor's: KeyError: 'scale'"),
        ("tokenizer.json", "{}", "is not a tokenizer of the library"),
        ("tokenizer.json", tokenizers.Tokenizer(tokenizers.models.BPE()).to_str(), "is not a byte-level tokenizer"),
    ):
        directory = fast.save(tmp_path / problem[:12])
        (directory / name).write_text(text)
        with pytest.raises(ValueError, match=problem):
            load_fast(str(directory))


def test_a_row_is_cut_with_a_warning_and_a_robot_too_wide_refused(caplog):
    tokenizer, fast = load_tokenizer("bytes"), fit_fast(smooth_chunks(50), vocab_size=300)
    tokenize = TokenizeActionPrompt(tokenizer, fast, 1024, 30, 4)
    row = {"prompt": "Pick_up", "state": np.zeros(2), "actions": smooth_chunks(1)[0]}
    cut = tokenize(row)
    assert cut["prompt_mask"].all() and cut["prompt_tokens"].shape == (30,)
    assert "cut to 30: 'Pick_up'; raise --model.max-token-len" in caplog.text
    with pytest.raises(ValueError, match=r"robot has 3 action dims, the model takes 2: set --model.action-dim 3"):
        TokenizeActionPrompt(tokenizer, fast, 1024, 30, 2)(row)
    with pytest.raises(ValueError, match="the row has no prompt"):
        tokenize({"state": np.zeros(2)})


def test_tokens_that_would_be_words_are_refused():
    tokenizer, fast = load_tokenizer("bytes"), fit_fast(smooth_chunks(50), vocab_size=300)
    with pytest.raises(ValueError, match=r"has 300 tokens, .* set --model.vocab-size (\d+) or more") as refused:
        check_vocabulary(tokenizer, fast, 512)
    enough = int(str(refused.value).split("--model.vocab-size ")[1].split()[0])
    check_vocabulary(tokenizer, fast, enough)
    with pytest.raises(ValueError):
        check_vocabulary(tokenizer, fast, enough - 1)


def test_sampled_tokens_become_the_chunk_that_training_rows_say(tmp_path, fast):
    tokenizer, vocab_size = load_tokenizer("bytes"), 2048
    read = ActionTokens(str(fast.save(tmp_path / "fast")), vocab_size, HORIZON, DIMS)
    tokenize = TokenizeActionPrompt(tokenizer, fast, vocab_size, 200, DIMS)
    chunk = smooth_chunks(1, seed=5)[0]
    row = tokenize({"prompt": "go", "state": np.zeros(2), "actions": chunk})
    said = row["prompt_tokens"][row["token_ar_mask"]]
    # As sampled: from "Action: " to the end, then padding; another chunk after the end is not looked at.
    sampled = np.zeros((3, 200), np.int32)
    sampled[0, : len(said)] = said
    sampled[1, : len(said)], sampled[1, len(said) + 3 : 2 * len(said) + 3] = said, said
    sampled[2, : len(said) - 4] = said[:-4]
    decoded = np.asarray(jax.jit(read)(sampled))
    np.testing.assert_allclose(decoded[0], fast.decode(fast.encode(chunk), HORIZON, DIMS), atol=1e-5)
    np.testing.assert_array_equal(decoded[1], decoded[0])
    assert not decoded[2].any()
    assert vocabulary_token(fast.vocab_size - 1, vocab_size) >= tokenizer.vocab_size
