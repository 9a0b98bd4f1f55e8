"""Merging replay buffers: the whole is the union of its parts, as the zarr package reads it."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr
from stores import LENGTHS, arms, push_t, write

from openpi_train.data.formats.zarr import Zarr, zarr_writer
from openpi_train.data.formats.zarr.merge import StoreToMerge, merge
from openpi_train.data.formats.zarr.store import BadChunk, Store
from openpi_train.data.formats.zarr.zarr_layout import read_layout
from openpi_train.tools import data as data_tool

ROOT = Path(__file__).resolve().parents[4]
TASKS = ("blocks_ranking_rgb", "blocks_ranking_size", "hanging_mug", "place_cans", "stack_blocks", "stack_bowls")


def lengths(seed):
    return (4 + seed, 7, 3 + 2 * seed)


def part_arrays(seed):
    return arms(lengths(seed), seed=seed)


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Six stores that differ in length, format, chunks and codec; one is a zip file."""
    folder = tmp_path_factory.mktemp("six")
    forms = [{}, {"form": 3}, {"chunk_rows": 9}, {"form": 3, "chunk_rows": 2, "shards": True}, {"chunk_rows": 50}, {}]
    return [
        write(
            folder / f"{task}-demo_clean-{seed}.zarr{'.zip' * (seed == 4)}",
            part_arrays(seed),
            lengths(seed),
            **forms[seed],
        )
        for seed, task in enumerate(TASKS)
    ]


@pytest.fixture
def small_blocks(monkeypatch):
    """A block per chunk, so that a small store has many."""
    monkeypatch.setattr("openpi_train.data.formats.zarr.store._BLOCK_BYTES", 1)


def parts(paths):
    return [StoreToMerge.parse(str(path)) for path in paths]


def check_union(path):
    root = zarr.open_group(str(path), mode="r", zarr_format=2)
    for name in ("head_camera", "state", "action"):
        expected = np.concatenate([part_arrays(seed)[name] for seed in range(6)])
        np.testing.assert_array_equal(root[f"data/{name}"][:], expected, strict=True)
    counts = [sum(lengths(seed)) for seed in range(6)]
    ends = np.cumsum([length for seed in range(6) for length in lengths(seed)])
    np.testing.assert_array_equal(root["meta/episode_ends"][:], ends)
    np.testing.assert_array_equal(root["data/task_id"][:], np.repeat(np.arange(6), counts))
    assert [task["name"] for task in root.attrs["tasks"]] == list(TASKS)


def test_a_merge_of_six_stores_is_their_union(six, tmp_path, capsys):
    out = tmp_path / "six_tasks.zarr"
    words = ["merge", *map(str, six), "--out", str(out), "--prompt", "hanging_mug=hang up the mug"]
    assert data_tool.main(words, lambda *_: None) == 0
    said = capsys.readouterr().out
    assert "18 episodes, " in said and "hanging_mug ('hang up the mug')" in said
    check_union(out)
    cache = str(tmp_path / "cache")
    whole = Zarr(path=str(out), cache_dir=cache).open()
    sources = [Zarr(path=str(path), cache_dir=cache).open() for path in six]
    assert list(whole.episode_ids) == [name for source in sources for name in source.episode_ids]
    first = np.concatenate([[0], np.cumsum([source.num_steps for source in sources])])
    for number, prompt in ((0, "blocks ranking rgb"), (2, "hang up the mug")):
        step = int(first[number]) + 5
        assert whole.prompts[whole.prompt_index[step]] == prompt
        frames = sources[number].frames(np.array([5]), "head_camera")
        np.testing.assert_array_equal(whole.frames(np.array([step]), "head_camera"), frames)
    assert "task_id" not in whole.columns
    assert not list(tmp_path.glob("*unfinished*"))


@pytest.mark.slow
def test_a_merge_that_is_killed_goes_on_where_it_was(six, tmp_path, monkeypatch, small_blocks):
    out, written = tmp_path / "six.zarr", []
    crc = zarr_writer._crc

    def killed_after(count):
        def note(values):
            written.append(len(values))
            if len(written) > count:
                raise KeyboardInterrupt
            return crc(values)

        monkeypatch.setattr(zarr_writer, "_crc", note)

    work = tmp_path / "six.zarr.unfinished"
    for count in (1, 20):
        killed_after(len(written) + count)
        with pytest.raises(KeyboardInterrupt):
            merge(parts(six), out, prompts={})
        with (work / "journal.jsonl").open("a") as journal:
            journal.write('["head_camera", 0, 4')  # cut short
        assert not out.exists()
        with pytest.raises(FileNotFoundError, match="holds no zarr store"):  # an unfinished one is none
            Zarr(path=str(work)).open()
    with pytest.raises(ValueError, match=r"\.unfinished was begun with other arrays, stores, tasks: give the same"):
        merge(parts(six[:5]), out, prompts={})
    monkeypatch.setattr(zarr_writer, "_crc", crc)
    kept = {path: path.stat().st_mtime_ns for path in work.glob("data/action/*.0")}
    merge(parts(six), out, prompts={})
    check_union(out)
    again = [path for path, time in kept.items() if (out / path.relative_to(work)).stat().st_mtime_ns != time]
    assert (len(kept), len(again)) == (22, 1)  # the block that was written, but not yet in the journal
    with pytest.raises(FileExistsError, match=r"six\.zarr exists already: give another target"):
        merge(parts(six), out, prompts={})


def test_a_block_that_does_not_read_back_is_named(six, tmp_path, monkeypatch, small_blocks):
    verify = zarr_writer._Writer.verify

    def damaged(writer):
        shutil.copy(writer.work / "data/state/0.0", writer.work / "data/state/1.0")
        verify(writer)

    monkeypatch.setattr(zarr_writer._Writer, "verify", damaged)
    with pytest.raises(ValueError, match=r"rows 4\.\.7 of data/state differ from what was written"):
        merge(parts(six[:2]), tmp_path / "a.zarr", prompts={})
    assert not (tmp_path / "a.zarr").exists()


def test_merged_stores_can_be_merged_again_and_keep_their_tasks(six, tmp_path):
    pair = tmp_path / "pair.zarr"
    merge(parts(six[:2]), pair, prompts={TASKS[1]: "by size"})
    merge(
        [StoreToMerge.parse(f"mug={six[2]}"), StoreToMerge.parse(str(pair)), StoreToMerge.parse(f"mug={six[3]}")],
        tmp_path / "all.zarr",
        prompts={},
    )
    layout = read_layout(Store(tmp_path / "all.zarr"))
    assert layout.tasks == (("mug", "mug"), (TASKS[0], "blocks ranking rgb"), (TASKS[1], "by size"))
    ids = zarr.open_group(str(tmp_path / "all.zarr"))["data/task_id"][:]
    counts = [sum(lengths(seed)) for seed in (2, 0, 1, 3)]
    np.testing.assert_array_equal(ids, np.repeat([0, 1, 2, 0], counts))


def test_tasks_of_one_prompt_share_it(six, tmp_path):
    out = tmp_path / "three.zarr"
    merge(parts(six[:3]), out, prompts={TASKS[0]: "sort", TASKS[1]: "by size", TASKS[2]: "sort"})
    source = Zarr(path=str(out), cache_dir=str(tmp_path / "cache")).open()
    assert list(source.prompts) == ["sort", "by size"]
    np.testing.assert_array_equal(source.prompt_index, np.repeat([0, 1, 0], [sum(lengths(seed)) for seed in range(3)]))


def test_a_task_that_changes_within_an_episode_is_refused(six, tmp_path):
    pair = tmp_path / "pair.zarr"
    merge(parts(six[:2]), pair, prompts={})
    zarr.open_group(str(pair))["data/task_id"][1] = 1
    with pytest.raises(ValueError, match=r"pair\.zarr: data/task_id changes within an episode"):
        merge(parts([pair, six[2]]), tmp_path / "out.zarr", prompts={})


def test_stores_that_cannot_be_one_are_refused_with_every_difference(six, tmp_path):
    wide = write(tmp_path / "wide.zarr", arms(dims=16))
    double = write(
        tmp_path / "double.zarr", {name: v.astype(float) if v.ndim == 2 else v for name, v in arms().items()}
    )
    large = write(tmp_path / "large.zarr", arms() | {"head_camera": np.zeros((sum(LENGTHS), 3, 24, 32), np.uint8)})
    other = write(tmp_path / "other.zarr", push_t())
    with pytest.raises(ValueError) as caught:
        merge(parts([six[0], wide, double, large, other, six[0]]), tmp_path / "out.zarr", prompts={})
    said, first = str(caught.value), six[0].name
    for line in (
        f"{six[0]} is given twice",
        f"data/action is float32 [16] per step in wide.zarr, float32 [14] in {first}",
        f"data/state is float64 [14] per step in double.zarr, float32 [14] in {first}",
        f"data/head_camera is uint8 [3, 24, 32] per step in large.zarr, uint8 [3, 12, 16] in {first}",
        f"other.zarr has no data/head_camera, but {first} has one",
        f"{first} has no data/keypoint, but other.zarr has one",
    ):
        assert f"\n  {line}" in said
    assert not list(tmp_path.glob("out*"))


def test_bad_prompts_and_damaged_parts_are_named(six, tmp_path):
    with pytest.raises(ValueError, match=r"--prompt mug: no such task; there are blocks_ranking_rgb, hanging_mug"):
        merge(parts([six[0], six[2]]), tmp_path / "out.zarr", prompts={"mug": "x"})
    torn = tmp_path / "torn.zarr"
    shutil.copytree(six[0], torn)
    (torn / "data/action/1.0").unlink()
    with pytest.raises(
        BadChunk, match=r"torn\.zarr: rows 0\.\.\d+ of data/action cannot be read \(.*1\.0.* is missing"
    ):
        merge(parts([six[1], torn]), tmp_path / "out.zarr", prompts={})


def test_written_chunks_are_all_there_even_if_they_are_zero(tmp_path):
    zero = write(tmp_path / "zero.zarr", {name: np.zeros_like(values) for name, values in arms().items()})
    merge(parts([zero]), tmp_path / "out.zarr", prompts={})
    metadata = json.loads((tmp_path / "out.zarr/data/state/.zarray").read_text())
    assert metadata["zarr_format"] == 2 and metadata["compressor"]["cname"] == "zstd"
    assert Zarr(path=str(tmp_path / "out.zarr"), cache_dir=str(tmp_path / "cache")).open().num_episodes == 3


KILLED = """
import sys, time
from pathlib import Path
from openpi_train.data.formats.zarr import store
from openpi_train.data.formats.zarr import zarr_writer
from openpi_train.data.formats.zarr.merge import StoreToMerge, merge

store._BLOCK_BYTES, crc = 1, zarr_writer._crc
zarr_writer._crc = lambda values: time.sleep(0.05) or crc(values)
merge([StoreToMerge.parse(path) for path in sys.argv[2:]], Path(sys.argv[1]), prompts={})
"""


@pytest.mark.multiprocess
def test_a_process_that_is_killed_while_merging_loses_a_block_and_no_more(six, tmp_path, small_blocks):
    out = tmp_path / "six.zarr"
    process = subprocess.Popen([sys.executable, "-c", KILLED, out, *six], cwd=ROOT)
    journal = tmp_path / "six.zarr.unfinished" / "journal.jsonl"
    deadline = time.monotonic() + 240
    while not journal.is_file() or len(journal.read_text().split()) < 40:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    noted = len([line for line in journal.read_text().splitlines() if line.endswith("]")])
    merge(parts(six), out, prompts={})
    check_union(out)
    assert noted >= 10
    assert not list(out.rglob("*lock*"))
