"""LeRobot's dataset format. Read next: `source.py` reads, `write.py` writes, `layout.py` describes the files."""

from openpi_train.data.lerobot.index import LeRobot
from openpi_train.data.lerobot.write import LeRobotWriter

__all__ = ["LeRobot", "LeRobotWriter"]
