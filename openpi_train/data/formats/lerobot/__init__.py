"""LeRobot's dataset format.

Read next: `lerobot_source.py` reads, `lerobot_writer.py` writes, `lerobot_layout.py` describes the files.
"""

from openpi_train.data.formats.lerobot.lerobot_index import LeRobot
from openpi_train.data.formats.lerobot.lerobot_writer import LeRobotWriter

__all__ = ["LeRobot", "LeRobotWriter"]
