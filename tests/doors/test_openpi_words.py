"""The words of openpi's `serve_policy.py` and `compute_norm_stats.py` are those of our verbs."""

import pytest

from openpi_train import cli
from openpi_train.doors.openpi_words import serve_words, stats_words
from openpi_train.runtime.exits import UsageError


@pytest.mark.parametrize(
    "given",
    [
        "policy:checkpoint --policy.config=pi05_libero --policy.dir=a/b --port 9",
        "policy:checkpoint --policy.config pi05_libero --policy.dir a/b --port 9",
        "--port 9 policy:checkpoint --policy.dir a/b --policy.config pi05_libero",
    ],
)
def test_its_server_is_ours_with_the_experiment(given, capsys):
    words = serve_words(given.split())
    assert words[0] == "a/b" and sorted(words[1:]) == sorted(["--experiment", "pi05_libero", "--port", "9"])
    assert "as: python -m openpi_train serve a/b " in capsys.readouterr().err


def test_its_prompt_and_what_names_no_checkpoint():
    assert serve_words(["policy:checkpoint", "--policy.dir=d", "--default_prompt", "pick up"]) == [
        *("d", "--prompt", "pick up")
    ]
    with pytest.raises(UsageError, match="name the checkpoint"):
        serve_words(["--env", "DROID", "policy:default"])


@pytest.mark.parametrize("given", [["--config-name", "debug"], ["--config-name=debug"], ["--config_name", "debug"]])
def test_its_norm_stats_are_ours(given, capsys):
    assert stats_words([*given, "--batch-size", "4"]) == ["debug", "--batch-size", "4"]
    assert "as: python -m openpi_train stats debug" in capsys.readouterr().err


def test_our_own_words_stay_as_they_are(capsys):
    own = ["checkpoints/debug/x", "--experiment", "debug", "--prompt", "policy"]
    assert serve_words(own) == own and stats_words(["debug", "--seed", "3"]) == ["debug", "--seed", "3"]
    assert capsys.readouterr().err == ""


def test_the_verbs_take_them(tmp_path, capsys):
    assert cli.run(["stats", "--config-name", "debug", "--assets-base-dir", str(tmp_path)]) == 0
    assert list(tmp_path.rglob("norm_stats.json"))
    assert cli.run(["serve", "policy:checkpoint", "--policy.config=debug", f"--policy.dir={tmp_path}/no"]) != 0
    assert f"no checkpoint at {tmp_path}/no" in capsys.readouterr().err
