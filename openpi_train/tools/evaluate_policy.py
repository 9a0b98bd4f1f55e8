"""The `eval` verb: evaluate a policy on held-out episodes (open loop) and in an environment (closed loop).

A checkpoint of a language model is evaluated by `evaluate_text.py`.

Every process loads the policy on its own devices and takes its share of the episodes, in groups that are the same for
any number of processes, and so are the results. They are written to the run's `eval/<step>/`.
Read next: `open_loop.py`, `envs/closed_loop.py`, `policy/acting.py`.
"""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from openpi_train.command_line import ProcessFlags, changed_flags
from openpi_train.data.core.files import write_json, write_text
from openpi_train.data.formats.detection import source_at
from openpi_train.data.robot.opened import open_windows
from openpi_train.data.robot.windows import Windows
from openpi_train.data.text.text_data import TextData
from openpi_train.envs.closed_loop import ClosedLoop, evaluate, protocol
from openpi_train.envs.ensembling import Ensembled
from openpi_train.envs.env import Env, NoEnv
from openpi_train.envs.named_envs import environment, with_settings
from openpi_train.envs.rollout import Policy as EnvPolicy
from openpi_train.envs.video import VideoRecorder
from openpi_train.evaluation.closed_loop_success import num_executed, write_score
from openpi_train.experiment import Experiment
from openpi_train.fields import as_json
from openpi_train.launch import preflight
from openpi_train.planning.simulators import simulators_in
from openpi_train.policy.acting import Acting, ActingInRealTime
from openpi_train.policy.loading import choose_dataset, load_policy
from openpi_train.policy.policy import Policy
from openpi_train.runtime import agree, logs, session
from openpi_train.runtime.exits import DataError, UsageError, reported_as
from openpi_train.runtime.phases import phase
from openpi_train.runtime.world import find_world
from openpi_train.sampling.flow import as_flow
from openpi_train.sampling.real_time_chunking import MAX_GUIDANCE
from openpi_train.tools import evaluate_text, figures, open_loop
from openpi_train.tools.requests import EvaluateRequest, EvaluateTextRequest
from openpi_train.training.start_check import tell_simulators

logger = logging.getLogger(__name__)

_PLOTTED_EPISODES = 3
_NOTHING_OF_TEXTS = EvaluateTextRequest()


def main(request: EvaluateRequest, texts: EvaluateTextRequest, process: ProcessFlags) -> int:
    """Evaluate, write the results, and print the tables. Every process of the run must call it."""
    logs.configure(0)
    if preflight.devices() is not None:
        return check_ahead(request)
    world = find_world(process, os.environ)
    logs.configure(world.process_index)
    facts = {"eval": as_json(dataclasses.replace(request, out=str(request.out))), "texts": as_json(texts)}
    session.start(world, facts=facts, devices_per_process=process.devices_per_process)
    with phase("evaluating"):
        run(request, texts)
    session.stop()
    return 0


def check_ahead(request: EvaluateRequest) -> int:
    """Raise what an evaluation would for its checkpoint and environment, as far as it is soon known."""
    stored, experiment = evaluate_text.open_model(request.checkpoint, request.experiment)
    if request.out is None:
        folder_of(stored.where)
    if not isinstance(experiment.data, TextData):
        closed_loop_of(request, experiment, _dataset_number(experiment, request.dataset))
        _check_recorded(request)
    return 0


def run(request: EvaluateRequest, texts: EvaluateTextRequest = _NOTHING_OF_TEXTS) -> Path:
    """Evaluate in processes that have met. Returns the folder of the results. Every process must call it."""
    stored, experiment = evaluate_text.open_model(request.checkpoint, request.experiment)
    folder = request.out or folder_of(stored.where)
    if isinstance(experiment.data, TextData):
        return evaluate_text.run(request, texts, stored, experiment, folder)
    if given := changed_flags(texts):
        raise UsageError(f"{', '.join(given)}: for language models, and {stored.where} is a robot's policy")
    figures.require_figures()
    number = _dataset_number(experiment, request.dataset)
    config = closed_loop_of(request, experiment, number)
    _check_recorded(request)
    if not request.held_out and not config.num_episodes:
        raise UsageError("there is nothing to do: --held-out 0, and no environment (give one with --env NAME)")
    policy = load_policy(
        request.checkpoint,
        experiment=experiment if stored.experiment is None else request.experiment,
        dataset=number,
        average=request.average,
        num_sample_steps=request.num_sample_steps,
        guidance=request.guidance,
        batch_sizes=(request.batch_size,),
        devices=jax.local_devices(),
    )
    begin = _begin(request, policy, config)  # refused before anything is computed
    if request.held_out:
        _in_open_loop(request, policy, experiment, number, folder)
    if config.num_episodes:
        _in_closed_loop(request, policy, config, begin, folder)
    elif jax.process_index() == 0:
        named = "the experiment names no environment; give one with --env NAME"
        print(f"closed loop: {'left out by --episodes 0' if request.episodes == 0 else named}")
    return folder


def folder_of(checkpoint: str) -> Path:
    """`eval/<step>` in the directory of the checkpoint's run. Raises UsageError if it belongs to no run."""
    step = Path(checkpoint)
    step = step.parent if step.name == "params" else step
    if not (step.parent / "experiment.json").is_file():
        raise UsageError(f"{checkpoint} lies in no run's directory: say with --out DIR where the results are to go")
    return step.parent / "eval" / step.name


def closed_loop_of(request: EvaluateRequest, experiment: Experiment, dataset: int) -> ClosedLoop:
    """The experiment's closed loop with the requested options."""
    given = {
        "env": NoEnv() if request.episodes == 0 else _env(request, experiment),
        "episodes_per_task": request.episodes or None,
        "execute": request.execute,
        "max_steps": request.max_steps,
        "num_videos": request.videos,
        "seed": request.seed,
        "dataset": dataset,
        "episodes_per_device": request.batch_size,
    }
    asked = {name: value for name, value in given.items() if value is not None}
    # Another environment has other tasks.
    tasks = {"tasks": None} if "env" in asked else {}
    return dataclasses.replace(experiment.robot_eval.closed_loop, **asked, **tasks)


def _env(request: EvaluateRequest, experiment: Experiment) -> Env | None:
    with reported_as(UsageError):
        if request.env is not None:
            return environment(request.env, settings=request.env_settings)
        own = experiment.robot_eval.closed_loop.env
        return with_settings(own, request.env_settings) if request.env_settings else None


def _dataset_number(experiment: Experiment, wanted: str | None) -> int:
    """The index of the dataset whose robot acts, from a number or an asset id; by default that of the run's closed
    loop."""
    if wanted is None:
        return experiment.robot_eval.closed_loop.dataset
    chosen = choose_dataset(experiment, int(wanted) if wanted.isdecimal() else wanted)
    return experiment.demonstrations.datasets.index(chosen)


def _check_recorded(request: EvaluateRequest) -> None:
    """Raise UsageError or DataError for flags of the open loop without one, or if --data is no dataset."""
    given = [f"--{name}" for name in ("data", "only") if getattr(request, name) is not None]
    if given and not request.held_out:
        raise UsageError(f"{' and '.join(given)}: for the open loop, which --held-out 0 leaves out")
    if request.data is not None:
        with reported_as(DataError):
            source_at(request.data)


def _in_open_loop(request: EvaluateRequest, policy: Policy, experiment: Experiment, number: int, folder: Path) -> None:
    with reported_as(DataError):
        windows, actions = _recorded(request, experiment, number)
        episodes = open_loop.held_out_episodes(windows, request.held_out)
        found = [
            open_loop.predict(policy, windows, episode, request.batch_size, actions.mean)
            for episode in episodes[jax.process_index() :: jax.process_count()]
        ]
    names, plotted = policy.form.robot.action_names, episodes[:_PLOTTED_EPISODES]
    for predicted in found:
        if predicted.episode in plotted:
            picture = figures.chunks(predicted, names, policy.form.robot.control_hz)
            write_text(folder / f"open_loop_{predicted.episode}.svg", picture)
    parts = agree.gather("open-loop errors", [predicted.sums for predicted in found])
    errors = [sums for part in parts for sums in part]
    if jax.process_index() == 0:
        result = open_loop.summary(names, errors, actions.deviation)
        result["plots"] = [f"open_loop_{episode}.svg" for episode in plotted]
        write_json(folder / "open_loop.json", {"settings": _settings(request), **result})
        print(f"open loop, {open_loop.counted(result, _settings(request))}:")
        print(open_loop.table(result))
        print(f"plots of predicted and recorded actions: {', '.join(str(folder / name) for name in result['plots'])}")


def _recorded(
    request: EvaluateRequest, experiment: Experiment, number: int
) -> tuple[Windows, open_loop.TrainingActions]:
    """The windows of the recorded episodes that are asked for, and the actions that the policy was trained on.

    Raises ValueError or DataError if there are none.
    """
    config, shape = experiment.demonstrations, experiment.policy.rows.window
    if request.data is not None:
        datasets = list(config.datasets)
        datasets[number] = dataclasses.replace(datasets[number], validation=source_at(request.data))
        config = dataclasses.replace(config, datasets=tuple(datasets))
    training = open_windows(config, shape)[number]
    windows, actions = training.in_split("validation"), open_loop.TrainingActions.of(training)
    if request.data is not None or request.only is not None:
        try:
            windows = dataclasses.replace(windows, only=request.only)
        except ValueError as error:
            raise DataError(str(error).replace("--data.datasets.N.only", "--only")) from error
    if not len(windows):
        raise DataError("no episode is held out (--data.validation-fraction); --held-out 0 leaves this part out")
    return windows, actions


def _in_closed_loop(
    request: EvaluateRequest, policy: Policy, config: ClosedLoop, begin: Callable[[], EnvPolicy], folder: Path
) -> None:
    tell_simulators(simulators_in(config.env, "evaluations", "--batch-size", config.episodes_per_device))
    recorder = VideoRecorder(config.env, config.num_videos, folder / "videos")
    index, count, size = jax.process_index(), jax.process_count(), config.episodes_per_device
    score = evaluate(
        begin,
        config,
        execute=_execute(config, policy),
        history=policy.form.window.history,
        batch_size=size * count,
        rows=size * index + np.arange(size),
        gather=agree.gather,
        recorder=recorder,
    )
    assert score is not None, "nothing asked it to stop"
    settings = {**_settings(request), "execute": _execute(config, policy), "closed_loop": as_json(config)}
    write_score(folder, score, recorder, settings)
    if index == 0:
        print(f"closed loop, {config.env.name}, {config.num_episodes} episodes:")
        print(protocol(config, _execute(config, policy)))
        print(score.table())
        print(f"written to {folder}")


def _execute(config: ClosedLoop, policy: Policy) -> int:
    return num_executed(config, policy.form.window)


def _begin(request: EvaluateRequest, policy: Policy, config: ClosedLoop) -> Callable[[], EnvPolicy]:
    """A function that makes the policy for a batch of episodes. Raises UsageError for conflicting options."""
    execute, ahead = _execute(config, policy), policy.form.window.num_ahead
    if config.num_episodes and execute > ahead:
        raise UsageError(f"--execute {execute}: the policy's chunks have {ahead} actions")
    if request.ensemble is not None and request.real_time_delay is not None:
        raise UsageError("--ensemble and --real-time-delay are two ways to join chunks: give one of them")
    for flag, value in (("guidance", request.real_time_guidance), ("method", request.real_time_method)):
        if value is not None and request.real_time_delay is None:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UsageError(f"--real-time-{flag} {shown} is for real-time chunking: give --real-time-delay")
    if request.real_time_delay is not None:
        real_time = functools.partial(
            ActingInRealTime,
            _by_method(request, policy),
            config.env,
            delay=request.real_time_delay,
            execute=execute,
            max_guidance=MAX_GUIDANCE if request.real_time_guidance is None else request.real_time_guidance,
            joins=request.real_time_method != "none",
        )
        with reported_as(UsageError):
            real_time()
        return real_time
    acting = Acting(policy, config.env)
    if request.ensemble is not None:
        return lambda: Ensembled(acting, request.ensemble or 0.0, execute)
    return lambda: acting


def _by_method(request: EvaluateRequest, policy: Policy) -> Policy:
    """The policy, with its chunks joined as the flags say. Raises UsageError if it cannot join them so."""
    method = request.real_time_method
    if method == "none":
        wrong = request.real_time_guidance is not None
    else:
        trained_for = as_flow(policy.sampler.action_sampler).max_delay
        if method == "trained" and not trained_for:
            raise UsageError(
                "--real-time-method trained is for a policy that was trained with --objective.max-delay; this one was "
                "not: give guided"
            )
        wrong = request.real_time_guidance is not None and trained_for > 0 and method != "guided"
    if wrong:
        raise UsageError(
            f"--real-time-guidance {request.real_time_guidance:g} is for chunks that are joined by guidance: give "
            "--real-time-method guided, or leave it out"
        )
    if method != "guided":
        return policy
    return dataclasses.replace(policy, sampler=dataclasses.replace(policy.sampler, guided=True, _programs={}))


def _settings(request: EvaluateRequest) -> dict[str, Any]:
    return as_json(dataclasses.replace(request, out=None))
