"""Comparison of a checkpoint's leaves with those that a model needs: none may be dropped, missing or invented.

Read next: `checkpoint_formats.py`, which opens checkpoints.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from openpi_train.runtime.exits import CheckpointError

# Number of names of one kind that an error lists before it only counts.
_LISTED = 8


# A model's advice for (missing names, unknown names, names of another shape).
Explain = Callable[[list[str], list[str], list[str]], list[str]]


def account(
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    *,
    where: str,
    may_miss: str | None = None,
    explain: Explain | None = None,
) -> None:
    """Check that the found leaves are the expected ones, by name, shape and kind of number.

    Floating-point types of all widths are one kind: they are cast when they are placed.

    Args:
        found, expected: objects with a shape and a dtype, by name.
        where: the checkpoint's name in errors.
        may_miss: a regular expression; expected names that fully match it may be absent.
        explain: the model's advice on the differences, as sentences (`ParamRules.explain`).

    Raises:
        CheckpointError: with all differences, the closest names, and what to do.
    """
    optional = re.compile(may_miss) if may_miss else None
    missing = [name for name in expected if name not in found and not (optional and optional.fullmatch(name))]
    extra = [name for name in found if name not in expected]
    both = [name for name in expected if name in found]
    misshapen = [name for name in both if tuple(found[name].shape) != tuple(expected[name].shape)]
    other_kind = [name for name in both if _kind(found[name]) != _kind(expected[name])]
    kinds = {
        "missing in the checkpoint": [_with_closest(name, extra) for name in missing],
        "in the checkpoint, but unknown to the model": extra,
        "of another shape": [
            f"{name} is {tuple(found[name].shape)}, the model wants {tuple(expected[name].shape)}" for name in misshapen
        ],
        "of another kind of number": [
            f"{name} is {found[name].dtype}, the model wants {expected[name].dtype}" for name in other_kind
        ],
    }
    if not any(kinds.values()):
        return
    advice = [*_explain(missing, extra, both), *(explain(missing, extra, misshapen) if explain else [])]
    advice = advice or ["compare the model's variants and sizes with the checkpoint's"]
    lines = [
        f"{where} does not fit the model: of {len(expected)} leaves that it needs, "
        f"{len(both) - len(set(misshapen) | set(other_kind))} are there as they should be"
    ]
    for title, names in kinds.items():
        if names:
            lines += [f"{title} ({len(names)}):", *(f"  {name}" for name in names[:_LISTED])]
        if len(names) > _LISTED:
            lines.append(f"  ... and {len(names) - _LISTED} more")
    raise CheckpointError("\n".join([*lines, *(f"  -> {sentence}" for sentence in advice)]))


def _kind(leaf: Any) -> str:
    dtype = np.dtype(leaf.dtype)
    # ml_dtypes' floats, such as bfloat16, have numpy's kind "V".
    return "f" if dtype.kind in "fV" else "i" if dtype.kind in "iu" else dtype.kind


def _explain(missing: list[str], extra: list[str], both: list[str]) -> list[str]:
    """Advice that applies to any model."""
    if not both:
        return ["no name is the model's: this is a checkpoint of another model, or in another format"]
    lora = [name for name in extra if "lora" in name]
    if lora and len(lora) == len(extra) and not missing:
        return [
            f"these {len(lora)} are LoRA factors and the model has none: choose the model's LoRA variants, "
            "or merge the factors into the weights first with `convert --merge-lora`"
        ]
    if all("lora" in name for name in both) and missing:
        return [
            "the checkpoint holds LoRA factors only: they need the weights that they were trained on, in one checkpoint"
        ]
    if missing and all("lora" in name for name in missing) and not extra:
        return [
            "the checkpoint has no LoRA factors, but the model has: choose its plain variants; a LoRA run can use it "
            "unchanged as start weights (--weight-loader.params-path)"
        ]
    return []


def _with_closest(name: str, extra: list[str]) -> str:
    closest = difflib.get_close_matches(name, extra, n=1)
    return f"{name} (closest in the checkpoint: {closest[0]})" if closest else name
