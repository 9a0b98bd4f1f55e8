"""Saves on a local disk, and their copies in the run directory: bits, damage, room, other runs, other devices."""

import dataclasses
import errno
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import types

import jax
import numpy as np
import pytest
from checkpoint_process import SAVED_WITH, abstract, make_state, same_bits
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from openpi_train_configs.debug import debug
from stored_arrays import stored_arrays

from openpi_train.checkpoints import checkpoint_store, copy_out, fencing, local_files, local_tier
from openpi_train.checkpoints.checkpoint_store import Checkpoints
from openpi_train.checkpoints.pieces import describe_pieces, dtype_and_shape, fetch, fetch_share, place, writes
from openpi_train.experiment import LocalCheckpoints
from openpi_train.interop.manifest import find_damage
from openpi_train.launch.processes import free_port
from openpi_train.runtime import agree
from openpi_train.runtime.exits import HardwareError, StorageError, UsageError

LOCALLY = {name: value for name, value in SAVED_WITH.items() if name != "norm_stats"}


@pytest.fixture(autouse=True)
def nothing_is_claimed(monkeypatch):
    monkeypatch.setattr(fencing, "_claimed", {})


@pytest.fixture
def run(tmp_path) -> pathlib.Path:
    return tmp_path / "runs" / "debug" / "x"


@pytest.fixture
def disk(tmp_path) -> pathlib.Path:
    return tmp_path / "disk"


def folder(disk: pathlib.Path) -> pathlib.Path:
    return disk / "debug" / "x" / "process_0"


def on_disk(disk: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder(disk).iterdir())


def opened(run: pathlib.Path, disk: pathlib.Path, **options) -> Checkpoints:
    return Checkpoints(run, local_directory=str(disk), **options)


@pytest.fixture
def saved(run, disk) -> tuple[pathlib.Path, pathlib.Path]:
    """A run with checkpoint 1 in its directory and local save 2."""
    with opened(run, disk) as checkpoints:
        checkpoints.save(make_state(1), **SAVED_WITH)
        checkpoints.save_locally(make_state(2), **LOCALLY)
    return run, disk


def restored_step(run: pathlib.Path, disk: pathlib.Path, **state) -> int:
    """What a run goes on from, whose bits are checked."""
    like = make_state(0, **state)
    with opened(run, disk) as checkpoints:
        restored, meta = checkpoints.restore(abstract(like))
    assert same_bits(restored, make_state(meta["step"], **state))
    return meta["step"]


def flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("ema", [True, False])
def test_a_newer_local_save_gives_back_bits_structure_and_meta(run, disk, ema):
    with opened(run, disk) as checkpoints:
        checkpoints.save(make_state(1, ema=ema), **SAVED_WITH)
        stall_s = checkpoints.save_locally(make_state(2, ema=ema), **LOCALLY, extra={"wandb_id": "abc"})
    assert stall_s > 0
    assert [path.name for path in run.iterdir() if path.name.isdecimal()] == ["1"]
    again = opened(run, disk)
    restored, meta = again.restore(abstract(make_state(0, ema=ema)))
    assert same_bits(restored, make_state(2, ema=ema))
    assert (meta["step"], meta["data_position"], meta["wandb_id"]) == (2, {"step": 7}, "abc")
    assert again.copy_is_missing
    again.close()


def test_the_newest_of_several_local_saves_is_picked(run, disk):
    """As a killed run leaves them: the older one goes only once the newer one is known to be whole."""
    killed = opened(run, disk)
    for step in (1, 2):
        killed.save_locally(make_state(step), **LOCALLY)
    killed._local.wait()
    assert on_disk(disk) == ["1", "2"]
    assert restored_step(run, disk) == 2


def test_a_copy_has_the_arrays_and_files_of_a_checkpoint_saved_without_a_local_disk(tmp_path, run, disk):
    state = make_state(5)
    with opened(run, disk) as checkpoints:
        checkpoints.save(state, **SAVED_WITH)
    with Checkpoints(tmp_path / "plain") as plain:
        plain.save(state, **SAVED_WITH)
    assert find_damage(run / "5") == ""
    assert stored_arrays(run / "5") == stored_arrays(tmp_path / "plain" / "5")
    metas = [json.loads((directory / "5" / "meta.json").read_text()) for directory in (run, tmp_path / "plain")]
    assert {**metas[0], "saved_at": 0} == {**metas[1], "saved_at": 0}
    assert {path.name for path in (run / "5").iterdir()} == {path.name for path in (tmp_path / "plain/5").iterdir()}
    restored, _ = Checkpoints(run).restore(abstract(make_state(0, num_devices=2)))
    assert same_bits(restored, make_state(5, num_devices=2))


def test_pieces_of_replicas_are_fetched_once_and_put_back_on_all():
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    cut, whole = NamedSharding(mesh, PartitionSpec(None, "fsdp")), NamedSharding(mesh, PartitionSpec())
    value = np.arange(48, dtype=np.float32).reshape(6, 8)
    items = {"params": {"w": jax.device_put(value, cut), "b": jax.device_put(np.int32(7), whole)}}
    pieces = fetch(items)
    assert sorted(pieces) == ["params/b[]", *(f"params/w[0:6,{n}:{n + 2}]" for n in (0, 2, 4, 6))]
    assert describe_pieces(items) == {name: f"{array.dtype.name}{list(array.shape)}" for name, array in pieces.items()}
    assert dtype_and_shape("bfloat16[2, 3]") == (jax.numpy.bfloat16, (2, 3))
    assert dtype_and_shape("int32[]") == (np.int32, ())
    back = place(pieces, items)["params"]
    assert back["w"].sharding == cut
    np.testing.assert_array_equal(back["w"], value)
    assert int(back["b"]) == 7
    assert sorted(fetch_share(items)) == sorted(pieces), "one process writes all that it holds"


def test_the_next_step_takes_over_the_memory_of_a_state_whose_pieces_are_still_being_written():
    """A view of it, which numpy prefers on a CPU, would have jax keep both states."""
    leaf = jax.numpy.arange(1000, dtype=np.float32)
    pieces = fetch({"params": {"w": leaf}})
    jax.jit(lambda leaf: leaf * 0 - 1, donate_argnums=0)(leaf)
    assert leaf.is_deleted()
    np.testing.assert_array_equal(pieces["params/w[0:1000]"], np.arange(1000))


def test_what_all_hold_is_written_by_processes_in_turn_and_from_each_of_their_devices():
    @dataclasses.dataclass(frozen=True)
    class Device:
        process_index: int
        local: int

    class Whole(jax.sharding.Sharding):
        def devices_indices_map(self, global_shape):
            return {Device(process, local): (slice(None),) for process in (0, 1) for local in (0, 1, 2)}

    whole = Whole()
    writing = [
        [device for device in whole.devices_indices_map((8,)) if writes(device, number, whole, (8,))]
        for number in range(6)
    ]
    assert all(len(devices) == 1 for devices in writing)
    assert [devices[0].process_index for devices in writing] == [0, 1, 0, 1, 0, 1]
    assert [devices[0].local for devices in writing] == [0, 0, 1, 1, 2, 2]


def test_state_may_be_donated_while_it_is_saved_locally(run, disk):
    state = make_state(5, rows=160_000)
    like = abstract(state)
    expected = jax.tree.map(lambda leaf: np.array(leaf).tobytes(), state)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    with opened(run, disk) as checkpoints:
        checkpoints.save_locally(state, **LOCALLY)
        for _ in range(3):
            state = overwrite(state)
    restored, _ = opened(run, disk).restore(like)
    assert jax.tree.map(lambda leaf: np.array(leaf).tobytes(), restored) == expected


def test_a_step_that_both_have_comes_from_the_local_disk(run, disk, caplog):
    with opened(run, disk) as checkpoints:
        checkpoints.save(make_state(3), **SAVED_WITH)
    with caplog.at_level(logging.INFO):
        again = opened(run, disk)
        restored, _ = again.restore(abstract(make_state(0)))
    assert f"restored checkpoint 3 from {folder(disk) / '3'}" in caplog.text
    assert same_bits(restored, make_state(3))
    assert not again.copy_is_missing
    assert again.save(make_state(3), **SAVED_WITH) == 0.0
    again.close()


def test_a_newer_checkpoint_in_the_run_directory_is_preferred(saved, caplog):
    run, disk = saved
    with Checkpoints(run) as without:
        without.restore(abstract(make_state(0)))
        without.save(make_state(3), **SAVED_WITH)
    with caplog.at_level(logging.INFO):
        assert restored_step(run, disk) == 3
    assert "local checkpoint 2 is older than the run directory's 3" in caplog.text
    assert on_disk(disk) == []


def test_a_restored_local_save_can_be_copied_without_being_written_again(saved):
    run, disk = saved
    checkpoints = opened(run, disk)
    state, _ = checkpoints.restore(abstract(make_state(0)))
    written = (folder(disk) / "2" / "pieces.bin").stat().st_mtime_ns
    checkpoints.save(state, **SAVED_WITH)
    checkpoints.close()
    assert (folder(disk) / "2" / "pieces.bin").stat().st_mtime_ns == written
    assert same_bits(Checkpoints(run).restore(abstract(make_state(0)))[0], make_state(2))


def test_damage_in_the_run_directory_does_not_hide_a_whole_local_save(saved):
    run, disk = saved
    with opened(run, disk, keep_last=2) as checkpoints:
        checkpoints.restore(abstract(make_state(0)))
        checkpoints.save(make_state(3), **SAVED_WITH)
    shutil.rmtree(folder(disk) / "3")
    with opened(run, disk) as checkpoints:
        checkpoints.restore(abstract(make_state(0)))
        checkpoints.save_locally(make_state(4), **LOCALLY)
    shutil.copytree(run / "3", run / "5")
    flip(run / "5" / "meta.json")
    assert restored_step(run, disk) == 4
    assert list(run.glob("5.damaged-*"))


def flip_a_piece(save):
    flip(save / "pieces.bin")


def cut_the_pieces(save):
    os.truncate(save / "pieces.bin", 100)


def flip_the_record(save):
    flip(save / "record.json")


def lose_the_record(save):
    (save / "record.json").unlink()


def lose_all(save):
    shutil.rmtree(save)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_piece, "is corrupt: its crc32 is"),
        (cut_the_pieces, "pieces.bin is torn: it has 100 bytes"),
        (flip_the_record, "record.json is corrupt"),
        (lose_the_record, "record.json is missing: the save was cut off before its end"),
        (lose_all, "there is no local checkpoint"),
    ],
)
def test_a_damaged_local_save_is_passed_over_with_the_reason(saved, caplog, damage, reason):
    run, disk = saved
    damage(folder(disk) / "2")
    with caplog.at_level(logging.INFO):
        assert restored_step(run, disk) == 1
    assert reason in caplog.text
    assert on_disk(disk) == []


def test_a_local_save_of_an_older_run_of_the_same_name_is_not_picked(saved, caplog):
    run, disk = saved
    run.rename(run.with_name("x.replaced"))
    with Checkpoints(run) as anew:
        anew.save(make_state(1), **SAVED_WITH)
    with caplog.at_level(logging.WARNING):
        assert restored_step(run, disk) == 1
    assert "local checkpoint 2 is passed over: process 0 on " in caplog.text
    assert "it belongs to another run of this name" in caplog.text


def test_a_local_save_cut_over_other_devices_is_not_picked(saved, caplog):
    run, disk = saved
    with caplog.at_level(logging.WARNING):
        assert restored_step(run, disk, num_devices=4) == 1
    assert "it was saved with another model, or cut otherwise" in caplog.text


def test_a_local_save_of_another_number_of_processes_is_not_picked(saved, caplog, monkeypatch):
    run, disk = saved
    monkeypatch.setattr(local_tier, "_topology", lambda: {"processes": 2, "devices": 16})
    with caplog.at_level(logging.WARNING):
        assert restored_step(run, disk) == 1
    assert "it was saved by another number of processes (1, now 2) or devices (8, now 16)" in caplog.text


DIE = """
import os, signal, sys
sys.path[:0] = [{tests!r}]
import jax
jax.config.update("jax_num_cpu_devices", 8)
from checkpoint_process import SAVED_WITH, make_state
from openpi_train.checkpoints import copy_out
from openpi_train.checkpoints import local_files
from openpi_train.checkpoints.checkpoint_store import Checkpoints

checkpoints = Checkpoints({run!r}, local_directory={disk!r})
checkpoints.save(make_state(1), **SAVED_WITH)
checkpoints.wait()

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

{target} = die
checkpoints.save(make_state(2), **SAVED_WITH)
checkpoints.wait()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("target", "newest"),
    [("local_files._write_piece", 1), ("local_files.write_text", 1), ("copy_out._Data", 2)],
    ids=["writing the pieces", "before the record", "copying"],
)
def test_sigkill_during_a_save_or_its_copy_leaves_nothing_that_is_picked(run, disk, target, newest):
    code = DIE.format(tests=str(pathlib.Path(__file__).parents[1]), run=str(run), disk=str(disk), target=target)
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == -9, done.stderr
    assert (folder(disk) / "2").exists()
    with opened(run, disk) as checkpoints:
        restored, _ = checkpoints.restore(abstract(make_state(0)))
        assert same_bits(restored, make_state(newest))
        assert checkpoints.copy_is_missing == (newest == 2)
        checkpoints.save(make_state(2), **SAVED_WITH)
    assert on_disk(disk) == ["2"]
    assert [path.name for path in run.iterdir() if path.name[0].isdecimal()] == ["2"]


SAVE_TOGETHER = """
import sys
sys.path[:0] = [{tests!r}]
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from checkpoint_process import SAVED_WITH, abstract, make_state, same_bits
from openpi_train.checkpoints.checkpoint_store import Checkpoints

jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(
    "127.0.0.1:{port}", 3, int(sys.argv[1]), cluster_detection_method="deactivate", shutdown_timeout_seconds=30
)
mesh = jax.make_mesh((2, 3), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)
jax.set_mesh(mesh)

def state(step):
    whole = make_state(step, rows=12)
    cuts = jax.tree.map(
        lambda leaf: NamedSharding(mesh, PartitionSpec(*("fsdp" if size == 6 else None for size in leaf.shape))), whole
    )
    return jax.jit(lambda tree: tree, out_shardings=cuts)(whole)

def opened():
    return Checkpoints({run!r}, local_directory={disk!r})

with opened() as checkpoints:
    checkpoints.save(state(1), **SAVED_WITH)
    checkpoints.save_locally(state(2), data_position={{}}, experiment={{}})
with opened() as checkpoints:
    restored, meta = checkpoints.restore(abstract(state(0)))
    assert meta["step"] == 2
    assert same_bits(restored, state(2))
jax.distributed.shutdown()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_whose_devices_hold_parts_of_two_replicas_save_and_copy_each_piece(run, disk):
    """Two replicas of three shards over three processes of two devices: the second holds a part of each replica."""
    tests = str(pathlib.Path(__file__).parents[1])
    code = SAVE_TOGETHER.format(tests=tests, run=str(run), disk=str(disk), port=free_port())
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(index)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(3)
    ]
    said = [process.communicate(timeout=480)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, said
    like = {"rows": 12, "num_devices": 4}
    restored, _ = Checkpoints(run).restore(abstract(make_state(0, **like)))
    assert same_bits(restored, make_state(1, **like))


def test_only_the_newest_whole_local_save_stays(run, disk):
    with opened(run, disk) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save_locally(make_state(step), **LOCALLY)
            assert str(step) in on_disk(disk)
        assert on_disk(disk) == ["2", "3"], "the older one goes once the newer one is known to be whole"
    assert on_disk(disk) == ["3"]


def test_left_overs_and_folders_of_processes_that_are_no_more_are_removed(saved):
    run, disk = saved
    (folder(disk) / "7").mkdir()
    (folder(disk) / "0123456789abcdef.mark").touch()
    (disk / "debug" / "x" / "process_3" / "9").mkdir(parents=True)
    assert restored_step(run, disk) == 2
    assert on_disk(disk) == ["2"]
    assert [path.name for path in (disk / "debug" / "x").iterdir()] == ["process_0"]


def test_a_slow_copy_holds_up_neither_local_saves_nor_itself_when_its_source_is_removed(run, disk, monkeypatch):
    may_copy, dispatch = threading.Event(), copy_out._Dispatcher.dispatch

    def wait_and_dispatch(*arguments, **named):
        assert may_copy.wait(60)
        return dispatch(*arguments, **named)

    monkeypatch.setattr(copy_out._Dispatcher, "dispatch", wait_and_dispatch)
    checkpoints = opened(run, disk)
    checkpoints.save(make_state(1), **SAVED_WITH)
    for step in (2, 3):
        checkpoints.save_locally(make_state(step), **LOCALLY)
    checkpoints._local.finish()
    assert on_disk(disk) == ["3"]
    assert checkpoints.steps() == []
    may_copy.set()
    checkpoints.close()
    assert same_bits(Checkpoints(run).restore(abstract(make_state(0)))[0], make_state(1))


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["reserve", "write"], ids=["before", "while it is written"])
def test_a_local_disk_that_is_full_costs_the_local_save_and_nothing_else(saved, caplog, monkeypatch, where):
    run, disk = saved
    checkpoints = opened(run, disk)
    checkpoints.restore(abstract(make_state(0)))
    monkeypatch.setattr(local_files, where, full)
    with caplog.at_level(logging.WARNING):
        checkpoints.save_locally(make_state(3), **LOCALLY)
        checkpoints.save(make_state(4), **SAVED_WITH)
        checkpoints.close()
    assert "No space left on device" in caplog.text
    assert "It is left out, on all; the run goes on" in caplog.text
    assert on_disk(disk) == ["2"], "the newest that is whole"
    assert same_bits(Checkpoints(run).restore(abstract(make_state(0)))[0], make_state(4))


def test_room_is_reserved_on_a_real_disk(run, tmp_path):
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with opened(run, disk) as checkpoints:
            checkpoints.save_locally(make_state(1), **LOCALLY)
            checkpoints.save_locally(make_state(2, rows=100_000), **LOCALLY)
            assert on_disk(disk) == ["1"]
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_bug_while_saving_locally_is_no_full_disk(run, disk, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(local_files, "write", fail)
    checkpoints = opened(run, disk)
    checkpoints.save_locally(make_state(1), **LOCALLY)
    with pytest.raises(ZeroDivisionError):
        checkpoints.wait()


def test_a_failed_copy_is_an_error_and_leaves_the_local_save(run, disk, monkeypatch):
    checkpoints = opened(run, disk)
    monkeypatch.setattr(checkpoint_store, "write_manifest", full)
    checkpoints.save(make_state(1), **SAVED_WITH)
    with pytest.raises(StorageError, match="saving checkpoint 1 failed: OSError"):
        checkpoints.wait()
    monkeypatch.undo()
    assert restored_step(run, disk) == 1


def test_an_older_start_neither_saves_nor_deletes_where_a_newer_one_has_the_run(run, disk, monkeypatch):
    """The newer one takes the run over between two saves, then between the pieces of a save and its record."""
    run.mkdir(parents=True)
    fencing.claim(run)
    older = opened(run, disk)
    older.save_locally(make_state(1), **LOCALLY)
    older._local.finish()
    own, newer = fencing.claimed(run), "generation 2, process 1 on another\n"
    (run / fencing.NAME).write_text(newer)
    (folder(disk) / "3").mkdir()  # the newer start's
    for deed in (lambda: older.save_locally(make_state(2), **LOCALLY), lambda: older._local.settle(None)):
        with pytest.raises(UsageError, match=r"a newer start of the run owns .*generation 2"):
            deed()
        assert on_disk(disk) == ["1", "3"]
    (run / fencing.NAME).write_text(own)
    (folder(disk) / "3").rmdir()
    write_piece = local_files._write_piece

    def take_over_and_write(*arguments):
        (run / fencing.NAME).write_text(newer)
        return write_piece(*arguments)

    monkeypatch.setattr(local_files, "_write_piece", take_over_and_write)
    older.save_locally(make_state(2), **LOCALLY)
    with pytest.raises(UsageError, match="a newer start"):
        older._local.finish()
    assert on_disk(disk) == ["1", "2"] and not (folder(disk) / "2" / "record.json").exists()


def test_a_process_that_has_claimed_nothing_asks_by_the_claim_of_process_0(run, disk, monkeypatch):
    run.mkdir(parents=True)
    (run / fencing.NAME).write_text("generation 4\n")
    broadcast = agree.broadcast

    def told(name, value=None):
        return [value[0], value[1], "generation 4\n"] if name == "the run's id" else broadcast(name, value)

    monkeypatch.setattr(local_tier, "agree", types.SimpleNamespace(gather=agree.gather, broadcast=told))
    other = opened(run, disk)
    other.save_locally(make_state(1), **LOCALLY)
    (run / fencing.NAME).write_text("generation 5\n")
    with pytest.raises(UsageError, match="a newer start"):
        other.save_locally(make_state(2), **LOCALLY)


def others(gather):
    """`runtime/agree.py` as if there were other processes, who say what `gather` gives."""
    return types.SimpleNamespace(gather=gather, broadcast=agree.broadcast)


def test_a_local_directory_that_two_hosts_see_is_refused(run, disk, monkeypatch):
    run.mkdir(parents=True)

    def gather(name, value):
        if name != "open the local directories":
            return [value, ["", False]]
        there = disk / "debug" / "x" / "process_1" / "its.mark"
        there.parent.mkdir(parents=True)
        there.touch()
        return [value, ["another boot", "node2", "its.mark"]]

    monkeypatch.setattr(local_tier, "agree", others(gather))
    with pytest.raises(UsageError, match=rf"--local-checkpoints.dir {disk} is one directory for node2 and .*each host"):
        local_tier.LocalTier(disk, run)
    assert not list(folder(disk).glob("*.mark"))


def test_processes_of_one_host_may_share_a_local_directory(run, disk, monkeypatch):
    run.mkdir(parents=True)

    def gather(name, value):
        if name != "open the local directories":
            return [value, ["", False]]
        there = disk / "debug" / "x" / "process_1" / "its.mark"
        there.parent.mkdir(parents=True)
        there.touch()
        return [value, [value[0], "another name", "its.mark"]]

    monkeypatch.setattr(local_tier, "agree", others(gather))
    local_tier.LocalTier(disk, run)


def test_a_local_directory_that_cannot_be_made_is_refused(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--local-checkpoints.dir .*file cannot be used by process 0 on"):
        opened(run, tmp_path / "file")


def test_a_local_disk_that_fails_is_its_hosts_hardware(run, tmp_path, monkeypatch):
    def fail(path, **how):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(local_tier, "_OPEN_S", 0.0)
    with monkeypatch.context() as broken:
        broken.setattr(pathlib.Path, "touch", fail)
        with pytest.raises(HardwareError, match=r"cannot be used by process 0 on .*Input/output error"):
            opened(run, tmp_path / "here")
    monkeypatch.setattr(
        local_tier,
        "agree",
        others(lambda name, value: [value, value if name.startswith("open") else ["it fails", True]]),
    )
    with pytest.raises(StorageError, match="it fails"):
        local_tier.LocalTier(tmp_path / "here", run)


def test_a_relative_local_directory_and_an_interval_of_0_are_refused():
    local = LocalCheckpoints(dir="here", interval=0)
    with pytest.raises(UsageError, match=r"--local-checkpoints.interval 0 must be at least 1"):
        dataclasses.replace(debug, exp_name="x", local_checkpoints=local).check(1)
    with pytest.raises(UsageError, match=r"--local-checkpoints\.dir 'here' .*absolute path"):
        dataclasses.replace(debug, exp_name="x", local_checkpoints=dataclasses.replace(local, interval=1)).check(1)


def test_saves_of_different_starts_are_not_mixed(saved, caplog, monkeypatch):
    """As if another process had step 2 from another start, and none of step 1."""
    run, disk = saved

    def gather(name, value):
        return [value, {"2": {"start": "another"}}] if name.startswith("list") else [value]

    monkeypatch.setattr(local_tier, "agree", others(gather))
    with caplog.at_level(logging.WARNING):
        assert restored_step(run, disk) == 1
    assert "the processes have it from different starts of the run" in caplog.text
