"""The help of an experiment: short enough to be read, and everything behind it."""

import re

import pytest

from openpi_train import cli
from openpi_train.command_line import OF_OTHERS


def shown(capsys, *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        cli.run(["debug", *words])
    return end.value.code, capsys.readouterr().out


def test_the_page_has_what_most_people_use_and_names_the_parts(capsys):
    code, page = shown(capsys, "--help")
    assert code == 0 and len(page.splitlines()) < 100
    assert all(f"  {flag} " in page for flag in ("--exp-name", "--dataset", "--batch-size", "--lr-schedule.peak-lr"))
    assert "--model.siglip.width" not in page and "model (" in page and "timeouts (7)" in page
    assert "with --help PART" in page and "--help-all" in page


def test_a_part_has_all_its_flags_with_their_whole_text_and_the_experiments_values(capsys):
    code, page = shown(capsys, "--help", "eval")
    assert code == 0 and "--eval.closed-loop.execute" in page and "--batch-size" not in page
    assert "None: the model's own number. [None]" in page and "(rounded up to whole batches" in page
    assert shown(capsys, "--help", "others")[1].count("\n  --") > 30


def test_percent_signs_are_shown_once(capsys):
    with pytest.raises(SystemExit):
        cli.run(["lm_sft", "--help", "data"])
    assert "{% generation %}" in capsys.readouterr().out


def test_an_unknown_part_is_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(["debug", "--help", "eva"])
    assert end.value.code == 2 and "model, objective" in capsys.readouterr().err


def test_all_is_still_to_be_had(capsys):
    code, page = shown(capsys, "--help-all")
    assert code == 0 and all(flag in page for flag in ("--model.siglip.width", "--timeouts.stuck-s", "--batch-size"))


def test_flags_of_other_trainers_are_named_by_flags_that_are_there(capsys):
    there = set()
    for name in ("act", "lm_grpo"):
        with pytest.raises(SystemExit):
            cli.run([name, "--help-all"])
        there |= set(re.findall(r"--[\w.-]+", capsys.readouterr().out))
    assert set(OF_OTHERS.values()) <= there and not OF_OTHERS.keys() & there


def test_a_tyro_without_its_list_of_flags_shows_all_of_them(capsys, monkeypatch):
    monkeypatch.delattr("tyro.extras.get_parser")
    code, page = shown(capsys, "--help")
    assert code == 0 and "--model.siglip.width" in page
