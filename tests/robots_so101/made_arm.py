"""Calibrations of a follower and a leader, and a bus with the servos of each."""

import json
from pathlib import Path

from servo_bus import ServoBus

# By joint: id, drive_mode, homing_offset, range_min, range_max; as lerobot-calibrate writes them.
FOLLOWER = {
    "shoulder_pan": (1, 0, -500, 1000, 3000),
    "shoulder_lift": (2, 1, 120, 800, 3200),
    "elbow_flex": (3, 0, 0, 900, 3100),
    "wrist_flex": (4, 0, 7, 850, 3250),
    "wrist_roll": (5, 0, -1024, 0, 4095),
    "gripper": (6, 0, 1023, 2000, 3500),
}
LEADER = {name: (number, 0, 3, 700, 3300) for name, (number, *_) in FOLLOWER.items()}
FIELDS = ("id", "drive_mode", "homing_offset", "range_min", "range_max")


def save(values: dict, path: Path) -> Path:
    path.write_text(json.dumps({name: dict(zip(FIELDS, one, strict=True)) for name, one in values.items()}))
    return path


def bus(values: dict, present: dict[int, int]) -> ServoBus:
    """Servos that hold this calibration: a negative offset has bit 11 set."""
    registers = {
        number: {31: abs(offset) | (0x800 if offset < 0 else 0), 9: low, 11: high}
        for number, _, offset, low, high in values.values()
    }
    return ServoBus(registers, present)
