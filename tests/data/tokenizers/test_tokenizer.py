import logging
import pickle
from pathlib import Path

import numpy as np
import pytest

from openpi_train.data.formats.rlds.schema import find_version
from openpi_train.data.tokenizers.tokenizer import discretize, load_tokenizer, train_tokenizer

TEXTS = [
    "pick up  the red cube",
    "line one\nline two",
    "öffne die Tür",
    " leading and trailing ",
    "12 + 30 = 42",
    "日本",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(TEXTS * 30, tmp_path_factory.mktemp("trained") / "deep" / "small.model", 420)


def test_trained_tokenizer_is_lossless_also_on_text_it_never_saw(tokenizer):
    for text in [*TEXTS, "Zebra  ~\n\t∑ never seen", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_pieces_are_where_paligemma_has_them(tokenizer):
    assert tokenizer.encode("", bos=True, eos=True) == [2, 1]
    assert tokenizer.vocab_size <= 420


def test_loading_the_written_file_gives_the_same_tokens(tokenizer):
    loaded = load_tokenizer(tokenizer.name, max_vocab_size=tokenizer.vocab_size)
    copied = pickle.loads(pickle.dumps(tokenizer))
    for text in TEXTS:
        assert loaded.encode(text) == copied.encode(text) == tokenizer.encode(text)


def test_prompts_are_cleaned_padded_and_ended_by_a_newline_of_their_own(tokenizer):
    tokens, mask = tokenizer.prompt("  pick_up the\nred cube\n", 32)
    assert tokens.dtype == np.int32
    expected = [2, *tokenizer.encode("pick up the red cube"), *tokenizer.encode("\n")]
    assert tokens[mask].tolist() == expected
    assert mask.tolist() == [True] * len(expected) + [False] * (32 - len(expected))
    assert not tokens[~mask].any()


def test_truncation_is_warned_of_once_per_text(tokenizer, caplog):
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        tokens, mask = tokenizer.prompt("pick up the red cube", 3)
    assert mask.all()
    assert tokens.shape == (3,)
    assert caplog.text.count("cut to 3: 'pick up the red cube'; raise --model.max-token-len") == 1


@pytest.mark.parametrize("name", ["trained", "bytes"])
def test_no_state_makes_a_longer_prompt_than_the_longest(tokenizer, name):
    tokenizer = tokenizer if name == "trained" else load_tokenizer("bytes")
    generator = np.random.default_rng(0)
    states = [np.full(7, value) for value in (-2.0, -1.0, 0.0, 1.0)] + [
        generator.uniform(-1.2, 1.2, 7) for _ in range(20)
    ]
    for text in (*TEXTS, "  pick_up the\nred cube\n", "x"):
        lengths = [tokenizer.prompt(text, 400, state)[1].sum() for state in states]
        assert max(lengths) <= tokenizer.longest_prompt(text, 7)
        if name == "bytes":  # a token per digit
            assert max(lengths) == tokenizer.longest_prompt(text, 7)
        assert tokenizer.prompt(text, 400)[1].sum() == tokenizer.longest_prompt(text)


def test_states_fall_into_256_bins():
    centres = (np.arange(256) + 0.5) / 128 - 1
    assert np.array_equal(discretize(centres), np.arange(256))
    assert discretize(np.array([-1.5, -1.0, 1.0, 7.0])).tolist() == [-1, 0, 255, 255]


def test_a_missing_file_says_how_to_get_one():
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at ./no/such.model: give the path .* --data.tokenizer"):
        load_tokenizer("./no/such.model")


def test_a_hub_name_without_the_hub_client_or_the_network_says_what_to_do(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"google/no-such-model.*--data.tokenizer"):
        load_tokenizer("google/no-such-model")


def test_the_hub_client_is_asked_offline_when_told_so(tmp_path, monkeypatch, tokenizer):
    import sys
    import types

    calls = []

    def kept(repository, name, local_files_only):
        calls.append((repository, name, local_files_only))
        raise FileNotFoundError("not in the cache")

    def download(repository, allow_patterns):
        calls.append((repository, *allow_patterns, False))
        (tmp_path / "tokenizer.model").write_bytes(Path(tokenizer.name).read_bytes())
        return tmp_path

    client = types.SimpleNamespace(hf_hub_download=kept, snapshot_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert load_tokenizer("google/some").vocab_size == tokenizer.vocab_size
    with pytest.raises(FileNotFoundError, match="offline and not cached"):
        load_tokenizer("google/some", offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="offline and not cached"):
        load_tokenizer("google/some")
    # What the client keeps is taken without asking the hub.
    assert calls == [("google/some", "tokenizer.model", only_kept) for only_kept in (True, False, True, True)]


def test_a_file_of_another_kind_and_a_vocabulary_too_large_are_refused(tmp_path, tokenizer):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"not a sentencepiece model")
    with pytest.raises(ValueError, match="is not a SentencePiece model"):
        load_tokenizer(str(path))
    with pytest.raises(ValueError, match=f"has {tokenizer.vocab_size} pieces, the model's vocabulary only 100"):
        load_tokenizer(tokenizer.name, max_vocab_size=100)


def test_the_byte_tokenizer_is_built_in_and_lossless():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.vocab_size <= 264
    assert tokenizer.decode(tokenizer.encode("öffne a\n 日本")) == "öffne a\n 日本"
    assert load_tokenizer("bytes").encode("abc") == tokenizer.encode("abc")


def test_the_embedded_datasets_are_said_to_be_written_first(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENPI_TRAIN_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="data prepare --name tabletop_reach` writes it"):
        load_tokenizer(str(tmp_path / "datasets" / "tabletop_reach" / "tokenizer.model"))
    with pytest.raises(FileNotFoundError, match="data prepare --name tabletop` writes it"):
        find_version(str(tmp_path / "datasets" / "tabletop"))
    with pytest.raises(FileNotFoundError) as raised:
        find_version(str(tmp_path / "mine"))
    assert "data prepare" not in str(raised.value)
