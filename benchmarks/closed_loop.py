"""A policy trained on demonstrations of the embedded tabletop, and how often it succeeds as training goes on.

`tabletop_dp.py` and `demo.py` say which. The initial states are drawn from seeds that no demonstration has, the
environment judges success, and the untrained network is the row of step 0.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.report import ROOT, Cell, Table, number
from openpi_train.cli import parse_experiment
from openpi_train.data.normalize import read_norm_stats
from openpi_train.data.tokenizer import load_tokenizer
from openpi_train.data.transforms import Normalize, Unnormalize
from openpi_train.envs.base import EnvObservation
from openpi_train.envs.rollout import rollout
from openpi_train.envs.tabletop import Tabletop
from openpi_train.experiment import Experiment
from openpi_train.interop.formats import model_params, open_checkpoint
from openpi_train.nn.params import Params, merge_module, module_params
from openpi_train.tools.prepare import named_tasks, prepare
from openpi_train.types import Observation

COLUMNS = ("step", "CPU s", "held-out loss", "successes", "share", "95 % interval")
# Of the initial states; demonstrations are drawn otherwise (`tools/prepare.py`).
STATES_SEED = 2_026
# What --quick adds: it shows that everything runs.
QUICK = ("--num-train-steps", "2", "--save-interval", "1", "--keep-period", "1", "--batch-size", "4")
QUICK += ("--eval.num-rows", "4", "--eval.num-sample-steps", "1", "--lr-schedule.warmup-steps", "1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What is trained and where it acts.

    `execute` actions of each chunk are carried out; of the last policy at least `target` of the episodes must succeed,
    of the untrained one less than `untrained_target`.
    """

    experiment: str
    dataset: str
    tasks: tuple[str, ...]
    episodes_per_task: int
    execute: int
    target: float
    untrained_target: float = 0.1
    quick_flags: tuple[str, ...] = ()


def parse(program: str, description: str | None, study: Study, argv: Sequence[str]) -> tuple[argparse.Namespace, list]:
    """The command line, understood, and the experiment's own flags in it."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {program}",
        description=description,
        epilog=f"Flags of {study.experiment} may follow.",
    )
    parser.add_argument("--episodes", type=int, default=100, help="initial states of each task (%(default)s)")
    parser.add_argument("--out", type=Path, help="where the run is kept (default: nowhere)")
    parser.add_argument("--quick", action="store_true", help="two steps and episodes, to see that it runs")
    flags, rest = parser.parse_known_args(argv)
    if flags.quick:
        flags.episodes, rest = 2, [*QUICK, *study.quick_flags, *rest]
    parse_experiment(study.experiment, ["--exp-name", "benchmark", *rest])
    return flags, rest


def measure(title: str, study: Study, flags: argparse.Namespace, rest: Sequence[str]) -> Table:
    """Write the demonstrations, train, and roll out every checkpoint that was kept."""
    with tempfile.TemporaryDirectory() as temporary:
        return _measure(title, study, flags, rest, (flags.out or Path(temporary)).absolute())


def _measure(title: str, study: Study, flags: argparse.Namespace, rest: Sequence[str], out: Path) -> Table:
    made = prepare(
        out / "datasets" if flags.quick else None,
        name=study.dataset,
        tasks=study.tasks,
        # Of few episodes none might be held out.
        episodes_per_task=40 if flags.quick else study.episodes_per_task,
    )
    words = ["--exp-name", "benchmark", "--checkpoint-base-dir", f"{out}/runs", "--assets-base-dir", f"{out}/assets"]
    words += ["--dataset", str(made.dataset.parent), "--data.tokenizer", str(made.tokenizer), "--overwrite", *rest]
    experiment = parse_experiment(study.experiment, words)
    started, cpu_s = time.monotonic(), _children_s()
    subprocess.run([sys.executable, "-m", "openpi_train", study.experiment, *words], cwd=ROOT, check=True)
    wall_s, cpu_s = time.monotonic() - started, _children_s() - cpu_s
    directory = out / "runs" / study.experiment / "benchmark"
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["val/loss_ema"] for line in lines if "val/loss_ema" in line}
    env = Tabletop(task_list=named_tasks(study.tasks))
    saved = sorted(int(path.parent.name) for path in directory.glob("*/manifest.json") if path.parent.name.isdecimal())
    policy = CheckpointPolicy(experiment, env, directory / str(saved[-1]))
    keys, tasks = _states(env, flags.episodes)
    rows: list[list[Cell]] = []
    for step in (0, *saved):
        policy.params = policy.untrained() if step == 0 else policy.load(directory / str(step))
        limit = 2 * study.execute if flags.quick else None
        outcome = rollout(policy, env, keys, tasks, execute=study.execute, max_steps=limit)
        assert outcome is not None
        wins, all_ = int(outcome.success.sum()), len(tasks)
        low, high = wilson(wins, all_)
        loss = losses.get(step)
        rows.append(
            [step, cpu_s * step / saved[-1], loss, f"{wins} of {all_}", wins / all_, f"{low:.0%} to {high:.0%}"]
        )
        print(f"step {step}: {wins} of {all_} episodes succeed", flush=True)
    by_task = [f"{name} {outcome.success[tasks == task].mean():.0%}" for task, name in enumerate(env.tasks)]
    notes = [
        f"{made.num_episodes['train']} demonstrations of {made.num_steps['train']} control steps; "
        f"training took {number(cpu_s)} s of CPU (start and evaluations included, shared out over the steps) and "
        f"{number(wall_s)} s; last step by task: {', '.join(by_task)}"
    ]
    failure = "" if flags.quick else _failure(study, rows)
    return Table(title, COLUMNS, rows, notes, failure)


def _failure(study: Study, rows: Sequence[Sequence[Cell]]) -> str:
    first, last = (float(row[4] or 0) for row in (rows[0], rows[-1]))  # type: ignore[arg-type]
    if last < study.target:
        return f"{study.experiment} succeeds in {last:.0%} of the episodes, {study.target:.0%} are asked for"
    if first >= study.untrained_target:
        return f"the untrained {study.experiment} succeeds in {first:.0%}: the tasks show nothing"
    return ""


def _states(env: Tabletop, episodes: int) -> tuple[jax.Array, np.ndarray]:
    """Keys and tasks of the initial states, the tasks taking turns."""
    tasks = np.tile(np.arange(len(env.tasks)), episodes)
    return jax.random.split(jax.random.key(STATES_SEED), len(tasks)), tasks


class CheckpointPolicy:
    """The policy of a run's step, its host steps and normalisation included."""

    def __init__(self, experiment: Experiment, env: Tabletop, step: Path):
        self._experiment, self._env = experiment, env
        (dataset,) = experiment.data.datasets
        self._robot, model = dataset.robot, experiment.model
        stats, form = read_norm_stats(step / "assets" / dataset.asset), experiment.data.normalization
        form = form or model.normalization
        self._inputs = [Normalize(stats, form), *model.transforms(load_tokenizer(experiment.data.tokenizer))]
        self._outputs = Unnormalize(stats, form)
        self._graphdef = nnx.graphdef(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))
        self._sample = jax.jit(self._sampled)
        self.params: Params = {}

    def load(self, step: Path) -> Params:
        """The parameters of a checkpoint."""
        leaves = model_params(open_checkpoint(step, self._experiment.model), self._experiment.model)
        return {path: jnp.asarray(leaf.whole()) for path, leaf in leaves.items()}

    def untrained(self) -> Params:
        """Parameters as a run begins with."""
        return module_params(self._experiment.model.build(nnx.Rngs(self._experiment.seed)))

    def __call__(self, observation: EnvObservation, keys: jax.Array) -> np.ndarray:
        """Chunks of actions in the robot's units."""
        state = np.asarray(observation.state)
        images = {
            f"image/{slot}": np.asarray(observation.images[feature.rpartition("/")[2]])
            for slot, feature in self._robot.cameras.items()
        }
        rows = []
        for index, task in enumerate(np.asarray(observation.task).tolist()):
            row = {"state": state[index], "prompt": self._env.instruction(task)}
            row |= {name: pictures[index] for name, pictures in images.items()}
            for transform in self._inputs:
                row = transform(row)
            rows.append(row)
        columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        actions = np.asarray(self._sample(self.params, columns, keys))
        actions = self._outputs({"actions": actions})["actions"][..., : len(self._robot.action_names)]
        return self._robot.from_model(actions, state)

    def _sampled(self, params: Params, columns: dict[str, jax.Array], keys: jax.Array) -> jax.Array:
        experiment, shape = self._experiment, (self._experiment.model.window.horizon, self._width)
        slots = sorted(name.removeprefix("image/") for name in columns if name.startswith("image/"))
        observation = Observation(
            images={slot: columns[f"image/{slot}"] for slot in slots},
            image_masks={slot: jnp.ones(len(keys), bool) for slot in slots},
            state=columns["state"],
            prompt_tokens=columns["prompt_tokens"],
            prompt_mask=columns["prompt_mask"],
        )
        noise = jax.vmap(lambda key: jax.random.normal(key, shape))(keys)
        network = merge_module(self._graphdef, params)
        steps = experiment.eval.num_sample_steps
        return experiment.objective.sample_actions(network, observation, noise, keys, steps)

    @property
    def _width(self) -> int:
        return self._experiment.model.batch_spec(1, self._experiment.data.cameras).actions.shape[-1]


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's interval (1927) of a share, at 95 %."""
    z = 1.959964
    share, unit = successes / trials, 1 + z**2 / trials
    middle = (share + z**2 / (2 * trials)) / unit
    half = z / unit * (share * (1 - share) / trials + z**2 / (4 * trials**2)) ** 0.5
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
