"""The `generate` verb: a prompt, a message, a file that is continued, a conversation in the terminal."""

import json
import logging

import ml_dtypes
import numpy as np
import pytest
from text_models import write_model

from openpi_train import cli
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.interop.stored_leaves import Stored, in_memory
from openpi_train.policy.text_model import load_text_model, stored_dtype
from openpi_train.runtime.exits import DATA, USAGE, UsageError
from openpi_train.tools import generate_text
from openpi_train.tools.generate_text import chat, complete_file

SETTINGS = SamplingSettings(max_new_tokens=6, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(folder):
    return load_text_model(folder, num_rows=4, max_length=96)


@pytest.fixture
def loaded(model, monkeypatch):
    """The verb's model, without loading it again."""
    asked = []

    def load(where, **given):
        asked.append((where, given))
        return model

    monkeypatch.setattr(generate_text, "load_text_model", load)
    return asked


def whole(model, given, settings=SETTINGS, row=0):
    """The completion of one prompt alone."""
    return model.complete([model.prompt_of(given)], settings, rows=[row])[0].text


def test_a_folder_is_computed_in_the_dtype_of_its_tensors(model):
    assert model.generator._devices.dtype == "float32"  # though the config's own default is bfloat16

    def stored(*dtypes):
        leaves = {str(number): in_memory(np.zeros(size, dtype)) for number, (size, dtype) in enumerate(dtypes)}
        return Stored(where="memory", format="huggingface", params=leaves)

    assert stored_dtype(stored((9, ml_dtypes.bfloat16), (6, np.float32))) == "bfloat16"
    assert stored_dtype(stored((6, ml_dtypes.bfloat16), (9, np.float32))) == "float32"
    assert stored_dtype(stored((6, np.float16))) == "float32"


@pytest.mark.slow
def test_a_prompt_is_continued_and_a_message_answered(folder, model, capsys):
    flags = ["--max-new-tokens", "6", "--seed", "3", "--max-length", "96"]
    assert cli.run(["generate", str(folder), "--prompt", "What is", *flags]) == 0
    assert capsys.readouterr().out == whole(model, "What is") + "\n"
    assert cli.run(["generate", str(folder), "--message", "What is", "--system", "Be short.", *flags]) == 0
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is"}]
    assert capsys.readouterr().out == whole(model, asked) + "\n"


def test_a_text_for_a_model_of_conversations_is_continued_and_said_to_be(loaded, model, capsys, caplog):
    said = "--message asks by the model's chat template"
    with caplog.at_level(logging.INFO):
        for flag, is_said in (("--prompt", True), ("--message", False)):
            caplog.clear()
            assert cli.run(["generate", "x", flag, "What is", "--max-new-tokens", "2"]) == 0
            assert (said in caplog.text) is is_said


def test_several_samples_are_numbered_and_differ(loaded, model, capsys):
    flags = ["--prompt", "What", "--samples", "3", "--max-new-tokens", "6", "--seed", "3", "--dtype", "float32"]
    assert cli.run(["generate", "somewhere", *flags]) == 0
    expected = [whole(model, "What", row=row) for row in range(3)]
    assert capsys.readouterr().out == "".join(f"[{row + 1}] {text}\n" for row, text in enumerate(expected))
    assert len(set(expected)) == 3
    ((where, given),) = loaded
    assert where == "somewhere" and given["dtype"] == "float32" and given["num_rows"] == 16


RECORDS = [
    {"prompt": "What is", "number": 7},
    {"messages": [{"role": "user", "content": "日本?"}]},
    {"prompt": [{"role": "user", "content": "Tokyo"}]},
    {"prompt": "It"},
    {"prompt": "of course"},
]


def written(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_file_is_completed_in_its_order_and_continued_where_it_was_stopped(model, tmp_path):
    source, target = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    complete_file(model, source, target, SETTINGS, 2)
    found = written(target)
    for number, (record, line) in enumerate(zip(RECORDS, found, strict=True)):
        assert {name: line[name] for name in record} == record
        given = record.get("prompt", record.get("messages"))
        expected = [whole(model, given, row=2 * number + sample) for sample in range(2)]
        assert [one["text"] for one in line["completions"]] == expected
        assert all(one["finish_reason"] in ("stop", "length") and one["tokens"] <= 6 for one in line["completions"])
    whole_file = target.read_bytes()
    # Stopped in the middle of the third line.
    cut = whole_file.index(b"\n", whole_file.index(b"\n") + 1) + 20
    target.write_bytes(whole_file[:cut])
    complete_file(model, source, target, SETTINGS, 2)
    assert target.read_bytes() == whole_file


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"text": "a"}', "it has no prompt: needed is `prompt`"),
        ('{"prompt": ""}', "it has no prompt"),
        ('{"prompt": [1]}', "it has no prompt"),
        ("{", "not JSON"),
        (json.dumps({"prompt": "long " * 200}), "tokens, which leaves no room for a completion"),
        ('{"prompt": "b", "completions": []}', "it has a column `completions`, which --out writes: rename or remove"),
        ('{"prompt": "b", "note": "\\ud800"}', 'its column "note" has half of a surrogate pair'),
        ('{"prompt": "b", "notes": {"\\udc00": 1}}', 'its column "notes" has half of a surrogate pair'),
    ],
)
def test_a_record_that_cannot_be_completed_is_named_by_its_line(loaded, tmp_path, line, told, capsys):
    source, target = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n' + line + "\n")
    assert cli.run(["generate", "somewhere", "--file", str(source), "--out", str(target)]) == DATA
    error = capsys.readouterr().err
    assert "prompts.jsonl:2" in error and told in error
    assert not target.exists()


def test_a_file_without_prompts_is_refused(loaded, tmp_path, capsys):
    source, target = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n \n")
    assert cli.run(["generate", "somewhere", "--file", str(source), "--out", str(target)]) == DATA
    assert "prompts.jsonl has no prompts: needed is one object per line" in capsys.readouterr().err
    assert not target.exists()


def test_completions_of_other_prompts_are_not_continued(loaded, tmp_path, capsys):
    source, target = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    target.write_text('{"prompt": "b", "completions": [{"text": "c"}]}\n')
    before = target.read_bytes()
    assert cli.run(["generate", "somewhere", "--file", str(source), "--out", str(target)]) == DATA
    assert "line 1 does not hold 1 completions of prompts.jsonl:1" in capsys.readouterr().err
    assert target.read_bytes() == before


def test_numbers_that_do_not_equal_themselves_are_continued(loaded, model, tmp_path):
    source, target = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "score": NaN}\n{"prompt": "b", "scores": [NaN, Infinity]}\n')
    target.write_text(
        '{"prompt": "a", "score": NaN, "completions": [{}]}\n'
        '{"prompt": "b", "scores": [NaN, Infinity], "completions": [{}]}\n'
    )
    before = target.read_bytes()
    complete_file(model, source, target, SETTINGS, 1)  # nothing is left to do
    assert target.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[1, 2]", "line 2 is no line of completions: [1, 2] is no object"),
        ("hello", "line 2 is no line of completions: not JSON"),
        ("", "line 2 is no line of completions: not JSON"),
        ('{"prompt": "b", "completions": 1}', "line 2 does not hold 1 completions of prompts.jsonl:2"),
        ('{"prompt": "b"}', "line 2 does not hold 1 completions of prompts.jsonl:2"),
        ('{"completions": [{}]}', "line 2 does not hold 1 completions of prompts.jsonl:2"),
    ],
)
def test_a_file_that_holds_no_completions_is_named_with_the_line(loaded, tmp_path, line, told, capsys):
    source, target = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    target.write_text('{"prompt": "a", "completions": [{}]}\n' + line + "\n")
    before = target.read_bytes()
    assert cli.run(["generate", "somewhere", "--file", str(source), "--out", str(target)]) == DATA
    error = capsys.readouterr().err
    assert f"--out {target}: {told}" in error and "name another file, or remove this one" in error
    assert target.read_bytes() == before


@pytest.mark.slow
def test_a_conversation_goes_on_until_it_is_begun_anew(model):
    said = []
    chat(
        model,
        [],
        SETTINGS,
        ["What is two?\n", "\n", "And Japan?\n", "/new\n", "And Japan?\n", "long " * 99 + "\n"],
        said.append,
    )
    first = [{"role": "user", "content": "What is two?"}]
    answer = whole(model, first)
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And Japan?"}]
    expected = f"> {answer}\n> > {whole(model, second)}\n> > {whole(model, second[-1:])}\n> "
    found = "".join(said)
    assert found.startswith(expected)
    assert "leaves no room for a completion" in found and found.endswith("/new starts a new conversation\n> \n")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--prompt", "a", "--message", "b"], "--prompt and --message exclude each other"),
        (["--file", "a.jsonl"], "--file and --out must both be given"),
        (["--file", "a", "--out", "a"], "--out a is the file with the prompts"),
        (["--samples", "2"], "--samples is for"),
        (["--prompt", "a", "--system", "b"], "--system is for"),
        (["--prompt", "a", "--top-p", "1.5"], "top_p 1.5 must be above 0 and at most 1"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature -1.0 must be at least 0"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags, told, capsys):
    assert cli.run(["generate", "somewhere", *flags]) == USAGE
    assert told in capsys.readouterr().err


def test_a_model_without_a_chat_template_or_tokenizer_says_so(tmp_path):
    folder = write_model(tmp_path / "plain", template=None)
    plain = load_text_model(folder, max_length=32, num_rows=1)
    with pytest.raises(UsageError, match=r"has no chat template.*give plain texts"):
        plain.prompt_of([{"role": "user", "content": "a"}])
    said = []
    with pytest.raises(UsageError, match="has no chat template"):  # before anything is asked
        generate_text.chat(plain, [], SamplingSettings(), [], said.append)
    assert not said
    with pytest.raises(UsageError, match=r"--max-length 999 is more than the 256 tokens"):
        load_text_model(folder, max_length=999)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"no tokenizer\.json.*--tokenizer"):
        load_text_model(folder)
