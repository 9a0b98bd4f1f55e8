import logging

from openpi_train.runtime import logs, phases


def say():
    ours, theirs = logging.getLogger("openpi_train.training"), logging.getLogger("jax")
    ours.info("our news")
    theirs.info("library chatter")
    theirs.warning("library warning")
    ours.error("our error")


def test_process_zero_shows_news_and_files_keep_everything(tmp_path, capsys):
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
    with phases.phase("training", of_steps=True):
        phases.at_step(12)
        say()
    phases.at_step(0)
    assert "E process 0 step 12 [training] openpi_train.training: our error" in kept_by(tmp_path)


def kept_by(run_dir):
    return logs.log_path(run_dir, 0).read_text()


def test_other_processes_show_only_errors_with_their_number(tmp_path, capsys):
    logs.configure(3, tmp_path)
    say()
    shown = capsys.readouterr().err
    assert "process 3: our error" in shown
    assert "our news" not in shown and "library warning" not in shown
    assert "our news" in (tmp_path / "logs" / "process_3.log").read_text()


def test_a_full_disk_disturbs_neither_the_run_nor_its_log(small_disk, fill_disk, capfd):
    logs.configure(0, small_disk)
    filler = fill_disk()
    for number in range(100):
        logging.getLogger("jax").info("chatter %d %s", number, "x" * 80)
    logging.getLogger("openpi_train").info("our news")
    logs.dump_stacks()
    shown = capfd.readouterr().err
    assert shown.count("process_0.log cannot be written (No space left on device)") == 1
    assert "our news" in shown and "Logging error" not in shown
    assert "where every thread of this process is:" in shown, "the file does not take it"
    filler.unlink()
    logging.getLogger("jax").info("more")
    kept = kept_by(small_disk)
    assert [line.split()[-2] for line in kept.splitlines() if "chatter" in line] == [str(one) for one in range(100)]
    assert "our news" in kept and "cannot be written" in kept and ": more\n" in kept and "is complete again" in kept


def test_what_the_log_file_has_not_taken_in_the_end_is_shown(small_disk, fill_disk, capsys):
    logs.configure(1, small_disk)
    fill_disk()
    for _ in range(50):
        logging.getLogger("openpi_train").info("%s", "x" * 90)
    logging.getLogger("openpi_train").info("the last news")
    assert "the last news" not in capsys.readouterr().err, "process 1 shows errors only"
    logs.configure(1)
    shown = capsys.readouterr().err
    assert "what did not fit into" in shown and "the last news" in shown


def test_a_traceback_goes_to_the_file_alone(tmp_path, capsys):
    logs.configure(0)
    assert not logs.keep_traceback(ValueError("wrong")), "there is no file yet"
    logs.configure(0, tmp_path)
    try:
        raise ValueError("wrong")
    except ValueError as error:
        assert logs.keep_traceback(error)
    assert "Traceback" in kept_by(tmp_path) and "ValueError: wrong" in kept_by(tmp_path)
    assert capsys.readouterr().err == ""


def test_what_orbax_says_of_a_save_is_kept_from_warnings_on(tmp_path):
    logs.configure(1, tmp_path)
    for library in ("absl", "orbax.checkpoint"):
        logging.getLogger(library).info("one of 43 lines")
        logging.getLogger(library).warning("a warning of %s", library)
    kept = (tmp_path / "logs" / "process_1.log").read_text()
    assert "one of 43" not in kept and "a warning of absl" in kept and "a warning of orbax.checkpoint" in kept


def test_a_long_log_is_kept_beside_a_new_one_and_stays_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_MOST_BYTES", 2000)
    logs.configure(2, tmp_path)
    for number in range(100):
        logging.getLogger("openpi_train").info("line %d", number)
    path = tmp_path / "logs" / "process_2.log"
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["process_2.log", "process_2.log.1"]
    assert all(file.stat().st_size < 2200 for file in files)
    said = files[1].read_text() + files[0].read_text()
    numbers = [int(line.rsplit(maxsplit=1)[1]) for line in said.splitlines()]
    assert numbers == list(range(numbers[0], 100)), "no line between the two is lost"
