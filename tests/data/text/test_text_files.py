"""Which files are a split's, and the records in them."""

import errno
import gzip
import json
import re
import shutil
import types
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from openpi_train.data.core import hub
from openpi_train.data.core.source import BadRecord
from openpi_train.data.text.text_files import TextFile, find_files, names_a_path, parsed


def folder(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text('{"text": "a"}\n')
    return str(root)


@pytest.mark.parametrize(
    ("names", "split", "found"),
    [
        (["train.jsonl", "test.jsonl", "README.md"], "train", ["train.jsonl"]),
        (["train.jsonl", "test.jsonl"], None, ["test.jsonl", "train.jsonl"]),
        (["data/train-00001-of-2.jsonl", "data/train-00000-of-2.jsonl", "data/dev.jsonl"], "train",
         ["data/train-00000-of-2.jsonl", "data/train-00001-of-2.jsonl"]),
        (["data/train-0.jsonl", "data/dev-0.jsonl"], "validation", ["data/dev-0.jsonl"]),
        (["a/training/x.json", "a/eval/x.json"], "test", ["a/eval/x.json"]),
        (["a/part1.jsonl", "a/dataset_info.json", "dataset_infos.json"], "train", ["a/part1.jsonl"]),
        (["part1.jsonl", "part2.jsonl"], "train", ["part1.jsonl", "part2.jsonl"]),
        (["train_sft-0.parquet.json", "train_gen.json"], "train_sft", ["train_sft-0.parquet.json"]),
        (["constrained.jsonl", "train.jsonl"], "train", ["train.jsonl"]),
        # What lies beside data on disks.
        (["train.jsonl", ".ipynb_checkpoints/train-checkpoint.jsonl", "._train.jsonl", "__MACOSX/train.jsonl",
          ".Trash-0/files/train.jsonl", ".git/lfs/train.jsonl", "a/.cache/train.jsonl"], "train", ["train.jsonl"]),
        (["part.json", "_delta_log/0000.json", "_temporary/0/part.json"], "train", ["part.json"]),
        # A file's own name before that of its folder, and of this the whole name.
        (["training_data/train.jsonl", "training_data/test.jsonl"], "train", ["training_data/train.jsonl"]),
        (["training_data/train.jsonl", "training_data/test.jsonl"], "test", ["training_data/test.jsonl"]),
        (["train/a.jsonl", "train/test_a.jsonl", "test/b.jsonl"], "train", ["train/a.jsonl"]),
        (["train/a.jsonl", "train/test_a.jsonl", "test/b.jsonl"], "test", ["test/b.jsonl", "train/test_a.jsonl"]),
        (["test_data/a.jsonl", "my-eval.d/a.jsonl"], "train", ["my-eval.d/a.jsonl", "test_data/a.jsonl"]),
        (["validation/en/a.jsonl", "train/en/a.jsonl"], "dev", ["validation/en/a.jsonl"]),
        (["train/dev/a.jsonl", "train/b.jsonl"], "train", ["train/b.jsonl"]),
        (["easy/train.jsonl", "hard/train.jsonl"], "easy", ["easy/train.jsonl"]),
        # However they are spelt.
        (["TRAIN.jsonl", "Test.jsonl"], "train", ["TRAIN.jsonl"]),
        (["a1.jsonl", "test2.jsonl", "train1.jsonl"], "train", ["train1.jsonl"]),
        (["data-v2.jsonl", "data-v20.jsonl", "v2data.jsonl"], "v2", ["data-v2.jsonl"]),
        (["(val).jsonl", "contest.jsonl", "latest.jsonl"], "validation", ["(val).jsonl"]),
    ],
)  # fmt: skip
def test_a_split_is_a_word_of_the_files_name_or_a_folders_whole_name(tmp_path, names, split, found):
    assert [file.name for file in find_files(folder(tmp_path, *names), split)] == found


def test_a_file_of_another_split_than_its_folder_is_told(tmp_path, caplog):
    find_files(folder(tmp_path, "train/a.jsonl", "train/test_a.jsonl"), "train")
    assert re.search(r"train/test_a\.jsonl is not read .*split train", caplog.text)


def test_linked_folders_are_entered_and_what_is_read_at_its_place_is_not_read_again(tmp_path):
    folder(tmp_path, "root/train/a.jsonl", "elsewhere/b.jsonl", "elsewhere/c/c.jsonl")
    root = tmp_path / "root"
    (root / "more").symlink_to(tmp_path / "elsewhere")
    (root / "one.jsonl").symlink_to(tmp_path / "elsewhere" / "b.jsonl")  # as in the cache of the hub
    for place, target in [("train/loop", root), ("again", root / "train"), ("gone", tmp_path / "none")]:
        (root / place).symlink_to(target)
    # Two folders with links to each other.
    (tmp_path / "elsewhere" / "back").symlink_to(root / "train")
    found = [file.name for file in find_files(str(root), None)]
    assert found == ["more/c/c.jsonl", "one.jsonl", "train/a.jsonl"]
    (root / "one.jsonl").unlink()
    assert find_files(str(root), None)[0].name == "more/b.jsonl"


def test_a_linked_split_is_read_where_it_is_asked_for(tmp_path):
    root = folder(tmp_path, "versions/1/a.jsonl", "versions/2/a.jsonl")
    (tmp_path / "train").symlink_to(tmp_path / "versions" / "2")
    assert [file.name for file in find_files(root, "train")] == ["train/a.jsonl"]
    assert [file.name for file in find_files(root, None)] == ["versions/1/a.jsonl", "versions/2/a.jsonl"]


SAVED = Path(__file__).parent / "saved"


def read(where, split, columns=("messages",)):
    return [
        (file.place(number), raw) for file in find_files(str(where), split) for number, raw in file.records(columns)
    ]


def test_what_save_to_disk_of_the_datasets_library_wrote_is_read(tmp_path):
    def contents(split, where=SAVED / "splits"):
        return [(place, raw["messages"][0]["content"]) for place, raw in read(where, split)]

    first, second = "train/data-00000-of-00002.arrow: row 1", "train/data-00001-of-00002.arrow: row 1"
    assert contents("train") == [(first, "b"), (second, "1+1?")]
    assert contents("test") == [("test/data-00000-of-00001.arrow: row 1", "ä")]
    assert [content for _, content in contents("train", SAVED / "flat")] == ["1+1?", "ä", "b"]
    ((_, row),) = read(SAVED / "splits", "test", ["messages", "n"])
    assert row["n"] == 1 and row["messages"][0] == {"role": "user", "content": "ä"}
    assert row["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    # One split alone, and what was written there later or before.
    shutil.copytree(SAVED / "flat", tmp_path / "flat")
    for stale in ("cache-01ab.arrow", "data-00001-of-00003.arrow"):
        shutil.copy(tmp_path / "flat" / "data-00000-of-00001.arrow", tmp_path / "flat" / stale)
    assert contents("train", tmp_path / "flat") == contents("train", SAVED / "flat")
    (tmp_path / "flat" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(BadRecord, match=r"flat lacks data-00000-of-00001\.arrow.*state\.json"):
        find_files(str(tmp_path / "flat"))
    (tmp_path / "flat" / "state.json").write_text("[]")
    with pytest.raises(BadRecord, match=r"state\.json is none of a dataset that save_to_disk"):
        find_files(str(tmp_path / "flat"))


def test_a_damaged_arrow_file_is_named(tmp_path):
    content = (SAVED / "flat" / "data-00000-of-00001.arrow").read_bytes()
    for name, part in [("cut.arrow", content[:-700]), ("none.arrow", b""), ("zeros.arrow", bytes(2000))]:
        (tmp_path / name).write_bytes(part)
        with pytest.raises(BadRecord, match=rf"{name}: row 1: the file is damaged"):
            list(TextFile(tmp_path / name, name).records(["messages"]))


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_read_error_of_the_system_is_no_damage(tmp_path, monkeypatch, ending):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(b"")

    def fails(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(TextFile, "_batches", fails)
    with pytest.raises(OSError, match="Stale file handle"):
        list(TextFile(path, path.name).records(["text"]))


def test_a_path_is_told_from_a_split():
    paths = ["a.jsonl", "b/c", "hub:me/texts", "test.parquet"]
    assert [names_a_path(text) for text in (*paths, "test", "validation", "train_sft")] == [True] * 4 + [False] * 3


def test_missing_files_and_splits_are_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no texts in .*\.jsonl"):
        find_files(str(tmp_path))
    for missing in ("none", "none.jsonl"):
        with pytest.raises(FileNotFoundError, match=rf"there is no file or folder .*/{missing}: check the path"):
            find_files(str(tmp_path / missing))
    with pytest.raises(FileNotFoundError, match=r"no file of the split dev in .*which has test\.jsonl, train\.jsonl"):
        find_files(folder(tmp_path, "train.jsonl", "test.jsonl"), "dev")
    with pytest.raises(FileNotFoundError, match=r"no file of the split train .*test\.jsonl"):
        (tmp_path / "train.jsonl").unlink()
        find_files(str(tmp_path), "train")
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(FileNotFoundError, match="none of"):
        find_files(str(tmp_path / "a.csv"))
    assert [file.name for file in find_files(str(tmp_path / "test.jsonl"), "train")] == ["test.jsonl"]


RECORDS = [{"text": "ä", "n": 1}, {"text": "b\n", "n": 2}, {"text": None, "n": 3}]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "ndjson.gz", "parquet", "arrow", "feather.arrow"])
def test_records_are_the_same_in_every_format(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    lines = "\ufeff" + "\n\n".join(json.dumps(record) for record in RECORDS)
    table = pa.Table.from_pylist(RECORDS)
    if ending == "parquet":
        parquet.write_table(table, path)
    elif ending.endswith("arrow"):  # both of Arrow's formats
        made = pa.ipc.new_stream if ending == "arrow" else pa.ipc.new_file
        with path.open("wb") as raw, made(raw, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    else:
        path.write_bytes(gzip.compress(lines.encode()) if ending.endswith("gz") else lines.encode())
    (file,) = find_files(str(path))
    found = list(file.records(["text", "n"]))
    assert [parsed(raw) for _, raw in found] == RECORDS
    assert [file.place(number) for number, _ in found] == (
        [f"a.{ending}:{n}" for n in (1, 3, 5)] if "json" in ending else [f"a.{ending}: row {n}" for n in (1, 2, 3)]
    )


def test_entries_that_only_other_records_of_a_parquet_file_have_are_not_there(tmp_path):
    calls = [[{"name": "add", "arguments": {"a": 1, "of": ["x", None]}}], [{"name": "now", "arguments": {"zone": "Z"}}]]
    records = [
        {
            "messages": [
                {"role": "user", "content": [{"text": "x"}, {"image": "u"}]},
                {"role": "assistant", "calls": one},
            ]
        }
        for one in calls
    ]
    parquet.write_table(pa.Table.from_pylist([*records, {"messages": None}]), tmp_path / "a.parquet")
    (file,) = find_files(str(tmp_path))
    assert [record for _, record in file.records(["messages"])] == [*records, {"messages": None}]


def test_two_columns_of_one_name_are_refused(tmp_path):
    parquet.write_table(pa.table([["a"], ["b"], [1], [2]], names=["text", "text", "n", "n"]), tmp_path / "a.parquet")
    (file,) = find_files(str(tmp_path))
    with pytest.raises(BadRecord, match=r"a\.parquet: several columns are called text; rename all but one"):
        list(file.records(["text"]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"not JSON \(Expecting ',' delimiter at character 13\)"),
        (b"[1, 2]", r"\[1, 2\] is no object; needed is one object per line or entry"),
        (b"[", "not JSON .* one object per line"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"n": ' + b"1" * 4301 + b"}", "an integer has more than 4300 digits; write it as a string"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(line, message):
    with pytest.raises(ValueError, match=message):
        parsed(line)


ARRAYS = {
    "one line": json.dumps(RECORDS),
    "indented": "\ufeff\n " + json.dumps(RECORDS, indent=2, ensure_ascii=False) + "\n\n",
    "no space": json.dumps(RECORDS, separators=(",", ":")),
}


@pytest.mark.parametrize("ending", ["json", "json.gz"])
@pytest.mark.parametrize("text", ARRAYS.values(), ids=ARRAYS)
def test_a_file_may_be_one_array(tmp_path, text, ending):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    (file,) = find_files(str(path))
    found = list(file.records(["text", "n"]))
    assert [parsed(raw) for _, raw in found] == RECORDS
    assert [file.place(number) for number, _ in found] == [f"a.{ending}: record {n}" for n in (1, 2, 3)]


def test_json_files_of_lines_and_empty_arrays_are_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("\n\n".join(json.dumps(record) for record in RECORDS))
    assert [(number, parsed(raw)) for number, raw in TextFile(path, "a.json").records([])] == [*enumerate(RECORDS, 1)]
    path.write_text("[ ]")
    assert list(TextFile(path, "a.json").records([])) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[{"text": "a"}, {"text": }]',
            r"record 2: not JSON \(Expecting value in line 1, character 26\); needed is an array",
        ),
        ('[{"text": "a"}\n {"text": "b"}]', r"record 2: not JSON \(Expecting ',' or '\]' in line 2, character 2\)"),
        ('[{"text": "a"},]', r"record 2: not JSON \(Expecting an entry after ','"),
        ('[{"text": "a"}', r"record 2: not JSON \(Expecting ',' or '\]'"),
        ('[{"text": "a"}] x', r"record 2: not JSON \(Extra data after the array"),
        ('[{"text": ' + "[" * 100_000, "record 1: nested too deeply"),
    ],
)
def test_what_is_wrong_with_an_array_is_said(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(BadRecord, match=rf"a\.json: {message}"):
        list(TextFile(path, "a.json").records([]))
    path.write_bytes(b'[{"text": "\xff"}]')
    with pytest.raises(BadRecord, match=r"a\.json is not UTF-8"):
        list(TextFile(path, "a.json").records([]))


def test_an_entry_that_is_no_object_is_a_bad_record(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('["{}", 3, null]')
    for _, raw in TextFile(path, "a.json").records([]):
        with pytest.raises(ValueError, match="is no object; needed is one object per line or entry"):
            parsed(raw)


def test_an_entry_with_a_long_integer_is_a_bad_record_and_the_others_are_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"n": 1}, {"text": "ä", "n": [' + "1" * 4301 + ', 2]}, {"n": 3}]')
    (_, first), (place, long), (_, last) = TextFile(path, "a.json").records([])
    assert (parsed(first), place, parsed(last)) == ({"n": 1}, 2, {"n": 3})
    with pytest.raises(ValueError, match="an integer has more than 4300 digits"):
        parsed(long)


def test_damaged_files_are_named(tmp_path):
    parquet.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-20])
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[: len(content) // 2])
    flipped = bytearray(gzip.compress(b'{"text": "a"}\n' * 1000))
    flipped[10:20] = b"\xff" * 10  # after the header: a block of a type that there is not
    (tmp_path / "c.jsonl.gz").write_bytes(flipped)
    for name in ("a.parquet", "b.jsonl.gz", "c.jsonl.gz"):
        with pytest.raises(BadRecord, match=rf"{name}.*is damaged"):
            list(TextFile(tmp_path / name, name).records(["text"]))


def test_a_dataset_on_the_hub_is_a_folder_of_its_cache(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(name, **given):
        asked.update(given, name=name)
        folder(tmp_path, "data/train.jsonl")
        return str(tmp_path)

    monkeypatch.setitem(
        __import__("sys").modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download)
    )
    (file,) = find_files("hub:me/texts@v2", "train", offline=True)
    assert file.name == "data/train.jsonl"
    assert (asked["name"], asked["revision"], asked["repo_type"]) == ("me/texts", "v2", "dataset")
    assert asked["local_files_only"] and "**/*.parquet" in asked["allow_patterns"]
    with pytest.raises(hub.UsageError, match="allowed: hub:USER/NAME"):
        find_files("hub:texts")
