"""The program of `make demo`: a small pi0 learns the tabletop's easiest tasks, given as prompts.

Then the policy is served, a client acts in the environment with its answers, and `report` summarises the run.
Read next: `closed_loop.py`, `configs/tabletop_runs.py`.
"""

import argparse
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import closed_loop
from benchmarks.report import ROOT, Table
from openpi_train.data.core.files import write_json
from openpi_train.data.make.embedded import named_tasks
from openpi_train.envs.closed_loop import ClosedLoop, evaluate
from openpi_train.envs.env import Env, EnvObservation
from openpi_train.envs.score import Score
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.envs.video import VideoRecorder

STUDY = closed_loop.Study(
    experiment="pi0_tabletop_reach",
    dataset="tabletop_reach",
    tasks=("reach_red", "reach_blue"),
    episodes_per_task=1_000,
    target=0.6,
    quick_flags=(
        *("--model.language.depth", "1", "--model.action-expert.depth", "1", "--model.remat", "none"),
        *("--objective.no-augment", "--data.text-lengths", "1"),
    ),
)
# The seed of the client's initial states; evaluation during training has 0.
CLIENT_SEED = 1
EXECUTE = 4


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line."""
    return closed_loop.parse("demo", __doc__, STUDY, argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Train and serve the policy, act with it, and return the tables."""
    flags, rest = parse(argv)
    with closed_loop.folder(flags) as out:
        trained = closed_loop.measure("Demo: a small pi0 on the tabletop's easiest tasks", STUDY, flags, rest, out)
        config = ClosedLoop(
            env=TabletopEnv(task_list=named_tasks(STUDY.tasks)),
            episodes_per_task=1 if flags.quick else 10,
            max_steps=2 * EXECUTE if flags.quick else None,
            seed=CLIENT_SEED,
        )
        run = closed_loop.run_directory(STUDY, out)
        with served(run) as address:
            score = act(address, config, run / "eval" / str(trained.rows[-1][0]))
        subprocess.run([sys.executable, "-m", "openpi_train", "report", str(run)], cwd=ROOT, check=True)
    rows = [
        [name, f"{one.successes} of {one.trials}", "{:.0%} to {:.0%}".format(*one.interval), one.share]
        for name, one in {**score.by_task, "all": score.overall}.items()
    ]
    columns = ("task", "successes", "95 % interval", "share")
    return [trained, Table("Demo, served: a client acts through the socket", columns, rows)]


@contextlib.contextmanager
def served(checkpoint: Path) -> Iterator[str]:
    """Start a server of this checkpoint and yield its address; the server is stopped at the end."""
    command = [sys.executable, "-m", "openpi_train", "serve", str(checkpoint), "--port", "0", "--max-batch", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"ready .* (ws://[^ ,]+)", line):
                yield found[1]
                return
        raise RuntimeError(f"no server of {checkpoint}: it ended with code {process.wait()}\n{''.join(said[-20:])}")
    finally:
        process.terminate()
        process.communicate(timeout=60)


def act(address: str, config: ClosedLoop, folder: Path) -> Score:
    """The score of the policy at `address` (openpi's protocol), also written with videos into `folder`."""
    from websockets.sync.client import connect

    from openpi_train.policy import wire

    with connect(address, compression=None, max_size=None) as connection:
        connection.recv()  # the server's metadata

        def ask(request: dict[str, Any]) -> np.ndarray:
            connection.send(wire.encode(request))
            answer = connection.recv()
            if isinstance(answer, str):
                raise RuntimeError(f"the server at {address} refuses: {answer}")
            return wire.decode(answer)["actions"]

        def policy(observation: EnvObservation, _: Any) -> np.ndarray:
            return np.stack([ask(request) for request in requests(observation, config.env)])

        recorder = VideoRecorder(config.env, config.num_videos, folder / "videos")
        score = evaluate(lambda: policy, config, execute=EXECUTE, recorder=recorder)
    assert score is not None, "nobody asks it to stop"
    videos = [f"videos/{path.name}" for path in recorder.write()]
    settings = {"server": address, "execute": EXECUTE, "seed": config.seed}
    write_json(folder / "closed_loop.json", {"settings": settings, **score.as_json(), "videos": videos})
    return score


def requests(observation: EnvObservation, env: Env) -> Iterator[dict[str, Any]]:
    """The client's request for each episode of a batch."""
    images = {name: np.asarray(image) for name, image in observation.images.items()}
    for row, (state, task) in enumerate(zip(np.asarray(observation.state), observation.task, strict=True)):
        pictures = {name: image[row] for name, image in images.items()}
        yield {**pictures, "state": state, "prompt": env.instruction(int(task))}
