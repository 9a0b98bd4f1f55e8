"""Keeps a few rollouts of an iteration to look at, in the run's `rollouts/<iteration>`. Read next: `rollout_feed.py`.

rollouts.jsonl              a line per rollout: of texts prompt and completion, of robots what happened
<k>_success.mp4, _failure   what a robot saw in line k, a picture per query
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from openpi_train.data.core.files import write_text
from openpi_train.envs.video import side_by_side, write_video
from openpi_train.rl.advantages import mixed
from openpi_train.rl.collection import Collection
from openpi_train.rl.outcomes import SOLVED
from openpi_train.rl.rollouts import Actor, Rollouts
from openpi_train.runtime import agree

logger = logging.getLogger(__name__)

ROLLOUTS = "rollouts.jsonl"
_PICTURES_PER_S = 4


def best_and_worst(collected: Collection, most: int) -> list[int]:
    """At most so many rollouts: of each group the one with the highest and the one with the lowest reward.

    Groups whose outcomes differ come first. One rollout stands for a group with equal rewards. Fillers, and rollouts
    without a reward, are left out.
    """
    rewards, groups = collected.rollouts.rewards, collected.groups
    is_known = collected.counts & ~np.isnan(rewards)
    is_mixed = mixed(collected.rollouts.outcomes, groups)
    found: list[int] = []
    for wanted in (True, False):
        for group in np.unique(groups[is_known & (is_mixed == wanted)]):
            numbers = np.flatnonzero(is_known & (groups == group))
            found += dict.fromkeys(int(numbers[place(rewards[numbers])]) for place in (np.argmax, np.argmin))
    return found[:most]


def keep_some(folder: Path, actor: Actor, collected: Collection, most: int) -> None:
    """Write `best_and_worst` of the rollouts that are learnt from to `folder`. Every process must call it.

    A process makes videos of the rollouts whose pictures it has. A folder that cannot be written is warned of.
    """
    rollouts, shown = collected.rollouts, best_and_worst(collected, most)
    films: dict[str, str] = {}
    try:
        for place, number in enumerate(shown):
            if pictures := actor.pictures(rollouts, number):
                outcome = "success" if rollouts.outcomes[number] >= SOLVED else "failure"
                frames = [side_by_side([picture[name] for name in sorted(picture)]) for picture in pictures]
                films[str(number)] = write_video(folder / f"{place:02d}_{outcome}", frames, _PICTURES_PER_S).name
    except OSError as error:
        logger.warning("no videos of rollouts in %s: %s", folder, error)
    videos = {name: video for part in agree.gather("videos of rollouts", films) for name, video in part.items()}
    if jax.process_index() != 0:
        return
    lines = [_line(actor, rollouts, number, videos.get(str(number))) for number in shown]
    try:
        write_text(folder / ROLLOUTS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    except OSError as error:
        logger.warning("no rollouts are kept in %s: %s", folder, error)


def _line(actor: Actor, rollouts: Rollouts, number: int, video: str | None) -> Mapping[str, Any]:
    outcome = float(rollouts.outcomes[number])
    return {
        "prompt_id": int(rollouts.prompt_ids[number]),
        "reward": float(rollouts.rewards[number]),
        "outcome": None if np.isnan(outcome) else outcome,
        "is_cut": bool(rollouts.is_cut[number]),
        **actor.shown(rollouts, number),
        **({} if video is None else {"video": video}),
    }
