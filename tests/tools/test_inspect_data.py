"""`data inspect`: what is wrong with a dataset is in the text, and the contact sheet shows its frames."""

import argparse
import dataclasses

import numpy as np
from PIL import Image

from openpi_train.data.core.source import BadRecord
from openpi_train.data.make.fake import FakeData
from openpi_train.robots.bridge import Bridge
from openpi_train.tools import data as data_tool
from openpi_train.tools.inspect_data import contact_sheet, inspect

FRONT, WRIST, SIDE = (f"observation/image_{number}" for number in range(3))


def broken():
    """Three cameras, of which one is black and one has frames that cannot be read; a constant and a holey dimension."""
    source = FakeData(num_episodes=5, image_height=12, image_width=16, cameras=(FRONT, WRIST, SIDE)).open()
    state = np.array(source.columns["observation/state"])
    state[:, 2], state[7, 4] = 0.25, np.nan
    source.columns = {**source.columns, "observation/state": state}
    read = source.frames

    def frames(steps, camera):
        if camera == SIDE and len(steps) and steps[0] == 0:
            raise BadRecord("step 0 is torn")
        return np.zeros((len(steps), 12, 16, 3), np.uint8) if camera == WRIST else read(steps, camera)

    source.frames = frames
    return source


def line_of(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)


def test_constants_holes_black_and_torn_cameras_are_named(tmp_path):
    source = broken()
    text = inspect("toy data", source, out=tmp_path)
    assert "1 of 14 dims (observation/state[2] = 0.25)" in line_of(text, "constant dims:")
    assert "1 of 5 episodes (NaN or infinity in observation/state[4]: 1)" in line_of(text, "not finite:")
    assert f"40 of 40 pictures looked at ({WRIST})" in line_of(text, "black pictures:")
    assert f"1 of 40 pictures looked at ({SIDE})" in line_of(text, "unreadable pictures:")
    assert "12 x 16" in line_of(text, WRIST) and text.partition("suspicious")[2].count("\n  ") == 4
    lengths = np.diff(source.episode_ends, prepend=0)
    assert f"5, of {lengths.min()} to {lengths.max()} control steps" in text and "not said by the dataset" in text
    assert (tmp_path / "toy_data.txt").read_text() in text
    low, high = source.columns["observation/state"][:, 0].min(), source.columns["observation/state"][:, 0].max()
    assert f"{low:.4g}" in line_of(text, "state[0]") and f"{high:.4g}" in line_of(text, "state[0]")


def test_the_contact_sheet_holds_the_frames_in_their_places(tmp_path):
    source = broken()
    sheet = np.asarray(contact_sheet(source, [1, 3], 4))
    assert sheet.shape == (6 * (96 + 14 + 4) + 4, 4 * 132 + 4, 3)
    top, left = 4 + 14, 4 + 3 * 132  # the first line: episode 1, the front camera, its last step
    last = int(source.episode_ends[1]) - 1
    expected = np.asarray(Image.fromarray(source.frames(np.array([last]), FRONT)[0]).resize((128, 96)))
    np.testing.assert_array_equal(sheet[top : top + 96, left : left + 128], expected)
    assert not sheet[top + 114 : top + 114 + 96, left : left + 128].any()  # the black one below
    inspect("toy", source, out=tmp_path)
    with Image.open(tmp_path / "toy.png") as stored:
        assert stored.size == (8 * 132 + 4, 15 * 114 + 4)
    red = np.asarray(contact_sheet(source, [0], 2))[4 + 14 + 2 * 114 :, 4:132]
    assert (red[:96] == (160, 0, 0)).all()


def test_an_experiments_datasets_are_shown_as_its_robot_reads_them(capsys):
    cameras = {"base_0_rgb": FRONT, "left_wrist_0_rgb": "observation/hand"}
    dataset = argparse.Namespace(
        asset="arm", source=FakeData(num_episodes=3, image_height=12, image_width=16), robot=Bridge(cameras=cameras)
    )
    experiment = argparse.Namespace(demonstrations=argparse.Namespace(datasets=(dataset,)))
    assert data_tool.main(["inspect", "my_experiment"], lambda *_: experiment) == 0
    text = capsys.readouterr().out
    assert "5 Hz by its robot" in text and "delta_yaw_rad" in text and "gripper_fraction" in text
    assert "missing cameras: 1 of 2 cameras" in line_of(text, "observation/hand (left_wrist_0_rgb)")
    assert "base_0_rgb" in line_of(text, FRONT)


def test_a_rate_that_robot_and_dataset_disagree_on_is_said():
    source = FakeData(num_episodes=2, image_height=12, image_width=16).open()
    about = dataclasses.replace(source.about(), control_hz=12.0)
    source.about = lambda: about
    assert "12 Hz, but its robot says 5: which is it?" in inspect("toy", source, Bridge())
