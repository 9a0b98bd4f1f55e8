"""The keys of a YAML config of the PyTorch post-training tool, for one algorithm. Read next: `training_flags.py`."""

from collections.abc import Mapping
from typing import Literal

from openpi_train.doors.posttraining.without_flag import WITHOUT_FLAG
from openpi_train.doors.yaml_file import YamlFile
from openpi_train.json_object import JsonObject

Algorithm = Literal["sft", "rm", "dpo", "ppo", "grpo"]
# The algorithms that learn from a policy's own completions.
RL_ALGORITHMS: tuple[Algorithm, ...] = ("ppo", "grpo")
# The sections of hyperparameters that belong to an algorithm, by its name.
SECTIONS: Mapping[Algorithm, tuple[str, ...]] = {
    "sft": ("sft",),
    "rm": ("reward", "rm"),
    "dpo": ("dpo",),
    "ppo": ("ppo", "rlhf"),
    "grpo": ("grpo", "rlhf"),
}


class YamlConfig(YamlFile):
    """The keys of a YAML config, for one algorithm. Args and errors are those of `YamlFile`."""

    def __init__(self, config: JsonObject, algorithm: Algorithm, given: JsonObject):
        super().__init__(config, WITHOUT_FLAG, "the tool", given)
        self.algorithm: Algorithm = algorithm
        # The optimizer steps of an iteration of RL, within which nothing is saved.
        self.iteration_steps = 1

    def steps(self, key: str, default: int | None = None) -> int | None:
        """A number of optimizer steps, as `count`, of whole iterations."""
        value = self.count(key, default)
        if value is None or value % self.iteration_steps == 0:
            return value
        self.note(f"whole iterations, of {self.iteration_steps} steps", key)
        return self.whole_iterations(value)

    def whole_iterations(self, num_steps: int) -> int:
        """At least so many steps."""
        return -(-num_steps // self.iteration_steps) * self.iteration_steps

    @property
    def learns_from_rollouts(self) -> bool:
        """Whether the algorithm learns from the policy's own completions."""
        return self.algorithm in RL_ALGORITHMS

    def own(self, *names: str) -> tuple[str, ...]:
        """The keys of the algorithm's own hyperparameters: in `training`, at the top, or in its section."""
        return (*names, *self.in_section(*names))

    def plain_own(self, rows: Mapping[str, str]) -> None:
        """`plain` for the algorithm's own hyperparameters."""
        for name, row in rows.items():
            kind, *names = row.split()
            self.plain({name: " ".join((kind, *self.own(*names)))})

    def in_section(self, *names: str) -> tuple[str, ...]:
        """The keys of these names in the algorithm's section."""
        return tuple(f"{section}.{name}" for section in SECTIONS[self.algorithm] for name in names)

    def leave_others(self) -> None:
        """Note the sections that belong to other algorithms."""
        mine = SECTIONS[self.algorithm]
        for section in (name for names in SECTIONS.values() for name in names if name not in mine):
            self.note_all(section, f"for another algorithm than {self.algorithm}")
