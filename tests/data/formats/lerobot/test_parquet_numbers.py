"""Numbers of parquet columns against the rows that they were made from, in every way in which lists are stored."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from openpi_train.data.core.source import BadRecord
from openpi_train.data.formats.lerobot.parquet_numbers import numbers

ROWS = np.arange(24, dtype=np.float32).reshape(6, 4)
KINDS = {
    "lists": pa.list_(pa.float32()),
    "fixed-size lists": pa.list_(pa.float32(), 4),
    "large lists": pa.large_list(pa.float32()),
    "float64": pa.list_(pa.float64()),
}


def stored(tmp_path, values, kind=None):
    """The column as it comes back from a file, with the rows of three row groups."""
    column = pa.array(values, kind) if kind is not None else pa.array(values)
    parquet.write_table(pa.table({"x": column}), tmp_path / "x.parquet", row_group_size=2)
    return parquet.read_table(tmp_path / "x.parquet")["x"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_written_however_lists_are_stored(tmp_path, kind):
    values, counts = numbers(stored(tmp_path, ROWS.tolist(), KINDS[kind]), "float32", (4,))
    np.testing.assert_array_equal(values, ROWS, strict=True)
    assert counts.tolist() == [4] * 6


@pytest.mark.parametrize(
    ("nested", "shape"),
    [
        (ROWS.reshape(6, 2, 2), (2, 2)),
        (ROWS, (2, 2)),  # one list of all numbers
        (ROWS.reshape(6, 1, 4), (4,)),
        (ROWS.reshape(6, 4, 1), (4,)),
        (ROWS.reshape(6, 2, 1, 2), (2, 2)),
        (ROWS[:, :1], ()),
    ],
)
def test_the_same_numbers_may_be_nested_otherwise(tmp_path, nested, shape):
    values, counts = numbers(stored(tmp_path, nested.tolist()), "float32", shape)
    np.testing.assert_array_equal(values, nested.reshape(6, *shape), strict=True)
    assert set(counts.tolist()) == {int(np.prod(shape))}


WRONG = {
    "lists of 3 and 5": ([[0, 1, 2], [3, 4, 5, 6, 7]], [3, 5]),
    "an empty list and one of 8": ([[], [0, 1, 2, 3, 4, 5, 6, 7]], [0, 8]),
    "a null, and one of 8": ([None, [0, 1, 2, 3, 4, 5, 6, 7]], [-1, 8]),
    "a null in a list": ([[0, 1, None, 3], [0, 1, 2]], [-1, 3]),
}


@pytest.mark.parametrize("form", ["lists", "large lists"])
@pytest.mark.parametrize("fault", WRONG)
def test_numbers_of_one_row_are_never_those_of_another(tmp_path, fault, form):
    bad, told = WRONG[fault]
    rows = [*ROWS[:2].tolist(), *bad, *ROWS[2:].tolist()]
    values, counts = numbers(stored(tmp_path, rows, KINDS[form]), "float32", (4,))
    assert counts.tolist() == [4, 4, *told, 4, 4, 4, 4]
    np.testing.assert_array_equal(values[[0, 1, 4, 5, 6, 7]], ROWS)
    assert not values[2:4].any()


def test_nulls_of_fixed_size_lists_and_irregular_lists_of_lists_are_wrong_alone(tmp_path):
    rows = [*ROWS[:3].tolist(), None, [0, 1, None, 3], *ROWS[3:].tolist()]
    values, counts = numbers(stored(tmp_path, rows, KINDS["fixed-size lists"]), "float32", (4,))
    assert counts.tolist() == [4, 4, 4, -1, -1, 4, 4, 4]
    np.testing.assert_array_equal(np.delete(values, [3, 4], 0), ROWS)
    nested = [ROWS[0].reshape(2, 2).tolist(), [[1, 2, 3], [4]], [[1, 2]], ROWS[1].reshape(2, 2).tolist()]
    values, counts = numbers(stored(tmp_path, nested), "float32", (2, 2))
    assert counts.tolist() == [4, -1, -1, 4]
    np.testing.assert_array_equal(values[[0, 3]], ROWS[:2].reshape(2, 2, 2))


def test_single_numbers_that_are_missing_are_found_and_nan_is_a_number(tmp_path):
    values, counts = numbers(stored(tmp_path, [1, None, 3]), "int64", ())
    assert (values.tolist(), counts.tolist()) == ([1, 0, 3], [1, -1, 1])
    values, counts = numbers(stored(tmp_path, [1.0, float("nan")]), "float32", ())
    assert np.isnan(values[1]) and counts.tolist() == [1, 1]
    values, counts = numbers(pa.chunked_array([pa.nulls(2)]), "float32", ())
    assert counts.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("values", "dtype", "shape", "message"),
    [
        (["1", "2"], "float32", (), "it holds string, not numbers"),
        (
            [1.5, 2.0],
            "int64",
            (),
            "it holds double numbers? that int64 cannot hold|it holds float64 numbers that int64",
        ),
        ([300, 1], "uint8", (), "it holds int64 numbers that uint8 cannot hold"),
        ([[[1, 2], [3, 4]]], "float32", (4,), r"\(\[2, 2\] in the first row\), not \[4\] numbers per step"),
        ([[[1, 2, 3], [4, 5, 6]]], "float32", (6, 1, 1, 1), "not"),
    ],
)
def test_a_column_of_something_else_is_refused(tmp_path, values, dtype, shape, message):
    with pytest.raises(ValueError, match=message):
        numbers(stored(tmp_path, values), dtype, shape)


def test_a_row_of_another_length_costs_its_episode_and_not_its_neighbours(broken):
    copy = broken("v30_image")
    whole = copy.open()
    (file,) = (
        path
        for path in copy.root.glob("data/*/*.parquet")
        if 1 in parquet.read_table(path)["episode_index"].to_pylist()
    )
    table = parquet.read_table(file)
    rows = table["action"].to_pylist()
    at = table["episode_index"].to_pylist().index(1) + 5
    rows[at], rows[at + 1] = rows[at][:5], [*rows[at][5:], *rows[at + 1]]
    place = table.schema.get_field_index("action")
    parquet.write_table(table.set_column(place, "action", pa.array(rows)), file)
    told = r"episode 1: action of step 5 is 5 numbers, not 7, and 1 more steps like it"
    with pytest.raises(BadRecord, match=told):
        copy.open()
    source = copy.open(on_bad_record="skip")
    assert list(source.episode_ids) == [whole.episode_ids[0], whole.episode_ids[2]]
    kept = np.r_[0:20, 37:60]
    np.testing.assert_array_equal(source.columns["action"], whole.columns["action"][kept])
