"""The server of a bad disk: FUSE's operations, done on the folder behind unless a rule refuses them.

python -m benchmarks.drill.passthrough BEHIND AT    rules come as JSON lines on its input; it unmounts where that ends

Nothing about the files is cached but their open pages, so each access comes here. Read next: `bad_disk.py`, the caller.
"""

import contextlib
import errno
import fnmatch
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

# It would take an older one first where both are installed.
os.environ["FUSE_LIBRARY_NAME"] = "fuse3"
import mfusepy

# As `utimens` passes them on (UTIME_NOW, UTIME_OMIT of <sys/stat.h>).
_NOW, _OMIT = (1 << 30) - 1, (1 << 30) - 2
# The kernel has done the work of these, or it is not ours.
_NOT_BEHIND = os.O_DIRECT | os.O_APPEND
# A file that is deleted while it is open gets such a name. It lies in a folder of its own, which nobody sees, so that
# the folder where it was can be deleted (over NFS it cannot).
_HIDDEN = ".fuse_hidden"
_MAX_THREADS = 64  # as many operations may be delayed at once
_STAT = ("st_mode", "st_ino", "st_dev", "st_nlink", "st_uid", "st_gid", "st_rdev", "st_size", "st_blksize", "st_blocks")
_SPACE = (
    *("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_flag"),
    "f_namemax",
)


class Rules:
    """What is refused or delayed now, and how often it was."""

    def __init__(self):
        self._rules: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._healings = 0

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Do what the other side asks for."""
        with self._changed:
            if request["what"] == "misbehave":
                until = None if request["seconds"] is None else time.monotonic() + request["seconds"]
                self._rules.append({**request, "until": until, "left": request["times"], "met": Counter()})
                return len(self._rules) - 1
            if request["what"] == "heal":
                for rule in self._rules:
                    rule["left"] = 0
                self._healings += 1
                self._changed.notify_all()
                return None
            of = request["of"]
            return sum((rule["met"] for rule in (self._rules if of is None else [self._rules[of]])), Counter())

    def check(self, operation: str, *paths: str) -> None:
        """Return if the operation may go on; raise its error otherwise, or wait."""
        with self._changed:
            for rule in self._rules:
                if self._applies(rule, operation, paths):
                    rule["met"][f"{operation} {' '.join(paths)}"] += 1
                    if rule["left"] is not None:
                        rule["left"] -= 1
                    if rule["number"]:
                        raise OSError(rule["number"], os.strerror(rule["number"]))
                    self._wait(rule["delay_s"])

    def _wait(self, delay_s: float) -> None:
        before = self._healings
        self._changed.wait_for(lambda: self._healings > before, delay_s)

    def _applies(self, rule: Mapping[str, Any], operation: str, paths: tuple[str, ...]) -> bool:
        return (
            rule["left"] != 0
            and operation in rule["operations"]
            and (rule["until"] is None or time.monotonic() < rule["until"])
            and any(fnmatch.fnmatchcase(path, rule["on"]) for path in paths)
        )


class Passthrough(mfusepy.Operations):
    """The operations of the kernel on the folder behind. A file's handle is the descriptor of the file there."""

    use_ns = True

    def __init__(self, behind: str, rules: Rules):
        self._behind, self._rules = behind, rules
        os.makedirs(f"{behind}/{_HIDDEN}", exist_ok=True)
        self._names: dict[int, str] = {}  # of open files, which may have no name any more

    def init_with_config(self, conn_info: Any, config_3: Any) -> None:
        """The disk is there: tell the other side."""
        _say("ready")

    def getattr(self, path, fh=None):
        self._check("lookup", path, fh)
        found = os.lstat(self._place(path)) if fh is None else os.fstat(fh)
        times = {"st_atime": found.st_atime_ns, "st_mtime": found.st_mtime_ns, "st_ctime": found.st_ctime_ns}
        return {name: getattr(found, name) for name in _STAT} | times

    def readlink(self, path):
        self._check("readlink", path)
        return os.readlink(self._place(path))

    def readdir(self, path, fh):
        self._check("list", path)
        found: list[Any] = [".", ".."]
        with os.scandir(self._place(path)) as entries:
            for one in entries:
                with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                    mode = one.stat(follow_symlinks=False).st_mode
                    found.append((one.name, {"st_ino": one.inode(), "st_mode": mode}, 0))
        return [one for one in found if one[0] != _HIDDEN]

    def statfs(self, path):
        self._check("space", path)
        found = os.statvfs(self._place(path))
        return {name: getattr(found, name) for name in _SPACE}

    def open(self, path, flags):
        self._check("open", path)
        return self._opened(path, os.open(self._place(path), flags & ~_NOT_BEHIND))

    def create(self, path, mode, fi=None):
        self._check("create", path)
        flags = (fi or os.O_WRONLY) & ~_NOT_BEHIND | os.O_CREAT
        handle = self._opened(path, os.open(self._place(path), flags, mode))
        self._give_to_caller(path)
        return handle

    def read(self, path, size, offset, fh):
        self._check("read", path, fh)
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        self._check("write", path, fh)
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        self._check("truncate", path, fh)
        os.truncate(self._place(path) if fh is None else fh, length)

    def fallocate(self, path, mode, offset, size, fh):
        self._check("fallocate", path, fh)
        if mode:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        os.posix_fallocate(fh, offset, size)

    def flush(self, path, fh):
        self._check("close", path, fh)

    def release(self, path, fh):
        self._names.pop(fh, None)
        os.close(fh)

    def fsync(self, path, datasync, fh):
        self._check("fsync", path, fh)
        (os.fdatasync if datasync else os.fsync)(fh)

    def fsyncdir(self, path, datasync, fh):
        self._check("fsync", path)
        folder = os.open(self._place(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def mkdir(self, path, mode):
        self._check("mkdir", path)
        os.mkdir(self._place(path), mode)
        self._give_to_caller(path)

    def mknod(self, path, mode, dev):
        self._check("create", path)
        os.mknod(self._place(path), mode, dev)
        self._give_to_caller(path)

    def symlink(self, target, source):
        self._check("symlink", target)
        os.symlink(source, self._place(target))
        self._give_to_caller(target)

    def link(self, target, source):
        self._check("link", target)
        os.link(self._place(source), self._place(target), follow_symlinks=False)

    def rename(self, old, new):
        if _is_hidden(new):  # libfuse's way to delete a file that is open
            self._check("unlink", old)
        else:
            self._check("rename", old, None, new)
        os.rename(self._place(old), self._place(new))

    def unlink(self, path):
        self._check("unlink", path)
        os.unlink(self._place(path))

    def rmdir(self, path):
        self._check("rmdir", path)
        os.rmdir(self._place(path))

    def chmod(self, path, mode):
        self._check("attributes", path)
        os.chmod(self._place(path), mode)

    def chown(self, path, uid, gid):
        self._check("attributes", path)
        os.chown(self._place(path), uid, gid, follow_symlinks=False)

    def utimens(self, path, times=None):
        self._check("attributes", path)
        place = self._place(path)
        before = os.lstat(place)
        given = zip(times or (_NOW, _NOW), (before.st_atime_ns, before.st_mtime_ns), strict=True)
        now = time.time_ns()
        atime, mtime = ({_NOW: now, _OMIT: old}.get(new, new) for new, old in given)
        os.utime(place, ns=(atime, mtime), follow_symlinks=False)

    def _place(self, path: str | None) -> str:
        if path is None:  # of a file that has no name any more
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return f"{self._behind}/{_HIDDEN}/{os.path.basename(path)}" if _is_hidden(path) else self._behind + path

    def _check(self, operation: str, path: str | None, handle: int | None = None, *others: str) -> None:
        name = path or self._names.get(-1 if handle is None else handle, "")
        self._rules.check(operation, name, *others)

    def _opened(self, path: str, handle: int) -> int:
        self._names[handle] = path
        return handle

    def _give_to_caller(self, path: str) -> None:
        uid, gid, _ = mfusepy.fuse_get_context()
        if (uid, gid) != (0, 0):
            os.chown(self._place(path), uid, gid, follow_symlinks=False)


def _is_hidden(path: str) -> bool:
    return os.path.basename(path).startswith(_HIDDEN)


class _Fuse(mfusepy.FUSE):
    """Without two mistakes of the library: under libfuse 3 it drops the handle, and the flags of renameat2."""

    def truncate_fuse_3(self, path, length, fip):
        return self.ftruncate(path, length, fip)

    def rename_fuse_3(self, old, new, flags):
        if flags:  # as NFS does
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self.rename_fuse_2(old, new)


def main(behind: str, at: str) -> None:
    """Serve until the input ends."""
    os.umask(0)  # the kernel has applied the caller's
    rules = Rules()
    threading.Thread(target=_listen, args=(rules, at), daemon=True).start()
    _Fuse(
        Passthrough(behind, rules),
        at,
        foreground=True,
        fsname="bad_disk",
        allow_other=True,
        default_permissions=True,
        use_ino=True,
        max_threads=_MAX_THREADS,
        entry_timeout=0,
        attr_timeout=0,
        negative_timeout=0,
    )


def _listen(rules: Rules, at: str) -> NoReturn:
    for line in sys.stdin:
        _say(rules.answer(json.loads(line)))
    subprocess.run(["umount", "--lazy", at], stderr=subprocess.DEVNULL, check=False)
    os._exit(0)  # operations may wait


def _say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
