"""Adapt an experiment to another number of devices, and its learning rate to the batch size.

Pure functions from experiment to experiment, with a log line per decision. Read next: `training/settling.py`.
"""

import dataclasses
import math

from openpi_train.experiment import Experiment


def adapt(experiment: Experiment, num_devices: int, first_devices: int | None) -> tuple[Experiment, list[str]]:
    """The experiment as it runs on `num_devices`, and a line for the log per decision.

    `first_devices` is the number of devices at the first start of a continued run, None for a new run. Three
    things may change: the batch size, if it is given per device (`keep_effective_batch_size` False), and with it the
    groups of RL, so that an iteration has the same number of steps on any devices; accumulation, tensor groups
    and `fsdp_devices`, if the number of devices differs from the first start (`elastic`); the learning rate
    (`lr_scaling`). At the first start `micro_batch_size` sets the accumulation. Values that do not fit are left
    unchanged, and `Experiment.check` refuses them with advice.
    """
    if not experiment.numbers_are_in_range:
        return experiment, []
    began_on = first_devices or num_devices
    lines: list[str] = []
    if not experiment.keep_effective_batch_size:
        experiment = _of_all_devices(experiment, began_on)
    # Devices of a tensor group hold the same rows, so a group counts as one.
    groups_at_first = max(began_on // experiment.sharding.tensor_devices, 1)
    if num_devices != began_on and experiment.elastic:
        experiment, regrouped = _regroup(experiment, num_devices)
        lines += regrouped
    tensor_devices = experiment.sharding.tensor_devices
    groups = max(num_devices // tensor_devices, 1)
    experiment, accumulated = _accumulate(experiment, groups_at_first)
    lines += accumulated
    if num_devices != began_on:
        lines.append(f"the run began on {began_on} devices and goes on on {num_devices}: same rows, same loss")
        if experiment.elastic:
            experiment, changes = _fit(experiment, groups, groups_at_first)
            lines += changes
    experiment, rate = _scale(experiment)
    rows, rest = divmod(experiment.batch_size, groups * experiment.grad_accum)
    if rest:
        return experiment, [*lines, rate]  # the check that follows reports what divides
    devices = f"{groups} devices" if tensor_devices == 1 else f"{groups} groups of {tensor_devices} devices"
    batch = (
        f"effective batch size {experiment.batch_size}: {rows} rows x {devices} x {experiment.grad_accum} micro-batches"
    )
    return experiment, [*lines, batch, rate]


def _of_all_devices(experiment: Experiment, num_devices: int) -> Experiment:
    """The experiment with the rows, and the groups of its RL, of all devices instead of one."""
    rl = experiment.rl
    if rl is not None:
        rl = dataclasses.replace(rl, num_groups=rl.num_groups * num_devices)
    return dataclasses.replace(experiment, batch_size=experiment.batch_size * num_devices, rl=rl)


def _accumulate(experiment: Experiment, num_devices: int) -> tuple[Experiment, list[str]]:
    """Set `grad_accum` from `micro_batch_size` if only the latter is given."""
    if experiment.micro_batch_size is None or experiment.grad_accum > 1:
        return experiment, []
    grad_accum, rest = divmod(experiment.batch_size, experiment.micro_batch_size * num_devices)
    if rest or grad_accum <= 1:
        return experiment, []
    line = f"grad_accum {grad_accum}: micro_batch_size {experiment.micro_batch_size} on {num_devices} devices"
    return dataclasses.replace(experiment, grad_accum=grad_accum), [line]


def _regroup(experiment: Experiment, num_devices: int) -> tuple[Experiment, list[str]]:
    """The largest tensor groups of so many devices, at most as large as those that the experiment names."""
    given = experiment.sharding.tensor_devices
    if num_devices % given == 0:
        return experiment, []
    shared = _largest_divisor(num_devices, given)
    sharding = dataclasses.replace(experiment.sharding, tensor_devices=shared)
    line = f"tensor_devices {shared} instead of {given}, which does not divide {num_devices}"
    return dataclasses.replace(experiment, sharding=sharding), [line]


def _largest_divisor(number: int, most: int) -> int:
    return max(divisor for divisor in range(1, most + 1) if number % divisor == 0)


def _fit(experiment: Experiment, num_devices: int, began_on: int) -> tuple[Experiment, list[str]]:
    """Keep the rows per step, with at most as many rows on a device at a time as at the first start."""
    lines = []
    most = experiment.batch_size // (began_on * experiment.grad_accum)
    rows, rest = divmod(experiment.batch_size, num_devices)
    fitting = [] if rest else [n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= most]
    if fitting and fitting[0] != experiment.grad_accum:
        lines.append(f"grad_accum {fitting[0]} instead of {experiment.grad_accum}: {rows // fitting[0]} rows at a time")
        experiment = dataclasses.replace(experiment, grad_accum=fitting[0])
    if fitting and experiment.micro_batch_size is not None:
        experiment = dataclasses.replace(experiment, micro_batch_size=rows // fitting[0])
    if experiment.fsdp_devices is not None and num_devices % experiment.fsdp_devices:
        shared = _largest_divisor(num_devices, experiment.fsdp_devices)
        lines.append(f"fsdp_devices {shared} instead of {experiment.fsdp_devices}, which does not divide {num_devices}")
        experiment = dataclasses.replace(experiment, fsdp_devices=shared)
    return experiment, lines


def _scale(experiment: Experiment) -> tuple[Experiment, str]:
    """Multiply the learning rate by the batch's ratio to the reference, or by its square root."""
    schedule, reference = experiment.lr_schedule, experiment.reference_batch_size
    if experiment.lr_scaling == "none" or reference is None:
        return experiment, f"learning rate: peak {schedule.peak_lr:g}"
    ratio = experiment.batch_size / reference
    factor = ratio if experiment.lr_scaling == "linear" else math.sqrt(ratio)
    rates = {name: getattr(schedule, name) for name in ("warmup_lr", "peak_lr", "decay_lr")}
    larger = {name: rate * factor for name, rate in rates.items() if rate is not None}
    scaled = dataclasses.replace(schedule, **larger)
    line = (
        f"learning rate: peak {scaled.peak_lr:g} = {schedule.peak_lr:g} x {factor:g} ({experiment.lr_scaling} in the "
        f"batch: {experiment.batch_size} against {reference})"
    )
    return dataclasses.replace(experiment, lr_schedule=scaled), line
