"""The disk that misbehaves, on which runs are drilled: it is a file system like another until it is told not to be."""

import contextlib
import errno
import fcntl
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from debian import install
from runs.command import ROOT

from benchmarks.drill.bad_disk import BadDisk, why_not

install("fusermount3")
pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    with BadDisk(folder / "behind", folder / "at") as made:
        yield made


@pytest.fixture
def there(disk) -> Path:
    """An empty folder on the disk, which behaves again afterwards."""
    folder = disk.at / "there"
    folder.mkdir()
    yield folder
    disk.heal()
    shutil.rmtree(folder)


NAMES = ("a", "b", "c", "d/e", "d/f", "d")


def write(base, rng):
    place, data = base / rng.choice(NAMES), rng.randbytes(rng.randrange(20_000))
    flags = os.O_WRONLY | rng.choice([0, os.O_CREAT, os.O_CREAT | os.O_TRUNC, os.O_CREAT | os.O_EXCL, os.O_APPEND])
    offset = rng.randrange(30_000)
    file = os.open(place, flags, 0o640)
    try:
        os.lseek(file, offset, os.SEEK_SET)
        done = os.write(file, data)
        os.fsync(file)
        return done, os.fstat(file).st_size, os.lseek(file, 0, os.SEEK_CUR)
    finally:
        os.close(file)


def read(base, rng):
    with (base / rng.choice(NAMES)).open("rb") as file:
        file.seek(rng.randrange(20_000))
        found = file.read(rng.randrange(20_000))
        if not os.fstat(file.fileno()).st_size:
            return found
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            return found, bytes(mapped)


def change_mapped(base, rng):
    place, letter = base / rng.choice(NAMES), bytes([rng.randrange(256)])
    with place.open("r+b") as file:
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0) as mapped:
                mapped[:1] = letter
                mapped.flush()


def truncate(base, rng):
    os.truncate(base / rng.choice(NAMES), rng.randrange(40_000))


def replace(base, rng):
    (base / rng.choice(NAMES)).rename(base / rng.choice(NAMES))


def link(base, rng):
    os.link(base / rng.choice(NAMES), base / rng.choice(NAMES), follow_symlinks=False)


def symlink(base, rng):
    os.symlink(rng.choice(NAMES), base / rng.choice(NAMES))


def delete(base, rng):
    (base / rng.choice(NAMES)).unlink()


def delete_while_open(base, rng):
    """Also over an open file, and its folder with it."""
    place = base / rng.choice(NAMES)
    other = base / rng.choice(NAMES)
    with place.open("r+b") as file:
        if rng.random() < 0.5:
            place.unlink()
        elif other.is_file():
            other.rename(place)
        with contextlib.suppress(OSError):
            place.parent.rmdir()
        file.truncate(7)
        file.write(b"more")
        file.flush()
        file.seek(0)
        return file.read()


def make_folder(base, rng):
    (base / rng.choice(NAMES)).mkdir(0o750)


def delete_folder(base, rng):
    (base / rng.choice(NAMES)).rmdir()


def attributes(base, rng):
    place, mode, when = base / rng.choice(NAMES), rng.randrange(0o1000), rng.randrange(2**30)
    place.chmod(mode)
    os.utime(place, (when, when + 1))
    return [getattr(place.stat(), name) for name in ("st_mode", "st_nlink", "st_atime", "st_mtime", "st_uid")]


ACTIONS = (write, read, change_mapped, truncate, replace, link, symlink, delete, delete_while_open, make_folder)
ACTIONS += (delete_folder, attributes)


def outcome(action, base, seed):
    try:
        return action(base, random.Random(seed))
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def content(base):
    """All that is below a folder, by path."""
    found = {}
    for place in sorted(base.rglob("*")):
        kind = place.lstat()
        size = None if place.is_dir() else kind.st_size
        data = os.readlink(place) if place.is_symlink() else place.read_bytes() if place.is_file() else None
        found[str(place.relative_to(base))] = (kind.st_mode, size, kind.st_nlink, data)
    return found


def test_it_does_what_a_plain_folder_does(there, tmp_path):
    rng = random.Random(0)
    good = 0
    for number in range(400):
        action, seed = rng.choice((*ACTIONS, write, read, write)), rng.random()
        found, expected = (outcome(action, base, seed) for base in (there, tmp_path))
        assert found == expected, f"{number}: {action.__name__}"
        good += not isinstance(expected, str)
        if number % 20 == 0:
            assert content(there) == content(tmp_path), number
    assert content(there) == content(tmp_path) and good > 100


def test_processes_that_append_at_once_lose_nothing(there):
    text = "import sys\nfor number in range(60): open(sys.argv[1], 'a').write(f'{sys.argv[2]} {number}\\n')"
    running = [subprocess.Popen([sys.executable, "-c", text, there / "log", name]) for name in "xy"]
    assert [one.wait() for one in running] == [0, 0]
    assert sorted((there / "log").read_text().split("\n")[:-1]) == sorted(f"{a} {n}" for a in "xy" for n in range(60))


def test_a_lock_holds_for_other_processes(there):
    with (there / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        done = subprocess.run([sys.executable, "-c", text, there / "lock"], capture_output=True, text=True, check=False)
        assert "BlockingIOError" in done.stderr


def test_other_things_that_checkpoints_need(disk, there):
    direct = os.open(there / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    with mmap.mmap(-1, 8192) as page:  # aligned, as O_DIRECT wants it
        page.write(b"x" * 8192)
        assert os.write(direct, page) == 8192 and os.preadv(direct, [page], 4096) == 4096
    os.close(direct)
    with (there / "sparse").open("wb") as file:
        file.truncate(1 << 30)
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
        os.fsync(file.fileno())
    assert 1 << 20 <= (there / "sparse").stat().st_blocks * 512 < 2 << 20
    folder = os.open(there, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    assert shutil.disk_usage(there).total == shutil.disk_usage(disk._behind).total
    # Namespaces of mounts, as hosts have them, that are made now.
    words = ["unshare", "-m", "stat", "--format=%s", there / "direct"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "8192\n"


def use(folder):
    """A file's life, by the operation that is met first."""
    file = os.open(folder / "new", os.O_RDWR | os.O_CREAT)
    try:
        os.write(file, b"data")
        os.fsync(file)
    finally:
        os.close(file)
    os.rename(folder / "new", folder / "old")
    (folder / "old").read_bytes()
    os.unlink(folder / "old")


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "close", "rename", "read", "open", "unlink"])
def test_an_operation_is_refused_as_often_as_told(disk, there, operation):
    times = 2 if operation == "read" else 1  # the kernel reads again what it could not read ahead
    number = disk.misbehave("EIO", on="*/there/*", operations=(operation,), times=times)
    with pytest.raises(OSError) as caught:
        use(there)
    assert caught.value.errno == errno.EIO
    assert [name.split()[0] for name in disk.met(number)] == [operation] and disk.met(number).total() == times
    use(there)


@pytest.mark.parametrize("kind", ["ESTALE", "EDQUOT", "EROFS", "ENOSPC"])
def test_the_error_is_the_one_it_is_told(disk, there, kind):
    disk.misbehave(kind, on="*/there/*", times=2)  # the kernel asks twice where a handle is stale
    with pytest.raises(OSError) as caught:
        use(there)
    assert caught.value.errno == getattr(errno, kind)


def test_others_than_those_it_is_told_of_are_well(disk, there):
    number = disk.misbehave("EIO", on="*/manifest.json", operations=("open",))
    use(there)
    assert not disk.met(number)
    (there / "other").write_text("x")
    with pytest.raises(OSError):
        (there / "other").rename(there / "manifest.json")
        (there / "manifest.json").read_text()
    assert disk.met(number) == {"open /there/manifest.json": 1}


def test_a_full_disk_can_be_read_and_emptied_and_a_read_only_one_only_read(disk, there):
    (there / "old").write_text("x")
    disk.misbehave("EDQUOT")
    with pytest.raises(OSError):
        (there / "new").write_text("x")
    assert (there / "old").read_text() == "x"
    disk.heal()
    disk.misbehave("EROFS")
    with pytest.raises(OSError):
        (there / "old").unlink()
    assert (there / "old").read_text() == "x"
    disk.heal()
    disk.misbehave("ENOSPC")
    (there / "old").unlink()


def test_what_cannot_be_deleted_stays_until_it_is_healed(disk, there):
    (there / "100").mkdir()
    (there / "100" / "file").write_text("x")
    number = disk.misbehave("undeletable", on="*/100/*")
    with pytest.raises(PermissionError):
        shutil.rmtree(there / "100")
    (there / "100" / "file").write_text("y")
    disk.heal()
    shutil.rmtree(there / "100")
    assert disk.met(number) == {"unlink /there/100/file": 1}


def test_it_misbehaves_for_some_seconds(disk, there):
    disk.misbehave("EIO", operations=("create",), seconds=0.3)
    began = time.monotonic()
    while True:
        with contextlib.suppress(OSError):
            (there / "file").write_text("x")
            break
        time.sleep(0.02)
    assert time.monotonic() - began > 0.2


def test_a_delay_holds_up_one_place_until_it_is_healed(disk, there):
    number = disk.misbehave("delay", on="*/slow", operations=("write",), delay_s=60)
    slow = threading.Thread(target=(there / "slow").write_text, args=("x",))
    slow.start()
    while not disk.met(number):
        time.sleep(0.01)
    (there / "fast").write_text("x")
    assert slow.is_alive()
    disk.heal()
    slow.join()
    assert (there / "slow").read_text() == "x"


def test_it_is_unmounted_when_its_maker_is_killed(tmp_path):
    text = (
        "import sys, time\nfrom pathlib import Path\nfrom benchmarks.drill.bad_disk import BadDisk\n"
        "with BadDisk(Path(sys.argv[1]), Path(sys.argv[2])):\n  print('mounted', flush=True)\n  time.sleep(60)"
    )
    at = tmp_path / "at"
    words = [sys.executable, "-c", text, tmp_path / "behind", at]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None and maker.stdout.readline() == "mounted\n" and os.path.ismount(at)
        maker.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while os.path.ismount(at) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.ismount(at) and at.is_dir()
