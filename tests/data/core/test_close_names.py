"""What a wrong path is told to be nearly."""

import pytest

from openpi_train.data.core.close_names import guess
from openpi_train.data.formats.detection import source_at
from openpi_train.data.text.text_files import find_files


def test_what_has_nearly_the_name_is_named_and_nothing_else(tmp_path):
    (tmp_path / "so101 cubes").mkdir()
    (tmp_path / "chat.jsonl").touch()
    assert guess(tmp_path / "so101_cubes") == f" (did you mean {tmp_path / 'so101 cubes'}?)"
    assert guess(tmp_path / "others") == guess(tmp_path / "none" / "chat.jsonl") == ""
    with pytest.raises(FileNotFoundError, match=r"exist \(did you mean .*/so101 cubes\?\): give the folder"):
        source_at(str(tmp_path / "so101-cubes"))
    with pytest.raises(FileNotFoundError, match=r"chats\.jsonl \(did you mean .*/chat\.jsonl\?\): check the path"):
        find_files(str(tmp_path / "chats.jsonl"))


def test_a_name_that_lerobot_has_nearly_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    (tmp_path / "me" / "so101_cubes").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"would have it .* \(did you mean .*/me/so101_cubes\?\)$"):
        source_at("me/so101_cube")
