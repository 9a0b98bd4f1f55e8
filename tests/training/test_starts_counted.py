"""What a run counts of its starts; `tests/runs/test_crash_loop.py` has whole runs."""

import pathlib

from openpi_train.training import crash_loop


def test_a_record_that_cannot_be_read_for_now_is_kept(tmp_path, monkeypatch, caplog):
    for _ in range(3):
        crash_loop._counted(tmp_path, 10)
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "read_bytes", lambda path: raise_(OSError(5, "Input/output error", str(path))))
        assert crash_loop._counted(tmp_path, 10).in_vain == 0 and "this start is not counted" in caplog.text
    assert crash_loop._counted(tmp_path, 10).in_vain == 3


def raise_(error):
    raise error
