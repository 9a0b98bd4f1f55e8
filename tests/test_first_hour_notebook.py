"""`examples/first_hour.ipynb`, run from its first cell to its last as it is in the repository, but for a quarter of the
training steps: the error of the actions is then below the mean action's, and no episode need succeed."""

import base64
import io
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "first_hour.ipynb"
# A word of each cell that is looked at.
WORDS = {
    "sample": "data sample",
    "sheet": "look/demos.png",
    "curves": "matplotlib",
    "eval": "openpi_train eval",
    "episode": "episode.gif",
    "load": "load_policy",
    "serve": "Popen",
}


def printed(cell) -> str:
    """What a cell wrote, and the texts of its results."""
    return "".join(output.get("text", "") for output in cell.outputs)


def pictures(cell) -> list[Image.Image]:
    found = [output.data for output in cell.outputs if "data" in output]
    return [
        Image.open(io.BytesIO(base64.b64decode(data[kind])))
        for data in found
        for kind in ("image/png", "image/gif")
        if kind in data
    ]


def test_no_output_is_in_the_repository():
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert len(cells) > 5
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_it_runs_and_the_policy_learns(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENPI_TRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    for name in [name for name in os.environ if name.startswith(("PYTEST_", "JAX_NUM_CPU_DEVICES"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # a user's, not that of conftest.py, which is spared effort
    text = NOTEBOOK.read_text()
    assert text.count("1200") == 4  # steps, and what follows them
    notebook = nbformat.reads(text.replace("1200", "300"), as_version=4)
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}
    of = {name: next(cell for cell in cells.values() if word in cell.source) for name, word in WORDS.items()}
    assert "120, 1" in printed(of["sample"])  # episodes, control steps
    (sheet,) = pictures(of["sheet"])
    assert min(sheet.size) > 100
    error, mean = map(float, re.findall(r"action error (\S+), of the mean action (\S+)", printed(of["curves"]))[0])
    assert error < 0.75 * mean
    assert pictures(of["curves"])
    assert re.search(r"reach_red\s+\d+/20", printed(of["eval"]))
    (episode,) = pictures(of["episode"])
    assert episode.format == "GIF" and episode.n_frames > 3
    assert "gripper_fraction" in printed(of["load"])
    assert "the server says OK" in printed(of["serve"]) and "the same actions: True" in printed(of["serve"])
