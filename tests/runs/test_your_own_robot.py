"""docs/tutorials/my_robot.md from its recording to its last command, as a user would: only the sizes are smaller.

What comes before, tests/test_tutorials.py types.
"""

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
SMALL = ("--num-train-steps", "3", "--batch-size", "4", "--save-interval", "3", "--ema-decay", "None")
SMALL += ("--model.image-height", "16", "--model.image-width", "16", "--model.backbone-widths", "8")
SMALL += ("--model.dim-model", "16", "--model.dim-feedforward", "16", "--model.n-encoder-layers", "1")
SMALL += ("--model.remat", "none", "--data.validation-fraction", "0")
DRIVER = """
import numpy as np


class Driver:
    def __init__(self):
        self.random, self.now = np.random.default_rng(0), np.array([0, 0, 0, 100.0])

    def state(self):
        return self.now

    def picture(self):
        image = np.zeros((64, 64, 3), np.uint8)
        row, column = np.int64(self.goal[:2]) + 28
        image[row : row + 8, column : column + 8] = 255
        image[:, int(self.now[0]) + 32] = 100
        return image

    def move(self, target):
        self.now = self.now + np.clip(target - self.now, -5, 5)

    def teleoperated(self):
        self.goal = np.array([*self.random.uniform(-25, 25, 2), 0, 0])
        return [self.goal] * 15
"""
ASK = """
import numpy as np
from openpi_train import load_policy

policy = {call}
seen = {{"observation/images/front": np.zeros((64, 64, 3), np.uint8), "state": [0, 0, 0, 1]}}
print("names", *policy.metadata["action_names"])
print("asked for", *policy.infer(seen)["actions"][0])
"""


def test_the_page_runs_from_its_recording_to_its_last_command(tmp_path):
    page = PAGE.read_text().partition("## Record")[2]
    written = dict(re.findall(r'^```python title="(.+?)"\n(.*?)^```', page, re.DOTALL | re.MULTILINE))
    assert list(written) == ["record.py", "my_arm.py"]
    (call,) = re.findall(r"`(load_policy\(.*?\))`", page)
    for name, text in {**written, "my_driver.py": DRIVER, "ask.py": ASK.format(call=call)}.items():
        (tmp_path / name).write_text(text)
    variables = environment(OPENPI_TRAIN_HOME=str(tmp_path / "home"), PYTHONPATH=str(ROOT))

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    run("record.py")
    assert (tmp_path / "recorded" / "meta" / "info.json").is_file()
    inspect, train, serve = (line.split() for line in re.findall(r"^python (-m openpi_train .*)$", page, re.MULTILINE))
    text = run(*inspect)
    assert "12, of" in text and "10 Hz" in text
    assert re.search(r"constant dims: .*wrist = 0", text)  # the driver never moves it
    # 25 degrees at most, in radians; the gripper is open when a recording begins.
    assert all(abs(float(number)) < 0.5 for number in re.search(r"shoulder_rad\W+(.*)", text)[1].split("│")[:5])
    with Image.open(tmp_path / "look" / "recorded.png") as sheet:
        assert np.ptp(np.asarray(sheet)) == 255
    run(*train, *SMALL)
    run_directory = tmp_path / "checkpoints" / "act" / "own_units"
    assert (run_directory / "3" / "manifest.json").is_file()
    written = json.loads((run_directory / "experiment.json").read_text())
    assert (written["model"]["__class__"], written["model"]["action_dim"]) == ("ActConfig", 4)
    assert serve[2:] == ["serve", "checkpoints/act/own_units"]
    names, asked = run("ask.py").splitlines()
    assert names == "names shoulder_rad elbow_rad wrist_rad gripper_fraction"
    assert np.isfinite([float(number) for number in asked.split()[2:]]).all()
