import logging

import pytest

from openpi_train.runtime import logs


@pytest.fixture
def restored_logging():
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.captureWarnings(False)


def say():
    ours, theirs = logging.getLogger("openpi_train.training"), logging.getLogger("orbax")
    ours.info("our news")
    theirs.info("library chatter")
    theirs.warning("library warning")
    ours.error("our error")


def test_process_zero_shows_news_and_files_keep_everything(tmp_path, capsys, restored_logging):
    logs.configure(0)
    logs.configure(0, tmp_path)
    say()
    shown = capsys.readouterr().err
    assert shown.count("our news") == 1
    assert "library warning" in shown and "our error" in shown and "library chatter" not in shown
    kept = logs.log_path(tmp_path, 0).read_text()
    for text in ("our news", "library chatter", "library warning", "our error", "process 0 openpi_train.training"):
        assert text in kept


def test_other_processes_show_only_errors_with_their_number(tmp_path, capsys, restored_logging):
    logs.configure(3, tmp_path)
    say()
    shown = capsys.readouterr().err
    assert "process 3: our error" in shown
    assert "our news" not in shown and "library warning" not in shown
    assert "our news" in (tmp_path / "logs" / "process_3.log").read_text()
