"""A run on a LeRobot dataset by the command line alone: the `debug` experiment's model and robot on the fixture."""

from pathlib import Path

import pytest
from command import check, losses, openpi_train, train

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
FIXTURES = Path(__file__).resolve().parents[1] / "data" / "lerobot" / "fixtures"
CAMERA = ("--data.datasets.0.robot.cameras.base-0-rgb", "observation/images/front")


@pytest.mark.parametrize("name", ["v21_video", "v30_video"])
def test_the_debug_model_trains_on_a_lerobot_dataset_named_on_the_command_line(tmp_path, name):
    home = {"OPENPI_TRAIN_HOME": str(tmp_path / "home")}
    flags = ("--dataset", FIXTURES / name, *CAMERA, "--num-workers", "1", "--num-train-steps", "2")
    train(tmp_path, "debug", *flags, **home)
    assert set(losses(tmp_path)) == {1, 2}
    assert (tmp_path / "assets" / "debug" / name / "norm_stats.json").is_file()


def test_a_dataset_of_no_known_format_ends_the_run_with_the_code_for_data(tmp_path):
    done = openpi_train("debug", "--exp-name", "x", "--dataset", tmp_path)
    check(done, 3, "holds no LeRobot dataset", "holds no RLDS dataset")
