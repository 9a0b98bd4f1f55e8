"""How many completions an iteration of ppo or grpo has, and how often they are learnt from.

An iteration makes as many completions as one optimizer step takes, times `num_mini_batches`, as TRL's does; more if
that is no whole group. Read next: `rl/rollouts.py`.
"""

import math

from openpi_train.doors.config_file import contradiction
from openpi_train.doors.posttraining.yaml_config import YamlConfig
from openpi_train.runtime.exits import UsageError

_GROUP_SIZE = "num_generations group_size num_return_sequences n_samples_per_prompt".split()
_EPOCHS = {"ppo": "ppo_epochs num_ppo_epochs".split(), "grpo": "num_iterations grpo_epochs num_grpo_epochs".split()}
_MINI_BATCHES = "num_mini_batches ppo_buffer_size".split()
_AT_A_TIME = "local_rollout_forward_batch_size micro_rollout_batch_size".split()
# Micro-batches of an iteration (TRL's `GRPOConfig`), and completions of a device in one (its older `PPOConfig`).
_MICROS, _COMPLETIONS = ("steps_per_generation",), ("batch_size",)


def iteration_flags(file: YamlConfig, *, rows: int, accum: int, of_all: bool, group_size: int, epochs: int) -> None:
    """Translate the keys of groups and passes, and set the optimizer steps of an iteration.

    Args:
        rows: of an optimizer step; of all devices (`of_all`) or of one, and then the groups are of one, too.
        accum: micro-batches of a step.
        group_size: completions of a prompt, if no key says how many.
        epochs: passes over an iteration's completions, if no key says how many.

    Raises UsageError.
    """
    group_size = file.spelled("rl.group-size", YamlConfig.count, *file.own(*_GROUP_SIZE)) or group_size
    epochs = file.spelled("rl.epochs", YamlConfig.count, *file.own(*_EPOCHS[file.algorithm])) or epochs
    file.spelled("rl.completions-per-device", YamlConfig.count, *file.own(*_AT_A_TIME))
    rollouts = math.lcm(rows * _mini_batches(file, rows, accum, of_all), group_size)
    keys = (*file.own(*_MINI_BATCHES, *_MICROS), *file.in_section(*_COMPLETIONS))
    file.flag("rl.num-groups", rollouts // group_size, *keys)
    file.iteration_steps = epochs * rollouts // rows


def _mini_batches(file: YamlConfig, rows: int, accum: int, of_all: bool) -> int:
    """The optimizer steps that an iteration's completions are taken in."""
    found = {}
    if (count := file.agreed(YamlConfig.count, *file.own(*_MINI_BATCHES))) is not None:
        found["num_mini_batches"] = count
    completions, micros = file.in_section(*_COMPLETIONS), file.own(*_MICROS)
    for keys, of_step, what in ((completions, rows, "rows of a step"), (micros, accum, "micro-batches of a step")):
        value = file.agreed(YamlConfig.count, *keys)
        if value is None:
            continue
        key = next(key for key in keys if key in file.values)
        if keys is completions and of_all:
            raise contradiction(f"{key} counts the completions of one device and the DeepSpeed file the rows of all")
        if value % of_step:
            raise UsageError(f"{key} is {value}, which is no multiple of the {of_step} {what}")
        found[key] = value // of_step
    if len(set(found.values())) > 1:
        raise contradiction(" and ".join(f"{key} gives {value} steps of an iteration" for key, value in found.items()))
    return next(iter(found.values()), 1)
