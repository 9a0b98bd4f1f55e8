"""Instructions from LeRobot's language rows, against lerobot 0.6.1's own renderer (`fixtures/make_language.py`)."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from openpi_train.data.core.source import BadRecord
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.formats.lerobot.language_rows import read_lists

FIXTURES = Path(__file__).parent / "fixtures"
READ = json.loads((FIXTURES / "v30_language.json").read_text())


def prompts(source) -> list[str]:
    return [source.prompts[number] for number in source.prompt_index]


@pytest.mark.parametrize("prompt_from", ["subtask", "task_aug"])
def test_each_step_has_the_text_that_lerobot_reads_or_that_of_its_task(broken, prompt_from):
    copy = broken("v30_language")
    of_tasks = prompts(copy.open())
    assert set(of_tasks) == {"push the block", "pull the lever"}
    source = copy.open(prompt_from=prompt_from)
    lerobot = READ[prompt_from]
    assert prompts(source) == [text or task for text, task in zip(lerobot, of_tasks, strict=True)]
    (told,) = source.findings
    first = lerobot.index(None)
    assert (told.kind, told.count, told.total) == (f"no {prompt_from}", lerobot.count(None), 60)
    assert first == 20 and told.where.endswith("episode 1, step 0")
    assert list(source.episode_ids) == list(copy.open().episode_ids)


def test_what_is_not_read_says_how_it_is(broken):
    left_out = broken("v30_language").open().about().left_out
    assert "prompt-from subtask" in left_out["language_persistent"] and "events" in left_out["language_events"]


def test_a_dataset_without_such_texts_says_so(broken, tmp_path):
    with pytest.raises(ValueError, match=r"has no column language_persistent, from which prompt_from 'subtask'"):
        LeRobot(path=str(FIXTURES / "v30_image"), cache_dir=str(tmp_path), prompt_from="subtask").open()
    copy = broken("v30_language")
    for file in copy.root.glob("data/*/*.parquet"):
        table = parquet.read_table(file)
        lists = [
            [row for row in rows or () if row["style"] != "subtask"]
            for rows in table["language_persistent"].to_pylist()
        ]
        at = table.schema.get_field_index("language_persistent")
        column = pa.array(lists, table.schema.field(at).type)
        parquet.write_table(table.set_column(at, "language_persistent", column), file)
    with pytest.raises(ValueError, match=r"has no text of style subtask, .* its styles are memory, plan, task_aug"):
        copy.open(prompt_from="subtask")


def with_rows(copy, change):
    """The dataset with other language rows at each step of episode 0."""
    files = copy.root.glob("data/*/*.parquet")
    (file,) = (path for path in files if 0 in parquet.read_table(path)["episode_index"].to_pylist())
    table = parquet.read_table(file)
    at = table.schema.get_field_index("language_persistent")
    column = pa.array(list(map(change, table["language_persistent"].to_pylist())), table.schema.field(at).type)
    parquet.write_table(table.set_column(at, "language_persistent", column), file)
    return copy


def test_two_subtasks_that_begin_at_one_time_make_a_bad_episode(broken):
    copy = with_rows(broken("v30_language"), lambda rows: [*rows, {**rows[-1], "style": "subtask", "timestamp": 0.75}])
    with pytest.raises(BadRecord, match=r"episode 0: 2 subtasks begin at 0\.750 s"):
        copy.open(prompt_from="subtask")


@pytest.mark.parametrize("rows", [None, [], "blank"])
def test_an_episode_whose_rows_are_null_or_blank_has_its_task(broken, rows):
    copy = with_rows(
        broken("v30_language"),
        lambda found: [{**row, "content": " \t"} for row in found] if rows == "blank" else rows,
    )
    assert prompts(copy.open(prompt_from="subtask"))[:20] == ["push the block"] * 20


@pytest.mark.parametrize(
    "texts",
    [["ab"] * 3, ["ab", "ba", "ab"], ["a", "aa", ""], ["aa", "a", "a"], [""] * 3, [None, "a"], ["a", None], ["a"]],
)
def test_lists_are_those_of_each_step_whether_they_are_the_same_or_not(texts):
    lists = [None if text is None else [{"style": "s", "content": letter} for letter in text] for text in texts]
    kind = pa.list_(pa.struct([("style", pa.string()), ("content", pa.string())]))
    assert read_lists(pa.chunked_array([pa.array(lists[:1], kind), pa.array(lists[1:], kind)])) == lists
