"""What `posttrain` gives an experiment that learns from its own completions: ppo and grpo.

Values for absent keys are TRL's (`PPOConfig`, `GRPOConfig`). Read next: `rl_flags.py`.
"""

import dataclasses
from typing import Any

from openpi_train.doors.posttraining.rl_flags import DEFAULTS
from openpi_train.doors.posttraining.training_flags import TranslatedConfig
from openpi_train.evaluation.text_evaluations import TextEvaluations
from openpi_train.experiment import Experiment
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.rl.estimator import AdvantageEstimator
from openpi_train.rl.rewards.text_reward import TextReward
from openpi_train.rl.text_rl import TextRL
from openpi_train.sampling.token_distribution import TokenDistribution

# Held-out prompts that are completed at every evaluation.
_HELD_OUT = 256


def with_rl(experiment: Experiment, translated: TranslatedConfig) -> Experiment:
    """The experiment on prompts with the RL, objective, rate and evaluations of ppo or grpo."""
    defaults, is_ppo = DEFAULTS[translated.algorithm], translated.algorithm == "ppo"
    rewards = tuple(TextReward(name=name, weight=weight) for name, weight in translated.rewards)
    data: Any = experiment.data
    # What evaluations compare with the references, if there are some.
    scores = tuple(one.name for one in rewards if one.compares) or ("exact_match",)
    return dataclasses.replace(
        experiment,
        objective=PolicyGradient(
            distribution=TokenDistribution(temperature=defaults.temperature),
            kl_weight=0.0 if is_ppo else defaults.kl_weight,
            value_weight=0.1 if is_ppo else 0.0,
        ),
        data=dataclasses.replace(data, on_no_targets="drop"),
        rl=TextRL(
            group_size=defaults.group_size,
            epochs=defaults.epochs,
            advantages=AdvantageEstimator(
                kind="gae" if is_ppo else "grpo", kl_weight=defaults.kl_weight if is_ppo else 0.0
            ),
            rewards=rewards,
        ),
        lr_schedule=dataclasses.replace(experiment.lr_schedule, peak_lr=defaults.learning_rate),
        eval=TextEvaluations(
            interval=experiment.eval.interval,
            num_prompts=_HELD_OUT if experiment.eval.interval else 0,
            scores=scores if data.kind == "texts" else (),
        ),
    )
