"""What the `data` verb makes: `prepare` an embedded dataset, a `sample`, demonstrations that it does `collect`.

Each is a class: its fields are the flags, `run` executes it. Read next: `data.py`, the verb and its other commands;
`sample_data.py`, `data/make/embedded.py`, `collect.py`.
"""

import abc
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from openpi_train.command_line import Request
from openpi_train.fields import at_least
from openpi_train.runtime.exits import UsageError
from openpi_train.tools.requests import given_fields

if TYPE_CHECKING:
    from openpi_train.experiment import Experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataRequest(Request, abc.ABC):
    """One command on datasets."""

    @property
    def of_experiment(self) -> str | None:
        """The name of the experiment, if it needs one; unknown flags are then fields of the experiment."""
        return None

    @abc.abstractmethod
    def run(self, experiment: "Experiment | None") -> int | None:
        """Run the command and print the result; returns the exit code, None for 0.

        Raises OSError and ValueError with advice.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepare(DataRequest):
    """Write an embedded dataset and its tokenizer: of the tabletop, or with `--name arithmetic` the arithmetic task.

    Without flags: the dataset that this repository's experiments read under that name (docs/howto/data.md). A run that
    needs such a dataset also writes it.
    """

    # Datasets' folder; None: $OPENPI_TRAIN_HOME/datasets.
    directory: Path | None = None
    # Of the dataset's own folder.
    name: str = "tabletop"
    # Tasks to record, such as reach_red pick_yellow; none: those of `data/make/embedded.py`, as with all that follows.
    tasks: tuple[str, ...] = ()
    # Training episodes of each.
    episodes_per_task: int | None = None
    # Held-out episodes of each.
    val_episodes_per_task: int | None = None
    # Pixels of a side.
    image_size: int | None = None
    # Of scenes and disturbances.
    seed: int | None = None

    def run(self, experiment: "Experiment | None") -> None:
        from openpi_train.data.text import arithmetic

        if self.name == arithmetic.NAME:
            self._refuse_episodes()
            print(f"{arithmetic.prepare(self.directory, seed=self.seed or 0)}: datasets and tokenizer.json")
            return
        import jax

        from openpi_train.data.make.embedded import prepare

        # It simulates on the CPU; jax would otherwise reserve a GPU for nothing.
        jax.config.update("jax_platforms", "cpu")
        changes = given_fields(self, "episodes_per_task", "val_episodes_per_task", "image_size", "seed")
        if self.tasks:
            changes["tasks"] = self.tasks
        made = prepare(self.directory, name=self.name, **changes)
        print(
            f"{made.dataset}: {made.num_episodes} episodes, {made.num_steps} control steps; tokenizer {made.tokenizer}"
        )

    def _refuse_episodes(self) -> None:
        for name in ("tasks", "episodes_per_task", "val_episodes_per_task", "image_size"):
            if getattr(self, name):
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} is for datasets of the tabletop; --name {self.name} takes --seed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(DataRequest):
    """Write a dataset of demonstrations from a simulator, to try everything on.

    It has pictures, states, actions and instructions. By default it takes less than a minute. The same flags give the
    same actions on every machine.
    """

    # The dataset to make.
    out: Annotated[Path, Positional, arg(metavar="OUT")]
    # LeRobot's version 3.0 with videos, RLDS as tensorflow-datasets writes it, or diffusion_policy's replay buffer.
    format: Literal["lerobot", "rlds", "zarr"] = "lerobot"
    # The simulator: the embedded tabletop, or Meta-World (needs the extra sim).
    env: Literal["tabletop", "metaworld"] = "tabletop"
    # Tasks by name, such as reach_red stack_red_blue; none: a few.
    tasks: tuple[str, ...] = ()
    # Episodes of each.
    episodes_per_task: int = at_least(1, 8)
    # Pixels of a side.
    image_size: int = at_least(16, 224)
    # Of scenes and disturbances.
    seed: int = 0
    # Move what is at OUT aside.
    overwrite: bool = False

    def run(self, experiment: "Experiment | None") -> None:
        import jax

        from openpi_train.tools.sample_data import next_commands, sample

        # As for `prepare`.
        jax.config.update("jax_platforms", "cpu")
        made = sample(
            self.out,
            form=self.format,
            env_name=self.env,
            tasks=self.tasks,
            episodes_per_task=self.episodes_per_task,
            image_size=self.image_size,
            seed=self.seed,
            overwrite=self.overwrite,
        )
        print(f"wrote {self.out} ({self.format}), read back:\n{made.account}")
        print(f"go on with (training holds {made.num_held_out} of the {made.num_episodes} episodes out):")
        print("\n".join(f"  {line}" for line in next_commands(self.out, self.env)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collect(DataRequest):
    """Record demonstrations by an environment's scripted expert, as a zarr store."""

    # tabletop, metaworld (needs the extra sim), fetch:reach, fetch:push (fetch), or of ManiSkill maniskill:PushCube-v1,
    # maniskill:StackCube-v1 (maniskill).
    env: Annotated[str, Positional, arg(metavar="ENV")]
    # The store to make; a begun one is continued.
    out: Path
    # Tasks by name, such as reach push; none: all.
    tasks: tuple[str, ...] = ()
    # Successful episodes of each.
    episodes_per_task: int = at_least(1, 20)
    # Pixels of a side; None: the environment's own, of metaworld no pictures.
    image_size: int | None = at_least(1, None)
    # Arguments of what makes a Gymnasium environment, each as NAME=VALUE.
    env_make: Annotated[tuple[str, ...], arg(name="env.make")] = ()
    # Of initial states and disturbances.
    seed: int = 0
    # Processes; the files are the same with any number.
    workers: int = at_least(1, 1)

    def run(self, experiment: "Experiment | None") -> None:
        import jax

        from openpi_train.envs.in_processes import ProcessEnv
        from openpi_train.envs.named_envs import environment
        from openpi_train.tools.collect import collect

        # As for `prepare`.
        jax.config.update("jax_platforms", "cpu")
        env = environment(
            self.env, image_size=self.image_size, settings={"make": self.env_make} if self.env_make else None
        )
        found = collect(
            env.env if isinstance(env, ProcessEnv) else env,  # `workers` are the processes here
            self.out,
            tasks=self.tasks or None,
            episodes_per_task=self.episodes_per_task,
            seed=self.seed,
            workers=self.workers,
        )
        for one in found:
            print(one.text())
        say_what_is_in(self.out)


def say_what_is_in(out: Path) -> None:
    """Print what a zarr store that was written holds."""
    from openpi_train.data.formats.zarr.store import Store
    from openpi_train.data.formats.zarr.zarr_layout import read_layout

    layout = read_layout(Store(out))
    tasks = ", ".join(f"{name} ({prompt!r})" for name, prompt in layout.tasks)
    print(
        f"wrote {out}: {len(layout.episode_ends)} episodes, {layout.episode_ends[-1]} control steps, every block read "
        f"back; tasks {tasks}; train from it with --dataset {out}"
    )
