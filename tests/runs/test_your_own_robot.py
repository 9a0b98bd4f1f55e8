"""docs/tutorials/my_robot.md from its first file to its last command, as a user would: only the sizes are smaller."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from command import ROOT, environment
from PIL import Image

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
PAGE = ROOT / "docs" / "tutorials" / "my_robot.md"
SMALL = ("--num-train-steps", "3", "--batch-size", "4", "--eval.interval", "0", "--save-interval", "3")
SMALL_ACT = ("--model.image-height", "16", "--model.image-width", "16", "--model.backbone-widths", "8")
SMALL_ACT += ("--model.dim-model", "16", "--model.dim-feedforward", "16", "--model.n-encoder-layers", "1")
SMALL_ACT += ("--model.remat", "none", "--ema-decay", "None", "--data.validation-fraction", "0")
SMALLER = ("--model.language.depth", "2", "--model.action-expert.depth", "2", "--objective.num-flow-draws", "1")


def files() -> dict[str, str]:
    """The page's files by name."""
    blocks = re.findall(r"^```python\n(# (\w+\.py).*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return {name: text for text, name in blocks}


def commands() -> list[list[str]]:
    # Those before, without a class of one's own, are in `data/formats/lerobot/test_described.py`.
    own = PAGE.read_text().partition("## Your driver")[2]
    return [line.split() for line in re.findall(r"^    python -m openpi_train (.*)$", own, re.MULTILINE)]


def test_the_page_runs_from_its_first_file_to_its_last(tmp_path):
    written = files()
    assert list(written) == ["client.py", "my_driver.py", "record.py", "my_arm.py", "drive.py"]
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    variables = environment(OPENPI_TRAIN_HOME=str(tmp_path / "home"), PYTHONPATH=str(ROOT))

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    run("record.py")
    assert (tmp_path / "my_arm" / "meta" / "info.json").is_file()
    inspect, train, train_act, *_ = commands()
    text = run("-m", "openpi_train", *inspect)
    assert "12, of" in text and "10 Hz" in text and "shoulder_rad" in text
    assert re.search(r"constant dims: .*wrist_rad = 0", text)  # the page's arm never moves it
    with Image.open(tmp_path / "look" / "my_arm.png") as sheet:
        assert np.ptp(np.asarray(sheet)) == 255
    run("-m", "openpi_train", *train, *SMALL, *SMALLER)
    assert (tmp_path / "checkpoints" / "first" / "x" / "3" / "manifest.json").is_file()
    place = re.search(r"the arm is at \[(.*)\]", run("drive.py"))
    assert place and np.isfinite([float(number) for number in place[1].split()]).all()
    run("-m", "openpi_train", *train_act, *SMALL, *SMALL_ACT)
    run_directory = tmp_path / "checkpoints" / "act" / "x"
    assert (run_directory / "3" / "manifest.json").is_file()
    written = json.loads((run_directory / "experiment.json").read_text())
    assert (written["model"]["__class__"], written["model"]["action_dim"]) == ("ActConfig", 4)
