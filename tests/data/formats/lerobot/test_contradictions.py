"""A rate that the timestamps of a LeRobot dataset contradict is told."""

import json
import logging
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openpi_train.data.formats.lerobot import LeRobot

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(params=["v21_image", "v30_image"])
def copied(tmp_path, request):
    shutil.copytree(FIXTURES / request.param, tmp_path / "arm")
    return tmp_path / "arm"


def opened(root):
    return LeRobot(path=str(root), cache_dir=str(root.parent / "index")).open()


def with_fps(root, fps):
    file = root / "meta" / "info.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"fps": fps}))


def test_a_rate_that_timestamps_contradict_is_told_with_its_first_file(copied, caplog):
    caplog.set_level(logging.WARNING)
    assert not opened(copied).findings
    with_fps(copied, 30)
    (finding,) = opened(copied).findings
    assert (finding.kind, finding.count, finding.total, finding.unit) == ("another rate", 3, 3, "episodes")
    assert finding.where.startswith("data/chunk-000/") and finding.where.endswith("episode 0")
    assert "meta/info.json says 30 steps per second, their timestamps 10" in finding.what
    assert finding.line() in caplog.text


def test_the_rounding_of_a_rate_is_none(copied):
    with_fps(copied, 10.02)
    assert not opened(copied).findings


def test_one_episode_of_another_rate_is_told(copied):
    for file in (copied / "data").rglob("*.parquet"):
        table = pq.read_table(file)
        place = table.column_names.index("timestamp")
        pairs = zip(table.column(place).to_pylist(), table.column("episode_index").to_pylist(), strict=True)
        column = pa.array([time / 5 if episode == 1 else time for time, episode in pairs], table.schema[place].type)
        pq.write_table(table.set_column(place, table.field(place), column), file)
    (finding,) = opened(copied).findings
    assert (finding.count, finding.total) == (1, 3) and finding.where.endswith("episode 1")
    assert finding.what == "meta/info.json says 10 steps per second, their timestamps 50"


def test_timestamps_that_stand_still_are_told(copied):
    for file in (copied / "data").rglob("*.parquet"):
        table = pq.read_table(file)
        place = table.column_names.index("timestamp")
        column = pa.array([0.0] * len(table), table.schema[place].type)
        pq.write_table(table.set_column(place, table.field(place), column), file)
    (finding,) = opened(copied).findings
    assert finding.kind == "time stamps that go back" and (finding.count, finding.total) == (57, 60)
