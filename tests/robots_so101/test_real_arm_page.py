"""The commands of docs/howto/real_arm.md in their order, with a small policy, whose error where it was corrected falls.

There are two arms on buses that answer the protocol, a camera that is a stream of pictures, and a person at the keys
who moves the leader. LeRobot's own commands are not run.
"""

import http.server
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scservo_sdk", reason="the extra so101")
pytest.importorskip("cv2", reason="the extra so101")
if sys.platform == "win32":
    pytest.skip("pseudo-terminals", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "robots" / "so101"))

from arm import NAMES
from made_arm import FOLLOWER, LEADER, bus, save

from openpi_train.data.core.image import encode
from openpi_train.data.formats.lerobot import LeRobot, LeRobotWriter
from openpi_train.launch.processes import free_port

PAGE = ROOT / "docs" / "howto" / "real_arm.md"
SMALL = (
    "--num-train-steps 20 --batch-size 8 --log-interval 10 --model.image-height 32 --model.image-width 32 "
    "--model.backbone-widths 8 16 --model.dim-model 32 --model.n-heads 4 --model.dim-feedforward 64 "
    "--model.n-encoder-layers 1 --model.no-use-vae --model.remat none --model.action-horizon 8"
)
# The person swings all of the leader's joints alike, between these ticks.
LEADER_TICKS = 2040, 2160


def page_commands() -> list[list[str]]:
    """The words of every command of the page's blocks, but LeRobot's."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for words in map(shlex.split, lines) if not words[0].startswith("lerobot-")]


class Stream(http.server.BaseHTTPRequestHandler):
    """A camera: JPEGs, one after the other, 30 per second."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=next")
        self.end_headers()
        random = np.random.default_rng(0)
        try:
            while True:
                picture = encode(random.integers(0, 256, (32, 48, 3), np.uint8))
                head = f"--next\r\nContent-Type: image/jpeg\r\nContent-Length: {len(picture)}\r\n\r\n"
                self.wfile.write(head.encode() + picture + b"\r\n")
                time.sleep(1 / 30)
        except OSError:
            pass

    def log_message(self, format, *args):
        pass


def write_demos(folder: Path) -> None:
    """Four demonstrations in which the arm swings."""
    joints = {"dtype": "float32", "shape": [6], "names": list(NAMES)}
    camera = {"dtype": "video", "shape": [32, 48, 3], "names": ["height", "width", "channels"]}
    features = {"observation.state": joints, "action": joints, "observation.images.front": camera}
    writer = LeRobotWriter(folder, fps=30, features=features)
    for episode in range(4):
        swing = (20 * np.sin(np.arange(31) / 8 + episode))[:, None] + [0, 0, 0, 0, 0, 50]
        frames = (np.full((32, 48, 3), 5 * step, np.uint8) for step in range(30))
        columns = {"observation.state": swing[:-1].astype(np.float32), "action": swing[1:].astype(np.float32)}
        writer.add_episode(columns, {"observation.images.front": frames}, task="put the cube into the box")
    writer.finish()


def wait_for(seconds: float, is_there) -> None:
    ends_s = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < ends_s, "waited too long"
        time.sleep(0.05)


def swing(leader, ended: threading.Event) -> None:
    """Move all joints of the leader, as a person does, until the end."""
    low, high = LEADER_TICKS
    while not ended.wait(0.01):
        tick = round((low + high) / 2 + (high - low) / 2 * np.sin(5 * time.monotonic()))
        leader.set_positions(dict.fromkeys(range(1, 7), tick))


def answers(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5).read().strip() == b"OK"
    except (urllib.error.URLError, OSError):
        return False


def drive(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run the program at a terminal; one episode, half of it the person's. Returns what it printed."""
    keyboard, terminal = os.openpty()
    printed = folder / "drive.txt"
    with printed.open("w") as out:
        started = subprocess.Popen(
            words, cwd=folder, stdin=terminal, stdout=out, stderr=subprocess.STDOUT, env=environment
        )
    try:
        for text, key, then_s in (("episode 0", b"\n", 1), ("", b" ", 3), ("you move", b" ", 0.5), ("", b"\n", 0)):
            wait_for(120, lambda text=text: text in printed.read_text() or started.poll() is not None)
            assert started.poll() is None, printed.read_text()
            os.write(keyboard, key)
            time.sleep(then_s)
        wait_for(60, lambda: "episode 1" in printed.read_text())
        os.write(keyboard, b"q")
        assert started.wait(120) == 0, printed.read_text()
    finally:
        started.kill()
        started.wait()
        os.close(keyboard), os.close(terminal)
    return printed.read_text()


@pytest.mark.slow
def test_the_page_is_done_as_it_stands(tmp_path):
    write_demos(tmp_path / "demos")
    save(FOLLOWER, tmp_path / "follower.json"), save(LEADER, tmp_path / "leader.json")
    camera = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stream)
    camera.daemon_threads = True
    threading.Thread(target=camera.serve_forever, daemon=True).start()
    follower = bus(FOLLOWER, {1: 2000, 2: 2000, 3: 2000, 4: 2050, 5: 2048, 6: 2750})
    leader, ended = bus(LEADER, dict.fromkeys(range(1, 7), 2100)), threading.Event()
    follower.share = 0.6  # it lags behind its goals
    person = threading.Thread(target=swing, args=(leader, ended))
    person.start()
    left_out = ("PYTHONPATH", "JAX_NUM_CPU_DEVICES")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"HOME": str(tmp_path), "PYTHONUNBUFFERED": "1", "COLUMNS": "120", "PYTHONPATH": str(ROOT)}
    port, server, served = free_port(), None, 0
    here = {
        "python": sys.executable,
        "robots/so101/drive.py": str(ROOT / "robots" / "so101" / "drive.py"),
        "/dev/ttyACM0": follower.port,
        "/dev/ttyACM1": leader.port,
        "0": f"http://127.0.0.1:{camera.server_address[1]}/",
    }
    try:
        for words in page_commands():
            verb = words[words.index("openpi_train") + 1] if "openpi_train" in words else "drive"
            words = [here.get(word, word) for word in words]
            if verb == "serve":
                if server is not None:
                    server.terminate()
                    assert server.wait(60) == 0
                port = free_port()
                with (tmp_path / f"serve_{served}.txt").open("w") as out:
                    server = subprocess.Popen(
                        [*words, "--port", str(port)], cwd=tmp_path, env=environment, stdout=out, stderr=out
                    )
                wait_for(240, lambda port=port, server=server: answers(port) or server.poll() is not None)
                assert server.poll() is None, (tmp_path / f"serve_{served}.txt").read_text()
                served += 1
            elif verb == "drive":
                said = drive([*words, "--server", f"ws://127.0.0.1:{port}"], tmp_path, environment)
                assert "wrote corrections: 1 episodes" in said
                check_corrections(tmp_path / "corrections")
                assert follower.torques == leader.torques == [0] * 6
            else:
                more = SMALL.split() if verb == "act" else []
                done = subprocess.run(
                    [*words, *more], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
                )
                assert done.returncode == 0, done.stdout + done.stderr
    finally:
        if server is not None:
            server.kill()
            server.wait()
        ended.set(), person.join()
        follower.close(), leader.close(), camera.shutdown(), camera.server_close()
    assert served == 2
    runs = [tmp_path / f"checkpoints/act/{name}" for name in ("first", "second")]
    first, second = (next(run.rglob("norm_stats.json")).read_text() for run in runs)
    assert first == second
    marked = LeRobot(path=str(tmp_path / "corrections")).open().columns["is_intervention"].sum()
    before, after = (json.loads(next(run.glob("eval/*/open_loop.json")).read_text()) for run in runs)
    assert before["control_steps"] == after["control_steps"] == marked
    assert after["overall"]["rms"] < 0.9 * before["overall"]["rms"]
    assert before["overall"]["rms_of_mean_action"] == after["overall"]["rms_of_mean_action"]


def check_corrections(folder: Path) -> None:
    """The person's steps are marked, and their actions are where the leader was."""
    found = LeRobot(path=str(folder)).open()
    marked = np.ravel(found.columns["is_intervention"])
    assert marked.sum() > 10 and not marked[0] and not marked[-1]
    assert np.diff(marked.astype(int)).tolist().count(1) == 1  # one intervention
    actions = found.columns["action"][marked]
    # All of the leader's joints were at the same tick, and 11.375 of them are a degree; both arms have whole ticks.
    ticks = 2000 + 11.375 * actions[:, :1]
    np.testing.assert_allclose(11.375 * actions[:, :5], np.repeat(ticks - 2000, 5, axis=1), atol=1.1)
    np.testing.assert_allclose(actions[:, 5], (ticks[:, 0] - 700) / 26, atol=0.1)  # the gripper's share of 700..3300
    assert LEADER_TICKS[0] - 1 <= ticks.min() and ticks.max() <= LEADER_TICKS[1] + 1 and np.ptp(ticks) > 40
    assert found.prompts == ["put the cube into the box"]
