"""How long a run takes, and what one of its length would hardly learn, told before it starts.

Read next: `optim/schedules.py`, `optim/ema.py`.
"""

from openpi_train.data.robot.config import DataConfig
from openpi_train.experiment import Experiment
from openpi_train.optim import AdamW, Lion, learning_rate

# An average that holds more of the start's parameters than of the run's is hardly what was asked for.
_MOST_OF_START = 0.5
# A step of Adam or Lion moves each parameter by about the rate; those of networks are about .01 to .1.
_MOST_A_STEP, _LEAST_IN_ALL = 0.1, 1e-4


def unfit_for_length(experiment: Experiment, num_samples: int | None = None) -> list[str]:
    """What keeps a run of `num_train_steps` from learning, or its result from holding it, each with what to change.

    All of it is allowed, and some of it meant. Length in epochs must be converted to steps before. `num_samples`: those
    of the training data, where they are known.
    """
    problems = [*unfit_rate(experiment), *_of_step_sizes(experiment), *_of_average(experiment)]
    size, steps, interval = experiment.batch_size, experiment.num_train_steps, experiment.log_interval
    if num_samples is not None and experiment.rl is None and size > num_samples:
        problems.append(
            f"--batch-size {size}: there are {num_samples} training samples, so a step reads some of them several "
            f"times; give --batch-size {num_samples} or less, or more data"
        )
    if 1 < steps < interval:
        problems.append(
            f"--log-interval {interval}: this run of {steps} steps ends before its loss is written down at all but the "
            f"last; give --log-interval {max(steps // 10, 1)}"
        )
    return problems


def length_in_words(experiment: Experiment, step_s: float | None, num_samples: int | None) -> str | None:
    """The run's steps in hours, and in passes over its data; None where neither is known, or its length is in epochs.

    Args: `step_s` is a step's forecast time in seconds, of RL with its share of the rollouts; `num_samples` are the
    rows of an epoch; each None if not known.
    """
    steps, size = experiment.num_train_steps, experiment.batch_size
    if experiment.num_epochs is not None:
        return None
    told = []
    if step_s is not None:
        told.append(f"about {_in_words(steps * step_s / 3600)} hours, without compiling, evaluations and checkpoints")
    if num_samples and experiment.rl is None:
        passes = _in_words(steps * size / num_samples)
        told.append(f"their {steps * size:,} rows are {passes} passes over the {num_samples:,} of the data")
    return f"{steps:,} steps (--num-train-steps): {'; '.join(told)}" if told else None


def num_recorded(experiment: Experiment) -> int | None:
    """The rows of the only dataset, those held out included, if its metadata say how many. Raises nothing."""
    data = experiment.data
    if not isinstance(data, DataConfig) or len(data.datasets) != 1:
        return None
    try:
        return data.datasets[0].source.num_steps_in_metadata()
    except (OSError, ValueError):
        return None  # opening the data says why


def _in_words(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def unfit_rate(experiment: Experiment) -> list[str]:
    """The same of the learning rate by step alone."""
    schedule, steps = experiment.lr_schedule.over(experiment.num_train_steps), experiment.num_train_steps
    if schedule.peak_lr == 0:
        return ["--lr-schedule.peak-lr 0: no step changes a parameter; give a rate above 0"]
    if experiment.lr_schedule.warmup_ratio is None and schedule.warmup_steps < experiment.lr_schedule.warmup_steps:
        return [
            f"the warm-up of {experiment.lr_schedule.warmup_steps} steps fills this run of {steps}: it is shortened to "
            f"{schedule.warmup_steps} (--lr-schedule.warmup-steps sets another)"
        ]
    if schedule.warmup_steps >= steps:
        last = float(learning_rate(schedule.create(), steps - 1)) / schedule.peak_lr
        return [
            f"--lr-schedule.warmup-steps {schedule.warmup_steps}: this run of {steps} steps ends before its warm-up "
            f"does, at {last:.2g} of --lr-schedule.peak-lr, and learns little; set --lr-schedule.warmup-ratio 0.1, or "
            "fewer warm-up steps"
        ]
    decay_steps = schedule.decay_steps or 0
    rest = steps - decay_steps
    if schedule.kind in ("linear", "cosine", "wsd") and rest > 0 and (schedule.decay_lr == 0 or 2 * rest > steps):
        effect = "change nothing" if schedule.decay_lr == 0 else f"are at --lr-schedule.decay-lr {schedule.decay_lr}"
        return [
            f"--lr-schedule.decay-steps {decay_steps}: the last {rest} of {steps} steps {effect}; set "
            f"--lr-schedule.decay-steps {steps}, or None, which is the run's length"
        ]
    if schedule.kind == "wsd" and decay_steps - round(schedule.tail_ratio * decay_steps) >= steps:
        return [
            f"--lr-schedule.decay-steps {decay_steps}: this run of {steps} steps ends before the rate falls (kind "
            "wsd); set --lr-schedule.decay-steps None, which is the run's length"
        ]
    return []


def _of_step_sizes(experiment: Experiment) -> list[str]:
    """Rates with which a step of Adam or Lion destroys the weights, or all steps together change nothing."""
    peak, steps = experiment.lr_schedule.over(experiment.num_train_steps).peak_lr, experiment.num_train_steps
    if not isinstance(experiment.optimizer, AdamW | Lion) or peak == 0:
        return []
    each = f"--lr-schedule.peak-lr {peak:g}: a step moves each parameter by about as much"
    if peak >= _MOST_A_STEP:
        return [f"{each}, which is as large as the parameters are; 1e-5 to 1e-3 is usual"]
    if peak * steps < _LEAST_IN_ALL:
        return [f"{each}, and {steps} steps by {peak * steps:.1g} in all, which changes nothing; give a larger rate"]
    return []


def _of_average(experiment: Experiment) -> list[str]:
    decay, steps = experiment.ema_decay, experiment.num_train_steps
    # With a warm-up the first updates keep nothing of the start's parameters.
    if decay is None or experiment.ema_warmup.power is not None or decay**steps <= _MOST_OF_START:
        return []
    return [
        f"--ema-decay {decay}: after {steps} steps the average, which is saved and served, is {decay**steps:.0%} the "
        "parameters that the run began with; set --ema-decay None, or --ema-warmup.power 0.75"
    ]
