"""What a family says of a model's parameters: published names, groups, which stay fixed, low-rank factors.

Read next: `model_config.py`, whose `param_rules` is one; `language/accompanied.py`, whose rules are made of others.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from openpi_train.parallel.params import ParamLeaves


def _own_name(path: str) -> str:
    return path


def _none(path: str) -> bool:
    del path
    return False


def _bfloat16(path: str) -> Any:
    del path
    return jnp.bfloat16


def _no_advice(missing: list[str], extra: list[str], misshapen: list[str]) -> list[str]:
    del missing, extra, misshapen
    return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamRules:
    """What is known of the parameters of a model, by path. Defaults: nothing is special about them.

    Attributes:
        public_name: the name under which the parameter of a path is published in checkpoints (default: the path).
        groups: names that `--freeze` takes beside patterns, each with the pattern of paths that it stands for.
        frozen: whether the model's own design keeps the parameter of a path fixed (LoRA's base weights, for one).
        frozen_dtype: the type in which a run keeps the parameter of a path if it is frozen (default: bfloat16, as
            openpi does): nothing updates it, so it needs no float32 master copy.
        explain: what can be said of a checkpoint that does not fit, as sentences with what to do. Of published names:
            those that the checkpoint lacks, those that the model does not know, those of other shapes.
        merge_lora: parameters by path with low-rank adapters folded into the weights, which are those of
            `ModelConfig.without_lora()`; as they are where there are none.
    """

    public_name: Callable[[str], str] = _own_name
    groups: Mapping[str, str] = dataclasses.field(default_factory=dict)
    frozen: Callable[[str], bool] = _none
    frozen_dtype: Callable[[str], Any] = _bfloat16
    explain: Callable[[list[str], list[str], list[str]], list[str]] = _no_advice
    merge_lora: Callable[[ParamLeaves], dict[str, Any]] = dict

    def published_below(self, name: str) -> "ParamRules":
        """The same, but that published names begin with `name`."""
        return dataclasses.replace(self, public_name=lambda path: name + self.public_name(path))

    @classmethod
    def of_parts(cls, parts: Mapping[str, "ParamRules"]) -> "ParamRules":
        """The rules of a model made of these parts, by what the paths of each begin with; without advice."""

        def found(path: str) -> tuple["ParamRules", str]:
            prefix = next(prefix for prefix in parts if path.startswith(prefix))
            return parts[prefix], path.removeprefix(prefix)

        def public_name(path: str) -> str:
            rules, below = found(path)
            return rules.public_name(below)

        def frozen(path: str) -> bool:
            rules, below = found(path)
            return rules.frozen(below)

        def frozen_dtype(path: str) -> Any:
            rules, below = found(path)
            return rules.frozen_dtype(below)

        def merge_lora(params: ParamLeaves) -> dict[str, Any]:
            merged: dict[str, Any] = {}
            for prefix, rules in parts.items():
                below = {path.removeprefix(prefix): leaf for path, leaf in params.items() if path.startswith(prefix)}
                merged |= {prefix + path: leaf for path, leaf in rules.merge_lora(below).items()}
            return merged

        groups = {
            name: f"{prefix}(?:{pattern})" for prefix, rules in parts.items() for name, pattern in rules.groups.items()
        }
        return cls(
            public_name=public_name, groups=groups, frozen=frozen, frozen_dtype=frozen_dtype, merge_lora=merge_lora
        )
