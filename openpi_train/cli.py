"""The command line, whose first word is a verb or an experiment. Read next: `train_verbs.py`, `experiment_flags.py`.

Nothing heavy is imported before the arguments are parsed, so `--help` is fast.
"""

import importlib.metadata
import itertools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from openpi_train.experiment_flags import HELP, parse_experiment, wants_help, with_flags
from openpi_train.json_object import JsonObject
from openpi_train.launch import preflight
from openpi_train.runtime import jax_wheels, logs
from openpi_train.runtime.closed_output import is_closed
from openpi_train.runtime.exits import (
    INTERRUPTED,
    USAGE,
    DataError,
    RunError,
    UsageError,
    kind_for,
    reported_as,
    run_guarded,
)
from openpi_train.train_verbs import TRAINING, posttrain, resume, ript, train, train_by_hydra, vla, wants_hydra

if TYPE_CHECKING:
    from openpi_train.experiment import Experiment

logger = logging.getLogger(__name__)

USAGE_TEXT = """\
usage: python -m openpi_train [train] <experiment> --exp-name NAME [--any.field value ...]
       python -m openpi_train [train] my_runs.py:NAME --exp-name NAME
       python -m openpi_train <verb> ...

Train an experiment, or run one of the verbs:
{verbs}

`python -m openpi_train list` lists the experiments; `<experiment> --help` shows its flags.
"""


def run(argv: Sequence[str]) -> int:
    """Run one command line. Returns the exit code (`runtime/exits.py` says what each means)."""
    if not argv or argv[0] in HELP:
        print(_usage(), end="")
        return 0 if argv else USAGE
    if argv[0] == "--version":
        print(f"openpi_train {importlib.metadata.version('openpi_train')}")
        return 0
    if argv[0] == "train":  # it may be left out
        if not argv[1:] or argv[1] in (*HELP, *VERBS):
            print(
                "error: train what? Name an experiment (python -m openpi_train list) or file.py:NAME", file=sys.stderr
            )
            return USAGE
        argv = argv[1:]
    verb, rest = argv[0], list(argv[1:])
    if verb in VERBS:
        if preflight.devices() is not None and verb not in (*TRAINING, "eval"):
            return 0  # nothing is known of it ahead
        return _reported(lambda: VERBS[verb](rest), argv)
    if wants_hydra(argv):
        return _reported(lambda: train_by_hydra(argv), argv)
    return _reported(lambda: _train(verb, rest), argv)


def _reported(command: Callable[[], int], argv: Sequence[str]) -> int:
    """Run the command and return its exit code; errors meant for the user are shown without a traceback."""
    try:
        if argv[0] not in _WITHOUT_JAX and not wants_help(argv):
            jax_wheels.check(os.environ)
        return command()
    except (RunError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError) and is_closed():
            raise  # for `quietly`
        print(f"error: {error}", file=sys.stderr)
        return kind_for(error, UsageError).exit_code if not isinstance(error, RunError) else error.exit_code
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED


def _train(name: str, argv: Sequence[str]) -> int:
    """Train the experiment of this name. Raises UsageError if it is neither that nor a verb."""
    from openpi_train import registry

    if ".py" not in name and name not in registry.entries():
        raise UsageError(registry.unknown(name, [*registry.entries(), *VERBS], "experiment or verb"))
    return train(name, argv)


def list_experiments(argv: Sequence[str]) -> int:
    """`list`: list every experiment with the first sentence of its description."""
    from openpi_train import registry
    from openpi_train.command_line import parse
    from openpi_train.tools.requests import ListRequest

    parse(ListRequest, argv, "list")
    found = registry.entries()
    width = max(map(len, found), default=0)
    for file, group in itertools.groupby(found.values(), key=lambda entry: entry.file):
        print(f"\n{registry.title(file)}")
        for entry in group:
            print(f"  {entry.name:<{width}}  {entry.summary}")
    return 0


def stats(argv: Sequence[str]) -> int:
    """`stats <experiment>`: compute the norm stats and print a table per dimension."""
    from openpi_train.command_line import parse_known
    from openpi_train.doors.openpi_words import stats_words
    from openpi_train.tools.requests import StatsRequest

    request, rest = parse_known(StatsRequest, stats_words(argv), "stats")
    experiment = parse_experiment(request.experiment, ["--exp-name", "stats", *rest])
    from openpi_train.tools.stats import stats_table

    with reported_as(DataError):
        data = experiment.demonstrations
        print(stats_table(data, shape=experiment.policy.rows.window, assets_dir=experiment.assets_dir))
    return 0


def data(argv: Sequence[str]) -> int:
    """`data sample|prepare|collect|index|check|inspect|repack|merge|convert|fit-fast|advantages`: datasets."""
    from openpi_train.tools.data import main

    return main(argv, parse_experiment)


def launch(argv: Sequence[str]) -> int:
    """`launch local|manual|ssh|slurm|kubernetes`: start the processes of a run."""
    from openpi_train.launch import launchers

    return launchers.main(list(argv))


def convert(argv: Sequence[str]) -> int:
    """`convert SOURCE TARGET|deepspeed`: convert a checkpoint to another form, or a DeepSpeed config to flags."""
    if argv and argv[0] == "deepspeed":
        return convert_deepspeed(argv[1:])
    from openpi_train.command_line import parse_known
    from openpi_train.tools.requests import ConvertRequest

    request, rest = parse_known(ConvertRequest, argv, "convert")
    from openpi_train.policy.experiment_json import experiment_of_run, with_recorded_model
    from openpi_train.tools import convert_checkpoint

    logs.configure(0)
    words = ["--exp-name", "convert", *rest]

    experiment = parse_experiment(request.experiment, words) if request.experiment else None

    def recorded(run: JsonObject) -> "Experiment":
        if request.experiment:
            return parse_experiment(request.experiment, words, lambda own: with_recorded_model(own, run))
        found = experiment_of_run(run, request.source)
        return with_flags(found, words, "convert", "The experiment of a run.") if rest else found

    return convert_checkpoint.main(request, experiment, recorded)


def convert_deepspeed(argv: Sequence[str]) -> int:
    """`convert deepspeed <file>`: translate a DeepSpeed config to flags, key by key."""
    from openpi_train.command_line import parse
    from openpi_train.doors.door_requests import DeepSpeedRequest

    request = parse(DeepSpeedRequest, argv, "convert deepspeed")
    from openpi_train.doors.deepspeed.flags import translate_file

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


def reproduce(argv: Sequence[str]) -> int:
    """`reproduce NAME`: make a published or own result again by one command: data, training, evaluation, a record."""
    from openpi_train.command_line import Own, TrainFlags, parse
    from openpi_train.reproduce import board
    from openpi_train.reproduce.reproduce_request import ReproduceRequest

    kind = tuple[Own[ReproduceRequest], Own[TrainFlags]]
    request, process = parse(kind, argv, "reproduce", ReproduceRequest.__doc__)
    if request.show or not request.name:
        print(board.table())
        return 0
    from openpi_train.reproduce.reproduce_run import main

    run_guarded(lambda: main(request, process))


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
    logs.configure(0)  # for what is told of the experiment: the robot that a dataset describes
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
    from openpi_train.runtime.device_kinds import find_kind

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
    from openpi_train.doors.openpi_words import serve_words
    from openpi_train.serve.request import ServeRequest, TextFlags

    kind = tuple[Own[ServeRequest], Own[TextFlags]]
    request, texts = parse(kind, serve_words(argv), "serve", ServeRequest.__doc__)
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
    "reproduce": reproduce,
    "report": report,
    "runs": runs,
}


# `launch`: the processes of a run may be on other machines.
_WITHOUT_JAX = ("list", "launch", "runs")


def _usage() -> str:
    lines = [f"  {name:<9} {(verb.__doc__ or '').split(': ', 1)[-1].splitlines()[0]}" for name, verb in VERBS.items()]
    return USAGE_TEXT.format(verbs="\n".join(lines))
