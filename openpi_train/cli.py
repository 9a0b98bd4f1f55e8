"""The command line, whose first word is a verb or an experiment. Read next: `registry.py`, `training/start.py`.

Nothing heavy is imported before the arguments are parsed, so `--help` is fast.
"""

import dataclasses
import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from openpi_train.launch import ahead_of_start
from openpi_train.runtime import jax_wheels, logs
from openpi_train.runtime.closed_output import is_closed
from openpi_train.runtime.exits import INTERRUPTED, USAGE, DataError, RunError, UsageError, reported_as, run_guarded
from openpi_train.runtime.world import WorldFlags, find_world

if TYPE_CHECKING:
    from openpi_train.command_line import TrainFlags
    from openpi_train.data.source import SourceConfig
    from openpi_train.experiment import Experiment

logger = logging.getLogger(__name__)

USAGE_TEXT = """\
usage: python -m openpi_train <experiment> --exp-name NAME [--any.field value ...]
       python -m openpi_train my_runs.py:NAME --exp-name NAME
       python -m openpi_train <verb> ...

Train an experiment, or run one of the verbs:
{verbs}

`python -m openpi_train list` lists the experiments; `<experiment> --help` explains every field.
"""


# It names a config of Hydra's, at any place of a command line (`interop/hydra_overrides.py`).
_HYDRAS_OPTION = ("--config-name", "-cn")


def run(argv: Sequence[str]) -> int:
    """Run one command line. Returns the exit code (`runtime/exits.py` says what each means)."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage(), end="")
        return 0 if argv else USAGE
    verb, rest = argv[0], list(argv[1:])
    if verb in VERBS:
        if ahead_of_start.devices() is not None and verb not in _CHECKED_AHEAD:
            return 0  # nothing is known of it ahead
        return _reported(lambda: VERBS[verb](rest), argv)
    if any(word.partition("=")[0] in _HYDRAS_OPTION for word in argv):
        return _reported(lambda: train_by_hydra(argv), argv)
    return _reported(lambda: train(verb, rest), argv)


def _reported(command: Callable[[], int], argv: Sequence[str]) -> int:
    """Run the command and return its exit code; errors meant for the user are shown without a traceback."""
    try:
        if argv[0] not in _WITHOUT_JAX and not _wants_help(argv):
            jax_wheels.check(os.environ)
        return command()
    except (RunError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError) and is_closed():
            raise  # for `quietly`
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, RunError) else USAGE
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED


def train(name: str, argv: Sequence[str]) -> int:
    """Train the experiment `name` (or `file.py:name`). Exits through the guard, so no peer waits for this process."""
    from openpi_train.command_line import TrainFlags, parse_known

    process, rest = parse_known(TrainFlags, argv, name, add_help=False)
    from openpi_train.tools import resume_run

    if not _wants_help(rest):  # process 0 logs the experiment that the dataset selects, and DeepSpeed's file
        logs.configure(find_world(process, os.environ).process_index)
        name = resume_run.of_several(name, rest)
    return _run(parse_experiment(name, rest), process)


def resume(argv: Sequence[str]) -> int:
    """`resume RUN`: continue a run as it was started; flags that are given replace its values."""
    from openpi_train.command_line import Own, TrainFlags, parse_known
    from openpi_train.tools.requests import ResumeRequest

    kind = tuple[Own[ResumeRequest], Own[TrainFlags]]
    (request, process), rest = parse_known(kind, argv, "resume", ResumeRequest.__doc__)
    logs.configure(find_world(process, os.environ).process_index)
    from openpi_train.tools import resume_run

    request, rest = resume_run.where_it_began(request, rest)
    return _run(with_flags(resume_run.experiment_of(request), rest, "resume", "The experiment of a run."), process)


def train_by_hydra(argv: Sequence[str]) -> int:
    """Train as a Hydra command line of RoboTwin's diffusion policy says: `--config-name robot_dp_14 KEY=VALUE ...`."""
    from openpi_train.interop import hydra_overrides

    command, given = hydra_overrides.translate(argv)
    logs.configure(find_world(WorldFlags(), os.environ).process_index)
    logger.info("Hydra's words, key by key:\n%s", command.report())
    return train(command.experiment, [*command.flags, *given])


def _run(experiment: "Experiment", process: "TrainFlags") -> int:
    """Train, or with `--dry-run` say what it needs."""
    from openpi_train.training import rehearsal, start

    if (num_devices := ahead_of_start.devices()) is not None:
        return rehearsal.check_ahead(experiment, num_devices)
    if process.dry_run:
        return rehearsal.dry_run(experiment, process, process.devices_per_process)
    run_guarded(lambda: start.main(experiment, process, process.devices_per_process))


def posttrain(argv: Sequence[str]) -> int:
    """`posttrain --config FILE`: train a language model as a YAML config of a PyTorch post-training tool says."""
    from openpi_train.command_line import Own, TrainFlags, parse_known
    from openpi_train.tools.requests import PosttrainRequest

    kind = tuple[Own[PosttrainRequest], Own[TrainFlags]]
    (request, process), rest = parse_known(kind, argv, "posttrain", PosttrainRequest.__doc__)
    logs.configure(find_world(process, os.environ).process_index)
    from openpi_train.tools import posttrain as tool

    def experiment_of(request: PosttrainRequest) -> "Experiment":
        default, words = tool.experiment_of(request, rest)
        return with_flags(default, words, "posttrain", "The experiment of a YAML config.")

    if request.mode == "train":
        return _run(experiment_of(request), process)
    algorithms = tool.algorithms_of(request)
    if ahead_of_start.devices() is not None:
        return 0
    tool.prepare_data([experiment_of(dataclasses.replace(request, algorithm=one)) for one in algorithms])
    return 0


def ript(argv: Sequence[str]) -> int:
    """`ript --config FILE`: let a robot policy learn from its own episodes as a YAML config of RIPT trainers says."""
    from openpi_train.tools.requests import RiptRequest

    return _train_by_yaml("ript", RiptRequest, argv)


def vla(argv: Sequence[str]) -> int:
    """`vla --config FILE`: train a PaliGemma policy as a YAML config of the VLA's PyTorch trainer says."""
    from openpi_train.tools.requests import VlaRequest

    return _train_by_yaml("vla", VlaRequest, argv)


def _train_by_yaml(verb: str, request_kind: Any, argv: Sequence[str]) -> int:
    """Train what the verb's module in `tools` makes of its request."""
    from openpi_train.command_line import Own, TrainFlags, parse_known

    kind = tuple[Own[request_kind], Own[TrainFlags]]
    (request, process), rest = parse_known(kind, argv, verb, request_kind.__doc__)
    logs.configure(find_world(process, os.environ).process_index)
    default, words = importlib.import_module(f"openpi_train.tools.{verb}").experiment_of(request, rest)
    return _run(with_flags(default, words, verb, "The experiment of a YAML config."), process)


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

    if ".py" not in name and name not in registry.entries():
        raise UsageError(registry.unknown(name, [*registry.entries(), *VERBS], "experiment or verb"))
    from openpi_train.command_line import ManyFields, Own, TrainFlags, parse_fields, parse_known
    from openpi_train.experiment import Experiment, of_one_length, with_own_warmup
    from openpi_train.interop.huggingface import named_model
    from openpi_train.models.language_part import language_of
    from openpi_train.optim import named_optimizer
    from openpi_train.tools import resume_run

    wants_help = _wants_help(argv)
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

    loaded = registry.load(name, named, any_dims=wants_help or robot is not None)
    recorded = loaded if wants_help else resume_run.going_on(loaded, argv)
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
    if mixture is not None and not wants_help:
        default = choice.on_mixture(default, mixture)
    if robot is not None and not wants_help:
        default = choice.on_features(default, relative=robot == "relative")
    if env is not None and not wants_help:
        default = _in_environment(default, env)
    if model_path is not None and not wants_help:
        language = language_of(default.model)
        if language is None or not goes_on or language.path != model_path:
            language = named_model(model_path)
        default = choice.on_model(default, language)
    default = choice.with_rewards(with_own_warmup(of_one_length(default, argv), argv), argv)
    # Blank lines between lines, which the help would join otherwise.
    about = registry.description(name).replace("\n", "\n\n")
    if wants_help:  # also shows the flags that have been removed
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


def _wants_help(argv: Sequence[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(argv)


def list_experiments(argv: Sequence[str]) -> int:
    """`list`: list every experiment with the first line of its description."""
    from openpi_train import registry
    from openpi_train.command_line import parse
    from openpi_train.tools.requests import ListRequest

    parse(ListRequest, argv, "list")
    found = registry.entries()
    width = max(map(len, found), default=0)
    for name, entry in found.items():
        print(f"{name:<{width}}  {entry.summary}")
    return 0


def stats(argv: Sequence[str]) -> int:
    """`stats <experiment>`: compute the norm stats and print a table per dimension."""
    from openpi_train.command_line import parse_known
    from openpi_train.tools.requests import StatsRequest

    request, rest = parse_known(StatsRequest, argv, "stats")
    experiment = parse_experiment(request.experiment, ["--exp-name", "stats", *rest])
    from openpi_train.tools.stats import stats_table

    with reported_as(DataError):
        print(stats_table(experiment.demonstrations, shape=experiment.policy.window, assets_dir=experiment.assets_dir))
    return 0


def data(argv: Sequence[str]) -> int:
    """`data prepare|collect|index|check|inspect|repack|merge|convert|fit-fast`: make, check, convert datasets."""
    from openpi_train.tools.data import main

    return main(argv, parse_experiment)


def launch(argv: Sequence[str]) -> int:
    """`launch local|manual|ssh|slurm|kubernetes`: start the processes of a run."""
    from openpi_train.launch import forms

    return forms.main(list(argv))


def convert(argv: Sequence[str]) -> int:
    """`convert SOURCE TARGET|deepspeed`: convert a checkpoint to another form, or a DeepSpeed config to flags."""
    if argv and argv[0] == "deepspeed":
        return convert_deepspeed(argv[1:])
    from openpi_train.command_line import parse_known
    from openpi_train.tools.requests import ConvertRequest

    request, rest = parse_known(ConvertRequest, argv, "convert")
    from openpi_train.policy.experiment_json import experiment_from_json, with_recorded_model
    from openpi_train.tools import convert_checkpoint

    logs.configure(0)
    words = ["--exp-name", "convert", *rest]

    experiment = parse_experiment(request.experiment, words) if request.experiment else None

    def recorded(run: Mapping[str, Any]) -> "Experiment":
        if request.experiment:
            return parse_experiment(request.experiment, words, lambda own: with_recorded_model(own, run))
        found = experiment_from_json(run)
        return with_flags(found, words, "convert", "The experiment of a run.") if rest else found

    return convert_checkpoint.main(request, experiment, recorded)


def convert_deepspeed(argv: Sequence[str]) -> int:
    """`convert deepspeed <file>`: translate a DeepSpeed config to flags, key by key."""
    from openpi_train.command_line import parse
    from openpi_train.tools.requests import DeepSpeedRequest

    request = parse(DeepSpeedRequest, argv, "convert deepspeed")
    from openpi_train.interop.deepspeed.flags import translate_file

    print(translate_file(request.file, request.devices).report())
    return 0


def doctor(argv: Sequence[str]) -> int:
    """`doctor [experiment]`: check this machine, its peers and what an experiment needs; say what to fix."""
    from openpi_train.command_line import Own, ProcessFlags, parse_known
    from openpi_train.tools.requests import DoctorRequest

    kind = tuple[Own[DoctorRequest], Own[ProcessFlags]]
    (request, process), rest = parse_known(kind, argv, "doctor", DoctorRequest.__doc__)
    if rest and not request.experiment:
        raise UsageError(f"{rest[0]} is a field of an experiment: name the experiment first")
    experiment = None
    for name in request.experiment:
        experiment = parse_experiment(name, ["--exp-name", "doctor", *rest])
    from openpi_train.tools.doctor import main

    run_guarded(lambda: main(request, experiment, process))


def evaluate(argv: Sequence[str]) -> int:
    """`eval RUN|CHECKPOINT`: evaluate a policy (errors, successes, videos), or a language model (perplexity, scores of
    its completions)."""
    from openpi_train.command_line import Own, ProcessFlags, parse
    from openpi_train.tools.requests import EvaluateRequest, EvaluateTextRequest

    kind = tuple[Own[EvaluateRequest], Own[EvaluateTextRequest], Own[ProcessFlags]]
    request, texts, process = parse(kind, argv, "eval", EvaluateRequest.__doc__)
    from openpi_train.tools.evaluate_policy import main

    run_guarded(lambda: main(request, texts, process))


def generate(argv: Sequence[str]) -> int:
    """`generate RUN|CHECKPOINT`: complete texts with a language model: a prompt, a file, a chat in the terminal."""
    from openpi_train.command_line import Own, parse
    from openpi_train.generation.sampling_settings import SamplingSettings
    from openpi_train.tools.requests import GenerateRequest

    kind = tuple[Own[GenerateRequest], Own[SamplingSettings]]
    request, settings = parse(kind, argv, "generate", GenerateRequest.__doc__)
    if problems := settings.check():
        raise UsageError("; ".join(problems))
    from openpi_train.tools.generate_text import main

    return main(request, settings)


def report(argv: Sequence[str]) -> int:
    """`report RUN`: write one HTML file about a run: curves, time, memory, data, evaluations with videos."""
    from openpi_train.command_line import parse
    from openpi_train.tools.requests import ReportRequest

    request = parse(ReportRequest, argv, "report")
    from openpi_train.tools.report import main

    return main(request)


def runs(argv: Sequence[str]) -> int:
    """`runs [FOLDER]`: list all runs below a folder with state, loss, best and speed; --diff compares two."""
    from openpi_train.command_line import parse
    from openpi_train.tools.requests import RunsRequest

    request = parse(RunsRequest, argv, "runs")
    from openpi_train.tools.list_runs import main

    return main(request)


def plan(argv: Sequence[str]) -> int:
    """`plan <experiment>`: forecast memory, traffic and speed per strategy on any devices, with a recommendation."""
    from openpi_train.command_line import parse_known
    from openpi_train.tools.requests import PlanRequest

    request, rest = parse_known(PlanRequest, argv, "plan")
    experiment = parse_experiment(request.experiment, ["--exp-name", "plan", *rest])
    from openpi_train.tools.plan import main

    return main(
        experiment,
        num_devices=request.devices,
        device_kind=request.device_kind,
        num_hosts=request.hosts,
        device_gib=request.device_gib,
        network_gb_s=request.network_gb_s,
        efficiency=request.efficiency,
        compiler=request.compiler if request.compile else None,
        compile_all=request.compile_all,
        words=[request.experiment, *rest],
        as_text=not request.json,
    )


def compile_step(argv: Sequence[str]) -> int:
    """`compile <experiment>`: compile a step for GPUs that need not be present; memory, kernels and their bound."""
    from openpi_train.command_line import parse_known
    from openpi_train.tools.requests import CompileRequest

    request, rest = parse_known(CompileRequest, argv, "compile")
    from openpi_train.planning.gpu import plugin
    from openpi_train.planning.gpu.targets import KINDS_OF_TARGETS
    from openpi_train.planning.kinds import find_kind

    logs.configure(0)
    find_kind(request.device_kind, KINDS_OF_TARGETS)  # a wrong one is told before the plugin is asked for
    for line in plugin.set_environment(os.environ, request.devices, request.hosts):
        logger.info("%s", line)
    experiment = parse_experiment(request.experiment, ["--exp-name", "compile", *rest])
    from openpi_train.tools import gpu_step
    from openpi_train.tools.plan import find_machine

    given = request.device_kind, request.devices, request.hosts, request.device_gib, request.network_gb_s
    machine = find_machine(*given)
    return gpu_step.main(experiment, machine, request)


def serve(argv: Sequence[str]) -> int:
    """`serve <run>`: serve a policy to robots over openpi's websocket protocol, a language model over OpenAI's API."""
    from openpi_train.command_line import Own, parse
    from openpi_train.serve.request import ServeRequest, TextFlags

    kind = tuple[Own[ServeRequest], Own[TextFlags]]
    request, texts = parse(kind, argv, "serve", ServeRequest.__doc__)
    from openpi_train.serve import main

    return main.replay(request, request.replay) if request.replay else main.run(request, texts)


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "list": list_experiments,
    "launch": launch,
    "resume": resume,
    "posttrain": posttrain,
    "ript": ript,
    "vla": vla,
    "stats": stats,
    "data": data,
    "convert": convert,
    "doctor": doctor,
    "plan": plan,
    "compile": compile_step,
    "serve": serve,
    "eval": evaluate,
    "generate": generate,
    "report": report,
    "runs": runs,
}


_CHECKED_AHEAD = ("resume", "posttrain", "ript", "vla", "eval")
# `launch`: the processes of a run may be on other machines.
_WITHOUT_JAX = ("list", "launch", "runs")


def _usage() -> str:
    lines = [f"  {name:<8} {(verb.__doc__ or '').split(': ', 1)[-1].splitlines()[0]}" for name, verb in VERBS.items()]
    return USAGE_TEXT.format(verbs="\n".join(lines))
