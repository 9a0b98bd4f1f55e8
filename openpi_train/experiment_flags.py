"""An experiment from its name, or from what another tool's config makes, and the flags of a command line.

Nothing heavy is imported with this module, so `--help` is fast. Read next: `registry.py`, `choice.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from openpi_train.runtime.exits import UsageError, reported_as

if TYPE_CHECKING:
    from openpi_train.data.source import SourceConfig
    from openpi_train.experiment import Experiment


def with_flags(default: "Experiment", argv: Sequence[str], name: str, about: str) -> "Experiment":
    """The experiment with the flags of `argv` applied. Exits with code 2 on an unknown flag, naming the closest."""
    from openpi_train.choice import on_mixture, with_rewards
    from openpi_train.command_line import ManyFields, parse_fields, parse_known
    from openpi_train.experiment import Experiment, of_one_length
    from openpi_train.optim import named_optimizer

    many, argv = parse_known(ManyFields, argv, name, add_help=False)
    if any(value is not None for value in (many.dataset, many.deepspeed, many.repo_id, many.data_robot)):
        flags = "--dataset, --data.repo-id, --data.robot and --deepspeed"
        raise UsageError(f"{flags} are for named experiments; --deepspeed-config names another file")
    if many.optimizer is not None:
        default = dataclasses.replace(default, optimizer=named_optimizer(many.optimizer, default.optimizer))
    if many.env is not None:
        default = _in_environment(default, many.env)
    if many.data_mixture is not None:
        default = on_mixture(default, many.data_mixture)
    default = with_rewards(of_one_length(default, argv), argv)
    return parse_fields(Experiment, default, argv, name, about)


def parse_experiment(name: str, argv: Sequence[str], before: Callable[["Experiment"], "Experiment"] = lambda it: it):
    """The experiment of this name, after `before`, with the flags of `argv` applied. Exits with code 2 on an unknown
    flag, naming the closest ones; raises UnknownName for an unknown experiment."""
    from openpi_train import choice, registry
    from openpi_train.command_line import ManyFields, Own, TrainFlags, parse_fields, parse_known
    from openpi_train.experiment import Experiment, of_one_length, with_own_warmup
    from openpi_train.interop.huggingface import named_model
    from openpi_train.models.language_part import language_of
    from openpi_train.optim import named_optimizer
    from openpi_train.tools import resume_run

    shows_help = wants_help(argv)
    many, argv = parse_known(ManyFields, argv, name, add_help=False)
    model_path, env, robot = many.model_path, many.env, many.data_robot
    mixture, repo_id = many.data_mixture, many.repo_id
    given = {"--dataset": many.dataset, "--data.repo-id": repo_id, "--data.mixture": mixture}
    if len(named_twice := [flag for flag, value in given.items() if value is not None]) > 1:
        raise UsageError(f"{' and '.join(named_twice)} both say what is trained on: give only one of them")
    source = None if many.dataset is None else choice.source_of(many.dataset)

    def named(own: "SourceConfig") -> "SourceConfig":
        """The first dataset of the command line."""
        return source or (choice.source_of(choice.weighted_path(mixture[0])[0]) if mixture else choice.moved(own, argv))

    loaded = registry.load(name, named, any_dims=shows_help or robot is not None)
    recorded = loaded if shows_help else resume_run.going_on(loaded, argv)
    # Of a run that goes on, what it has recorded of its dataset and its model is not read again.
    default, goes_on = before(recorded), recorded is not loaded
    if many.deepspeed is not None:
        from openpi_train.interop.deepspeed.flags import before_given

        given = argv if many.optimizer is None else [*argv, "--optimizer", many.optimizer]
        many, argv = parse_known(ManyFields, before_given(many.deepspeed, given), name, add_help=False)
    if many.optimizer is not None:
        default = dataclasses.replace(default, optimizer=named_optimizer(many.optimizer, default.optimizer))
    if source is not None and not (goes_on and choice.is_on(default, source)):
        default = choice.on_dataset(default, source)
    if repo_id is not None:
        default = choice.on_repo_id(default, repo_id)
    if mixture is not None and not shows_help:
        default = choice.on_mixture(default, mixture)
    if robot is not None and not shows_help:
        default = choice.on_features(default, relative=robot == "relative")
    if env is not None and not shows_help:
        default = _in_environment(default, env)
    if model_path is not None and not shows_help:
        language = language_of(default.model)
        if language is None or not goes_on or language.path != model_path:
            language = named_model(model_path)
        default = choice.on_model(default, language)
    default = of_one_length(default, argv)
    default = choice.with_rewards(default if goes_on else with_own_warmup(default, argv), argv)
    # Blank lines between lines, which the help would join otherwise.
    about = registry.description(name).replace("\n", "\n\n")
    if shows_help:  # also shows the flags that have been removed
        everything = tuple[Own[Experiment], Own[TrainFlags], Own[ManyFields]]
        own = (default, TrainFlags(), ManyFields())
        parse_fields(everything, own, argv, name, about)
    return parse_fields(Experiment, default, argv, name, about)


def _in_environment(experiment: "Experiment", name: str) -> "Experiment":
    """The experiment in the environment of this name."""
    from openpi_train.choice import on_env
    from openpi_train.envs.named import environment

    with reported_as(UsageError):
        return on_env(experiment, environment(name))


def wants_help(argv: Sequence[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(argv)
