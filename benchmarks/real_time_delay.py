"""Success against delay: a small pi0 balances a pole that goes on falling while an action chunk is computed.

Two policies per seed imitate the same demonstrations, one of them with `--objective.max-delay`. All act from the same
initial states, at each delay with chunks that are not joined, joined by guidance, and joined as trained.
Read next: `pole.py`, `openpi_train/policy/acting.py`, `docs/howto/serve.md`.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pole import PoleEnv
from benchmarks.report import ROOT, Spread, Table
from openpi_train.cli import parse_experiment
from openpi_train.envs.closed_loop import ClosedLoop, evaluate
from openpi_train.envs.score import wilson
from openpi_train.policy.acting import ActingInRealTime

SEEDS = (42, 43, 44)
METHODS = ("none", "guided", "trained")
# The methods that act by each policy of a seed.
KINDS: Mapping[str, Sequence[str]] = {"plain": METHODS[:2], "trained": METHODS[2:]}
EXPERIMENT = "pi0_bridge_traj_tiny"
TITLE = "Balancing a pole while the policy thinks: success against delay"
DELAYS = (0, 1, 2, 4, 6)
HORIZON, EXECUTE = 16, 8
COLUMNS = (
    "delay (control steps)",
    "method",
    "episodes",
    "jump at a seam (lowest to highest seed)",
    "beside it",
    "success (lowest to highest seed)",
    "95 % interval",
    "success",
)
_DENOISING_STEPS = 5
_SIZES = ("width", "depth", "mlp-dim", "num-heads", "head-dim")


@dataclasses.dataclass(frozen=True)
class Acted:
    """How one policy did: its successes, and the mean absolute change of the action from one control step to the next,
    where a new chunk begins to be executed and elsewhere; of the poles that stand, in units of the action.
    """

    successes: int
    at_seam: float
    beside: float


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks real_time_delay", description=__doc__
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of all runs (%(default)s)")
    parser.add_argument("--delays", type=int, nargs="+", default=DELAYS, help="in control steps (%(default)s)")
    parser.add_argument("--demonstrations", type=int, default=96, help="episodes of the expert (%(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps (%(default)s)")
    parser.add_argument("--episodes", type=int, default=100, help="initial states (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder in which to keep the runs (default: they are deleted)")
    parser.add_argument("--quick", action="store_true", help="train nothing: only check that the runs are understood")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Collect, train and act; returns the table."""
    from openpi_train.tools.collect import collect

    flags = parse(argv)
    if importlib.util.find_spec("mujoco") is None:
        return [
            Table(TITLE, COLUMNS, [], ["not measured: MuJoCo is not installed (pip install 'openpi_train[fetch]')"])
        ]
    found: dict[tuple[int, str], list[Acted]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        out = (flags.out or Path(temporary)).absolute()
        out.mkdir(parents=True, exist_ok=True)
        if not (out / "pole.zarr").exists():
            collect(PoleEnv(), out / "pole.zarr", episodes_per_task=2 if flags.quick else flags.demonstrations)
        if flags.quick:
            for kind in KINDS:
                parse_experiment(EXPERIMENT, words(out, SEEDS[0], kind, flags)).check(1)
            return [Table(TITLE, COLUMNS, [], ["Not run: its runs are understood."])]
        for seed, (kind, methods) in itertools.product(flags.seeds, KINDS.items()):
            run = trained(out, seed, kind, flags)
            for delay, method, acted in acted_by(run, methods, flags):
                found.setdefault((delay, method), []).append(acted)
    return [table(found, flags)]


def words(out: Path, seed: int, kind: str, flags: argparse.Namespace) -> list[str]:
    """The flags of a policy's training."""
    steps = str(flags.steps)
    given = ["--exp-name", f"{kind}_{seed}", "--seed", str(seed), "--overwrite"]
    given += ["--checkpoint-base-dir", str(out / "runs"), "--assets-base-dir", str(out / "assets")]
    given += ["--dataset", str(out / "pole.zarr"), "--data.robot", "recorded", "--data.tokenizer", "bytes"]
    given += ["--model.max-token-len", "16", "--model.action-dim", "4", "--model.action-horizon", str(HORIZON)]
    for part, sizes in (("language", (32, 2, 64, 2, 16)), ("action-expert", (32, 2, 128, 2, 16))):
        for name, size in zip(_SIZES, sizes, strict=True):
            given += [f"--model.{part}.{name}", str(size)]
    given += ["--objective.mask-action-dims", "--objective.num-flow-draws", "2", "--batch-size", "64"]
    given += ["--num-train-steps", steps, "--model.remat", "none"]
    given += ["--save-interval", steps, "--eval.interval", "0", "--eval.num-rows", "64", "--ema-decay", "0.99"]
    given += ["--lr-schedule.warmup-steps", "50", "--lr-schedule.decay-steps", steps, "--lr-schedule.peak-lr", "3e-3"]
    return given if kind == "plain" else [*given, "--objective.max-delay", str(max(flags.delays))]


def trained(out: Path, seed: int, kind: str, flags: argparse.Namespace) -> Path:
    """The directory of a policy's run; one that is over is not repeated."""
    run = out / "runs" / EXPERIMENT / f"{kind}_{seed}"
    if not (run / str(flags.steps)).exists():
        command = [sys.executable, "-m", "openpi_train", EXPERIMENT, *words(out, seed, kind, flags)]
        subprocess.run(command, cwd=ROOT, check=True)
    return run


def acted_by(run: Path, methods: Sequence[str], flags: argparse.Namespace) -> Iterator[tuple[int, str, Acted]]:
    """How the run's policy does at each delay by these methods, from the same initial states.

    What is known is in the run's `acted.json`, and is not measured again.
    """
    from openpi_train.policy.loading import load_policy

    record = run / "acted.json"
    known = json.loads(record.read_text()) if record.exists() else {}
    policy = None
    config = ClosedLoop(env=PoleEnv(), episodes_per_task=flags.episodes, execute=EXECUTE)
    for delay, method in itertools.product(flags.delays, methods):
        name = f"{method}, delay {delay}, {flags.episodes} episodes"
        if name not in known:
            policy = policy or load_policy(run, num_sample_steps=_DENOISING_STEPS, batch_sizes=(flags.episodes,))
            joins = method != "none"
            watched = Watched(ActingInRealTime(policy, config.env, delay=delay, execute=EXECUTE, joins=joins), delay)
            score = evaluate(lambda watched=watched: watched, config, execute=EXECUTE)
            assert score is not None, "nothing asked it to stop"
            known[name] = [score.overall.successes, watched.at_seam, watched.beside]
            record.write_text(json.dumps(known))
        yield delay, method, Acted(*known[name])


def table(found: Mapping[tuple[int, str], Sequence[Acted]], flags: argparse.Namespace) -> Table:
    """The table of all seeds together; intervals are of their episodes together."""
    rows = []
    for delay, method in itertools.product(flags.delays, METHODS):
        each = found[delay, method]
        total, successes = flags.episodes * len(each), sum(one.successes for one in each)
        shares = Spread(tuple(one.successes / flags.episodes for one in each))
        seams, beside = (Spread(tuple(getattr(one, name) for one in each)) for name in ("at_seam", "beside"))
        low, high = wilson(successes, total)
        rows.append([str(delay), method, total, seams, beside, shares, f"{low:.0%} to {high:.0%}", successes / total])
    notes = [
        f"Chunks of {HORIZON} actions, a new one every {EXECUTE}; {_DENOISING_STEPS} denoising steps; a control step "
        f"takes {1000 / PoleEnv().control_hz:g} ms. Seeds {', '.join(map(str, flags.seeds))}, two policies each.",
        "Jump: mean absolute change of the action where a new chunk begins to be executed, beside that elsewhere, of "
        "the poles that stand.",
    ]
    return Table(TITLE, COLUMNS, rows, notes)


class Watched:
    """A policy whose actions are compared with those before them, where a chunk begins to be executed and elsewhere.

    `at_seam` and `beside` are the mean absolute changes of the action from one control step to the next.
    """

    def __init__(self, policy: ActingInRealTime, delay: int):
        self._policy, self._delay = policy, delay
        self._last: np.ndarray | None = None
        self._at_seam: list[np.ndarray] = []
        self._beside: list[np.ndarray] = []

    def __call__(self, observation: Any, keys: Any) -> np.ndarray:
        """The chunks."""
        chunks = self._policy(observation, keys)
        executed = chunks[:, :EXECUTE]
        if self._last is not None:
            steps = np.abs(np.diff(np.concatenate([self._last, executed], axis=1), axis=1)).mean(-1)  # b execute
            steps = steps[np.abs(np.asarray(observation.state)[:, 1]) < 0.2]  # the poles that stand
            self._at_seam.append(steps[:, self._delay])
            self._beside.append(np.delete(steps, self._delay, axis=1).ravel())
        self._last = executed[:, -1:]
        return chunks

    @property
    def at_seam(self) -> float:
        return float(np.concatenate(self._at_seam).mean())

    @property
    def beside(self) -> float:
        return float(np.concatenate(self._beside).mean())
