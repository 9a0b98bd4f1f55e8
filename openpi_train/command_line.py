"""Flags of a command from the fields of a frozen dataclass, by tyro. Read next: `fields.py`, `cli.py`.

    class Report(Request):
        '''What the command does.'''

        # What the flag is for.
        num_rows: int = at_least(1, 20)

Nothing heavy is imported, so `--help` does not wait for jax.
"""

import dataclasses
import difflib
import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import tyro

from openpi_train.fields import at_least, too_small
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.world import WorldFlags

T = TypeVar("T")
# For a tuple of dataclasses: flags without the dataclass's name as prefix.
Own = Annotated[T, tyro.conf.arg(name="")]
_TYPES = tyro.constructors.ConstructorRegistry()


@_TYPES.primitive_rule
def _whole_numbers(
    type_info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[int] | None:
    """Flags that are whole numbers."""
    if type_info.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole_number(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )


def whole_number(word: str) -> int:
    """The number of a word such as "10000", "10_000" or "1e4". Raises ValueError if it is none, or not a whole one."""
    try:
        return int(word)
    except ValueError:
        number = float(word)
    if not number.is_integer():
        raise ValueError(f"{word} is not a whole number")
    return int(number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a command: a field's comment is the flag's help, `at_least` its limit."""

    def check(self) -> list[str]:
        """A sentence for every conflict between the fields, with the flag to change."""
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessFlags(WorldFlags):
    """Which process of the run this is; not part of the experiment."""

    # CPU devices to make in this process.
    devices_per_process: int | None = at_least(1, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainFlags(ProcessFlags):
    """Flags of a training command other than its experiment's fields."""

    # Print what the run needs, and start nothing.
    dry_run: bool = False


def _env_flag(name: str) -> Any:
    return tyro.conf.arg(name=f"env.{name}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvFlags(Request):
    """The environment to act in, and what is set of one that is Gymnasium's; None: what it says of itself."""

    # The environment of closed-loop evaluations, and of RL: tabletop, metaworld, metaworld:TASK, libero:SUITE,
    # maniskill:ID, aloha:TASK, fetch:TASK, pusht, gym:ID or FILE.py:FUNCTION. None: the experiment's own.
    env: Annotated[str | None, tyro.conf.arg(aliases=("--rl.env",))] = None
    # The instruction that the policy gets.
    env_prompt: Annotated[str | None, _env_flag("prompt")] = None
    # Control steps per second.
    env_rate: Annotated[float | None, _env_flag("rate")] = None
    # The entry of Gymnasium's info that says whether an episode has succeeded; terminated: it has where it ends.
    env_success: Annotated[str | None, _env_flag("success")] = None
    # Whether an episode succeeds at any control step, or only if it has succeeded at its last one.
    env_success_at: Annotated[Literal["any", "last"] | None, _env_flag("success-at")] = None
    # Entries of the observation that are the state, in this order.
    env_state: Annotated[tuple[str, ...] | None, _env_flag("state")] = None
    # Names of cameras, each as NAME=ENTRY of the observation.
    env_cameras: Annotated[tuple[str, ...] | None, _env_flag("cameras")] = None
    # Arguments of what makes the environment, each as NAME=VALUE.
    env_make: Annotated[tuple[str, ...] | None, _env_flag("make")] = None
    # Clip actions to the bounds that the environment declares.
    env_clip: Annotated[bool | None, _env_flag("clip")] = None

    @property
    def env_settings(self) -> dict[str, Any]:
        """What is set of the environment, by the rest of the flag's name."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(EnvFlags) if field.name != "env"}
        return {name.removeprefix("env_"): value for name, value in given.items() if value is not None}


# Flags of LeRobot, TRL and openpi, and what they are here.
OF_OTHERS = {
    other: flag
    for flag, others in {
        "--batch-size": "--train-batch-size --dataloader.batch-size",
        "--checkpoint-base-dir": "--output-dir --save-dir --log-dir",
        "--data.max-length": "--max-length --max-seq-length --max-seq-len",
        "--dataset": "--dataset.repo-id --dataset.root --dataset-name --dataset-path --data-path --train-file",
        "--env": "--env.type --env.task",
        "--eval.interval": "--eval-freq --eval-steps --eval-interval",
        "--exp-name": "--job-name --run-name --experiment-name",
        "--grad-accum": "--gradient-accumulation-steps",
        "--log-interval": "--log-freq --logging-steps --log-steps",
        "--lr-schedule.peak-lr": "--lr --learning-rate --optimizer.lr --policy.optimizer-lr",
        "--lr-schedule.warmup-steps": "--warmup-steps --num-warmup-steps --scheduler.num-warmup-steps",
        "--micro-batch-size": "--per-device-train-batch-size",
        "--model.action-horizon": "--policy.chunk-size --policy.horizon --chunk-size --action-horizon",
        "--model.dtype": "--bf16 --fp16 --dtype --policy.dtype --policy.use-amp",
        "--model.path": "--model-name-or-path --model --base-model",
        "--model.remat": "--gradient-checkpointing --policy.gradient-checkpointing",
        "--num-epochs": "--epochs --num-train-epochs",
        "--num-train-steps": "--steps --num-steps --max-steps --train-steps --total-steps",
        "--optimizer.weight-decay": "--weight-decay",
        "--project-name": "--wandb.project --wandb-project",
        "--reward": "--reward-funcs --reward-functions --reward-function",
        "--rl.group-size": "--num-generations --group-size",
        "--rl.max-new-tokens": "--max-completion-length --max-new-tokens",
        "--save-interval": "--save-freq --save-steps",
        "--wandb-enabled": "--wandb.enable --wandb",
    }.items()
    for other in others.split()
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverrideFlags(EnvFlags):
    """Flags that set many fields of an experiment at once; fields that are given explicitly take precedence."""

    # A DeepSpeed JSON config: its equivalent flags are logged and used.
    deepspeed: str | None = None
    # adamw, adafactor, lion, muon or sgd; set its fields with --optimizer.FIELD.
    optimizer: str | None = None
    # Train on the dataset at this path, of demonstrations or texts; its format is detected. Also the name of
    # a LeRobot dataset that LeRobot has downloaded (HF_LEROBOT_HOME). Texts may also be hub:USER/NAME.
    dataset: str | None = None
    # Train on this LeRobot dataset: a folder, or its name on the Hugging Face hub, which is looked for where LeRobot
    # downloads to (HF_LEROBOT_HOME). Robot and other settings stay.
    repo_id: Annotated[str | None, tyro.conf.arg(name="data.repo-id")] = None
    # Train on a mixture of these datasets in place of the experiment's own, each as PATH or PATH:WEIGHT; a weight is a
    # share of the rows, relative to the others', and 1 if none is given. Texts may also be hub:USER/NAME. The fields of
    # each are flags, numbered from 0 (data.datasets.1.weight).
    data_mixture: Annotated[tuple[str, ...] | None, tyro.conf.arg(name="data.mixture")] = None
    # The robot that the features of a LeRobot dataset describe, in place of the experiment's: its state, its cameras,
    # and its actions, which the model sees as recorded, or relative to the state at a chunk's start (all dims with a
    # name of the state's but grippers). Models without padded dims get its dims and cameras.
    data_robot: Annotated[Literal["recorded", "relative"] | None, tyro.conf.arg(name="data.robot")] = None
    # What completions are rewarded for, in place of the experiment's rewards: FILE.py:FUNCTION, one of TRL's form too,
    # or a name of docs/howto/reinforcement_learning.md. Of several the sum is the reward.
    reward: tuple[str, ...] | None = None
    # Train this language model: a folder in Hugging Face's form, or hub:USER/NAME. Its config.json sets the sizes, and
    # start weights and tokenizer come from there, too.
    model_path: Annotated[str | None, tyro.conf.arg(name="model.path")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags(Request):
    """The fields of an experiment that say where its run lies, and whether it goes on; None: the experiment's own."""

    exp_name: str = ""
    checkpoint_base_dir: str | None = None
    resume: bool = False
    resume_from: str | None = None
    overwrite: bool = False


def parse(kind: Callable[..., T], argv: Sequence[str], command: str, about: str | None = None) -> T:
    """Parse flags into a `kind`, a dataclass or a tuple of `Own[dataclass]`; `about` is the help's first paragraph.

    Exits with code 2 for an unknown flag, naming the closest ones, and for a value of the wrong type. Raises UsageError
    for values that `at_least` or `Request.check` forbid.
    """
    return _checked(tyro.cli(kind, args=argv, registry=_TYPES, **_options(command, about)))


def parse_known(
    kind: Callable[..., T], argv: Sequence[str], command: str, about: str | None = None, add_help: bool = True
) -> tuple[T, list[str]]:
    """Like `parse`; also returns the unknown words, in order."""
    options: dict[str, Any] = {"registry": _TYPES, **_options(command, about)}
    found, rest = tyro.cli(kind, args=argv, return_unknown_args=True, add_help=add_help, **options)
    return _checked(found), rest


def parse_fields(kind: Any, default: Any, argv: Sequence[str], command: str, about: str) -> Any:
    """The `default`, a `kind`, with the flags of `argv` applied: what is left when `parse_known` has taken its own.

    Exits with code 2 on an unknown flag, naming the closest ones, also among those of `TrainFlags` and `OverrideFlags`.
    """
    try:
        prog = f"python -m openpi_train {command}"
        return tyro.cli(kind, default=default, args=argv, prog=prog, description=about, registry=_TYPES)
    except SystemExit as end:
        if end.code:
            for word, flag in misspelt(argv):
                print(f"{word}: did you mean {flag}?", file=sys.stderr)
        raise


def misspelt(argv: Sequence[str]) -> list[tuple[str, str]]:
    """The words that are flags of other trainers, or nearly one of these, each with the flag here."""
    flags = []
    for kind in (TrainFlags, OverrideFlags):
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            given = [getattr(one, "name", None) for one in getattr(hint, "__metadata__", ())]
            flags.append("--" + (next(filter(None, given), None) or name.replace("_", "-")))
    found = []
    for word in (word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")):
        if word in OF_OTHERS:
            found.append((word, OF_OTHERS[word]))
            continue
        alike = [flag for flag in flags if flag.count(".") == word.count(".")]
        found += [(word, flag) for flag in difflib.get_close_matches(word, alike, n=1, cutoff=0.85)]
    return found


def changed_flags(request: Request, names: Sequence[str] | None = None) -> list[str]:
    """The flags, of these fields or of all, whose values are not their defaults."""
    return [
        f"--{field.name.replace('_', '-')}"
        for field in dataclasses.fields(request)
        if (names is None or field.name in names) and getattr(request, field.name) != field.default
    ]


def one_word(convert: Callable[[str], tuple[object, ...]], metavar: str) -> tyro.constructors.PrimitiveConstructorSpec:
    """An annotation for a tuple that `convert` makes from one word, such as comma-separated values."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: convert(words[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )


def _options(command: str, about: str | None) -> dict[str, Any]:
    return {
        "prog": f"python -m openpi_train {command}",
        "description": None if about is None else inspect.cleandoc(about),
    }


def _checked(found: T) -> T:
    problems = []
    for part in found if isinstance(found, tuple) else (found,):
        problems += too_small(part)
        problems += part.check() if isinstance(part, Request) else []
    if problems:
        raise UsageError("\n".join(problems))
    return found
