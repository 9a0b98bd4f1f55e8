"""Open loop: predicted against recorded actions in held-out episodes, in the robot's own units.

Read next: `evaluate_policy.py`, the caller; `evaluation/action_error.py` for normalised units, while training.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from openpi_train.data.robot.norm_stats import mean_action
from openpi_train.data.robot.windows import Windows
from openpi_train.evaluation.baseline import against_mean_action
from openpi_train.json_object import JsonObject
from openpi_train.policy.policy import Policy


@dataclasses.dataclass(frozen=True)
class Predicted:
    """An episode's recorded actions [n, a], and chunks [h, a] predicted at control steps of it.

    `sums` (JSON) are over all predicted control steps inside the episode, per action dim.
    """

    episode: int
    recorded: np.ndarray
    chunks: Mapping[int, np.ndarray]
    sums: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TrainingActions:
    """The mean action of the training data in the model's units, and the standard deviation in the robot's, [a] each.

    A policy that ignores its input learns the former.
    """

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def of(cls, windows: Windows) -> "TrainingActions":
        """Of these training windows."""
        return cls(mean_action(windows), windows.steps.actions[windows.starts].astype(np.float64).std(axis=0))


def held_out_episodes(windows: Windows, count: int) -> list[int]:
    """At most `count` episodes of the split, spread evenly over it."""
    episodes = np.unique(np.searchsorted(windows.source.episode_ends, windows.starts, side="right"))
    chosen = np.linspace(0, len(episodes) - 1, min(count, len(episodes))).round().astype(int)
    return episodes[chosen].tolist()


def observation_at(windows: Windows, step: int) -> dict[str, Any]:
    """The robot's observation at a control step of the dataset, in the form for a policy."""
    first, _ = windows.bounds(np.array([step]))
    behind = np.maximum(np.arange(step - windows.shape.history + 1, step + 1), first)
    images = {feature: windows.source.frames(behind, feature) for feature in windows.robot.cameras.values()}
    seen = {**images, "state": windows.steps.state[behind]}
    if windows.shape.history == 1:
        seen = {name: value[0] for name, value in seen.items()}
    return {**seen, "prompt": windows.prompt_at(step)}


def predict(policy: Policy, windows: Windows, episode: int, batch_size: int, mean: np.ndarray) -> Predicted:
    """Query the policy once per chunk length of the episode, with step numbers as draws.

    Args: `batch_size` is the number of observations per query, `mean` [a] the mean action in the model's units.
    """
    ends = windows.source.episode_ends
    start, end = (int(ends[episode - 1]) if episode else 0), int(ends[episode])
    places = windows.starts[(windows.starts >= start) & (windows.starts < end)]
    steps = [int(places[0])]
    for place in places.tolist():
        if place >= steps[-1] + windows.shape.num_ahead:
            steps.append(place)
    answers: list[dict[str, Any]] = []
    for first in range(0, len(steps), batch_size):
        part = steps[first : first + batch_size]
        answers += policy.infer_batch([observation_at(windows, step) for step in part], draws=part)
    recorded = np.asarray(windows.steps.actions[start:end], np.float64)
    _, chunk_ends = windows.chunk_bounds(np.array(steps))
    chunks = {
        step - start: answer["actions"][: chunk_end - step]
        for step, chunk_end, answer in zip(steps, chunk_ends.tolist(), answers, strict=True)
    }
    told = np.concatenate([recorded[step : step + len(chunk)] for step, chunk in chunks.items()])
    states = {place: windows.steps.state[start + place] for place in chunks}
    constant = [
        windows.robot.from_model(np.tile(mean, (len(chunk), 1)), states[place]) for place, chunk in chunks.items()
    ]
    difference = np.concatenate([*chunks.values()]) - told
    parts = {"absolute": np.abs(difference), "squared": difference**2}
    parts["squared_of_mean_action"] = (np.concatenate(constant) - told) ** 2
    sums = {name: part.sum(0).tolist() for name, part in parts.items()}
    return Predicted(episode, recorded, chunks, {"episode": episode, "count": len(told), **sums})


def summary(names: Sequence[str], errors: Sequence[JsonObject], deviation: np.ndarray) -> dict[str, Any]:
    """Per action dim the mean absolute and the root mean squared error, and the latter of the mean action.

    `names` end with the units, `errors` are the sums of episodes. They are added in the order of episodes, whichever
    process measured them. `overall` has the root mean squared errors over dims in units of the training actions'
    `deviation` [a], without dims that never move, and `verdict` compares them.
    """
    ordered = sorted(errors, key=lambda error: error["episode"])
    count = sum(error["count"] for error in ordered)
    absolute, squared, constant = (
        np.sum([error[name] for error in ordered], axis=0) / count
        for name in ("absolute", "squared", "squared_of_mean_action")
    )
    columns = zip(names, absolute, np.sqrt(squared), np.sqrt(constant), strict=True)
    dims = {
        name: {"mean_absolute": float(a), "rms": float(r), "rms_of_mean_action": float(c)} for name, a, r, c in columns
    }
    found = {"episodes": [error["episode"] for error in ordered], "control_steps": count, "dims": dims}
    moves = deviation > 0
    if not moves.any():
        return found
    whole = [float(np.sqrt((part[moves] / deviation[moves] ** 2).mean())) for part in (squared, constant)]
    overall = {"rms": whole[0], "rms_of_mean_action": whole[1]}
    return {**found, "overall": overall, "verdict": against_mean_action(*whole).words}


def counted(found: JsonObject, settings: JsonObject) -> str:
    """What was evaluated, in words: of a `summary`, and the request (JSON) that asked for it."""
    number, data, only = len(found["episodes"]), settings.get("data"), settings.get("only")
    episodes = "episode" if number == 1 else "episodes"
    named = f"{number} held-out {episodes}" if data is None else f"{number} {episodes} of {data}"
    marked = "" if only is None else f" where {only} is true"
    return f"{named}, {found['control_steps']} control steps{marked}"


def table(found: Mapping[str, Any]) -> str:
    """A table with one line per action dim, and the verdict."""
    width = max(len(name) for name in (*found["dims"], "action"))
    lines = [f"{'action':<{width}}  mean absolute  root mean square  of the mean action"]
    for name, one in found["dims"].items():
        numbers = (one["mean_absolute"], one["rms"], one["rms_of_mean_action"])
        lines.append(f"{name:<{width}}  {numbers[0]:>13.4g}  {numbers[1]:>16.4g}  {numbers[2]:>18.4g}")
    if "verdict" in found:
        whole = found["overall"]
        lines.append(
            f"root mean square over all dims, in standard deviations of the training actions: {whole['rms']:.4g}, and "
            f"{whole['rms_of_mean_action']:.4g} of the mean action\nthe policy is {found['verdict']}"
        )
    return "\n".join(lines)
