"""Copies of the datasets that lerobot wrote, to be damaged."""

import json
import shutil
from pathlib import Path

import pytest

from openpi_train.data.formats.lerobot import LeRobot

_FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def broken(tmp_path):
    """A function that copies a fixture, and opens the copy however often; its `root` is there to be damaged."""

    class Copy:
        def __init__(self, name: str):
            self.root = tmp_path / name
            shutil.copytree(_FIXTURES / name, self.root)

        def open(self, **options):
            return LeRobot(path=str(self.root), cache_dir=str(tmp_path / "cache"), **options).open()

        def edit_info(self, **changes):
            file = self.root / "meta" / "info.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return Copy
