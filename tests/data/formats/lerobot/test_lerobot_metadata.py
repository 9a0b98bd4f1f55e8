"""Metadata as they lie on disks: what says the same twice, what contradicts itself, and quirks that harm nothing."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from openpi_train.data.core.source import BadRecord
from openpi_train.data.formats.lerobot.encode import encode
from openpi_train.data.formats.lerobot.episodes import ParquetScan

FRONT = "observation.images.front"
EPISODES_30 = "meta/episodes/chunk-000/file-000.parquet"


def edit_rows(path, edit):
    """Write a parquet file's rows again, after `edit` changed the list of them."""
    rows = parquet.read_table(path).to_pylist()
    parquet.write_table(pa.Table.from_pylist(edit(rows) or rows), path)


def edit_lines(path, edit):
    """Write a file of JSON lines again, after `edit` changed the list of its lines."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    path.write_text("\n".join(edit(lines) or lines) + "\n", encoding="utf-8")


def prefixed(path, mark=b"\xef\xbb\xbf"):
    path.write_bytes(mark + path.read_bytes())


def as_floats(rows):
    """What pandas makes of whole numbers in a column that lacks one."""
    for row in rows:
        row.update({name: float(value) for name, value in row.items() if name.endswith("_index") and "/" in name})


def further_text(path):
    edit_lines(path, lambda lines: [json.dumps({"task_name": "x", **json.loads(line)}) for line in lines])


def more_tasks(root):
    table = parquet.read_table(root / "meta/tasks.parquet")
    parquet.write_table(table.append_column("category", pa.array(["a"] * len(table))), root / "meta/tasks.parquet")


def mac_files(root):
    for path in (*root.rglob("*.parquet"), *root.rglob("*.jsonl"), *root.rglob("*.mp4")):
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7" + b"x" * 99)


HARMLESS = {
    "BOM in info.json": ("v21_image", lambda root: prefixed(root / "meta/info.json")),
    "BOM in tasks.jsonl": ("v21_image", lambda root: prefixed(root / "meta/tasks.jsonl")),
    "BOM in episodes.jsonl": ("v21_image", lambda root: prefixed(root / "meta/episodes.jsonl")),
    "blank lines": ("v21_image", lambda root: prefixed(root / "meta/tasks.jsonl", b"\n \r\n")),
    "a further text": ("v21_image", lambda root: further_text(root / "meta/tasks.jsonl")),
    "a further column of texts": ("v30_image", more_tasks),
    "._ files in 2.1": ("v21_video", mac_files),
    "._ files in 3.0": ("v30_video", mac_files),
    "floats": ("v30_video", lambda root: edit_rows(root / EPISODES_30, as_floats)),
    "an episode twice in 2.1": (
        "v21_image",
        lambda root: edit_lines(root / "meta/episodes.jsonl", lambda lines: [*lines, lines[1]]),
    ),
    "a task twice": ("v21_image", lambda root: edit_lines(root / "meta/tasks.jsonl", lambda lines: [*lines, lines[0]])),
    "a left-over copy in 3.0": (
        "v30_video",
        lambda root: shutil.copy(root / EPISODES_30, root / "meta/episodes/chunk-000/file-001.parquet"),
    ),
}
TOLD = {
    "an episode twice in 2.1": ("an episode listed twice", 1, "meta/episodes.jsonl, line 4"),
    "a task twice": ("a task listed twice", 1, "meta/tasks.jsonl, line 3"),
    "a left-over copy in 3.0": ("an episode listed twice", 3, "meta/episodes/chunk-000/file-001.parquet, row 0"),
}


@pytest.mark.parametrize("quirk", HARMLESS)
def test_a_quirk_that_harms_nothing_leaves_the_dataset_what_it_was(broken, quirk):
    name, harm = HARMLESS[quirk]
    copy = broken(name)
    before = copy.open()
    harm(copy.root)
    after = copy.open()
    assert (after.fingerprint, list(after.prompts)) == (before.fingerprint, list(before.prompts))
    told = [(finding.kind, finding.count, finding.where) for finding in after.findings]
    assert told == ([TOLD[quirk]] if quirk in TOLD else [])


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_marks_at_which_python_divides_lines_may_stand_in_a_task(broken, mark):
    copy = broken("v21_image")
    tasks = [{"task_index": 0, "task": f"push{mark}it"}, {"task_index": 1, "task": "pull"}]
    lines = [json.dumps(task, ensure_ascii=False) for task in tasks]
    (copy.root / "meta/tasks.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert list(copy.open().prompts) == [f"push{mark}it", "pull"]


def other_length(root):
    edit_lines(root / "meta/episodes.jsonl", lambda lines: [*lines, lines[1].replace('"length": 17', '"length": 18')])


def other_text(number, text="green"):
    def harm(root):
        line = json.dumps({"task_index": number, "task": text})
        edit_lines(root / "meta/tasks.jsonl", lambda lines: [*lines, line])

    return harm


REFUSED = {
    "an episode with two lengths": (
        other_length,
        r"episodes\.jsonl, line 4: episode 1 is listed by meta/episodes\.jsonl, line 2, too, with another length",
    ),
    "a task with two texts": (other_text(0), r"tasks\.jsonl, line 3: task 0 is 'green', but meta/tasks\.jsonl, line 1"),
    "a negative number": (other_text(-1), r"tasks\.jsonl, line 3: its task_index is -1; needed is a whole number of 0"),
    "a fraction": (other_text(0.5), r"tasks\.jsonl, line 3: its task_index is 0\.5; needed is a whole number"),
    "no number": (other_text(None), r"tasks\.jsonl, line 3: its task_index is null; needed is a whole number"),
    "no text": (other_text(2, 7), r"tasks\.jsonl, line 3: the instruction should be a text called task"),
    "a torn task": (
        lambda root: edit_lines(root / "meta/tasks.jsonl", lambda lines: [lines[0], lines[1][:20]]),
        r"tasks\.jsonl, line 2: the line is not JSON \(.*\); mend or remove it",
    ),
    "a task that is no object": (
        lambda root: edit_lines(root / "meta/tasks.jsonl", lambda lines: [*lines, "[3]"]),
        r"tasks\.jsonl, line 3: \[3\] is no object",
    ),
    "a torn info.json": (
        lambda root: (root / "meta/info.json").write_text("{"),
        r"cannot read the metadata of .*: meta/info\.json is not JSON",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_metadata_that_contradict_themselves_are_refused_by_file_and_line(broken, fault):
    harm, message = REFUSED[fault]
    copy = broken("v21_image")
    harm(copy.root)
    with pytest.raises(ValueError, match=message):
        copy.open(on_bad_record="skip")


@pytest.mark.parametrize("entry", [{"shape": None}, {"shape": [2.5]}, {"shape": ["7"]}, {"shape": [-7]}])
def test_a_feature_that_is_not_described_is_named_and_whole_floats_are_whole(broken, entry):
    copy = broken("v21_image")
    before = copy.open()
    features = json.loads((copy.root / "meta/info.json").read_text())["features"]
    copy.edit_info(features={**features, "action": {**features["action"], "shape": [7.0]}}, chunks_size=1000.0)
    assert copy.open().fingerprint == before.fingerprint
    copy.edit_info(features={**features, "action": {**features["action"], **entry}})
    with pytest.raises(ValueError, match=r"info\.json: .*action .*dtype.* shape"):
        copy.open()


def test_a_missing_file_of_tasks_and_a_torn_one_of_episodes_are_named(broken):
    copy = broken("v21_image")
    (copy.root / "meta/tasks.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"meta/tasks\.jsonl is missing: download it"):
        copy.open()
    copy = broken("v30_image")
    (copy.root / EPISODES_30).write_bytes(b"PAR1 torn")
    with pytest.raises(ValueError, match=r"meta/episodes/chunk-000/file-000\.parquet: "):
        copy.open()


@pytest.mark.parametrize("torn", ['{"episode_index": 1, "len', "[1]"])
def test_a_damaged_line_of_an_episode_is_an_error_before_any_file_is_read_or_left_out(broken, monkeypatch, torn):
    copy = broken("v21_image")
    whole = copy.open()
    edit_lines(copy.root / "meta/episodes.jsonl", lambda lines: [lines[0], torn, lines[2]])
    with monkeypatch.context() as patch:
        patch.setattr(ParquetScan, "read", None)
        with pytest.raises(BadRecord, match=r"meta/episodes\.jsonl, line 2, episode unknown: .*mend or remove"):
            copy.open()
    source = copy.open(on_bad_record="skip")
    assert list(source.episode_ids) == [whole.episode_ids[0], whole.episode_ids[2]] and source.num_dropped == 1


def test_a_large_number_of_a_task_costs_no_memory(broken):
    copy = broken("v21_image")
    edit_lines(
        copy.root / "meta/tasks.jsonl", lambda lines: [*lines, json.dumps({"task_index": 1 << 40, "task": "never"})]
    )
    assert list(copy.open().prompts)[-1] == "never"


def test_other_totals_in_info_json_are_told(broken):
    copy = broken("v21_image")
    copy.edit_info(total_episodes=5)
    (finding,) = copy.open().findings
    assert (finding.kind, finding.count, finding.what) == (
        "info.json counts other episodes",
        3,
        "total_episodes is 5",
    )


def test_an_episode_without_a_video_is_left_out_if_so_asked(broken):
    copy = broken("v30_video")

    def lacks_front(rows):
        for part in ("chunk_index", "file_index", "from_timestamp"):
            rows[1][f"videos/{FRONT}/{part}"] = None

    edit_rows(copy.root / EPISODES_30, lacks_front)
    told = rf"row 1, episode 1: its videos/{FRONT}/chunk_index is null"
    with pytest.raises(BadRecord, match=told):
        copy.open()
    source = copy.open(on_bad_record="skip")
    assert source.num_dropped == 1 and source.episode_ends.tolist() == [20, 43]


@pytest.mark.parametrize("kind", ["mp4", "parquet"])
def test_missing_files_cost_their_episodes_if_so_asked_until_they_are_there(broken, caplog, kind):
    copy = broken("v21_video")
    whole = copy.open()
    lost = next(path for path in sorted(copy.root.rglob(f"*_000001.{kind}")))
    aside = lost.rename(copy.root / "aside")
    with pytest.raises(
        FileNotFoundError, match=rf"1 of the \d+ files .* are missing: .*{lost.name}.*on_bad_record skip"
    ):
        copy.open()
    source = copy.open(on_bad_record="skip")
    assert list(source.episode_ids) == [whole.episode_ids[0], whole.episode_ids[2]]
    assert "episode 1: " in caplog.text and "the file is missing: download it" in caplog.text
    with pytest.raises(BadRecord, match="the file is missing: download it"):
        copy.open()
    aside.rename(lost)
    assert copy.open(on_bad_record="skip").fingerprint == whole.fingerprint


def test_a_listed_feature_that_no_file_has_is_left_out_with_the_reason(broken):
    copy = broken("v21_image")
    features = json.loads((copy.root / "meta/info.json").read_text())["features"]
    features["observation.force"] = {"dtype": "float32", "shape": [3], "names": None}
    features["observation.images.top"] = features[FRONT]
    copy.edit_info(features=features)
    source = copy.open()
    assert "observation/force" not in source.columns and "observation/images/top" not in source.cameras
    why = "listed in meta/info.json, but in no data file"
    assert source.about().left_out == {"observation/force": why, "observation/images/top": why}
    # In some files and not in others, it is the files that are wrong.
    path = copy.root / "data/chunk-000/episode_000001.parquet"
    table = parquet.read_table(path)
    force = pa.array(np.zeros((len(table), 3), np.float32).tolist())
    parquet.write_table(table.append_column("observation.force", force), path)
    with pytest.raises(BadRecord, match=r"episode 0: the file lacks observation\.force, which other files"):
        copy.open()


SHAPES = {
    "channels first by its numbers alone": ([3, 48, 64], ["height", "width", "channels"], 0),
    "channels first without names": ([3, 48, 64], None, 0),
    "width first": ([64, 48, 3], ["width", "height", "channels"], 0),
    "another size": ([96, 128, 3], ["height", "width", "channels"], 1),
}


@pytest.mark.parametrize("name", ["v30_video", "v21_image"])
@pytest.mark.parametrize("case", SHAPES)
def test_a_camera_has_the_size_of_its_files_whatever_info_json_says(broken, name, case):
    shape, names, told = SHAPES[case]
    copy = broken(name)
    frames = copy.open().frames(np.arange(60), FRONT.replace(".", "/"))
    features = json.loads((copy.root / "meta/info.json").read_text())["features"]
    features[FRONT] |= {"shape": shape, "names": names}
    copy.edit_info(features=features)
    source = copy.open()
    np.testing.assert_array_equal(source.frames(np.arange(60), FRONT.replace(".", "/")), frames)
    assert source.frames(np.arange(0), FRONT.replace(".", "/")).shape == (0, 48, 64, 3)
    assert [(finding.kind, finding.where) for finding in source.findings] == [
        ("a camera of another size", FRONT)
    ] * told


def test_a_video_of_another_size_than_its_camera_s_others_costs_its_episode(broken):
    copy = broken("v21_video")
    (video,) = copy.root.rglob(f"{FRONT}/episode_000000.mp4")
    video.unlink()
    grey = (np.full((32, 40, 3), step, np.uint8) for step in range(20))
    encode(video, grey, (32, 40), fps=10, codec="h264")
    with pytest.raises(BadRecord, match=r"episode 0: .*000000\.mp4 is 32x40; the camera's other videos are 48x64"):
        copy.open()
    assert copy.open(on_bad_record="skip").num_episodes == 2
