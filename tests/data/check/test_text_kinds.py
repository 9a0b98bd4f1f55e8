"""Kinds of faults of texts: each is found alone, with its line, in JSON lines and parquet; none in sound texts."""

import json
import logging

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from openpi_train.data.check import record_measures
from openpi_train.data.check.record_flags import SpecialTokens
from openpi_train.data.check.record_measures import ExaminedTexts
from openpi_train.data.check.scripts import main_script
from openpi_train.data.check.text_kinds import TEXT_KINDS, examine_texts
from openpi_train.data.text import arithmetic
from openpi_train.data.text.text_files import find_files


def sound(number=20):
    return [{"prompt": f"How much is {n} and {n + 1}?", "completion": f"It is {2 * n + 1}."} for n in range(number)]


def spoken(number=20):
    """Conversations."""
    return [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"Number {n}."}]}
        for n in range(number)
    ]


def blank(rows):
    rows[4]["completion"] = " \n"


def copied(rows):
    rows[7] = {name: text.upper() + " " for name, text in rows[2].items()}


def damaged(rows):
    rows[5]["completion"] = "Café".encode().decode("latin-1")


def lost_character(rows):
    rows[5]["prompt"] = "What is a caf\ufffd?"


def other_script(rows):
    rows[6]["completion"] = "Это тринадцать."


def endless(rows):
    rows[3]["completion"] = "and so on, " * 4_000


def no_question(rows):
    rows[4]["prompt"] = " "


def silent_user(rows):
    rows[4]["messages"][0]["content"] = "\n"


def other_answer(rows):
    """Shorter than its question."""
    rows[6]["messages"][0]["content"] = "Please say this number in the language of your own country."
    rows[6]["messages"][1]["content"] = "Шесть."


def silent_assistant(rows):
    rows[4]["messages"][1]["content"] = ""


def no_assistant(rows):
    rows[4]["messages"][1]["role"] = "tool"


def open_end(rows):
    rows[4]["messages"].append({"role": "user", "content": "And then?"})


def preferred(number=20):
    return [{"prompt": f"Which is {n}?", "chosen": f"It is {n}.", "rejected": f"Not {n}."} for n in range(number)]


def opposite(rows):
    rows[9] = {"prompt": rows[2]["prompt"], "chosen": rows[2]["rejected"], "rejected": rows[2]["chosen"]}


def equal(rows):
    rows[4]["rejected"] = rows[4]["chosen"]


def nearly_equal(rows):
    rows[4]["rejected"] = rows[4]["chosen"] + "\n"


def judged(number=20):
    return [{"prompt": f"Say {n}.", "completion": f"It is {n}.", "label": n % 2 == 0} for n in range(number)]


def other_label(rows):
    rows[9] = rows[2] | {"label": not rows[2]["label"]}


def echo(rows):
    rows[4]["completion"] = rows[4]["prompt"]


def whole_text(rows):
    for row in rows:
        row["completion"] = f"{row['prompt']} {row['completion']}"


def echo_in_talk(rows):
    rows[4]["messages"] = [
        {"role": "user", "content": "Please say four."},
        {"role": "assistant", "content": "Please say four."},
    ]


def rendered(rows):
    for row in rows[3:8]:
        row["completion"] += "<|im_end|>"


def old_template(rows):
    for row in rows[3:8]:
        row["prompt"] = f"<s>[INST] {row['prompt']} [/INST]"


def rendered_turns(rows):
    for row in rows[3:8]:
        row["messages"][1]["content"] += "<|eot_id|>"


def early_assistant(rows):
    system = {"role": "system", "content": "Be short."}
    rows[4]["messages"] = [system, {"role": "assistant", "content": "Hello."}, *rows[4]["messages"]]


def two_questions(rows):
    rows[4]["messages"].insert(0, {"role": "user", "content": "Are you there?"})


def two_answers(rows):
    rows[4]["messages"].append({"role": "assistant", "content": "Anything else?"})


# Kind, count, line.
STANDARD = {
    echo: ("answers that repeat their prompt", 1, 5),
    whole_text: ("answers that repeat their prompt", 20, 1),
    rendered: ("special tokens in texts", 5, 4),
    old_template: ("special tokens in texts", 5, 4),
    blank: ("blank answers", 1, 5),
    no_question: ("blank prompts", 1, 5),
    copied: ("copies of texts", 1, 8),
    damaged: ("damaged characters", 1, 6),
    lost_character: ("damaged characters", 1, 6),
    other_script: ("languages mixed", 1, 7),
    endless: ("very long texts", 1, 4),
}
SPOKEN = {
    echo_in_talk: ("answers that repeat their prompt", 1, 5),
    rendered_turns: ("special tokens in texts", 5, 4),
    early_assistant: ("assistant speaks first", 1, 5),
    two_questions: ("one role twice in a row", 1, 5),
    two_answers: ("one role twice in a row", 1, 5),
    silent_assistant: ("blank answers", 1, 5),
    silent_user: ("blank prompts", 1, 5),
    other_answer: ("languages mixed", 1, 7),
    no_assistant: ("no assistant turn", 1, 5),
    open_end: ("no last answer", 1, 5),
}
PREFERRED = {
    equal: ("chosen equals rejected", 1, 5),
    nearly_equal: ("chosen equals rejected", 1, 5),
    opposite: ("contradicting preferences", 2, 10),
}
JUDGED = {other_label: ("contradicting preferences", 2, 10)}
FAULTS = [
    (rows, fault, *told)
    for rows, faults in ((sound, STANDARD), (spoken, SPOKEN), (preferred, PREFERRED), (judged, JUDGED))
    for fault, told in faults.items()
]


def write(path, rows):
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def found(path, held_out=None, **options):
    others = () if held_out is None else find_files(str(held_out))
    data = ExaminedTexts(name="made", files=find_files(str(path)), held_out=others, **options)
    return {finding.kind: finding for finding in examine_texts(data)}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("rows", "fault", "kind", "count", "line"), FAULTS, ids=lambda one: getattr(one, "__name__", "")
)
def test_a_fault_is_found_with_its_line_and_nothing_else_is(ending, rows, fault, kind, count, line, tmp_path):
    made = rows()
    fault(made)
    findings = found(write(tmp_path / f"made.{ending}", made))
    assert set(findings) == {kind} and findings[kind].count == count
    place = f"made.jsonl:{line}" if ending == "jsonl" else f"made.parquet: row {line}"
    assert findings[kind].where.partition(" (against")[0] == place


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("rows", [sound, spoken, preferred, judged])
def test_nothing_is_found_in_sound_texts(ending, rows, tmp_path):
    assert not found(write(tmp_path / f"made.{ending}", rows()))


def test_nothing_is_found_in_the_embedded_task_and_in_gsm8k(tmp_path, gsm8k):
    root = arithmetic.prepare(tmp_path)
    for name in ("demonstrations", "preferences", "prompts"):
        assert not found(root / name / "train.jsonl", root / name / "test.jsonl")
    columns = {"prompt": "question", "completion": "answer"}
    assert not found(gsm8k / "train.jsonl", gsm8k / "test.jsonl", columns=columns)


def test_records_that_cannot_be_read_and_other_types_are_counted_with_the_first(tmp_path):
    path = write(tmp_path / "made.jsonl", [*sound(5), *spoken(2)])
    path.write_text(path.read_text() + '{"prompt": \n{"prompt": "x"}\n')
    findings = found(path)
    assert set(findings) == {"unreadable records", "types mixed"}
    assert (findings["unreadable records"].count, findings["unreadable records"].total) == (1, 9)
    assert findings["unreadable records"].where.startswith("made.jsonl:8: not JSON")
    assert findings["types mixed"].where == "made.jsonl:6" and findings["types mixed"].count == 3


def test_a_held_out_prompt_in_training_is_found_whatever_its_case(tmp_path):
    training, others = sound(), sound(30)[20:]
    others[3] = {"prompt": training[11]["prompt"].lower(), "completion": "Another answer."}
    findings = found(write(tmp_path / "a.jsonl", training), write(tmp_path / "b.jsonl", others))
    assert set(findings) == {"held-out texts in training"}
    assert findings["held-out texts in training"].where == "a.jsonl:12"


def test_a_translation_has_another_script_in_each_field(tmp_path):
    rows = [{"prompt": f"Translate {n} please", "completion": f"Пожалуйста, вот {n}"} for n in range(9)]
    assert not found(write(tmp_path / "made.jsonl", rows))


def test_greetings_calls_of_tools_and_bad_answers_may_repeat_or_follow_each_other(tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    talk = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hi!"}]
    rows = [{"messages": [*talk, {"role": "user", "content": f"Look {n}."}, call, talk[1]]} for n in range(9)]
    assert not found(write(tmp_path / "talks.jsonl", rows))
    rows = preferred()
    rows[3]["rejected"] = rows[3]["prompt"] = "Which number comes after two?"
    assert not found(write(tmp_path / "pairs.jsonl", rows))


def test_tokens_of_the_experiments_tokenizer_are_told_in_messages_and_may_stand_in_rendered_strings(tmp_path):
    own = SpecialTokens(("<turn>", "</s>"))
    talks, texts = spoken(), [{"text": f"<turn>user {n}</s>"} for n in range(9)]
    for row in talks[:5]:
        row["messages"][0]["content"] += "<turn>"
    (finding,) = found(write(tmp_path / "talks.jsonl", talks), special=own).values()
    assert (finding.kind, finding.what) == ("special tokens in texts", "<turn> in 5")
    assert not found(write(tmp_path / "texts.jsonl", texts), special=own)
    assert found(tmp_path / "texts.jsonl")["special tokens in texts"].what == "</s> in 9"
    # A single text about language models is none.
    talks = spoken()
    talks[3]["messages"][0]["content"] = "What is <|endoftext|>?"
    assert not found(write(tmp_path / "one.jsonl", talks))


@pytest.mark.parametrize(
    ("record", "advice"),
    [
        ({"question": "1+1?", "answer": "2"}, "--columns prompt=question completion=answer"),
        (
            {"instruction": "Add", "input": "1 1", "output": "2"},
            "--columns prompt=instruction completion=output. This leaves out input",
        ),
        ({"dialogue": [{"speaker": "human", "text": "Hi"}]}, "--columns messages=dialogue. Its messages need"),
        (
            {"mesages": [{"role": "user", "content": "Hi"}]},
            "Did you mean messages? Rename it, or name the column: --columns messages=mesages",
        ),
        ({"turns": [{"from": "human", "value": "Hi"}], "id": "7"}, "Name the column: --columns messages=turns"),
        ({"promt": "1+1?", "anwser": "2"}, "prompt=promt completion=anwser"),
        ({"my text": "1+1?"}, "--columns 'text=my text'"),
        ({"context": "1+1?", "id": "2"}, "Name the columns: --columns prompt=COLUMN"),
        ({"question": "1+1?", "chosen": "2", "rejected": [3]}, "Repair or remove"),
        ({"content": "A text."}, "--columns text=content"),
        ({"a": "x", "b": "y"}, "Name the columns: --columns prompt=COLUMN completion=COLUMN, messages=COLUMN or text"),
    ],
)
def test_columns_of_no_type_are_told_with_the_flag_that_names_them(record, advice, tmp_path):
    path = write(tmp_path / "made.jsonl", [record] * 3)
    finding = found(path, columns_flag="--columns")["unreadable records"]
    assert advice in finding.remedy and "--data.datasets" not in finding.where + finding.remedy
    assert "skip" not in finding.training  # nothing would be left


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("pick up the cup", "Latin"),
        ("naïve café", "Latin"),
        ("возьми чашку (cup)", "Cyrillic"),
        ("拿起红色的杯子 cup", "Chinese"),
        ("赤いカップを取って", "Japanese"),
        ("컵을 집어", "Hangul"),
        ("ارفع الكوب", "Arabic"),
        ("12 + 30 = 42", None),
        ("x", None),
    ],
)
def test_the_script_of_a_text_is_that_of_most_letters(text, script):
    assert main_script(text) == script


def test_an_interrupted_pass_reads_finished_files_no_more(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abc":
        write(folder / f"{name}.jsonl", [{"prompt": f"{row['prompt']} {name}", **row} for row in sound()])
    kept, of_file, read = tmp_path / "kept", record_measures._of_file, []

    def interrupted(file, *rest):
        read.append(file.name)
        if len(read) == 3:
            raise KeyboardInterrupt
        return of_file(file, *rest)

    monkeypatch.setattr(record_measures, "_of_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found(folder, kept=kept)
    findings = found(folder, kept=kept)
    assert "2 of 3 parts are those of an earlier one" in caplog.text
    assert read == ["a.jsonl", "b.jsonl", "c.jsonl", "c.jsonl"]
    # Every text of the second and third file is one of the first.
    assert findings["copies of texts"].count == 40 and findings["copies of texts"].where == "b.jsonl:1"


def test_every_kind_says_what_it_is():
    assert all(kind.about for kind in TEXT_KINDS)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_an_unknown_role_is_named_and_no_other_fault_is_told_of_it(ending, tmp_path):
    rows = spoken()
    rows[4]["messages"] += [{"role": "user", "content": "And?"}, {"role": "assistent", "content": "Yes."}]
    findings = found(write(tmp_path / f"made.{ending}", rows))
    assert set(findings) == {"unreadable records"} and findings["unreadable records"].count == 1
    assert "message 3 of messages has the role 'assistent'; known are" in findings["unreadable records"].where
