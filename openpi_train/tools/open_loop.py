"""Open loop: predicted against recorded actions in held-out episodes, in the robot's own units.

Read next: `evaluate_policy.py`, the caller; `evaluation/action_error.py` for normalised units, while training.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from openpi_train.data.robot.windows import Windows
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


def predict(policy: Policy, windows: Windows, episode: int, batch_size: int) -> Predicted:
    """Query the policy once per chunk length of the episode, with step numbers as draws.

    Args: `batch_size` is the number of observations per query.
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
    chunks = {step - start: answer["actions"][: end - step] for step, answer in zip(steps, answers, strict=True)}
    told = np.concatenate([recorded[step : step + len(chunk)] for step, chunk in chunks.items()])
    difference = np.concatenate([*chunks.values()]) - told
    parts = {"absolute": np.abs(difference), "squared": difference**2, "recorded": told, "recorded_squared": told**2}
    sums = {name: part.sum(0).tolist() for name, part in parts.items()}
    return Predicted(episode, recorded, chunks, {"episode": episode, "count": len(told), **sums})


def summary(names: Sequence[str], errors: Sequence[JsonObject]) -> dict[str, Any]:
    """Per action dim the mean absolute and the root mean squared error, and the latter of the best constant.

    `names` end with the units, `errors` are the sums of episodes. They are added in the order of episodes, whichever
    process measured them.
    """
    ordered = sorted(errors, key=lambda error: error["episode"])
    count = sum(error["count"] for error in ordered)
    absolute, squared, total, total_squared = (
        np.sum([error[name] for error in ordered], axis=0)
        for name in ("absolute", "squared", "recorded", "recorded_squared")
    )
    spread = np.sqrt(np.maximum(total_squared / count - (total / count) ** 2, 0))
    columns = zip(names, absolute / count, np.sqrt(squared / count), spread, strict=True)
    dims = {name: {"mean_absolute": float(a), "rms": float(r), "rms_of_mean": float(s)} for name, a, r, s in columns}
    return {"episodes": [error["episode"] for error in ordered], "control_steps": count, "dims": dims}


def table(found: Mapping[str, Any]) -> str:
    """A table with one line per action dim."""
    width = max(len(name) for name in (*found["dims"], "action"))
    lines = [f"{'action':<{width}}  mean absolute  root mean square  of the best constant"]
    for name, one in found["dims"].items():
        lines.append(
            f"{name:<{width}}  {one['mean_absolute']:>13.4g}  {one['rms']:>16.4g}  {one['rms_of_mean']:>20.4g}"
        )
    return "\n".join(lines)
