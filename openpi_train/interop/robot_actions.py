"""How a robot's actions follow from the model's, as far as other trainers' policies can say it: relative action dims.

A policy's files say which dims are relative to the state (LeRobot), or can only hold absolute ones (diffusion_policy).
A robot that converts in another way, as Aloha with pi0's signs and grippers, has no place in them. Read next:
`lerobot_folder.py`, which writes and reads LeRobot's steps; `robots/robot.py`.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from openpi_train.interop.config_json import config_from_json
from openpi_train.robots.robot import Robot
from openpi_train.runtime.exits import UsageError

if TYPE_CHECKING:
    from openpi_train.interop.stored_leaves import Stored

# Values at which robots are tried, and how far their results may be from those of a relative action, in float32.
_NUM_TRIED, _ROUNDING = 16, 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActionDims:
    """The dims of an action: whether the state's dim at its place is added to the model's value, and their names."""

    names: tuple[str, ...]
    relative: tuple[bool, ...]

    @classmethod
    def absolute(cls, width: int) -> "ActionDims":
        """As many absolute dims, numbered."""
        return cls(names=numbered(width), relative=(False,) * width)

    def in_words(self) -> str:
        """Which dims are relative."""
        found = [name for name, relative in zip(self.names, self.relative, strict=True) if relative]
        if not found or len(found) == len(self.names):
            return "all relative to the state" if found else "all absolute"
        return f"relative to the state in {', '.join(found)}, absolute in the others"


def numbered(width: int) -> tuple[str, ...]:
    """Names of dims, none of them a part of another."""
    return tuple(f"action_{number:03d}" for number in range(width))


def action_dims(robot: Robot) -> ActionDims:
    """The robot's, found by trying what it computes.

    Raises UsageError if its model sees states, or its actions follow from the model's, in any other way.
    """
    random = np.random.default_rng(0)
    num_state, num_actions = len(robot.state_names), len(robot.action_names)
    state = random.uniform(-2, 2, (_NUM_TRIED, num_state))
    seen, _ = robot.to_model(state.copy())
    others = _differing(seen, state, robot.state_names)
    chunk = random.uniform(-2, 2, (_NUM_TRIED, 2, num_actions))
    added = robot.from_model(chunk.copy(), state.copy()) - chunk
    reference = np.zeros((_NUM_TRIED, num_actions))
    width = min(num_state, num_actions)
    reference[:, :width] = state[:, :width]
    relative = tuple(
        name not in _differing(added, reference[:, None], robot.action_names) for name in robot.action_names
    )
    expected = np.where(relative, reference[:, None], 0)
    others += [name for name in _differing(added, expected, robot.action_names) if name not in others]
    if others:
        raise UsageError(
            f"the {type(robot).__name__} robot's model has other units than the robot in {', '.join(others)}, and a "
            "policy of another trainer can only add to an action the state's number at the same place: serve it here "
            "(`serve`), or train with a robot whose states and actions are the model's"
            + _ADVICE.get(type(robot).__name__, "")
        )
    return ActionDims(names=robot.action_names, relative=relative)


_ADVICE = {"Aloha": " (--data.datasets.0.robot.no-adapt-to-pi)"}


def _differing(found: np.ndarray, expected: np.ndarray, names: tuple[str, ...]) -> list[str]:
    """The names of dims, the last axis, that are not as expected everywhere."""
    apart = np.abs(found - expected).reshape(-1, len(names)).max(axis=0)
    return [name for name, most in zip(names, apart.tolist(), strict=True) if not most <= _ROUNDING]


def robots_of(stored: "Stored") -> Mapping[str, Robot]:
    """The robots of a checkpoint by asset id: those given with it, else those of the experiment that it records."""
    if stored.robots or stored.experiment is None:
        return stored.robots
    datasets = stored.experiment.get("data", {}).get("datasets", ())
    return {
        dataset.get("asset_id") or str(number): config_from_json(dataset["robot"], Robot, "robot", {})
        for number, dataset in enumerate(datasets)
        if "robot" in dataset
    }


def stored_action_dims(stored: "Stored") -> ActionDims | None:
    """How the actions of a checkpoint's robot follow from its model's; None if nothing says whose robot it is.

    Raises UsageError if that differs between the robots of its norm stats, or as `action_dims` does.
    """
    robots = robots_of(stored)
    chosen = [robots[name] for name in stored.norm_stats if name in robots] or list(robots.values())
    found = [action_dims(robot) for robot in chosen]
    if len({one.relative for one in found}) > 1:
        listing = "; ".join(f"{name}: {action_dims(robot).in_words()}" for name, robot in robots.items())
        raise UsageError(
            f"the actions of the robots of {stored.where} differ, and a policy of another trainer is of one robot "
            f"({listing}): convert a copy with the norm stats of one of them in assets/"
        )
    return found[0] if found else stored.action_dims


def check_action_dims(stored: "Stored", robot: Robot) -> None:
    """Raise UsageError if another trainer's policy says that its actions follow from the model's in another way."""
    wanted = stored.action_dims
    if wanted is None:
        return
    given = action_dims(robot)
    if given.relative != wanted.relative and any((*given.relative, *wanted.relative)):
        raise UsageError(
            f"the actions of {stored.where} are {wanted.in_words()}; those of the experiment's robot, "
            f"{type(robot).__name__}, are {given.in_words()}: the robot would move otherwise than it was trained. Give "
            "an experiment whose robot has the same relative dims (its delta_mask; docs/tutorials/my_robot.md)"
        )


def openpis_transforms(robot: Robot) -> str | None:
    """What a config of openpi's must say of the robot's actions, as its checkpoints cannot; None if nothing."""
    adapts = getattr(robot, "adapt_to_pi", False)
    try:
        relative = action_dims(dataclasses.replace(robot, adapt_to_pi=False) if adapts else robot).relative  # pyright: ignore[reportCallIssue]
    except UsageError:
        return f"transforms of its own that do what {type(robot).__name__} does"
    runs = [(value, len(list(group))) for value, group in itertools.groupby(relative)]
    mask = ", ".join(str(count if value else -count) for value, count in runs)
    found = [f"DeltaActions and AbsoluteActions of make_bool_mask({mask})"] if any(relative) else []
    if adapts:
        found.insert(0, "AlohaInputs and AlohaOutputs with adapt_to_pi")
    return ", ".join(found) or None
