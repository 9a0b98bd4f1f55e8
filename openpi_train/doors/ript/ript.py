"""The `ript` verb: an experiment on a robot policy's own episodes from a YAML config of the RIPT trainers for pi0.

Model, robot and environment are those of the run whose checkpoint the config names, or of a named experiment. Values
for absent keys are those of the trainers: RLOO, groups that are mixed, AdamW at a constant 1e-5, three checkpoints.
Read next: `ript_flags.py`, `rl/robot_rl.py`.
"""

import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from openpi_train import registry
from openpi_train.checkpoints import checkpoint_formats
from openpi_train.choice import on_env
from openpi_train.doors.begun_anew import begun_anew
from openpi_train.doors.door_requests import RiptRequest
from openpi_train.doors.ript.ript_flags import ENV, KEYS, TranslatedRipt, translate_ript
from openpi_train.doors.yaml_file import read_yaml
from openpi_train.envs.env import Env
from openpi_train.envs.named_envs import FORMS, environment
from openpi_train.experiment import Experiment
from openpi_train.interop import native_format
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.optim import LRSchedule
from openpi_train.policy.experiment_json import experiment_of_run
from openpi_train.rl.estimator import AdvantageEstimator
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.runtime.exits import CheckpointError, UsageError, reported_as
from openpi_train.sampling.action_distribution import ActionDistribution
from openpi_train.sampling.action_token_distribution import ActionTokenDistribution
from openpi_train.sampling.denoising import DenoisingSampler
from openpi_train.sampling.denoising_distribution import DenoisingDistribution
from openpi_train.sampling.flow import FlowSampler
from openpi_train.sampling.flow_distribution import FlowDistribution
from openpi_train.training.documented_links import documented

logger = logging.getLogger(__name__)

NAME = "ript"
# Where the guide of the trainers says that they are.
_LINKS = {
    "{base}/logs/distributed_training_{time}_node0.log": "logs/process_0.log",
    "{base}/logs/train_rank_{process}.log": "logs/process_{process}.log",
    "{base}/distributed_training_results.json": "distributed_training_results.json",
    "{base}/checkpoints/checkpoint_latest": "latest",
}
_GUIDES_POLICY = ("output", "tabletop_few", "quick_distributed_test")
# Flow-SDE's eta: with less noise outcomes differ mainly by what is not scored (docs/howto/reinforcement_learning.md).
_NOISE = 1.0


def experiment_of(request: RiptRequest, given: Sequence[str]) -> tuple[Experiment, list[str]]:
    """The experiment of a config, and flags that are still to be applied to it: the config's, then the `given` ones.

    Logs what became of every key. Raises RunError, saying what to do.
    """
    replaced = {} if request.env is None else {ENV: request.env}
    translated = translate_ript(read_yaml(request.config), replaced, name=Path(request.config).stem)
    translated.tell(request.config, KEYS)
    if translated.debugs:
        os.environ.setdefault("NCCL_DEBUG", "INFO")
    documented(_LINKS)
    base = _base(request, translated)
    logger.info("model, robot and environment: those of %s", base.name)
    return learning(base, _env(translated.env)), [*(word for flag in translated.flags for word in flag), *given]


def learning(base: Experiment, env: Env | None) -> Experiment:
    """`base`, learning from rollouts in `env`, or None: in its own environment. Raises UsageError if there is none."""
    base = base if env is None else on_env(base, env)
    loop, own = base.robot_eval.closed_loop, base.rl
    if not isinstance(own, RobotRL):
        own = RobotRL(
            env=loop.env,
            execute=loop.execute,
            max_steps=loop.max_steps,
            episodes_per_device=loop.episodes_per_device,
            dataset=loop.dataset,
        )
    if not own.env.tasks:
        raise UsageError(
            f"{base.name} has no environment to act in: give --env NAME, or {ENV} in the config (tabletop, metaworld, "
            f"{FORMS})"
        )
    loop = loop if loop.env.tasks else dataclasses.replace(loop, env=own.env)
    objective = base.objective
    if not objective.learns_from_rollouts:
        objective = PolicyGradient(distribution=_distribution(base), average="rollouts")
    rate = LRSchedule(kind="constant", warmup_steps=0, peak_lr=1e-5)
    return dataclasses.replace(
        begun_anew(base, name=NAME, rate=rate, output="./output"),
        objective=objective,
        rl=dataclasses.replace(own, advantages=AdvantageEstimator(kind="rloo"), mixed_only=True),
        num_epochs=None,
        profile=0,
        keep_period=None,
        keep_last=3,
        eval=dataclasses.replace(base.robot_eval, interval=0, closed_loop=dataclasses.replace(loop, interval=0)),
    )


def _base(request: RiptRequest, translated: TranslatedRipt) -> Experiment:
    """The experiment that is named, or that of the run at the checkpoint."""
    if request.experiment is not None:
        with reported_as(UsageError):
            return registry.load(request.experiment)
    if translated.policy is None:
        raise UsageError("no policy: give policy_path in the config, the run of a policy, or --experiment NAME")
    try:
        place = checkpoint_formats.open_place(translated.policy)
    except CheckpointError as error:
        how = "name the run of one that is there"
        if Path(translated.policy).parts[-3:] == _GUIDES_POLICY:
            how = "./scripts/quick_distributed_test.sh makes this one, so run that first, or name your own run"
        raise CheckpointError(f"{error}\npolicy_path is the policy that RL begins from: {how}") from error
    recorded = native_format.recorded_experiment(place)[0] if native_format.recognises(place) else None
    if recorded is None:
        raise UsageError(
            f"policy_path {translated.policy} is no run of ours: name the experiment whose model, robot and "
            "environment the policy has with --experiment NAME (python -m openpi_train list)"
        )
    return experiment_of_run(recorded, str(place))


def _env(name: str | None) -> Env | None:
    if name is None:
        return None
    try:
        return environment(name)
    except ValueError as error:
        raise UsageError(f"{ENV}: {error} (--env NAME takes its place)") from error


def _distribution(base: Experiment) -> ActionDistribution:
    """The distribution whose evaluations are those of `base`."""
    sampler, steps = base.objective.action_sampler, base.robot_eval.num_sample_steps
    match sampler:
        case FlowSampler():
            return FlowDistribution(num_steps=steps, noise=_NOISE, augmentation=sampler.augmentation)
        case DenoisingSampler():
            return DenoisingDistribution(
                num_steps=steps,
                noise_schedule=sampler.noise_schedule,
                sampler=sampler.kind,
                augmentation=sampler.augmentation,
            )
    return ActionTokenDistribution(augmentation=sampler.augmentation)
