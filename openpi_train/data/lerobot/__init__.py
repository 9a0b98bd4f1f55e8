"""LeRobot's dataset format. Read next: `source.py` reads, `write.py` writes, `layout.py` says what lies where."""

from openpi_train.data.lerobot.index import LeRobot
from openpi_train.data.lerobot.write import LeRobotWriter

__all__ = ["LeRobot", "LeRobotWriter"]
