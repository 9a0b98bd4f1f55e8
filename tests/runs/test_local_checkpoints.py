"""Runs of two processes with local disks: killed after a local save, and what they go on from."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import ROOT, environment, losses, places, train, words
from small_runs import SMALL
from stored_arrays import stored_arrays
from test_supervised import process

from openpi_train.launch.processes import free_port
from openpi_train.runtime.exits import USAGE

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
# The run cannot end before the kill: at step 24 it waits until checkpoint 12 is whole, however slowly that is written.
RUN = f"{SMALL} --num-train-steps 36 --save-interval 12 --keep-last 3".split()
RUN += "--fsdp-devices 2 --sharding.min-shard-mib 0".split()  # each process holds its half


SLOWLY = ("--data.pause-s", "0.2")


def with_disk(base: Path) -> tuple[str, ...]:
    return "--local-checkpoints.dir", f"{base}/disk", "--local-checkpoints.interval", "3"


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The same run undisturbed, without local disks; by promise the same on one process."""
    base = tmp_path_factory.mktemp("straight")
    train(base, *RUN, devices=2)
    return base


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run whose process 1 was killed when both had a later local save than the run directory's checkpoint 12."""
    base = tmp_path_factory.mktemp("killed")
    launch = ("launch", "local", "--processes", "2", "--devices-per-process", "1", "--log-dir", f"{base}/output")
    command = [sys.executable, "-m", "openpi_train", *launch, "--", *RUN, *SLOWLY, *places(base), *with_disk(base)]
    with subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        try:
            deadline = time.monotonic() + 480
            while not (run_of(base) / "12" / "manifest.json").exists() or last_local_step(base) <= 12:
                assert launcher.poll() is None and time.monotonic() < deadline
                time.sleep(0.005)
            os.kill(process(launcher.pid, 1), signal.SIGKILL)
            output = launcher.communicate(timeout=480)[0]
        finally:
            launcher.kill()
    assert launcher.returncode == 128 + signal.SIGKILL, output[-4000:]
    assert max(losses(base, "small")) <= 24
    assert [path.name for path in run_of(base).iterdir() if path.name.isdecimal()] == ["12"]
    return base


@pytest.fixture
def copy(killed, tmp_path) -> Path:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True, symlinks=True)
    return tmp_path


def run_of(base: Path) -> Path:
    return base / "runs" / "small" / "x"


def local(base: Path, index: int) -> Path:
    return base / "disk" / "small" / "x" / f"process_{index}"


def last_local_step(base: Path) -> int:
    """The last step that both processes have saved."""
    saved = [{int(path.parent.name) for path in local(base, index).glob("*/record.json")} for index in (0, 1)]
    return max(saved[0] & saved[1], default=0)


def resume(base: Path, processes: int = 2) -> str:
    """What the resumed run says; it ends with the losses of an undisturbed one."""
    done = train(base, *RUN, *with_disk(base), "--resume", processes=processes, devices=2 // processes)
    return words(done)


def test_a_killed_run_goes_on_from_the_local_save_and_ends_bit_for_bit_as_if_undisturbed(copy, straight):
    step = last_local_step(copy)
    sizes = [(local(copy, index) / str(step) / "pieces.bin").stat().st_size for index in (0, 1)]
    whole = sum(path.stat().st_size for path in (straight / "runs/small/x/36").rglob("d/*"))
    assert max(sizes) < 0.75 * whole, "each process saves what its own device holds"
    said = resume(copy)
    assert re.search(rf"restored checkpoint {step} from \S*/disk/small/x/process_0/{step} in", said), said
    assert losses(copy, "small") == losses(straight, "small")
    for saved in ("12", "24", "36"):
        assert stored_arrays(run_of(copy) / saved) == stored_arrays(run_of(straight) / saved)
    assert [path.name for path in local(copy, 1).iterdir()] == ["36"]
    # Killed while the last checkpoint was copied: the next start makes up for it.
    shutil.rmtree(run_of(copy) / "36")
    said = resume(copy)
    assert "nothing is left to train" in said
    assert stored_arrays(run_of(copy) / "36") == stored_arrays(run_of(straight) / "36")


def test_hosts_that_see_one_local_directory_are_refused(tmp_path):
    (tmp_path / "boot_id").write_text("another boot\n")
    mount = f'mount --bind {tmp_path}/boot_id /proc/sys/kernel/random/boot_id && exec "$@"'
    on_another_host = ("unshare", "--mount", "sh", "-c", mount, "sh")
    possible = subprocess.run([*on_another_host, "true"], capture_output=True, text=True)
    if possible.returncode:
        pytest.skip(f"a process cannot be given another boot id here: {possible.stderr.strip()}")
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = (sys.executable, "-m", "openpi_train", *RUN, *places(tmp_path), *with_disk(tmp_path))
    started = [
        subprocess.Popen(
            [*prefix, *command, "--devices-per-process", "1"],
            env=environment(RANK=str(index), **common),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index, prefix in enumerate(((), on_another_host))
    ]
    said = [process.communicate(timeout=480)[0] for process in started]
    assert [process.returncode for process in started] == [USAGE] * 2, said
    assert re.search(
        r"--local-checkpoints.dir \S+/disk is one directory for \S+ and \S+; it must lie on a disk", said[0]
    )


def lose_the_disk_of_process_1(base):
    shutil.rmtree(local(base, 1))


def damage_the_disk_of_process_0(base):
    for path in local(base, 0).glob("*/pieces.bin"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def leave_all_as_it_is(base):
    pass


@pytest.mark.parametrize(
    ("harm", "processes", "says"),
    [
        (
            lose_the_disk_of_process_1,
            2,
            r"process 1 on \S+: it has no save of step \d+ in \S+: another host than before",
        ),
        (damage_the_disk_of_process_0, 2, r"process 0 on \S+: \S+ is corrupt: its crc32 is"),
        (leave_all_as_it_is, 1, r"it was saved by another number of processes \(2, now 1\) or devices \(2, now 2\)"),
    ],
    ids=["host replaced", "damaged", "other processes"],
)
def test_what_cannot_be_used_is_passed_over_with_the_reason(killed, copy, straight, harm, processes, says):
    harm(copy)
    said = resume(copy, processes)
    assert re.search(rf"local checkpoint {last_local_step(killed)} is passed over: .*{says}", said), said
    assert re.search(r"restored checkpoint 12 from \S*/runs/small/x/12 in", said), said
    assert losses(copy, "small") == losses(straight, "small")
    assert stored_arrays(run_of(copy) / "36") == stored_arrays(run_of(straight) / "36")
    assert [path.name for path in (copy / "disk" / "small" / "x").iterdir()] == [
        f"process_{k}" for k in range(processes)
    ]
