import json

import numpy as np

from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.norm_stats import compute_norm_stats
from openpi_train.data.robot.opened import open_windows
from openpi_train.data.robot.windows import WindowShape
from openpi_train.robots.bridge import Bridge
from openpi_train.tools.stats import stats_table

SHAPE = WindowShape(horizon=3)


def test_the_table_has_a_line_per_dim_with_its_numbers_and_writes_what_training_reads(tmp_path):
    config = DataConfig(datasets=(Dataset(source=FakeData(num_episodes=5), robot=Bridge(num_arms=2), asset_id="arm"),))
    text = stats_table(config, shape=SHAPE, assets_dir=tmp_path)
    stats, _ = compute_norm_stats(open_windows(config, SHAPE), [1.0], 10**6)
    lines = {
        cells[0]: cells for line in text.splitlines() if len(cells := line.replace("│", "|").strip("| ").split("|")) > 6
    }
    lines = {name.strip(): [cell.strip() for cell in cells[1:]] for name, cells in lines.items()}
    row = lines["first_delta_x_m"]
    expected = [getattr(stats["actions"], key)[0] for key in ("mean", "std", "q01", "q99", "low", "high")]
    np.testing.assert_allclose([float(cell) for cell in row[:6]], expected, rtol=1e-3)
    assert "raised" in lines["second_delta_yaw_rad"][6]
    written = json.loads((tmp_path / "arm" / "norm_stats.json").read_text())["norm_stats"]
    assert written["actions"]["mean"] == stats["actions"].mean.tolist()
