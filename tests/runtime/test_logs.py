import logging

import pytest

from openpi_train.runtime import logs, phases


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
    kept = kept_by(tmp_path)
    for text in ("our news", "library chatter", "library warning", "our error"):
        assert text in kept
    assert "I process 0 step 0 [starting] openpi_train.training: our news" in kept
    with phases.phase("training", limited=True):
        phases.at_step(12)
        say()
    phases.at_step(0)
    assert "E process 0 step 12 [training] openpi_train.training: our error" in kept_by(tmp_path)


def kept_by(run_dir):
    return logs.log_path(run_dir, 0).read_text()


def test_other_processes_show_only_errors_with_their_number(tmp_path, capsys, restored_logging):
    logs.configure(3, tmp_path)
    say()
    shown = capsys.readouterr().err
    assert "process 3: our error" in shown
    assert "our news" not in shown and "library warning" not in shown
    assert "our news" in (tmp_path / "logs" / "process_3.log").read_text()
