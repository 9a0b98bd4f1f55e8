"""The run directory: opened under clear rules, never overwritten, with a record of the start."""

import dataclasses
import errno
import json
import logging
import multiprocessing.dummy
import queue
import shlex
import sys
import time
import types
from pathlib import Path

import jax
import pytest
from openpi_train_configs.debug import debug

from openpi_train.data.core import hub
from openpi_train.data.core.files import write_json
from openpi_train.fields import as_json, changed_fields
from openpi_train.interop.manifest import write_manifest
from openpi_train.launch.spec import SAVED_STEP_VARIABLE
from openpi_train.models.paligemma import PaliGemmaFlowConfig
from openpi_train.optim import SGD, LRSchedule
from openpi_train.runtime import passing_errors
from openpi_train.runtime.exits import USAGE, StorageError, UsageError
from openpi_train.training import rundir
from openpi_train.training.run_record import recorded_json
from openpi_train.training.rundir import check_run, environment, open_run, record_start


def given(base, name="first", **fields):
    """The experiment that a command line asks for."""
    return dataclasses.replace(debug, name="debug", checkpoint_base_dir=str(base), exp_name=name, **fields)


def start(base, name="first", **fields):
    """A start that trains a step."""
    asked = given(base, name, **fields)
    run = open_run(asked)
    record_start(asked, {})
    (run.path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    return run


def test_new_run_records_experiment_and_environment(tmp_path):
    run = start(tmp_path)
    assert run.path == tmp_path / "debug" / "first"
    assert not run.resumed
    assert json.loads((run.path / "experiment.json").read_text()) == json.loads(json.dumps(as_json(given(tmp_path))))
    (first,) = json.loads((run.path / "environment.json").read_text())["starts"]
    assert first["versions"]["jax"] == jax.__version__
    assert first["devices"] == {"count": jax.device_count(), "kind": "cpu", "platform": "cpu"}
    assert first["argv"]


def test_a_run_directory_that_cannot_be_read_for_now_is_read_later(tmp_path, monkeypatch):
    start(tmp_path)
    read, left = Path.read_bytes, [2]

    def read_bytes(path):
        if left[0]:
            left[0] -= 1
            raise OSError(5, "Input/output error", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(passing_errors, "time", types.SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic))
    check_run(given(tmp_path, resume=True))
    left[0] = 2
    assert open_run(given(tmp_path, resume=True)).resumed and left == [0]


def test_existing_run_without_a_flag_is_an_error_that_names_both(tmp_path):
    start(tmp_path)
    with pytest.raises(UsageError, match=r"holds a run already: --resume .* --overwrite") as raised:
        start(tmp_path)
    assert raised.value.exit_code == USAGE


def test_a_start_that_has_trained_nothing_is_moved_aside_and_may_be_another_model(tmp_path, caplog):
    longer = dataclasses.replace(debug.model, action_horizon=debug.model.action_horizon + 1)
    first = start(tmp_path)
    with pytest.raises(UsageError, match=r"model\.action_horizon: the run has"):
        start(tmp_path, resume=True, model=longer)
    (first.path / "metrics.jsonl").write_bytes(b"")
    assert start(tmp_path, resume=True, model=longer).resumed
    (first.path / "metrics.jsonl").unlink()
    check_run(given(tmp_path))
    with caplog.at_level(logging.INFO):
        again = start(tmp_path)
    assert again.replaced is not None and (again.replaced / "experiment.json").is_file()
    assert f"trained nothing: the run that was in {again.path} now lies in {again.replaced}" in caplog.text
    for left in ("100", "100.damaged-1", "100.replaced-2"):
        (again.path / "metrics.jsonl").unlink(missing_ok=True)
        (again.path / left).mkdir()
        with pytest.raises(UsageError, match="holds a run already"):
            check_run(given(tmp_path))
        (again.path / left).rmdir()


def test_overwrite_moves_the_old_run_aside_with_all_its_files(tmp_path):
    old = start(tmp_path)
    (old.path / "7").mkdir()
    (old.path / "7" / "weights").write_text("precious")
    for times in (1, 2):  # twice within one second must not collide
        run = start(tmp_path, overwrite=True)
        assert run.replaced is not None
        assert not (run.path / "7").exists()
        assert len(list((tmp_path / "debug").glob("first.replaced-*"))) == times
    (kept,) = (tmp_path / "debug").glob("first.replaced-*/7/weights")
    assert kept.read_text() == "precious"


def test_overwrite_of_nothing_just_starts(tmp_path):
    run = start(tmp_path, overwrite=True)
    assert run.replaced is None
    assert not run.resumed


def test_resume_of_nothing_says_so_and_starts(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        check_run(given(tmp_path, resume=True))
        run = start(tmp_path, resume=True)
    assert not run.resumed
    assert f"there is no run in {tmp_path}/debug/first, so one begins there" in caplog.text
    assert "resume RUN" in caplog.text and not [one for one in caplog.records if one.levelno > logging.INFO]


@pytest.mark.parametrize(
    ("there", "asked", "warned"),
    [
        ("my_experiment", "my_experimnt", True),
        ("pi05 pick", "pi05 pikc", True),
        ("seed_1", "seed_2", False),
        ("baseline", "ablation", False),
    ],
)
def test_resume_of_a_name_that_is_nearly_a_runs_warns(tmp_path, caplog, there, asked, warned):
    run = start(tmp_path, there).path
    (run.parent / f"{asked}_").mkdir()  # no run
    with caplog.at_level(logging.WARNING):
        check_run(given(tmp_path, asked, resume=True))
    said = f"there is no run {run.parent / asked}, so one begins there. Did you mean {there}? It goes on with: "
    assert (said + f"python -m openpi_train resume {shlex.quote(str(run))}" in caplog.text) == warned
    assert warned or not caplog.records


@pytest.mark.parametrize("typed_in", ["project/scripts/deep", "."])
def test_resume_in_another_folder_names_the_run_that_was_meant(tmp_path, monkeypatch, caplog, typed_in):
    (tmp_path / "project" / "scripts" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    start("./checkpoints")
    check_run(given("./checkpoints", resume=True))
    assert "no run" not in caplog.text
    monkeypatch.chdir(tmp_path / typed_in)
    with caplog.at_level(logging.WARNING):
        check_run(given("./checkpoints", resume=True))
    meant = tmp_path / "project" / "checkpoints" / "debug" / "first"
    assert f"there is no run in {tmp_path / typed_in}/checkpoints/debug/first" in caplog.text
    assert f"python -m openpi_train resume {meant}" in caplog.text


def test_resume_keeps_the_record_of_every_start(tmp_path):
    start(tmp_path)
    run = start(tmp_path, resume=True)
    assert run.resumed
    starts = json.loads((run.path / "environment.json").read_text())["starts"]
    assert [entry["changed"] for entry in starts] == [{}, {"resume": [False, True]}]


@pytest.mark.parametrize("content", ["", "{}", "[1"])
def test_a_damaged_record_of_starts_is_moved_aside(content, tmp_path, caplog):
    run = start(tmp_path)
    (run.path / "environment.json").write_text(content)
    start(tmp_path, resume=True)
    assert len(json.loads((run.path / "environment.json").read_text())["starts"]) == 1
    assert [file.read_text() for file in run.path.glob("environment.json.damaged-*")] == [content]
    assert "environment.json cannot be read" in caplog.text


def test_a_restart_that_finds_no_run_where_one_was_saved_waits_for_the_file_system(tmp_path, monkeypatch):
    monkeypatch.setenv(SAVED_STEP_VARIABLE, "60")
    clock = iter(range(0, 10_000, 40))
    slow = types.SimpleNamespace(sleep=lambda _: None, monotonic=lambda: next(clock))
    monkeypatch.setattr(passing_errors, "time", slow)
    with pytest.raises(StorageError, match=r"step 60 was saved here before this restart"):
        check_run(given(tmp_path, resume=True))
    start(tmp_path)  # it is back
    check_run(given(tmp_path, resume=True))


def test_a_run_that_goes_on_uses_the_commits_of_its_first_start(tmp_path, monkeypatch):
    first, second = {"model me/a": "1" * 40}, {"model me/a": "2" * 40, "dataset me/b": "3" * 40}
    for resume, found in ((False, first), (True, second)):
        monkeypatch.setattr(hub, "_commits", dict(found))
        start(tmp_path, resume=resume)
    monkeypatch.setattr(hub, "_commits", {})
    rundir.use_first_commits(given(tmp_path))
    assert hub.commits() == {}
    rundir.use_first_commits(given(tmp_path, name="another", resume=True))
    assert hub.commits() == {}
    rundir.use_first_commits(given(tmp_path, resume=True))
    assert hub.commits() == second | first


def test_resume_that_fails_later_leaves_the_record_as_it_was(tmp_path):
    run = start(tmp_path)
    before = {path: path.read_bytes() for path in run.path.glob("*.json")}
    open_run(given(tmp_path, resume=True, batch_size=64))
    assert {path: path.read_bytes() for path in run.path.glob("*.json")} == before


def test_both_flags_exclude_each_other(tmp_path):
    with pytest.raises(UsageError, match="--resume and --overwrite exclude each other"):
        start(tmp_path, resume=True, overwrite=True)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "/tmp/x", "a\0b", "é" * 101])
def test_names_that_are_no_directory_name_are_refused(tmp_path, name):
    with pytest.raises(UsageError, match="--exp-name"):
        start(tmp_path, name)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_directory_with_other_peoples_files_is_left_alone(tmp_path, flags):
    place = tmp_path / "debug" / "first"
    place.mkdir(parents=True)
    (place / "thesis.tex").touch()
    with pytest.raises(UsageError, match="exists and is not a run"):
        start(tmp_path, **flags)
    assert [path.name for path in place.iterdir()] == ["thesis.tex"]


def test_log_files_may_be_there_before_the_run(tmp_path):
    (tmp_path / "debug" / "first" / "logs").mkdir(parents=True)
    assert not start(tmp_path).resumed


def test_resume_with_another_model_names_every_field_with_both_values(tmp_path):
    start(tmp_path)
    before = (tmp_path / "debug/first/experiment.json").read_bytes()
    wider = PaliGemmaFlowConfig(action_horizon=3)
    other = {"model": wider, "optimizer": SGD(), "ema_decay": None, "freeze": "img/.*"}
    with pytest.raises(UsageError) as raised:
        start(tmp_path, resume=True, **other)
    message = str(raised.value)
    for line in (
        "model.__class__: the run has 'Pi0Config', given 'PaliGemmaFlowConfig'",
        f"model.action_horizon: the run has {debug.model.action_horizon}, given 3",
        "optimizer.__class__: the run has 'AdamW', given 'SGD'",
        "ema_decay: the run has 0.99, given None",
        "freeze: the run has None, given 'img/.*'",
    ):
        assert line in message
    assert (tmp_path / "debug/first/experiment.json").read_bytes() == before


def test_resume_reports_harmless_changes_and_warns_of_the_others(tmp_path, caplog):
    run = start(tmp_path)
    changed = {
        "model": dataclasses.replace(debug.model, remat="none"),
        "optimizer": dataclasses.replace(debug.optimizer, b1=0.8),
        "log_interval": 5,
        "batch_size": 64,
        "ema_decay": 0.9,
        "timeouts": dataclasses.replace(debug.timeouts, data_s=7),
    }
    with caplog.at_level(logging.INFO):
        check_run(given(tmp_path, resume=True, **changed))  # before anything is planned
    levels = {record.getMessage().split()[2]: record.levelname for record in caplog.records if "with" in record.msg}
    told = ("model.remat", "log_interval", "timeouts.data_s")
    warned = ("optimizer.b1", "batch_size", "ema_decay")
    assert levels == {**dict.fromkeys(told, "INFO"), **dict.fromkeys(warned, "WARNING")}
    start(tmp_path, resume=True, **changed)
    assert json.loads((run.path / "experiment.json").read_text())["log_interval"] == 5


def test_a_run_that_is_made_longer_is_told_what_becomes_of_its_rate(tmp_path, caplog):
    falls = LRSchedule(kind="linear", warmup_steps=0, decay_steps=None, peak_lr=1e-3, decay_lr=0.0)
    start(tmp_path, num_train_steps=100, lr_schedule=falls)
    with caplog.at_level(logging.INFO):
        check_run(given(tmp_path, resume=True, num_train_steps=200, lr_schedule=falls))
    assert "at step 100 it is 0.0005, and was 0 in a run of 100 steps" in caplog.text


def test_torn_experiment_record_is_an_error(tmp_path):
    run = start(tmp_path)
    (run.path / "experiment.json").write_text("{")
    with pytest.raises(UsageError, match=r"experiment.json cannot be read .* put a copy back"):
        start(tmp_path, resume=True)


def test_a_record_that_a_power_cut_has_emptied_is_that_of_the_newest_checkpoint(tmp_path, caplog):
    run = start(tmp_path)
    settled, as_given = (as_json(given(tmp_path, seed=seed)) for seed in (6, 5))
    for step, content in (("2", {"experiment": settled, "given": as_given}), ("4", {})):
        write_json(run.path / step / "meta.json", content)
        write_manifest(run.path / step)
    whole = (run.path / "experiment.json").read_bytes()
    (run.path / "experiment.json").write_bytes(b"")
    assert recorded_json(run.path)["seed"] == 5
    assert "the experiment is that of checkpoint 2" in caplog.text
    start(tmp_path, resume=True, seed=5)
    assert caplog.text.count("the experiment is that of") == 1, "once"
    assert len((run.path / "experiment.json").read_bytes()) > len(whole) // 2, "the start has written it again"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EMFILE])
def test_a_run_directory_that_a_restart_cannot_use_any_more_may_be_mended(tmp_path, monkeypatch, number):
    start(tmp_path)

    def refuse(path):
        raise OSError(number, "refused", str(path))

    monkeypatch.setattr(rundir.run_lock, "hold", refuse)
    with pytest.raises(UsageError, match="refused"):
        open_run(given(tmp_path, resume=True))  # by hand
    monkeypatch.setenv("OPENPI_TRAIN_RESTART", "1")
    with pytest.raises(StorageError, match="could be used before this restart"):
        open_run(given(tmp_path, resume=True))


def test_changed_fields_are_dotted_paths_also_for_fields_that_one_side_lacks():
    saved, given = {"a": {"b": 1, "c": [1]}, "gone": 1}, {"a": {"b": 2, "c": [1]}, "new": 3}
    assert changed_fields(saved, given) == {"a.b": (1, 2), "gone": (1, None), "new": (None, 3)}


def test_base_directory_that_cannot_be_made_is_a_usage_error(tmp_path):
    (tmp_path / "file").touch()
    for begin in (start, lambda base: check_run(given(base))):  # also before anything is planned, as with --dry-run
        with pytest.raises(UsageError, match=rf"{tmp_path}/file is a file, and the run's folder would be"):
            begin(tmp_path / "file")


def two_processes(base, **flags):
    """What process 0 and process 1 get; threads stand for processes, a queue for the network."""
    network: queue.Queue = queue.Queue()

    def broadcast_0(_, value):
        network.put(json.loads(json.dumps(value)))
        return value

    def run(index):
        broadcast = broadcast_0 if index == 0 else lambda *_: network.get(timeout=240)
        try:
            return open_run(given(base, **flags), process_index=index, broadcast=broadcast)
        except UsageError as error:
            return str(error)

    with multiprocessing.dummy.Pool(2) as pool:
        return pool.map(run, [0, 1])


def test_every_process_gets_the_directory_or_the_error_of_process_0(tmp_path):
    first, second = two_processes(tmp_path)
    assert dataclasses.asdict(first) == dataclasses.asdict(second)
    (first.path / "1").mkdir()
    first, second = two_processes(tmp_path)
    assert first == second
    assert "--resume" in first


def test_process_that_does_not_see_the_directory_says_that_it_must_be_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(rundir, "_MARK_TIMEOUT_S", 0.3)
    own = start(tmp_path / "own").path  # an older run of this name on this host's own disk
    answer = {"path": str(own), "resumed": False, "replaced": None, "mark": "another word"}
    with pytest.raises(UsageError, match=r"process 1 on .* does not see .*file system that all hosts share"):
        open_run(given(tmp_path), process_index=1, broadcast=lambda *_: answer)


def test_environment_holds_no_secrets(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    monkeypatch.setenv("OPENPI_TRAIN_TOKEN", "hunter2")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JWT", "hunter2")
    monkeypatch.setenv("SLURM_JOB_COMMENT", "eyJhbGciOiJIUzI1NiJ9.hunter2.x")
    monkeypatch.setenv("NCCL_PROXY", "http://me:hunter2@proxy:3128")
    arguments = ["prog", "--hub-token", "hunter2", "--api-key=hunter2", "--model.max-token-len", "48"]
    monkeypatch.setattr(sys, "argv", arguments)
    recorded = environment()
    assert "hunter2" not in json.dumps(recorded)
    assert recorded["variables"]["SLURM_JOB_ID"] == "77"
    assert recorded["argv"] == ["prog", "--hub-token", "<hidden>", "--api-key=<hidden>", "--model.max-token-len", "48"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--env", "WANDB_API_KEY=hunter2"], ["--env", "WANDB_API_KEY=<hidden>"]),
        (["--note", "hf_" + "a" * 34], ["--note", "<hidden>"]),
        (["--proxy=http://me:hunter2@host:80"], ["--proxy=<hidden>"]),
        (["--wandb.key", "0123456789abcdef" * 2 + "01234567"], ["--wandb.key", "<hidden>"]),
        (["--exp-name", "key", "--path", "/a/token/b", "NAME=key"], None),
    ],
)
def test_the_recorded_command_holds_no_secrets(words, shown, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prog", *words])
    assert environment()["argv"] == ["prog", *(shown or words)]


@pytest.mark.slow
def test_a_check_refuses_like_an_open_and_leaves_no_trace(tmp_path):
    check_run(given(tmp_path))
    assert not any(tmp_path.iterdir())
    start(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    with pytest.raises(UsageError, match="holds a run already"):
        check_run(given(tmp_path))
    check_run(given(tmp_path, overwrite=True))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before
