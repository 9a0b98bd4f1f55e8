"""Comparison of the robots of a mixture: what one output of the model means in each dataset. Read next: `config.py`."""

from collections.abc import Iterator, Sequence
from typing import Literal

from openpi_train.robots.dataset_arm import DatasetArm
from openpi_train.robots.robot import Robot

# The dims of actions, or those of states, by name and order; control steps per second.
Difference = Literal["actions", "state", "rate"]
# A camera's 29.97 is the 30 of a robot.
_SAME_RATE = 0.01


def differences(robots: Sequence[tuple[str, Robot]], allowed: Sequence[Difference]) -> Iterator[str]:
    """A sentence for each difference of a robot from the first one that is not allowed, with what to do.

    Args: `robots` with the names of their datasets. Further dims behind those of the other robot are no difference.
    """
    for number, (name, robot) in enumerate(robots[1:], start=1):
        first_name, first = robots[0]
        names = f"--data.datasets.{number} ({name})", f"dataset 0 ({first_name})"
        if "actions" not in allowed:
            yield from _of_dims(*names, number, "action", first.action_names, robot)
            yield from _of_reference(*names, first, robot)
        if "state" not in allowed:
            yield from _of_dims(*names, number, "state", first.state_names, robot)
        if "rate" not in allowed:
            yield from of_rates(*names, first.control_hz, robot.control_hz)


def _of_reference(name: str, other: str, first: Robot, robot: Robot) -> Iterator[str]:
    """A sentence if a dim of the same name is relative to the state in one dataset, and absolute in the other."""
    try:
        pair = [one.delta_mask or (False,) * len(one.action_names) for one in (first, robot)]
    except ValueError:
        return  # said of the robot itself
    dims = zip(first.action_names, robot.action_names, *pair, strict=False)
    unequal = [dim for dim, same, one, two in dims if dim == same and one != two]
    if unequal:
        yield (
            f"action dims {', '.join(unequal)} of {name} and of {other} are relative to the state in one, and absolute "
            "in the other: the model would learn both as one. Make both alike by the robots' fields, or allow it by "
            "--data.may-differ actions"
        )


def of_rates(name: str, other: str, first_hz: float, rate_hz: float) -> Iterator[str]:
    """A sentence if two datasets of a mixture have other control rates."""
    if abs(rate_hz - first_hz) > _SAME_RATE * max(rate_hz, first_hz):
        yield (
            f"{name} has {rate_hz:g} control steps per second, {other} {first_hz:g}: a chunk of actions would last "
            f"{max(rate_hz, first_hz) / min(rate_hz, first_hz):.3g} times as long in one. Record or resample one at "
            "the rate of the other, or allow it with --data.may-differ rate"
        )


def _of_dims(
    name: str, other: str, number: int, what: Literal["action", "state"], wanted: Sequence[str], robot: Robot
) -> Iterator[str]:
    found = robot.action_names if what == "action" else robot.state_names
    unequal = [place for place, pair in enumerate(zip(wanted, found, strict=False)) if pair[0] != pair[1]]
    if not unequal:
        return
    place, kind = unequal[0], "actions" if what == "action" else "state"
    if isinstance(robot, DatasetArm) and set(wanted) <= set(found):
        how = f"Put them in one order with --data.datasets.{number}.robot.{what}-order {' '.join(wanted)}"
    elif isinstance(robot, DatasetArm) and len(wanted) == len(found) and not set(wanted) & set(found):
        how = (
            f"If they are the same dims, name them alike: --data.datasets.{number}.robot.{what}-dims {' '.join(wanted)}"
        )
    else:
        how = "Write a robot that gives them in one order (docs/tutorials/my_robot.md)"
    yield (
        f"{what} dim {place} of {name} is {found[place]!r}, and of {other} {wanted[place]!r}: the model would learn "
        f"both as one ({', '.join(found)} and {', '.join(wanted)}). {how}; or, if each robot is to keep its own dims, "
        f"allow it with --data.may-differ {kind}"
    )
