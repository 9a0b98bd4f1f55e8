"""Makes the pictures of the README and the pages, from real runs on this machine: `make pictures`, ten minutes.

The runs lie in WORK and are made once: without them, `pi0_tabletop_reach` is trained for six minutes. Chromium takes
the pictures of pages. Read next: `openpi_train/envs/video.py`, which makes the videos of `eval`.
"""

import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

from openpi_train import load_policy
from openpi_train.envs.closed_loop import ClosedLoop, evaluate
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.envs.tabletop_scene import Kind, Task
from openpi_train.envs.video import VideoRecorder
from openpi_train.policy.acting import Acting

PICTURES = Path(__file__).resolve().parent
WORK = Path(tempfile.gettempdir()) / "openpi_train_pictures"
ROBOT_RUN = "checkpoints/pi0_tabletop_reach/first_run"
TEXT_RUN = "checkpoints/arithmetic_sft/sums"
TASKS = (Task(Kind.REACH, "red"), Task(Kind.REACH, "blue"))
# What a terminal shows, as commands and the lines of their output that are kept; others become one line of dots.
SESSION = [
    (
        ("arithmetic_sft", "--exp-name", "sums", "--num-train-steps", "200"),
        r"parameters:|training texts|step \d+/|is complete|held-out prompts|learned|next: .*(report|generate)",
    ),
    (("generate", TEXT_RUN, "--prompt", "27+48=", "--samples", "4", "--max-new-tokens", "8"), r"^\[\d\]"),
    (("runs", "checkpoints/arithmetic_sft"), r"^(run|sums) "),
]


def main() -> None:
    """Make all pictures."""
    WORK.mkdir(exist_ok=True)
    terminal(SESSION, PICTURES / "terminal.svg")
    dataset()
    if not (WORK / ROBOT_RUN / "best").exists():
        command("pi0_tabletop_reach", "--exp-name", Path(ROBOT_RUN).name, "--overwrite")
    command("eval", ROBOT_RUN, "--episodes", "20")
    command("report", ROBOT_RUN)
    report()
    episode()
    for file in sorted(PICTURES.iterdir()):
        print(f"{file.stat().st_size / 1e3:6.0f} kB {file.name}")


def command(*words: str) -> str:
    """What `python -m openpi_train ...` in WORK prints, with its log."""
    called = [sys.executable, "-m", "openpi_train", *words]
    done = subprocess.run(called, cwd=WORK, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: code {done.returncode}\n{done.stdout[-2000:]}")
    return done.stdout


def terminal(session: Sequence[tuple[tuple[str, ...], str]], file: Path) -> None:
    """The commands with what they print, as SVG; no font is loaded from the network."""
    console = Console(record=True, width=118, file=io.StringIO())
    for words, kept in session:
        shown = " ".join(f"'{word}'" if "=" in word else word for word in words)
        console.print(Text(f"$ python -m openpi_train {shown}", style="bold"))
        dots = False
        for line in command(*words, *(["--overwrite"] if "--exp-name" in words else [])).splitlines():
            if re.search(kept, line):
                console.print(Text.from_ansi(line.replace(f"{WORK}/", "")), soft_wrap=False)
            elif not dots:
                console.print(Text("...", style="dim"))
            dots = not re.search(kept, line)
    code = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    file.write_text(console.export_svg(title="a first run", code_format=code))


def dataset() -> None:
    """The contact sheet of `data inspect`: the first three episodes of the sample."""
    command("data", "sample", "my_arm", "--overwrite")
    command("data", "inspect", "my_arm", "--out", "look")
    sheet = Image.open(WORK / "look" / "my_arm.png")
    save(sheet.crop((0, 0, sheet.width, sheet.height // 2)), PICTURES / "data.png", colors=256)


def report() -> None:
    """The top of a run's report: the verdict and the first curves."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("the pictures need Chromium: apt-get install chromium")
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1120,1250", "--virtual-time-budget=9000"]
    with tempfile.TemporaryDirectory() as folder:
        flags += [f"--user-data-dir={folder}", f"--screenshot={folder}/report.png"]
        subprocess.run([browser, *flags, f"file://{WORK / ROBOT_RUN}/report.html"], check=True, capture_output=True)
        save(Image.open(f"{folder}/report.png").convert("RGB"), PICTURES / "report.png", colors=64)


def episode() -> None:
    """Four episodes of the trained policy, filmed with more pixels than it sees."""
    policy = load_policy(str(WORK / ROBOT_RUN), batch_sizes=(4,))
    config = ClosedLoop(env=TabletopEnv(task_list=TASKS), episodes_per_task=2, execute=4, seed=2)
    film = Film(TabletopEnv(task_list=TASKS, image_size=208), 4, PICTURES)
    evaluate(lambda: Acting(policy, config.env), config, execute=4, recorder=film)
    frames = [Image.fromarray(frame).quantize(48, dither=Image.Dither.NONE) for frame in film.frames()]
    duration = round(1000 / config.env.control_hz)
    frames[0].save(PICTURES / "episode.gif", save_all=True, append_images=frames[1:], duration=duration, loop=0)


class Film(VideoRecorder):
    """The episodes one after the other."""

    def frames(self) -> list[np.ndarray]:
        """All frames, each of both cameras."""
        return [frame for _, episode in sorted(self._frames.items()) for frame in episode]


def save(image: Image.Image, file: Path, *, colors: int) -> None:
    """Write a PNG of few colours: a tenth of the size."""
    image.quantize(colors, dither=Image.Dither.NONE).save(file, optimize=True)


if __name__ == "__main__":
    main()
