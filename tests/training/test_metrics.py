"""Metric files: every bit, every step once, valid JSON, never a question asked."""

import json
import struct
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.training import metrics
from openpi_train.training.metrics import MetricWriters, read_evaluations, require_writers


def lines(directory, name="metrics.jsonl"):
    return [json.loads(line, parse_constant=pytest.fail) for line in (directory / name).read_text().splitlines()]


def write(directory, steps, **options):
    metrics = MetricWriters(directory, process_index=0, **options)
    for step in steps:
        metrics.log(step, {"loss": step / 3})
    metrics.close()


def test_numbers_read_back_with_the_same_bits(tmp_path):
    random = np.random.default_rng(0)
    floats = random.integers(0, 2**31 - 2**24, 500, np.int32).view(np.float32)  # any positive finite pattern
    metrics = MetricWriters(tmp_path, process_index=0)
    for step, value in enumerate(floats):
        metrics.log(step, {"loss": value, "double": float(value) / 3, "on_device": jnp.float32(value), "count": step})
    metrics.close()
    for step, (line, value) in enumerate(zip(lines(tmp_path), floats, strict=True)):
        assert np.float32(line["loss"]).tobytes() == value.tobytes()
        assert np.float32(line["on_device"]).tobytes() == value.tobytes()
        assert line["double"] == float(value) / 3
        assert line["count"] == step == line["step"]


def test_every_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    metrics = MetricWriters(tmp_path, process_index=0)
    metrics.log(1, {"loss": 0.5})
    assert lines(tmp_path) == [{"step": 1, "loss": 0.5}]
    metrics.close()


def test_nan_and_infinity_are_strings_in_valid_json(tmp_path):
    metrics = MetricWriters(tmp_path, process_index=0)
    metrics.log(1, {"a": float("nan"), "b": float("inf"), "c": np.float32("-inf")})
    metrics.close()
    assert lines(tmp_path) == [{"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}]
    assert float(lines(tmp_path)[0]["c"]) == -np.inf


def test_a_start_from_the_beginning_keeps_no_line_of_an_earlier_one(tmp_path):
    write(tmp_path, [0, 10])
    assert read_evaluations(tmp_path / "metrics.jsonl", 0) == []
    write(tmp_path, [0])
    assert [line["step"] for line in lines(tmp_path)] == [0]
    assert [line["step"] for line in lines(tmp_path, "metrics.superseded.jsonl")] == [0, 10]


def test_resume_cuts_later_steps_into_a_file_that_is_kept(tmp_path):
    write(tmp_path, [10, 20, 30, 40])
    write(tmp_path, [30, 40, 50], resume_step=20)
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 30, 40, 50]
    write(tmp_path, [50], resume_step=40)
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 30, 40, 50]
    assert [line["step"] for line in lines(tmp_path, "metrics.superseded.jsonl")] == [30, 40, 50]


def test_the_line_after_the_step_that_is_resumed_from_is_cut(tmp_path):
    write(tmp_path, [1, 2, 3])
    write(tmp_path, [3, 4], resume_step=2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert [line["step"] for line in lines(tmp_path, "metrics.superseded.jsonl")] == [3]


def test_resume_after_a_kill_removes_the_torn_last_line(tmp_path):
    write(tmp_path, [10])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')
    write(tmp_path, [20], resume_step=15)
    assert [line["step"] for line in lines(tmp_path)] == [10, 20]
    assert (tmp_path / "metrics.superseded.jsonl").read_text() == '{"step": 2\n'


def test_a_resume_reads_only_the_end_of_a_long_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(20_000)))
    seen = []
    real = metrics.lines_from_the_end
    monkeypatch.setattr(metrics, "lines_from_the_end", lambda path: (seen.append(one) or one for one in real(path)))
    MetricWriters(tmp_path, process_index=0, resume_step=19_990).close()
    assert len(seen) == 10
    assert path.read_text().splitlines()[-1] == '{"step": 19990, "loss": 1.0}'
    cut = [json.loads(line)["step"] for line in (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()]
    assert cut == list(range(19_991, 20_000))


def test_a_last_line_without_its_end_is_kept_and_ended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    written = MetricWriters(tmp_path, process_index=0, resume_step=2)
    written.log(3, {"loss": 1.0})
    written.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "loss": 1.0}\n'


@pytest.mark.parametrize("written_later", [0, 1, 2])
def test_lines_that_could_not_be_written_before_a_save_are_there_once_after_it(tmp_path, written_later):
    """The process is killed after the save, when the disk has taken none, one or all of them."""
    write(tmp_path, [10])
    first = MetricWriters(tmp_path, process_index=0, resume_step=10)
    first._lines._file._write_held = lambda: OSError(5, "Input/output error")
    for step in (20, 30):
        first.log(step, {"loss": step / 3})
    saved = first.unwritten()
    assert [json.loads(line)["step"] for line in saved] == [20, 30]
    first._lines._file._file.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines([*saved[:written_later], *([] if written_later else ['{"st'])])
    write(tmp_path, [40], resume_step=30, unwritten=saved)
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 30, 40]
    assert [line["loss"] for line in lines(tmp_path)] == [step / 3 for step in (10, 20, 30, 40)]


def test_resume_with_nothing_to_cut_leaves_the_file_alone(tmp_path):
    write(tmp_path, [10])
    write(tmp_path, [20], resume_step=10)
    assert [line["step"] for line in lines(tmp_path)] == [10, 20]
    assert not (tmp_path / "metrics.superseded.jsonl").exists()


def test_only_process_0_writes(tmp_path):
    metrics = MetricWriters(tmp_path, process_index=1, tensorboard=True, wandb_project="x")
    metrics.log(1, {"loss": 1.0})
    metrics.close()
    assert not any(tmp_path.iterdir())


def scalars(directory):
    """Step, name and value of everything in a run's event files."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for path in (directory / "tensorboard").iterdir():
        data = path.read_bytes()
        while data:  # TFRecord framing: length, crc, payload, crc
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return found


def test_tensorboard_files_hold_the_same_values(tmp_path):
    write(tmp_path, [1, 2], tensorboard=True)
    assert scalars(tmp_path) == [(1, "loss", np.float32(1 / 3)), (2, "loss", np.float32(2 / 3))]


@pytest.mark.parametrize("package", ["tensorboardX", "wandb"])
def test_absent_package_is_named_with_the_way_out(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=r"pip install 'openpi_train\[(tensorboard|wandb)\]', or give --no-"):
        require_writers(tensorboard=package == "tensorboardX", wandb=package == "wandb")
    require_writers(tensorboard=package == "wandb", wandb=False)


@pytest.fixture
def wandb_calls(monkeypatch, tmp_path):
    """A stand-in for the wandb package that records how it is called."""
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
    )
    module = types.ModuleType("wandb")
    module.init = lambda **options: calls.append(options) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path / "no-home"))
    return calls


def test_wandb_keeps_one_run_id_over_resumes_and_is_offline_without_a_key(tmp_path, wandb_calls):
    run = tmp_path / "run"
    run.mkdir()
    for step in (1, 2):
        write(run, [step], wandb_project="openpi", wandb_config={"seed": 1}, resume_step=step - 1)
    first, _, _, second, logged, _ = wandb_calls
    assert first["id"] == second["id"] == (run / "wandb_id.txt").read_text().strip()
    assert first["mode"] == "offline"
    assert first["resume"] == "allow"
    assert first["name"] == "run"
    assert logged == (2, {"loss": 2 / 3})


def test_wandb_is_online_with_a_key_unless_the_user_says_otherwise(tmp_path, wandb_calls, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    write(tmp_path, [], wandb_project="openpi")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write(tmp_path, [], wandb_project="openpi")
    assert [call["mode"] for call in wandb_calls if isinstance(call, dict)] == ["online", "disabled"]


@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_full_disk_holds_lines_up_until_there_is_room(small_disk, fill_disk, tensorboard, caplog):
    metrics = MetricWriters(small_disk, process_index=0, tensorboard=tensorboard)
    metrics.log(0, {"loss": 0.5})
    filler = fill_disk()
    # More than a page of the disk, than any buffer on the way, and than tensorboardX's queue of ten.
    for step in range(1, 500):
        metrics.log(step, {"loss": step / 3})
    assert (small_disk / "metrics.jsonl").read_bytes().count(b"\n") < 500
    assert sum("metrics.jsonl cannot be written (No space" in record.message for record in caplog.records) == 1
    filler.unlink()
    metrics.log(500, {"loss": 500 / 3})
    metrics.close()
    assert [line["step"] for line in lines(small_disk)] == list(range(501))
    if tensorboard:
        assert [step for step, _, _ in scalars(small_disk)] == list(range(501))


def test_lines_that_never_found_room_are_shown_with_the_code_of_a_full_disk(small_disk, fill_disk):
    metrics = MetricWriters(small_disk, process_index=0)
    fill_disk()
    for step in range(500):
        metrics.log(step, {"loss": step / 3})
    with pytest.raises(
        CheckpointError, match=r"metrics.jsonl: \d+ lines could not be .*No space left on device"
    ) as said:
        metrics.close()
    written = (small_disk / "metrics.jsonl").read_text()
    rest = str(said.value).partition("\n")[2]
    assert [json.loads(line)["step"] for line in (written + rest).splitlines()] == list(range(500))


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o644, True)])
def test_a_key_of_wandb_is_found_whoever_can_read_it_and_that_is_told(mode, warned, tmp_path, monkeypatch, caplog):
    """Python's `netrc` refuses ~/.netrc where others can read it, and wandb does not: the run was offline, unsaid."""
    file = tmp_path / ".netrc"
    file.write_text("machine api.wandb.ai login user password 0123\n")
    file.chmod(mode)
    for name in ("NETRC", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert metrics._has_wandb_key()
    assert (f"wandb's key {file} can be read by others" in caplog.text) is warned
