"""What flags, configs and metrics were called up to commit f4f83118, and are called now.

Command lines, runs and checkpoints of that time are read as if they had the present names. Read next:
`experiment_flags.py`, `policy/experiment_json.py`, `tools/run_files.py`.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_FIELDS = {
    ("Experiment", "practice"): "rl",
    ("PolicyGradient", "law"): "distribution",
    ("IndicatorFlow", "law"): "distribution",
    ("WeightedFlow", "law"): "distribution",
}
_CLASSES = {
    "TextPractice": "TextRL",
    "RobotPractice": "RobotRL",
    "TokenLaw": "TokenDistribution",
    "ActionTokenLaw": "ActionTokenDistribution",
    "FlowLaw": "FlowDistribution",
    "DenoisingLaw": "DenoisingDistribution",
}
# Of fields, by the last part of their flag.
_VALUES = {("average", "attempts"): "rollouts"}
_FLAGS = {"--practice": "--rl", "--objective.law": "--objective.distribution"}
_FLAG = re.compile(r"(--practice|--objective\.law)(?=[.=]|$)")
_METRICS = {
    "practice/attempts": "rl/rollouts",
    "practice/attempts_per_s": "rl/rollouts_per_s",
    "context": "prompt_id",
}
_METRIC = "practice/"


def present_words(words: Sequence[str]) -> list[str]:
    """A command line's words with the present names of flags; says which had other ones."""
    found: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        present = _FLAG.sub(lambda match: _FLAGS[match[1]], word, count=1) if word.startswith("--") else word
        if present != word:
            old, new = (one.partition("=")[0] for one in (word, present))
            logger.warning("%s is called %s now", old, new)
        flag, equals, value = present.rpartition("=")
        field = (flag if equals else before).rpartition(".")[2]
        found.append(f"{flag}{equals}{_VALUES.get((field, value), value)}")
    return found


def present_config(value: object) -> Any:
    """A config as `fields.as_json` stored it, with the present names."""
    if isinstance(value, list):
        return [present_config(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get("__class__", "")
    found = {_FIELDS.get((kind, name), name): present_config(item) for name, item in value.items()}
    for (field, old), new in _VALUES.items():
        if found.get(field) == old:
            found[field] = new
    return {**found, "__class__": _CLASSES.get(kind, kind)} if kind else found


def present_metrics(line: Mapping[str, object]) -> dict[str, Any]:
    """A line of metrics, or of the rollouts that are kept to look at, with the present names."""
    return {_present_metric(name): value for name, value in line.items()}


def _present_metric(name: str) -> str:
    return _METRICS.get(name) or (f"rl/{name.removeprefix(_METRIC)}" if name.startswith(_METRIC) else name)
