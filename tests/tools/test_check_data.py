"""`data check`: formats are recognised, each dataset has its findings, and the exit code says if there are some."""

import argparse
import json

import chats
import numpy as np
import pytest
from made_episodes import WRITERS, sound

from openpi_train.data.check import fault_kinds
from openpi_train.data.core.interface import OpeningRequest
from openpi_train.data.core.source import BadRecord
from openpi_train.data.formats.detection import source_at
from openpi_train.data.formats.parquet import Parquet
from openpi_train.data.formats.repack import repack
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.windows import WindowShape
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.models.language import LanguageConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.robots.bridge import Bridge
from openpi_train.runtime.exits import UsageError
from openpi_train.tools import check_data
from openpi_train.tools import data as data_tool

SMALL = {"num_episodes": 6, "image_height": 12, "image_width": 16}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENPI_TRAIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(*words, experiment=None):
    return data_tool.main(["check", *map(str, words)], lambda *_: experiment)


def check(path, **options):
    given = {"split": None, "columns": {}, "held_out": None, "num_frames": 200, **options}
    (checked,) = check_data.check_path(str(path), **given)
    return checked


def of_robots(*datasets, state_dims=(7, 7)):
    def check_dims(states, actions):
        if (states, actions) != state_dims:
            raise ValueError(f"the model has {state_dims[0]} state dims, the robot {states}")

    data = DataConfig(datasets=datasets)
    policy = argparse.Namespace(rows=argparse.Namespace(window=WindowShape(horizon=2), check_dims=check_dims))
    return argparse.Namespace(name="mine", data=data, demonstrations=data, policy=policy)


@pytest.mark.parametrize("form", WRITERS)
def test_exit_code_and_json_say_what_is_found_in_any_format(form, tmp_path, capsys, caplog):
    episodes = sound()
    path = WRITERS[form](tmp_path / "sound", episodes)
    assert run(path) == 0
    assert f"{path.name} (16 episodes, 510 control steps): nothing found" in capsys.readouterr().out
    episodes[3].state[4, 0] = np.inf
    path = WRITERS[form](tmp_path / "broken", episodes)
    caplog.clear()
    assert run(path, "--json") == 3
    told = json.loads(capsys.readouterr().out)
    (dataset,) = told["datasets"]
    (finding,) = dataset["findings"]
    assert (finding["kind"], finding["count"], finding["unit"]) == ("not finite", 1, "episodes")
    assert "episode 3, step 4 of" in finding["where"]
    assert not any("not finite" in line for line in caplog.messages)  # the table has it
    assert run(path) == 3
    assert "not finite" in capsys.readouterr().out


def damage(form, path):
    if form == "rlds":
        (shard,) = path.glob("*.tfrecord*")
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 255
        shard.write_bytes(content)
    elif form == "lerobot":
        (shard,) = path.glob("data/*/*.parquet")
        shard.write_bytes(shard.read_bytes()[:1000])
    elif form == "zarr":
        (path / "data/action/1.0").write_bytes(b"torn")
    else:
        (path / "1.parquet").write_bytes(b"torn")


@pytest.mark.parametrize(
    ("form", "kind"), [(form, "refused" if form == "lerobot" else "damaged episodes") for form in WRITERS]
)
def test_damaged_files_are_findings_with_their_place(form, kind, tmp_path):
    path = WRITERS[form](tmp_path / "made", sound())
    damage(form, path)
    (finding,) = check(path).findings
    # The only file of LeRobot's has all episodes.
    assert finding.kind == ("refused" if form == "lerobot" else "damaged episodes")
    assert finding.count >= 1 and (finding.where or finding.what)


def test_a_dataset_that_is_not_there_is_refused_and_the_next_is_checked(tmp_path):
    good = Dataset(source=FakeData(**SMALL), robot=Bridge(), asset_id="good")
    gone = Dataset(source=Rlds(path=str(tmp_path / "gone")), robot=Bridge())
    first, second = check_data.check_experiment(of_robots(gone, good), num_frames=16)
    assert first.name == "gone" and [finding.kind for finding in first.findings] == ["refused"]
    assert second.name == "good" and second.size.startswith("6 episodes") and not second.findings


def test_what_only_the_model_refuses_is_told_after_the_datasets():
    dataset = Dataset(source=FakeData(**SMALL), robot=Bridge(), asset_id="arm")
    assert len(check_data.check_experiment(of_robots(dataset), num_frames=16)) == 1
    first, second = check_data.check_experiment(of_robots(dataset, state_dims=(8, 8)), num_frames=16)
    assert first.name == "arm" and not first.findings
    (finding,) = second.findings
    assert second.name == "mine, as opened" and finding.what == "the model has 8 state dims, the robot 7"


def test_a_bug_in_the_check_of_one_dataset_does_not_hide_the_others(monkeypatch, capsys):
    def broken(data):
        if data.name == "first":
            raise KeyError("ours")
        yield from ()

    monkeypatch.setattr(fault_kinds, "KINDS", (fault_kinds.FaultKind(broken, ()),))
    datasets = [Dataset(source=FakeData(**SMALL), robot=Bridge(), asset_id=name) for name in ("first", "second")]
    with pytest.raises(KeyError, match="ours"):
        run("mine", experiment=of_robots(*datasets))
    out = capsys.readouterr().out
    assert "first (not checked to the end)" in out and "second (6 episodes" in out


def test_the_held_out_dataset_and_the_robot_of_each_are_looked_at():
    cameras = {"base_0_rgb": "observation/image_9"}
    dataset = Dataset(
        source=FakeData(**SMALL), validation=FakeData(**SMALL, seed=1), robot=Bridge(cameras=cameras), asset_id="arm"
    )
    checked = check_data.check_experiment(of_robots(dataset), num_frames=16)
    assert [one.name for one in checked] == ["arm", "arm, held out"]
    assert all([finding.kind for finding in one.findings] == ["missing cameras"] for one in checked)


def test_the_bridge_sample_has_one_black_camera_and_what_its_robot_reads_is_sound(bridge_sample):
    (finding,) = check(bridge_sample).findings
    assert (finding.kind, finding.count, finding.total) == ("black pictures", 200, 200)
    assert finding.what == "observation/image_3"
    # Its splits hold the same episodes.
    _, other = sorted(check(bridge_sample, held_out="val").findings, key=lambda finding: finding.kind)
    assert (other.kind, other.count, other.total) == ("held-out episodes in training", 25, 25)
    dataset = Dataset(source=Rlds(path=str(bridge_sample)), robot=Bridge(trajectory=True))
    (checked,) = check_data.check_experiment(of_robots(dataset), num_frames=200)
    assert not checked.findings and checked.size == "25 episodes, 250 control steps"


def test_an_interrupted_check_goes_on_and_leaves_nothing_behind(home, tmp_path, monkeypatch):
    path = WRITERS["zarr"](tmp_path / "made", sound())
    pictures = fault_kinds.KINDS[-1].find

    def interrupted(data):
        raise KeyboardInterrupt

    monkeypatch.setattr(fault_kinds, "KINDS", (*fault_kinds.KINDS[:-1], fault_kinds.FaultKind(interrupted, ())))
    with pytest.raises(KeyboardInterrupt):
        check(path)
    assert list(home.glob("index/check-made.zarr-*/parts/*.npz"))
    monkeypatch.setattr(fault_kinds, "KINDS", (*fault_kinds.KINDS[:-1], fault_kinds.FaultKind(pictures, ())))
    assert not check(path).findings
    assert not list(home.glob("index/check-*"))


def test_a_repacked_copy_tells_what_its_source_told(tmp_path, caplog):
    episodes = sound()
    episodes[3].state[4, 0] = np.inf
    path = WRITERS["parquet"](tmp_path / "made", episodes)
    copy = repack(source_at(str(path)).open(), tmp_path / "steps", split="train")
    caplog.clear()
    assert [finding.kind for finding in Rlds(path=str(copy)).open().findings] == ["not finite"]
    assert any("not finite: 1 of 16 episodes" in line for line in caplog.messages)
    assert [finding.kind for finding in check(copy).findings] == ["not finite"]


def texts(folder, name, rows):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_texts_are_recognised_by_their_files_and_checked_with_their_columns(tmp_path, capsys):
    rows = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(9)]
    path = texts(tmp_path / "qa", "train.jsonl", rows)
    texts(tmp_path / "qa", "test.jsonl", rows[4:5])
    columns = ["--columns", "prompt=question", "completion=answer"]
    assert run(path, *columns) == 0
    assert "(9 records): nothing found" in capsys.readouterr().out
    assert run(tmp_path / "qa", "--split", "train", "--held-out", "test", *columns, "--json") == 3
    (finding,) = json.loads(capsys.readouterr().out)["datasets"][0]["findings"]
    assert (finding["kind"], finding["where"]) == ("held-out texts in training", "train.jsonl:5")
    assert run(path) == 3 and "unreadable records" in capsys.readouterr().out


def test_a_note_is_shown_and_is_no_fault(tmp_path, capsys):
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(9)]
    path = texts(tmp_path / "qa", "train.jsonl", [*rows, {"prompt": "再见是什么意思？", "completion": "It is 9."}])
    assert run(path) == 0
    assert "note, languages" in capsys.readouterr().out
    path = texts(tmp_path / "qa", "train.jsonl", [*rows, {"prompt": "再见是什么意思？", "completion": ""}])
    assert run(path) == 3


def test_an_experiment_of_texts_is_also_opened_as_a_run_opens_it(tmp_path):
    rows = [{"prompt": f"{n}+1=", "completion": " "} for n in range(9)]
    path = texts(tmp_path / "sums", "train.jsonl", rows)
    data = TextData(datasets=(TextDataset(path=str(path)),), tokenizer="none")

    def refused():
        raise ValueError("no such tokenizer")

    first, second = check_data.check_experiment(
        argparse.Namespace(name="mine", data=data, open_data=refused), num_frames=8
    )
    assert (first.name, [finding.kind for finding in first.findings]) == ("train", ["blank answers"])
    assert [finding.kind for finding in second.findings] == ["refused"] and "tokenizer" in second.findings[0].what


def test_what_encoding_the_texts_tells_is_shown(tmp_path):
    talks = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}"}]} for n in range(9)
    ]
    # Its eos token is not the one that ends a turn of the template.
    tokenizer = str(chats.write(tmp_path / "tokenizer", template=chats.CHATML))
    path = texts(tmp_path / "talks", "train.jsonl", talks)
    data = TextData(
        datasets=(TextDataset(path=str(path)),), tokenizer=tokenizer, validation_fraction=0.0, max_length=64
    )
    sizes = DecoderSizes(vocab_size=400, width=16, depth=1, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
    request = OpeningRequest(model=LanguageConfig(sizes=sizes, context_length=64), seed=0, batch_size=2)
    experiment = argparse.Namespace(name="mine", data=data, open_data=lambda: data.open(request))
    records, as_opened = check_data.check_experiment(experiment, num_frames=8)
    assert (records.name, records.size, list(records.findings)) == ("train", "9 records", [])
    assert [finding.kind for finding in as_opened.findings] == ["no stop token is a target"]


def test_parquet_files_are_told_by_their_columns(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.table({"text": ["a b c", "d e f"]}), tmp_path / "words.parquet")
    assert check_data.holds_texts(str(tmp_path / "words.parquet"))
    assert not check_data.holds_texts(str(WRITERS["parquet"](tmp_path / "arm", sound(2))))
    # verl's table: a list of messages as prompt.
    asked = pa.table({"data_source": ["gsm8k"], "prompt": [[{"role": "user", "content": "1 + 1?"}]]})
    parquet.write_table(asked, tmp_path / "verl.parquet")
    assert check_data.holds_texts(str(tmp_path / "verl.parquet"))
    with pytest.raises(BadRecord, match="row 0: prompt is list, not a text; is this a table of texts"):
        Parquet(path=str(tmp_path / "verl.parquet"), cache_dir=str(tmp_path / "cache")).open()
    (tmp_path / "empty.jsonl").touch()
    assert [finding.kind for finding in check(tmp_path / "empty.jsonl").findings] == ["no records"]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("data.csv", "read_csv('data.csv').to_parquet('data.parquet')"),
        ("notes.txt", 'one {"text": "..."} for each document'),
        ("arm.hdf5", "Demonstrations are read as RLDS, LeRobot"),
    ],
)
def test_a_file_of_another_format_is_told_what_is_read_and_what_to_do(name, advice, tmp_path):
    (tmp_path / name).write_text("a,b\n1,2\n")
    for path in (tmp_path / name, tmp_path):
        (finding,) = check(path).findings
        assert finding.kind == "refused" and advice in finding.what and ".jsonl" in finding.what


def test_the_table_is_as_wide_as_asked_and_120_characters_in_a_pipe(tmp_path, monkeypatch, capsys):
    episodes = sound(4)
    episodes[1].state[4, 0] = np.inf
    path = WRITERS["parquet"](tmp_path / "made", episodes)
    for columns, width in (("130", 130), ("20", 100), ("", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        assert run(path) == 3
        assert max(map(len, capsys.readouterr().out.splitlines())) <= width


def test_flags_that_have_no_meaning_are_refused(tmp_path):
    with pytest.raises(UsageError, match="--columns prompt: needed is TYPE=COLUMN"):
        run(tmp_path, "--columns", "prompt")
    with pytest.raises(UsageError, match="are for a path; mine is taken for an experiment"):
        run("mine", "--split", "train")
    path = WRITERS["zarr"](tmp_path / "made", sound(2))
    with pytest.raises(UsageError, match="has no splits"):
        check(path, split="val")
    with pytest.raises(UsageError, match="there is nothing to check"):
        check_data.check_experiment(argparse.Namespace(name="mine", data=None), num_frames=8)


def test_rlds_whose_shards_are_all_missing_is_no_folder_of_texts(tmp_path):
    folder = WRITERS["rlds"](tmp_path, sound())
    for shard in folder.glob("*.tfrecord*"):
        shard.unlink()
    (checked,) = check_data.check_path(str(folder), split=None, columns={}, held_out=None, num_frames=0)
    (finding,) = checked.findings
    assert finding.kind == "refused" and "made-train.tfrecord-00000-of-00001" in finding.what
