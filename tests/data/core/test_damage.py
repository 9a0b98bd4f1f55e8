"""What is damage and what is a failure of the system, by the errors that the libraries really raise."""

import errno
import io
import os
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from openpi_train.data.core import files
from openpi_train.data.core.damage import of_record, raise_if_system, system_errno
from openpi_train.data.core.source import BadRecord
from openpi_train.data.formats import spans
from openpi_train.runtime.exits import DataError, StorageError

# Reading its beginning, which no process maps, is an I/O error.
IO_ERROR = Path("/proc/self/mem")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/mem and /dev/full are Linux's")


def raised(call) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def failing_chunk(folder: Path, harm) -> Exception:
    """What tensorstore raises for a chunk after `harm` was done to its file."""
    import tensorstore

    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/"}, "fill_missing_data_reads": False}
    array = tensorstore.open(
        spec, create=True, dtype="float32", shape=[4], chunk_layout=tensorstore.ChunkLayout(chunk_shape=[4])
    )
    array = array.result()
    array[:] = np.ones(4, np.float32)
    harm(folder / "0")
    return raised(lambda: array.read().result())


def looped(path: Path) -> None:
    """Replace a file by a link to itself: the system refuses to open it."""
    path.unlink()
    path.symlink_to(path.name)


@needs_linux
def test_errors_of_the_system_are_told_from_those_of_contents_by_every_library(tmp_path):
    import av
    import pyarrow.parquet as parquet
    from PIL import Image

    (tmp_path / "io.mp4").symlink_to(IO_ERROR)
    (tmp_path / "loop.parquet").symlink_to("loop.parquet")
    (tmp_path / "torn").write_bytes(b"PAR1 no file of any kind" * 9)
    picture = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)).save(picture, "PNG")
    half = io.BytesIO(picture.getvalue()[:2000])
    of_system = {
        "av": (errno.EIO, lambda: av.open(str(tmp_path / "io.mp4"))),
        "pyarrow": (errno.ELOOP, lambda: parquet.ParquetFile(tmp_path / "loop.parquet")),
        "python": (errno.ENOSPC, lambda: Path("/dev/full").write_bytes(b"x")),
    }
    for name, (number, call) in of_system.items():
        assert system_errno(raised(call)) == number, name
    of_contents = {
        "av": lambda: av.open(str(tmp_path / "torn")),
        "pyarrow": lambda: parquet.ParquetFile(tmp_path / "torn"),
        "pillow, none": lambda: Image.open(tmp_path / "torn"),
        "pillow, truncated": lambda: np.asarray(Image.open(half)),
        "zlib": lambda: zlib.decompress(b"none"),
    }
    for name, call in of_contents.items():
        assert system_errno(raised(call)) is None, name
    assert system_errno(failing_chunk(tmp_path / "a", looped)) == errno.ELOOP
    assert system_errno(failing_chunk(tmp_path / "b", lambda path: path.write_bytes(b"torn"))) is None
    assert system_errno(failing_chunk(tmp_path / "c", os.unlink)) is None


def test_words_of_libraries_that_give_no_number_are_understood():
    # As array_record 0.8.1 and tensorstore 0.1.86 said when the C library's `read` failed.
    said = "read() failed: Stale file handle; reading steps-00000.array_record; at byte 0"
    assert system_errno(RuntimeError(said)) == errno.ESTALE
    said = "PERMISSION_DENIED: Error reading local file \"a/0\": Permission denied [os_error_code='13']"
    assert system_errno(ValueError(said)) == errno.EACCES
    assert system_errno(ValueError("RESOURCE_EXHAUSTED: Too many open files in system")) == errno.EIO
    assert system_errno(ValueError("NOT_FOUND: chunk {1, 0} stored at local file is missing")) is None
    assert system_errno(RuntimeError("Invalid record: checksum does not match")) is None


@needs_linux
def test_the_error_names_the_file_that_could_not_be_read_or_written(tmp_path):
    with pytest.raises(OSError, match=r"Stale file handle: '.*a\.parquet'"):
        raise_if_system(OSError(errno.ESTALE, "Error reading bytes from file"), tmp_path / "a.parquet")
    raise_if_system(ValueError("torn"), tmp_path / "a.parquet")
    written = OSError(errno.ENOSPC, "No space left on device", "cache/pictures.bin")
    with pytest.raises(OSError, match=r"cache/pictures\.bin"):
        raise_if_system(written, tmp_path / "a.parquet")
    (tmp_path / "a.json").symlink_to(IO_ERROR)
    with pytest.raises(OSError, match=r"\[Errno 5\] Input/output error: '.*a\.json'"):
        files.read_json(tmp_path / "a.json")
    with pytest.raises(OSError, match=r"Input/output error: '.*a\.json'"):
        list(files.read_json_lines(tmp_path / "a.json"))


def test_only_damage_lets_another_row_stand_in():
    assert isinstance(of_record(OSError("the file ends 3 bytes too early"), "a, step 3"), BadRecord)
    failed = of_record(OSError(errno.EIO, "Input/output error"), "a, step 3")
    assert type(failed) is StorageError and "a, step 3: [Errno 5] Input/output error" in str(failed)


def test_a_step_that_will_not_be_readable_later_either_is_an_error_of_the_data():
    assert type(of_record(PermissionError(errno.EACCES, "Permission denied"), "a, step 3")) is DataError


def test_a_stale_handle_is_opened_anew_once(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"0123456789")
    stat, read, failures = (tmp_path / "a").stat(), os.pread, [errno.ESTALE, errno.ESTALE, errno.ESTALE]

    def pread(*given):
        if failures:
            raise OSError(failures.pop(), "Stale file handle")
        return read(*given)

    monkeypatch.setattr(os, "pread", pread)
    span = (tmp_path / "a", stat.st_size, stat.st_mtime_ns, 2, 3)
    with pytest.raises(OSError, match="Stale file handle"):
        spans.read_span(*span)
    assert spans.read_span(*span) == b"234" and not failures
    spans.open_file.cache_clear()


def test_lines_end_at_newlines_alone_and_a_byte_order_mark_is_none_of_the_text(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["a\u2028b", "a\x85b"]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(f'"{text}"' for text in texts).encode() + b'\n"plain"\n')
    assert list(files.read_json_lines(path)) == [(1, texts[0]), (3, texts[1]), (4, "plain")]
    path.write_bytes(b'"a"\n{"torn')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is not JSON \(.*\); mend or remove it"):
        list(files.read_json_lines(path))
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert files.read_json(path) == {"a": 1}
