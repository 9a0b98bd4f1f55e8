"""LeRobot's dataset format. Read next: `source.py` reads, `layout.py` says what lies where, `index.py` finds it."""

from openpi_train.data.lerobot.source import LeRobot

__all__ = ["LeRobot"]
