"""LeRobot's dataset format.

Read next: `lerobot_source.py` reads, `lerobot_writer.py` writes, `lerobot_layout.py` says what lies where.
"""

from openpi_train.data.lerobot.lerobot_index import LeRobot
from openpi_train.data.lerobot.lerobot_writer import LeRobotWriter

__all__ = ["LeRobot", "LeRobotWriter"]
