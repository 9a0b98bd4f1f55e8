"""Checkpoints: bits, damage, disks, retention, other models, other devices."""

import errno
import json
import logging
import math
import os
import pathlib
import re
import shutil
import threading
import types
import zlib

import forks
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_process import SAVED_WITH, abstract, make_state, same_bits

from openpi_train.checkpoints import checkpoint_store, step_dirs
from openpi_train.checkpoints.best import Best
from openpi_train.checkpoints.checkpoint_formats import open_checkpoint
from openpi_train.checkpoints.checkpoint_store import Checkpoints
from openpi_train.interop import manifest
from openpi_train.launch.processes import free_port
from openpi_train.runtime import passing_errors
from openpi_train.runtime.exits import CHECKPOINT, CheckpointError, HardwareError, PeerLostError, StorageError

PROGRAM = pathlib.Path(__file__).parents[1] / "checkpoint_process.py"


def publish(path: str) -> str:
    return f"PaliGemma/{path}"


def save_steps(directory, *steps, **options) -> Checkpoints:
    checkpoints = Checkpoints(directory, **options)
    for step in steps:
        checkpoints.save(make_state(step), **SAVED_WITH)
    checkpoints.wait()
    return checkpoints


def data_file(directory: pathlib.Path) -> pathlib.Path:
    """The largest file of a checkpoint's parameters."""
    return max((directory / "params").rglob("*/d/*"), key=lambda path: path.stat().st_size)


def flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def raise_(error: Exception):
    raise error


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory) -> pathlib.Path:
    """A run with checkpoints 1 and 2; tests copy it."""
    directory = tmp_path_factory.mktemp("two")
    save_steps(directory, 1, 2, keep_last=2).close()
    return directory


@pytest.fixture
def run(two_saved, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(two_saved, tmp_path / "run"))


@pytest.mark.parametrize("ema", [True, False])
def test_restore_gives_the_saved_bits_structure_and_meta(tmp_path, ema):
    state = make_state(5, ema=ema)
    stats = {"robot": {"norm_stats": {"state": {"mean": [0.5], "std": [2.0]}}}}
    with Checkpoints(tmp_path, public_name=publish) as checkpoints:
        stall_s = checkpoints.save(state, **{**SAVED_WITH, "norm_stats": stats}, extra={"wandb_id": "abc"})
    assert stall_s > 0
    restored, meta = Checkpoints(tmp_path, public_name=publish).restore(abstract(state))
    assert same_bits(restored, state)
    assert meta["step"] == 5
    assert meta["data_position"] == {"step": 7}
    assert meta["experiment"] == {"seed": 1}
    assert meta["wandb_id"] == "abc"
    assert meta["versions"]["jax"] == jax.__version__
    assert json.loads((tmp_path / "5/assets/robot/norm_stats.json").read_text()) == stats["robot"]


def test_state_may_be_donated_while_it_is_saved(tmp_path):
    state = make_state(5, rows=160_000)
    expected = jax.tree.map(lambda leaf: np.array(leaf).tobytes(), state)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path)
    like = abstract(state)
    checkpoints.save(state, **SAVED_WITH)
    for _ in range(3):
        state = overwrite(state)
    checkpoints.close()
    restored, _ = Checkpoints(tmp_path).restore(like)
    assert jax.tree.map(lambda leaf: np.array(leaf).tobytes(), restored) == expected


def test_everything_but_the_copy_is_left_to_a_thread_that_comes_last(tmp_path, monkeypatch):
    may_write, write, niceness = threading.Event(), ocp.PyTreeCheckpointHandler.save, []

    def wait_and_write(*arguments, **named):
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        assert may_write.wait(60)
        write(*arguments, **named)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "save", wait_and_write)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make_state(1), **SAVED_WITH)
    assert checkpoints.steps() == []
    may_write.set()
    checkpoints.close()
    assert checkpoints.steps() == [1]
    assert niceness == 2 * [max(10, os.getpriority(os.PRIO_PROCESS, 0))]  # for each item


def test_an_error_before_the_first_array_is_written_is_raised_by_the_next_call(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)

    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "save", fail)
    checkpoints.save(make_state(1), **SAVED_WITH)
    with pytest.raises(StorageError, match=r"saving checkpoint 1 failed: OSError.*Input/output error"):
        checkpoints.save(make_state(2), **SAVED_WITH)
    monkeypatch.undo()
    checkpoints.save(make_state(3), **SAVED_WITH)
    checkpoints.close()
    assert checkpoints.steps() == [3]


@pytest.fixture
def quick(monkeypatch):
    """What is tried again is tried at once; returns the pauses that were left out."""
    pauses = []
    clock = types.SimpleNamespace(sleep=pauses.append, monotonic=lambda: float(sum(pauses)))
    monkeypatch.setattr(passing_errors, "time", clock)
    return pauses


def failing(function, times, number=errno.EIO):
    """The function, which fails the first few times as a file server in a failover does."""
    left = [times]

    def call(*arguments, **named):
        if left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number), "manifest.json")
        return function(*arguments, **named)

    return call


@pytest.mark.parametrize("where", ["write_manifest", "Path.rename", "Path.mkdir", "Path.iterdir"])
def test_an_error_that_passes_costs_no_save(tmp_path, monkeypatch, quick, where):
    checkpoints = save_steps(tmp_path, 1)
    owner = checkpoint_store if where == "write_manifest" else pathlib.Path
    name = where.rpartition(".")[2]
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), 3))
    checkpoints.save(make_state(2), **SAVED_WITH)
    checkpoints.close()
    assert checkpoints.steps() == [2] and quick[:3] == [1.0, 2.0, 4.0]
    restored, _ = Checkpoints(tmp_path).restore(abstract(make_state(0)))
    assert same_bits(restored, make_state(2))


def test_a_rename_whose_answer_was_lost_is_not_asked_for_twice(tmp_path, monkeypatch, quick):
    checkpoints, rename = save_steps(tmp_path, 1), pathlib.Path.rename

    def rename_and_fail(*arguments):
        monkeypatch.setattr(pathlib.Path, "rename", rename)
        rename(*arguments)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(pathlib.Path, "rename", rename_and_fail)
    checkpoints.save(make_state(2), **SAVED_WITH)
    checkpoints.close()
    assert checkpoints.steps() == [2]


def test_what_an_attempt_at_the_manifest_has_left_is_not_in_it(tmp_path, monkeypatch, quick):
    """It may neither be renamed nor deleted for a moment."""
    checkpoints = Checkpoints(tmp_path)
    replace, unlink = pathlib.Path.replace, pathlib.Path.unlink
    monkeypatch.setattr(pathlib.Path, "replace", failing(replace, 3))
    monkeypatch.setattr(pathlib.Path, "unlink", failing(unlink, 3))
    checkpoints.save(make_state(2), **SAVED_WITH)
    checkpoints.close()
    listed = json.loads((tmp_path / "2" / "manifest.json").read_text())["files"]
    assert sorted([*listed, "manifest.json"]) == sorted(
        str(path.relative_to(tmp_path / "2")) for path in (tmp_path / "2").rglob("*") if path.is_file()
    )


def test_a_disk_that_fails_for_minutes_ends_a_save_for_a_restart(tmp_path, monkeypatch, quick):
    checkpoints = save_steps(tmp_path, 1)
    monkeypatch.setattr(checkpoint_store, "write_manifest", failing(None, math.inf))
    checkpoints.save(make_state(2), **SAVED_WITH)
    with pytest.raises(StorageError, match=r"saving checkpoint 2 failed: .*manifest\.json"):
        checkpoints.wait()
    assert checkpoints.steps() == [1]


def test_what_a_failed_save_has_left_and_nobody_can_delete_is_not_in_the_way(tmp_path, monkeypatch, caplog):
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / "2.saving" / "params").mkdir(parents=True)
    monkeypatch.setattr(step_dirs, "_remove", lambda *_: raise_(PermissionError(13, "Permission denied")))
    checkpoints.save(make_state(2), **SAVED_WITH)
    checkpoints.close()
    assert checkpoints.steps() == [2] and "2.saving failed and is tried again" in caplog.text


def test_restore_onto_other_mesh_gives_same_values(run):
    """Saved by 8 devices, restored onto 2."""
    like = abstract(make_state(0, num_devices=2))
    restored, _ = Checkpoints(run).restore(like)
    assert same_bits(restored, make_state(2, num_devices=2))


def test_no_array_is_stored_twice(tmp_path):
    save_steps(tmp_path, 1).close()
    leaves = json.loads((tmp_path / "1/meta.json").read_text())["leaves"]
    state = make_state(1)
    assert len(leaves) == len(jax.tree.leaves(state))
    assert leaves["params/params/img/w"] == "bfloat16[16, 6]"
    assert not any("img/w" in path for path in leaves if path.startswith("train_state/"))


def test_params_item_holds_ema_and_frozen_leaves_in_the_form_that_openpi_reads(tmp_path):
    """The reading calls are those of openpi's `restore_params` (models/model.py at 15a9616)."""
    state = make_state(5)
    checkpoints = Checkpoints(tmp_path, public_name=publish)
    checkpoints.save(state, **SAVED_WITH)
    checkpoints.close()
    with ocp.PyTreeCheckpointer() as reader:
        stored = reader.metadata(tmp_path / "5" / "params")
        stored = getattr(stored, "item_metadata", stored)
        item = {"params": stored["params"]}
        restore_args = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(restore_type=np.ndarray), item)
        tree = reader.restore(tmp_path / "5" / "params", ocp.args.PyTreeRestore(item=item, restore_args=restore_args))
    found = tree["params"]["PaliGemma"]
    np.testing.assert_array_equal(found["llm"]["layers"]["w"], np.asarray(state.ema["llm/layers/w"]))
    np.testing.assert_array_equal(found["img"]["w"], np.asarray(state.frozen["img/w"]))
    flat = open_checkpoint(tmp_path / "5").params
    assert set(flat) == {"PaliGemma/llm/layers/w", "PaliGemma/head/bias", "PaliGemma/img/w"}
    np.testing.assert_array_equal(flat["PaliGemma/head/bias"].whole(), np.asarray(state.ema["head/bias"]))


def test_the_manifest_is_written_last_and_names_every_file(tmp_path):
    stats = {"robot": {"norm_stats": {"state": 1}}, "lab/arm": {"norm_stats": {"state": 2}}}
    with Checkpoints(tmp_path) as checkpoints:
        beside = {**SAVED_WITH, "norm_stats": stats, "files": {"tokenizer/words.model": b"words"}}
        checkpoints.save(make_state(5), **beside)
    step = tmp_path / "5"
    contents = {path.relative_to(step).as_posix(): path.read_bytes() for path in step.rglob("*") if path.is_file()}
    listed = json.loads(contents.pop("manifest.json"))["files"]
    assert listed == {name: [len(content), zlib.crc32(content)] for name, content in contents.items()}
    assert {"meta.json", "tokenizer/words.model", "assets/robot/norm_stats.json"} < listed.keys()
    assert {asset: json.loads(contents[f"assets/{asset}/norm_stats.json"]) for asset in stats} == stats


def test_parameters_of_a_damaged_checkpoint_are_not_loaded(run):
    damaged = data_file(run / "2")
    flip(damaged)
    with pytest.raises(CheckpointError, match=f"{damaged.name} is corrupt"):
        open_checkpoint(run / "2")


def test_empty_run_restores_nothing(tmp_path):
    assert Checkpoints(tmp_path).restore(abstract(make_state(0))) is None


def flip_newest(run):
    flip(data_file(run / "2"))


def truncate_newest(run):
    path = data_file(run / "2")
    path.write_bytes(path.read_bytes()[:-1])


def delete_a_file(run):
    data_file(run / "2").unlink()


def delete_manifest(run):
    (run / "2/manifest.json").unlink()


def tear_manifest(run):
    path = run / "2/manifest.json"
    path.write_text(path.read_text()[:40])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_newest, "is corrupt: its crc32 is"),
        (truncate_newest, "is truncated: it has"),
        (delete_a_file, "is missing"),
        (tear_manifest, "manifest.json cannot be read"),
    ],
)
def test_damaged_newest_checkpoint_is_named_and_the_one_before_used(run, caplog, damage, reason):
    damage(run)
    with caplog.at_level(logging.WARNING):
        restored, meta = Checkpoints(run).restore(abstract(make_state(0)))
    assert meta["step"] == 1
    assert same_bits(restored, make_state(1))
    assert "checkpoint 2 cannot be used" in caplog.text
    assert reason in caplog.text
    assert "falling back to checkpoint 1" in caplog.text
    assert len(list(run.glob("2.damaged-*"))) == 1


def test_a_save_that_was_interrupted_before_its_manifest_is_no_damage(run, caplog):
    """An older version wrote the manifest into a directory that had its name already."""
    delete_manifest(run)
    assert Checkpoints(run).restore(abstract(make_state(0)))[1]["step"] == 1
    assert "the save of checkpoint 2 was interrupted" in caplog.text and "damaged" not in caplog.text
    assert len(list(run.glob("2.interrupted-*"))) == 1


def test_a_first_save_that_was_interrupted_begins_anew(run):
    shutil.rmtree(run / "1")
    delete_manifest(run)
    assert Checkpoints(run).restore(abstract(make_state(0))) is None


def test_what_was_set_aside_goes_with_the_next_checkpoint_after_it(run):
    flip_newest(run)
    (run / "9.damaged-20260101T000000").mkdir()
    checkpoints = Checkpoints(run, keep_last=2)
    checkpoints.restore(abstract(make_state(0)))
    assert len(list(run.glob("*.damaged-*"))) == 2
    checkpoints.save(make_state(2), **SAVED_WITH)
    checkpoints.close()
    assert [path.name for path in run.glob("*.damaged-*")] == ["9.damaged-20260101T000000"]


def test_an_error_of_the_file_system_is_no_damage_and_is_waited_for(run, monkeypatch):
    """EIO at the manifest, then ESTALE at an array, as in the failover of a file server."""
    pauses = []

    def fails_first(number, read):
        errors = [OSError(number, os.strerror(number))]
        return lambda *arguments: raise_(errors.pop()) if errors else read(*arguments)

    monkeypatch.setattr(manifest, "read_json", fails_first(errno.EIO, manifest.read_json))
    monkeypatch.setattr(manifest, "_size_and_crc32", fails_first(errno.ESTALE, manifest._size_and_crc32))
    monkeypatch.setattr(passing_errors.time, "sleep", pauses.append)
    assert Checkpoints(run).restore(abstract(make_state(0)))[1]["step"] == 2
    assert [pause for pause in pauses if pause >= 1.0] == [1.0, 2.0]


def test_a_file_system_that_stays_away_ends_with_a_code_that_is_restarted(run, monkeypatch):

    gone = OSError(errno.ESTALE, "Stale file handle")
    monkeypatch.setattr(checkpoint_store, "find_damage", lambda *_, **__: raise_(gone))
    with pytest.raises(StorageError, match="Stale file handle"):
        checkpoints = Checkpoints(run)
        monkeypatch.setattr(passing_errors.time, "monotonic", iter(range(0, 10**6, 400)).__next__)
        checkpoints.restore(abstract(make_state(0)))
    assert not list(run.glob("*.damaged-*"))


def test_a_checkpoint_that_may_not_be_read_is_told_and_stays(run, monkeypatch):
    denied = PermissionError(errno.EACCES, "Permission denied", "manifest.json")
    monkeypatch.setattr(checkpoint_store, "find_damage", lambda *_, **__: raise_(denied))
    with pytest.raises(CheckpointError, match=r"Permission denied.*manifest\.json"):
        Checkpoints(run).restore(abstract(make_state(0)))
    assert not list(run.glob("*.damaged-*"))


def test_a_device_that_fails_during_a_save_is_a_fault_of_the_hardware(tmp_path, monkeypatch):
    checkpoints = save_steps(tmp_path, 1)
    failed = RuntimeError("INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered")
    monkeypatch.setattr(checkpoints._writer, "write", lambda *_: raise_(failed))
    checkpoints.save(make_state(2), **SAVED_WITH)
    with pytest.raises(HardwareError, match="saving checkpoint 2 failed"):
        checkpoints.wait()


def test_damaged_step_can_be_saved_again(run):
    flip_newest(run)
    checkpoints = Checkpoints(run, keep_last=2)
    checkpoints.restore(abstract(make_state(0)))
    checkpoints.save(make_state(2), **SAVED_WITH)
    checkpoints.close()
    assert Checkpoints(run).restore(abstract(make_state(0)))[1]["step"] == 2


def test_two_newest_damaged_falls_back_to_the_third(tmp_path):
    save_steps(tmp_path, 1, 2, 3, keep_last=3).close()
    flip(data_file(tmp_path / "3"))
    flip(data_file(tmp_path / "2"))
    assert Checkpoints(tmp_path).restore(abstract(make_state(0)))[1]["step"] == 1


def test_all_damaged_is_an_error_that_names_each(run):
    flip(data_file(run / "1"))
    tear_manifest(run)
    with pytest.raises(CheckpointError, match=r"all 2 checkpoints.*\n  2: manifest.*\n  1: .*corrupt") as raised:
        Checkpoints(run).restore(abstract(make_state(0)))
    assert raised.value.exit_code == CHECKPOINT
    assert (run / "1").is_dir()
    assert (run / "2").is_dir()


def test_another_model_is_one_error_that_names_every_difference(run):
    state = make_state(0)
    other = abstract(state)
    other.params["new/w"] = other.params["head/bias"]
    del other.params["head/bias"]
    other.ema["llm/layers/w"] = jax.ShapeDtypeStruct((16, 7), jnp.float32, sharding=state.step.sharding)
    other.frozen["img/w"] = jax.ShapeDtypeStruct((16, 6), jnp.float32, sharding=state.step.sharding)
    with pytest.raises(CheckpointError) as raised:
        Checkpoints(run).restore(other)
    message = str(raised.value)
    assert "another model, optimizer, EMA or dtype" in message
    assert "train_state/params/new/w" in message
    assert "train_state/params/head/bias" in message
    assert "params/params/llm/layers/w: float32[16, 6] -> float32[16, 7]" in message
    assert "params/params/img/w: bfloat16[16, 6] -> float32[16, 6]" in message


def test_another_dtype_is_cast_only_when_asked(run):
    like = abstract(make_state(0))
    leaf = like.frozen["img/w"]
    like.frozen["img/w"] = jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
    checkpoints = Checkpoints(run)
    with pytest.raises(CheckpointError, match="img/w: bfloat16"):
        checkpoints.restore(like)
    restored, _ = checkpoints.restore(like, cast=True)
    assert restored.frozen["img/w"].dtype == jnp.float32
    np.testing.assert_array_equal(restored.frozen["img/w"], make_state(2).frozen["img/w"].astype(jnp.float32))


@pytest.mark.slow
def test_ema_switched_on_is_named_as_such(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make_state(1, ema=False), **SAVED_WITH)
    checkpoints.wait()
    with pytest.raises(
        CheckpointError, match=r"this run needs, the checkpoint lacks:\n    train_state/params/head/bias"
    ):
        Checkpoints(tmp_path).restore(abstract(make_state(0, ema=True)))


def test_leaves_that_only_the_checkpoint_has_are_named(run):
    """A run that keeps no average any more would else drop what it was trained to."""
    title = r"2 leaves the checkpoint has, this run does not:\n    train_state/params/head/bias"
    with pytest.raises(CheckpointError, match=title):
        Checkpoints(run).restore(abstract(make_state(0, ema=False)))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.ENOSPC])
def test_a_host_or_a_disk_that_refuses_a_save_is_no_fault_of_the_run(tmp_path, monkeypatch, number):
    checkpoints = save_steps(tmp_path, 1)
    refused = OSError(number, os.strerror(number), str(tmp_path))
    monkeypatch.setattr(checkpoints._dirs, "new_draft", lambda step: (_ for _ in ()).throw(refused))
    with pytest.raises(StorageError, match=os.strerror(number)):
        checkpoints.save(make_state(2), **SAVED_WITH)
    checkpoints.close()


def test_a_disk_without_room_for_a_first_checkpoint_is_the_users(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint_store.shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="not enough disk space for checkpoint 1"):
        checkpoints.save(make_state(1), **SAVED_WITH)
    checkpoints.close()


def test_full_disk_is_an_error_before_the_save_and_training_may_go_on(tmp_path, monkeypatch):
    checkpoints = save_steps(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint_store.shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StorageError, match=r"needs 1\.1 MB, 1\.0 MB are free. Free some space.*usable.*\[1\]"):
        checkpoints.save(make_state(2), **SAVED_WITH)
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.undo()
    checkpoints.save(make_state(2), **SAVED_WITH)
    checkpoints.close()
    assert checkpoints.steps() == [2]


FOUR_MIB = pytest.mark.parametrize("small_disk", ["4m"], indirect=True)


@FOUR_MIB
def test_save_is_refused_on_a_disk_that_is_too_small(small_disk):
    checkpoints = save_steps(small_disk, 1)
    with pytest.raises(StorageError, match="not enough disk space for checkpoint 2"):
        checkpoints.save(make_state(2, rows=100_000), **SAVED_WITH)
    assert checkpoints.steps() == [1]
    checkpoints.close()


@FOUR_MIB
@pytest.mark.multiprocess
def test_disk_that_fills_up_during_a_save_is_reported_and_the_older_checkpoint_stays(small_disk):
    process = python("fill", small_disk)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "saving checkpoint 2 failed" in output
    assert same_bits(
        Checkpoints(small_disk).restore(abstract(make_state(0, num_devices=1)))[0], make_state(3, num_devices=1)
    )


def test_a_save_broken_off_by_the_end_of_another_process_is_no_fault_of_the_checkpoint(tmp_path, monkeypatch):
    checkpoints = save_steps(tmp_path, 1)

    def fail(*_):
        try:
            raise RuntimeError("UNAVAILABLE: Failed to send RPC to coordination service")
        except RuntimeError as error:
            raise TimeoutError("Timed out while waiting for async_write_complete barrier.") from error

    monkeypatch.setattr(checkpoint_store, "write_manifest", fail)
    checkpoints.save(make_state(2), **SAVED_WITH)
    with pytest.raises(PeerLostError, match="saving checkpoint 2 failed: TimeoutError"):
        checkpoints.wait()


def test_error_of_a_background_save_is_raised_by_the_next_call(tmp_path, monkeypatch):
    checkpoints = save_steps(tmp_path, 1)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_store, "write_manifest", fail)
    checkpoints.save(make_state(2), **SAVED_WITH)
    with pytest.raises(StorageError, match=r"saving checkpoint 2 failed: OSError.*No space left"):
        checkpoints.wait()
    monkeypatch.undo()
    assert checkpoints.steps() == [1]
    checkpoints.save(make_state(2), **SAVED_WITH)
    checkpoints.close()
    assert checkpoints.steps() == [2]


def test_same_step_is_not_saved_twice(tmp_path):
    checkpoints = save_steps(tmp_path, 1)
    assert checkpoints.save(make_state(1), **SAVED_WITH) == 0.0
    checkpoints.close()


def test_saving_over_a_checkpoint_that_was_not_restored_is_an_error(run):
    with pytest.raises(CheckpointError, match=r"2 exists already.*--resume.*--overwrite"):
        Checkpoints(run).save(make_state(2), **SAVED_WITH)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [6]),
        ({"keep_last": 2}, [5, 6]),
        ({"keep_period": 2}, [2, 4, 6]),
        ({"keep_last": 2, "keep_period": 3}, [3, 5, 6]),
    ],
)
@pytest.mark.slow
def test_keep_last_and_keep_period(tmp_path, options, kept):
    checkpoints = save_steps(tmp_path, 1, 2, 3, 4, 5, 6, **options)
    assert checkpoints.steps() == kept
    checkpoints.close()


def test_checkpoint_with_the_lowest_metric_is_kept_as_best(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step, value in [(1, 0.5), (2, 0.25), (3, 0.75), (4, float("nan"))]:
        if step % 2:  # told before the save or after it
            checkpoints.note_metric(step, value)
        checkpoints.save(make_state(step), **SAVED_WITH)
        checkpoints.wait()
        if not step % 2:
            checkpoints.note_metric(step, value)
    assert checkpoints.best == Best(step=2, value=0.25)
    checkpoints.save(make_state(5), **SAVED_WITH)
    checkpoints.close()
    assert checkpoints.steps() == [2, 5]
    np.testing.assert_array_equal(
        open_checkpoint(tmp_path / "best").params["head/bias"].whole(),
        np.asarray(make_state(2).ema["head/bias"]),
    )
    again = Checkpoints(tmp_path)  # a resumed run knows the best so far
    again.restore(abstract(make_state(0)))
    again.note_metric(5, 0.3)
    assert again.best == Best(step=2, value=0.25)
    again.note_metric(5, 0.2)
    assert again.best == Best(step=5, value=0.2)
    assert (tmp_path / "best").resolve() == tmp_path / "5"


def test_metric_of_a_step_without_checkpoint_does_not_compete(tmp_path):
    checkpoints = save_steps(tmp_path, 1)
    checkpoints.note_metric(7, 0.1)
    assert checkpoints.best is None
    checkpoints.close()


def test_an_older_step_is_restored_and_those_after_it_are_set_aside(two_saved, tmp_path):
    shutil.copytree(two_saved, tmp_path / "run")
    with Checkpoints(tmp_path / "run") as checkpoints:
        found = checkpoints.restore(abstract(make_state(1)), step=1)
        assert found is not None and same_bits(found[0], make_state(1))
        assert checkpoints.steps() == [1] and list((tmp_path / "run").glob("2.replaced-*"))
        assert (tmp_path / "run" / "latest").resolve().name == "1"
        checkpoints.save(make_state(2), **SAVED_WITH)
    assert (tmp_path / "run" / "latest").resolve().name == "2"


def test_an_older_step_that_is_damaged_is_refused_and_nothing_is_changed(two_saved, tmp_path):
    shutil.copytree(two_saved, tmp_path / "run")
    flip(data_file(tmp_path / "run" / "1"))
    with (
        Checkpoints(tmp_path / "run") as checkpoints,
        pytest.raises(CheckpointError, match=r"checkpoint 1 in .* is corrupt.* Nothing was changed.* \(there are 2\)"),
    ):
        checkpoints.restore(abstract(make_state(1)), step=1)
    assert checkpoints.steps() == [1, 2]


def test_left_overs_of_killed_saves_are_removed_and_logged(tmp_path, caplog):
    (tmp_path / "7.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    (tmp_path / "8.saving.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "9.saving").mkdir()
    (tmp_path / "5.deleting").mkdir()
    for kept in ("3", "4.damaged-20260101T000000", "logs"):
        (tmp_path / kept).mkdir()
    with caplog.at_level(logging.WARNING):
        Checkpoints(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4.damaged-20260101T000000", "logs"]
    assert "7.orbax-checkpoint-tmp, left behind" in caplog.text


@pytest.mark.slow
def test_a_clean_up_that_fails_fails_no_save_and_leaves_no_half_checkpoint(tmp_path, monkeypatch, caplog):
    checkpoints = save_steps(tmp_path, 1)

    def delete_a_little(directory):
        (directory / "meta.json").unlink(missing_ok=True)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(step_dirs.shutil, "rmtree", delete_a_little)
    checkpoints.save(make_state(2), **SAVED_WITH)
    checkpoints.wait()
    assert "Input/output error" in caplog.text and "tried again at the next save" in caplog.text
    assert not (tmp_path / "1").exists(), "what is half deleted must not look like a checkpoint"
    monkeypatch.undo()
    checkpoints.save(make_state(3), **SAVED_WITH)
    checkpoints.close()
    assert not list(tmp_path.glob("*.deleting"))
    assert Checkpoints(tmp_path).restore(abstract(make_state(0)))[1]["step"] == 3
    assert not list(tmp_path.glob("*.damaged-*"))


def test_a_link_that_fails_for_a_moment_is_made_all_the_same(tmp_path, monkeypatch):
    failures = [OSError(5, "Input/output error", "latest"), OSError(116, "Stale file handle", "latest")]
    link = step_dirs.StepDirs.link_latest

    def fail_at_first(self):
        if failures:
            raise failures.pop()
        link(self)

    monkeypatch.setattr(step_dirs.StepDirs, "link_latest", fail_at_first)
    monkeypatch.setattr(passing_errors.time, "sleep", lambda seconds: None)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make_state(2), **SAVED_WITH)
    checkpoints.wait()
    assert not failures and (tmp_path / "latest").readlink() == pathlib.Path("2")


def test_two_parameters_under_one_public_name_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="would be published under one name, 'w'"):
        Checkpoints(tmp_path, public_name=lambda _: "w").save(make_state(1), **SAVED_WITH)


def test_asset_id_may_not_leave_the_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"asset id '\.\./x'"):
        Checkpoints(tmp_path).save(make_state(1), **{**SAVED_WITH, "norm_stats": {"../x": {}}})


def python(*arguments: object) -> forks.Script:
    return forks.Script(PROGRAM, *arguments)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("moment", "newest"), [("arrays", 1), ("manifest", 1), ("clean-up", 2)])
def test_sigkill_during_a_save_leaves_a_usable_checkpoint(tmp_path, moment, newest):
    process = python("die", tmp_path, moment)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == -9, output
    checkpoints = Checkpoints(tmp_path)
    restored, meta = checkpoints.restore(abstract(make_state(0)))
    assert meta["step"] == newest
    assert same_bits(restored, make_state(newest))
    checkpoints.save(make_state(newest + 1), **SAVED_WITH)
    checkpoints.close()
    assert checkpoints.steps()[-1] == newest + 1


def together(action: str, directory: pathlib.Path, processes: int, port: int) -> list[str]:
    started = [python(action, directory, index, processes, port) for index in range(processes)]
    outputs = [process.communicate(timeout=480)[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes, "\n".join(outputs)
    return outputs


def what_was_read(output: str) -> list[str]:
    """The files that a process has read for their checksums, in the order of their paths."""
    return sorted(re.findall(r"^read (.*)", output, re.MULTILINE))


def files_of(checkpoint: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json")


@pytest.mark.multiprocess
def test_saved_by_four_processes_restored_by_one_and_the_reverse(tmp_path):
    """Each process reads for the checksums only what it has written, and at a restart its share."""
    outputs = together("save", tmp_path / "four", 4, free_port())
    written = files_of(tmp_path / "four/4")
    listed = json.loads((tmp_path / "four/4/manifest.json").read_text())["files"]
    assert listed == {
        path.relative_to(tmp_path / "four/4").as_posix(): [path.stat().st_size, zlib.crc32(path.read_bytes())]
        for path in written
    }
    for index, output in enumerate(outputs):
        read = [path for path in what_was_read(output) if "/4.saving" in path]
        assert {int(found) for path in read for found in re.findall(r"ocdbt\.process_(\d)", path)} == {index}
        assert index == 0 or all("ocdbt.process" in path for path in read)
    assert sum(output.count("/4.saving") for output in outputs) == len(written)
    everyones = [path for path in written if path.parent.name == "d" and "ocdbt.process" in str(path)]
    assert {path.parents[1].name for path in everyones} == {f"ocdbt.process_{index}" for index in range(4)}
    for path in everyones:
        flip(path)
        found = [manifest.find_damage(tmp_path / "four/4", share=share, shares=4) for share in range(4)]
        assert [f"{path.name} is corrupt" in text for text in found].count(True) == 1
        flip(path)
    restored, _ = Checkpoints(tmp_path / "four").restore(abstract(make_state(0)))
    assert same_bits(restored, make_state(4))
    save_steps(tmp_path / "one", 3, 4).close()
    outputs = together("restore", tmp_path / "one", 2, free_port())
    assert sorted(what_was_read("\n".join(outputs))) == [str(path) for path in files_of(tmp_path / "one/4")]
    assert all(what_was_read(output) for output in outputs)


def test_all_processes_come_to_the_same_end_whichever_cannot_read_its_share(run, monkeypatch):
    """Damage that one has found counts, whatever another could not read."""
    of_others = []

    def gather(name, value, *_):
        return [value, *of_others] if name.startswith("verify") else [value]

    monkeypatch.setattr(checkpoint_store.agree, "gather", gather)
    checkpoints = Checkpoints(run)
    for obstacle, kind in ((["ESTALE", True], StorageError), (["no permission", False], CheckpointError)):
        of_others[:] = [["", obstacle]]
        with pytest.raises(kind, match=obstacle[0]):
            checkpoints.restore(abstract(make_state(0)))
    of_others[:] = [["", ["ESTALE", True]], ["d/4 is corrupt", None]]
    with pytest.raises(CheckpointError, match=r"all 2 checkpoints.*damaged"):
        checkpoints.restore(abstract(make_state(0)))


@pytest.mark.multiprocess
def test_damage_that_one_of_two_processes_finds_makes_both_fall_back(tmp_path):
    save_steps(tmp_path, 3, 4, keep_last=2).close()
    flip(data_file(tmp_path / "4"))
    output = "".join(together("restore-older", tmp_path, 2, free_port()))
    assert output.count("checkpoint 4 cannot be used") == 2
    assert len(list(tmp_path.glob("4.damaged-*"))) == 1


@pytest.mark.multiprocess
def test_full_disk_is_an_error_on_every_process(tmp_path):
    output = "".join(together("full", tmp_path, 2, free_port()))
    assert output.count("not enough disk space for checkpoint 3") == 2


@pytest.mark.multiprocess
def test_a_save_that_one_of_two_processes_cannot_write_is_given_up_by_both_and_the_next_is_whole(tmp_path):
    output = "".join(together("refused", tmp_path, 2, free_port()))
    for step, victim in ((3, 1), (4, 0)):
        assert output.count(f"saving checkpoint {step} failed: process {victim}: ValueError: UNKNOWN: Error wri") == 2
    assert not list(tmp_path.glob("*.saving*"))


@pytest.mark.multiprocess
def test_two_processes_save_beside_steps_and_meet_without_the_devices(tmp_path):
    together("beside", tmp_path, 2, free_port())
