"""Episodes in plain parquet files: columns, pictures, boundaries, damaged files, and the formats' detection."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from vla_project import LENGTHS, rows_of, write_episodes

from openpi_train.data.core.image import decode
from openpi_train.data.core.source import BadRecord
from openpi_train.data.formats.detection import source_at
from openpi_train.data.formats.parquet import Parquet


@pytest.fixture
def folder(tmp_path):
    return write_episodes(tmp_path / "episodes")


def opened(folder, **settings):
    return Parquet(path=str(folder), cache_dir=str(folder.parent / "index"), **settings).open()


def test_rows_are_those_of_the_files_in_order(folder):
    source = opened(folder)
    np.testing.assert_array_equal(
        source.episode_ends, np.cumsum([length for own in LENGTHS.values() for length in own])
    )
    rows = [rows_of(number) for number in range(len(LENGTHS))]
    for name in ("state", "action"):
        np.testing.assert_array_equal(source.columns[name], np.concatenate([own[name] for own in rows]))
    pictures = np.concatenate([own["image_1"] for own in rows])
    np.testing.assert_array_equal(source.frames(np.arange(source.num_steps)[::-1], "image_1"), pictures[::-1])
    np.testing.assert_array_equal(decode(source.encoded(6, "image_1")), pictures[6])
    assert [source.prompts[number] for number in source.prompt_index] == ["pick a"] * 8 + ["pick b"] * 4
    # A camera without pictures, and the marks of episodes, are none of them.
    assert source.cameras == ("image_1",) and set(source.columns) == {"state", "action"}
    assert source.describe(9).endswith("b.parquet, row 1, episode 2, step 1 of 4")
    assert len(set(source.episode_ids)) == 3


def test_a_folder_and_a_file_of_it_are_found_by_their_content(folder):
    assert source_at(str(folder)) == Parquet(path=str(folder))
    one = opened(folder / "b.parquet")
    assert one.num_episodes == 1 and one.episode_ids[0] == opened(folder).episode_ids[2]
    with pytest.raises(FileNotFoundError, match="folder of parquet files"):
        source_at(str(folder / "c.parquet"))


def test_a_changed_file_is_read_again(folder):
    before = opened(folder)
    assert Parquet(path=str(folder), cache_dir=str(folder.parent / "index")).is_ready()
    shutil.copy(folder / "b.parquet", folder / "c.parquet")
    after = opened(folder)
    assert (before.num_episodes, after.num_episodes) == (3, 4) and before.fingerprint != after.fingerprint
    (folder / "a.parquet").unlink()
    assert opened(folder).num_episodes == 2


def test_a_damaged_file_is_an_error_or_left_out(folder):
    (folder / "a.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(BadRecord, match=r"a\.parquet: "):
        opened(folder)
    source = opened(folder, on_bad_record="skip")
    assert source.num_episodes == source.num_dropped == 1 and "b.parquet, row 0" in source.describe(0)


def test_files_with_other_columns_are_refused_by_name(folder):
    table = parquet.read_table(folder / "b.parquet")
    parquet.write_table(table.append_column("force", pa.array([1.0] * len(table))), folder / "c.parquet")
    with pytest.raises(ValueError, match=r"c.parquet has other columns than .*a.parquet"):
        opened(folder)


def test_columns_with_rows_of_other_lengths_or_nulls_are_left_out_by_the_row(folder):
    rows = len(parquet.read_table(folder / "b.parquet"))
    columns = {
        "ragged": pa.array([[0.0, 1, 2], [3.0, 4, 5, 6, 7], *[[0.0] * 4] * (rows - 2)]),
        "fixed": pa.array([[1.0, 2], None, *[[3.0, 4]] * (rows - 2)], pa.list_(pa.float32(), 2)),
        "holed": pa.array([[1.0, None], *[[3.0, 4]] * (rows - 1)]),
        "whole": pa.array([[1, 2]] * rows, pa.list_(pa.int64(), 2)),
    }
    table = parquet.read_table(folder / "b.parquet")
    for name, column in columns.items():
        table = table.append_column(name, column)
    (folder / "one").mkdir()
    parquet.write_table(table, folder / "one" / "b.parquet")
    (folder / "one" / "._b.parquet").write_bytes(b"\0\5\x16\7")
    source = opened(folder / "one")
    assert set(source.columns) == {"state", "action", "whole"}
    left_out = source.about().left_out
    assert left_out["ragged"] == "its rows hold 3, 4, 5 numbers"
    assert left_out["fixed"].startswith("row 1 is null") and left_out["holed"].startswith("row 0 is null")
    shutil.copy(folder / "b.parquet", folder / "one" / "c.parquet")
    table = parquet.read_table(folder / "b.parquet")
    short = pa.array([[0.0], *table["action"].to_pylist()[1:]])
    place = table.schema.get_field_index("action")
    parquet.write_table(table.set_column(place, "action", short), folder / "one" / "b.parquet")
    with pytest.raises(ValueError, match=r"other columns.* action .*one: .*1, \d numbers"):
        opened(folder / "one")
