"""What `posttrain` gives an experiment that learns from its own completions: ppo and grpo.

Values for absent keys are TRL's (`PPOConfig`, `GRPOConfig`). Read next: `practice_flags.py`.
"""

import dataclasses
from typing import Any

from openpi_train.doors.posttraining.practice_flags import DEFAULTS
from openpi_train.doors.posttraining.training_flags import TranslatedConfig
from openpi_train.evaluation.text_evaluations import TextEvaluations
from openpi_train.experiment import Experiment
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.practice.estimator import AdvantageEstimator
from openpi_train.practice.rewards.text_reward import TextReward
from openpi_train.practice.text_practice import TextPractice
from openpi_train.sampling.token_law import TokenLaw

# Held-out prompts that are completed at every evaluation.
_HELD_OUT = 256


def with_practice(experiment: Experiment, translated: TranslatedConfig) -> Experiment:
    """The experiment on prompts with the practice, objective, rate and evaluations of ppo or grpo."""
    defaults, is_ppo = DEFAULTS[translated.algorithm], translated.algorithm == "ppo"
    rewards = tuple(TextReward(name=name, weight=weight) for name, weight in translated.rewards)
    data: Any = experiment.data
    # What evaluations compare with the references, if there are some.
    scores = tuple(one.name for one in rewards if one.compares) or ("exact_match",)
    return dataclasses.replace(
        experiment,
        objective=PolicyGradient(
            law=TokenLaw(temperature=defaults.temperature),
            kl_weight=0.0 if is_ppo else defaults.kl_weight,
            value_weight=0.1 if is_ppo else 0.0,
        ),
        data=dataclasses.replace(data, on_no_targets="drop"),
        practice=TextPractice(
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
