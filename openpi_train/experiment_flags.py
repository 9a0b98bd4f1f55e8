"""An experiment and the flags of a command line: the one way from words to an `Experiment`.

Experiments by name or file, of another tool's config and of a run that goes on are built alike: first the flags that
set many fields, in the order of `OVERRIDES`, then each field's own. Nothing heavy is imported with this module, so
`--help` is fast. Read next: `registry.py`, `choice.py`.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from openpi_train.former_names import present_words
from openpi_train.runtime.exits import ErrorCollector, UsageError, reported_as

if TYPE_CHECKING:
    from openpi_train.command_line import OverrideFlags
    from openpi_train.data.core.source import SourceConfig
    from openpi_train.experiment import Experiment

HELP = ("-h", "--help", "--help-all")


@dataclasses.dataclass(frozen=True)
class Override:
    """A flag that sets many fields: an attribute of `OverrideFlags`, and what its value makes of an experiment.

    Of a run that `goes_on`, what it has recorded of its dataset and its model is not read again. `--help` applies only
    what is `in_help`: what is quick, and changes the fields or their defaults.
    """

    field: str
    apply: Callable[["Experiment", Any, bool], "Experiment"]
    in_help: bool = False


def _optimizer(experiment: "Experiment", name: str, goes_on: bool) -> "Experiment":
    from openpi_train.optim import named_optimizer

    return dataclasses.replace(experiment, optimizer=named_optimizer(name, experiment.optimizer))


def _dataset(experiment: "Experiment", path: str, goes_on: bool) -> "Experiment":
    from openpi_train import choice
    from openpi_train.data.text.text_data import TextData

    if isinstance(experiment.data, TextData):
        return choice.on_texts(experiment, path)
    source = choice.source_of(path)
    return experiment if goes_on and choice.is_on(experiment, source) else choice.on_dataset(experiment, source)


def _repo_id(experiment: "Experiment", repo_id: str, goes_on: bool) -> "Experiment":
    from openpi_train import choice

    return choice.on_repo_id(experiment, repo_id)


def _mixture(experiment: "Experiment", words: Sequence[str], goes_on: bool) -> "Experiment":
    from openpi_train import choice

    return choice.on_mixture(experiment, words)


def _robot(experiment: "Experiment", actions: str, goes_on: bool) -> "Experiment":
    from openpi_train import choice

    return choice.on_features(experiment, relative=actions == "relative")


def _reward(experiment: "Experiment", names: Sequence[str], goes_on: bool) -> "Experiment":
    from openpi_train import choice

    return choice.on_rewards(experiment, names)


def _environment(experiment: "Experiment", name: str, goes_on: bool) -> "Experiment":
    from openpi_train.choice import on_env
    from openpi_train.envs.named_envs import environment

    with reported_as(UsageError):
        return on_env(experiment, environment(name))


def _environment_settings(experiment: "Experiment", settings: Mapping[str, object], goes_on: bool) -> "Experiment":
    from openpi_train.choice import on_env
    from openpi_train.envs.named_envs import with_settings

    return on_env(experiment, with_settings(experiment.robot_eval.closed_loop.env, settings))


def _model(experiment: "Experiment", path: str, goes_on: bool) -> "Experiment":
    from openpi_train import choice
    from openpi_train.models.language.huggingface import named_model
    from openpi_train.models.language.language_part import language_of

    language = language_of(experiment.model)
    if language is None or not goes_on or language.path != path:
        language = named_model(path)
    return choice.on_model(experiment, language)


OVERRIDES = (
    Override("optimizer", _optimizer, in_help=True),
    Override("dataset", _dataset, in_help=True),
    Override("repo_id", _repo_id, in_help=True),
    Override("data_mixture", _mixture),
    Override("data_robot", _robot),
    Override("reward", _reward, in_help=True),
    Override("env", _environment),
    Override("env_settings", _environment_settings),
    Override("model_path", _model),
)


def parse_experiment(name: str, argv: Sequence[str], before: Callable[["Experiment"], "Experiment"] = lambda it: it):
    """The experiment of this name, after `before`, with the flags of `argv` applied. Exits with code 2 on an unknown
    flag, naming the closest ones; raises UnknownName for an unknown experiment."""
    from openpi_train import choice, registry
    from openpi_train.tools import resume_run

    many, rest = _many_fields(argv, name)
    shows_help = wants_help(rest)

    def first_dataset(own: "SourceConfig") -> "SourceConfig":
        """The first dataset of the command line, by whose dims one of several experiments is chosen."""
        if many.dataset is not None:
            return choice.source_of(many.dataset)
        if many.data_mixture:
            return choice.source_of(choice.weighted_path(many.data_mixture[0])[0])
        return choice.moved(own, rest)

    loaded = registry.load(name, first_dataset, any_dims=shows_help or many.data_robot is not None)
    recorded = loaded if shows_help else resume_run.going_on(loaded, rest)
    # Blank lines between lines, which the help would join otherwise.
    about = registry.description(name).replace("\n", "\n\n")
    goes_on = recorded is not loaded
    return _built(before(recorded), many, rest, name, about, goes_on=goes_on, may_shorten_warmup=not goes_on)


def with_flags(
    default: "Experiment", argv: Sequence[str], name: str, about: str, *, goes_on: bool = False
) -> "Experiment":
    """The experiment with the flags of `argv` applied; `goes_on`: it is that of a run. Exits with code 2 on an unknown
    flag, naming the closest."""
    many, rest = _many_fields(argv, name)
    if many.deepspeed is not None and not goes_on:
        raise UsageError(
            "--deepspeed is for named experiments and runs: a YAML config says these things in its own keys, and "
            "posttrain takes a DeepSpeed file with --deepspeed-config"
        )
    return _built(default, many, rest, name, about, goes_on=goes_on, may_shorten_warmup=False)


def _built(
    default: "Experiment",
    many: "OverrideFlags",
    argv: Sequence[str],
    name: str,
    about: str,
    *,
    goes_on: bool,
    may_shorten_warmup: bool,
) -> "Experiment":
    """The experiment with `OVERRIDES`, and then each field of `argv`, applied."""
    from openpi_train import help_page
    from openpi_train.choice import tell_robots, with_chosen_cameras, with_rewards
    from openpi_train.command_line import OverrideFlags, Own, TrainFlags, parse_fields
    from openpi_train.experiment import Experiment, of_one_length, with_own_warmup

    shows_help = wants_help(argv)
    if many.deepspeed is not None:
        from openpi_train.doors.deepspeed.flags import before_given

        given = argv if many.optimizer is None else [*argv, "--optimizer", many.optimizer]
        of_file, argv = _many_fields(before_given(many.deepspeed, given), name)
        many = dataclasses.replace(many, optimizer=of_file.optimizer)
    experiment, together = default, ErrorCollector()
    for override in OVERRIDES:
        value = getattr(many, override.field)
        if value not in (None, {}) and (override.in_help or not shows_help):
            with together:
                experiment = override.apply(experiment, value, goes_on)
    if shows_help:
        together.raise_all()
    experiment = of_one_length(experiment, argv)
    experiment = with_rewards(with_own_warmup(experiment, argv) if may_shorten_warmup else experiment, argv)
    if shows_help:  # also shows the flags that have been removed
        everything: Any = tuple[Own[Experiment], Own[TrainFlags], Own[OverrideFlags]]
        values = (experiment, TrainFlags(), OverrideFlags())
        if "--help-all" not in argv:
            help_page.show(everything, values, argv[min(map(argv.index, {*HELP} & {*argv})) + 1 :], name, about)
        parse_fields(everything, values, ["--help"], name, about)
    try:
        experiment = parse_fields(Experiment, experiment, argv, name, about)
    except SystemExit:
        for error in together.errors:
            print(f"error: {error}", file=sys.stderr)
        raise
    if together.errors:
        with together:  # what else is wrong, as far as it does not depend on these flags
            experiment.check_values()
        together.raise_all()
    experiment = with_chosen_cameras(experiment)
    tell_robots(experiment, default)
    return experiment


def _many_fields(argv: Sequence[str], name: str) -> tuple["OverrideFlags", list[str]]:
    """The flags that set many fields, and the other words. Raises UsageError for two that say the same."""
    from openpi_train.command_line import OverrideFlags, parse_known

    many, rest = parse_known(OverrideFlags, present_words(argv), name, add_help=False)
    given = {"--dataset": many.dataset, "--data.repo-id": many.repo_id, "--data.mixture": many.data_mixture}
    if len(named_twice := [flag for flag, value in given.items() if value is not None]) > 1:
        raise UsageError(f"{' and '.join(named_twice)} both say what is trained on: give only one of them")
    return many, rest


def wants_help(argv: Sequence[str]) -> bool:
    return not set(HELP).isdisjoint(argv)
