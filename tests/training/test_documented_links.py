"""Logs are also where other tools' guides say that they are, and the lines of a run say where they lie."""

import dataclasses
import logging
import os
from pathlib import Path

import jax
import pytest
from openpi_train_configs.debug import debug

from openpi_train.doors.posttraining import posttrain
from openpi_train.doors.ript import ript
from openpi_train.doors.vla import vla
from openpi_train.runtime import logs
from openpi_train.training.documented_links import VARIABLE, documented, link_documented

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's experiment and directory, in a folder with a space, as seen from its parent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    experiment = dataclasses.replace(debug, name="ript", exp_name="try1", checkpoint_base_dir="./my output")
    (experiment.run_dir / "logs").mkdir(parents=True)
    (experiment.run_dir / "logs" / "process_0.log").write_text("a line\n")
    return experiment, experiment.run_dir


@pytest.mark.parametrize(
    ("links", "place"),
    [
        (ript._LINKS, "my output/logs/distributed_training_*_node0.log"),
        (vla._LINKS, "my output/try1_*/train.log"),
        (posttrain._LINKS, "my output/try1/logs/training.log"),
        ({"logs/training.log": "logs/process_0.log"}, "logs/training.log"),
    ],
)
def test_a_guides_tail_shows_the_log(run, links, place, tmp_path, caplog):
    documented(links)
    with caplog.at_level(logging.INFO):
        link_documented(*run)
        link_documented(*run)  # a start that goes on
    (found,) = tmp_path.glob(place)
    assert found.read_text() == "a line\n" and f"link: {found}" in caplog.text
    (tmp_path / "my output").rename(tmp_path / "moved")  # a link goes with its run, if that lies beside it
    if place.startswith("my output"):
        assert next((tmp_path / "moved").glob(place.removeprefix("my output/"))).read_text() == "a line\n"


def test_links_lead_to_what_is_not_there_yet_and_to_the_newest_run(run, tmp_path):
    experiment, directory = run
    documented(ript._LINKS)
    link_documented(experiment, directory)
    latest = tmp_path / "my output" / "checkpoints" / "checkpoint_latest"
    assert latest.is_symlink() and not latest.exists()
    (directory / "20").mkdir()
    (directory / "latest").symlink_to("20")
    assert os.path.realpath(latest) == str(directory / "20")
    other = dataclasses.replace(experiment, exp_name="try2")
    link_documented(other, other.run_dir)
    assert os.readlink(latest) == "../ript/try2/latest"
    logs_there = (tmp_path / "my output" / "logs").glob("distributed_training_*")
    assert len(list(logs_there)) in (1, 2), "of the same second, or another"


def test_every_process_has_a_link_of_its_own(run, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    documented({"{base}/logs/train_rank_{process}.log": "logs/process_{process}.log"})
    link_documented(*run)
    leads_to = {link.name: os.readlink(link) for link in (tmp_path / "my output" / "logs").iterdir()}
    assert leads_to == {f"train_rank_{k}.log": f"../ript/try1/logs/process_{k}.log" for k in range(3)}


def test_a_file_of_ones_own_is_left_alone(run, tmp_path, caplog):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "training.log").write_text("mine")
    documented({"logs/training.log": "logs/process_0.log"})
    link_documented(*run)
    assert (tmp_path / "logs" / "training.log").read_text() == "mine"
    assert "no link at logs/training.log" in caplog.text


def test_without_a_door_there_is_none(run, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    link_documented(*run)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_fails_says_where_its_log_is_before_the_error(run, caplog):
    try:
        logs.configure(0, run[1])
        with caplog.at_level(logging.INFO):
            logs.tell_path()
    finally:
        logs.configure(0)
    assert "log: " in (run[1] / "logs" / "process_0.log").read_text()


def test_the_scripts_ask_for_the_links_of_their_guides():
    scripts = {
        "run_distributed.py": '"logs/training.log=logs/process_0.log"',
        "train_multi_gpu.sh": '"$data/outputs/$task-robot_dp-train_seed$seed/logs.json.txt=logs.json.txt"',
    }
    for name, asked in scripts.items():
        assert asked in (ROOT / "scripts" / name).read_text() and VARIABLE in (ROOT / "scripts" / name).read_text()
