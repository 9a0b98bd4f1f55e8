"""A server says where its secrets are open to others, and where it asks nobody for a key."""

import pytest

from openpi_train.runtime.exits import UsageError
from openpi_train.serve import main
from openpi_train.serve.request import ServeRequest, TextFlags


@pytest.mark.parametrize(
    ("mode", "warned"), [(0o600, False), (0o400, False), (0o604, True), (0o644, True), (0o640, True)]
)
def test_a_key_that_others_can_read_is_warned_of_with_what_to_type(mode, warned, tmp_path, caplog):
    file = tmp_path / "key"
    file.write_text("secret\n")
    file.chmod(mode)
    assert main._api_key(str(file)) == "secret"
    assert (
        f"--api-key-file {file} can be read by others on this machine (mode {mode:04o}): chmod 600 {file}"
        in caplog.text
    ) is warned
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [
        ("0.0.0.0", None, True),
        ("::", None, True),
        ("10.0.0.1", None, True),
        ("0.0.0.0", "secret", False),
        ("127.0.0.1", None, False),
        ("localhost", None, False),
    ],
)
def test_an_open_door_without_a_key_is_warned_of(host, key, warned, tmp_path, caplog, monkeypatch):
    monkeypatch.delenv(main.API_KEY_VARIABLE, raising=False)
    if key:
        monkeypatch.setenv(main.API_KEY_VARIABLE, key)

    def bind(*_):
        raise UsageError("far enough")

    monkeypatch.setattr(main, "_bind", bind)
    with pytest.raises(UsageError, match="far enough"):
        main.run(ServeRequest(checkpoint=str(tmp_path), host=host), TextFlags())
    assert (f"--host {host} without a key: whoever reaches port" in caplog.text) is warned
