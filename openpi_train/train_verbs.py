"""The verbs that train, and the training of an experiment by its name. Read next: `training/start.py`.

Nothing heavy is imported with this module, so `--help` is fast.
"""

import dataclasses
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from openpi_train.experiment_flags import parse_experiment, wants_help, with_flags
from openpi_train.launch import preflight
from openpi_train.runtime import logs, other_tools
from openpi_train.runtime.exits import run_guarded
from openpi_train.runtime.passing_errors import patiently
from openpi_train.runtime.world import WorldFlags, find_world

if TYPE_CHECKING:
    from openpi_train.command_line import TrainFlags
    from openpi_train.experiment import Experiment

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

TRAINING = ("resume", "posttrain", "ript", "vla")
# They name a config of Hydra's, at any place of a command line (`doors/hydra_overrides.py`).
_HYDRAS_OPTIONS = ("--config-name", "-cn")
# The modules in `doors` of the verbs that read another tool's YAML config.
_MODULES = {"posttrain": "posttraining.posttrain", "ript": "ript.ript", "vla": "vla.vla"}


def train(name: str, argv: Sequence[str]) -> int:
    """Train the experiment `name` (or `file.py:name`). Exits through the guard, so no peer waits for this process."""
    from openpi_train.command_line import TrainFlags, parse_known

    process, rest = parse_known(TrainFlags, argv, name, add_help=False)
    from openpi_train.tools import edited_experiment, resume_run

    index = 0
    if not wants_help(rest):  # process 0 logs the experiment that the dataset selects, and DeepSpeed's file
        index = find_world(process, os.environ).process_index
        logs.configure(index)
        name = _read(lambda: resume_run.of_several(name, rest))
    experiment = _read(lambda: parse_experiment(name, rest))
    if index == 0:
        edited_experiment.tell_edits(experiment, typed)
    return _run(experiment, process)


def resume(argv: Sequence[str]) -> int:
    """`resume RUN`: continue a run as it was started; flags that are given replace its values."""
    from openpi_train.command_line import Own, TrainFlags, parse_known
    from openpi_train.tools.requests import ResumeRequest

    kind = tuple[Own[ResumeRequest], Own[TrainFlags]]
    (request, process), rest = parse_known(kind, argv, "resume", ResumeRequest.__doc__)
    index = find_world(process, os.environ).process_index
    logs.configure(index)
    from openpi_train.tools import edited_experiment, resume_run

    request, rest = _read(lambda: resume_run.where_it_began(request, rest))
    recorded = _read(lambda: resume_run.experiment_of(request))
    experiment = with_flags(recorded, rest, "resume", "The experiment of a run.", goes_on=True)
    if index == 0:
        edited_experiment.tell_edits(experiment, typed)
    return _run(experiment, process)


def typed(argv: Sequence[str]) -> "Experiment":
    """The experiment of a command line that trains. Errors: those of its verb."""
    from openpi_train.command_line import TrainFlags, parse_known
    from openpi_train.doors import door_requests as requests

    verb, words = argv[0], parse_known(TrainFlags, argv[1:], argv[0], add_help=False)[1]
    if wants_hydra(argv):
        from openpi_train.doors import hydra_overrides

        command, given = hydra_overrides.translate([verb, *words])
        return parse_experiment(command.experiment, [*command.flags, *given])
    kinds = {"posttrain": requests.PosttrainRequest, "ript": requests.RiptRequest, "vla": requests.VlaRequest}
    if verb not in kinds:
        return parse_experiment(verb, words)
    request, rest = parse_known(kinds[verb], words, verb)
    return _of_yaml(verb, request, rest)


def wants_hydra(argv: Sequence[str]) -> bool:
    """Whether these are words of Hydra's."""
    return any(word.partition("=")[0] in _HYDRAS_OPTIONS for word in argv)


def train_by_hydra(argv: Sequence[str]) -> int:
    """Train as a Hydra command line of RoboTwin's diffusion policy says: `--config-name robot_dp_14 KEY=VALUE ...`."""
    from openpi_train.doors import hydra_overrides

    command, given = hydra_overrides.translate(argv)
    logs.configure(find_world(WorldFlags(), os.environ).process_index)
    logger.info("Hydra's words, key by key:\n%s", command.report())
    other_tools.note_not_done(command.not_done)
    return train(command.experiment, [*command.flags, *given])


def posttrain(argv: Sequence[str]) -> int:
    """`posttrain --config FILE`: train a language model as a YAML config of a PyTorch post-training tool says."""
    from openpi_train.doors.door_requests import PosttrainRequest

    request, process, rest = _asked("posttrain", PosttrainRequest, argv)
    from openpi_train.doors.posttraining import posttrain as tool

    if request.mode == "train":
        return _run(_read(lambda: _of_yaml("posttrain", request, rest)), process)
    algorithms = tool.algorithms_of(request)
    if preflight.devices() is not None:
        return 0
    requests = [dataclasses.replace(request, algorithm=one) for one in algorithms]
    tool.prepare_data([_of_yaml("posttrain", one, rest) for one in requests])
    return 0


def ript(argv: Sequence[str]) -> int:
    """`ript --config FILE`: let a robot policy learn from its own episodes as a YAML config of RIPT trainers says."""
    from openpi_train.doors.door_requests import RiptRequest

    request, process, rest = _asked("ript", RiptRequest, argv)
    return _run(_read(lambda: _of_yaml("ript", request, rest)), process)


def vla(argv: Sequence[str]) -> int:
    """`vla --config FILE`: train a PaliGemma policy as a YAML config of the VLA's PyTorch trainer says."""
    from openpi_train.doors.door_requests import VlaRequest

    request, process, rest = _asked("vla", VlaRequest, argv)
    return _run(_read(lambda: _of_yaml("vla", request, rest)), process)


def _asked(verb: str, kind: object, argv: Sequence[str]) -> tuple[Any, "TrainFlags", list[str]]:
    """The request of a verb, which process this is, and the words that are left. Logging is as of this process.

    Raises UsageError if its config cannot be read, which is known before jax is imported.
    """
    from openpi_train.command_line import Own, TrainFlags, parse_known
    from openpi_train.doors.yaml_file import read_yaml

    (request, process), rest = parse_known(tuple[Own[kind], Own[TrainFlags]], argv, verb, kind.__doc__)
    logs.configure(find_world(process, os.environ).process_index)
    _read(lambda: read_yaml(request.config))  # pyright: ignore[reportAttributeAccessIssue]
    return request, process, rest


def _of_yaml(verb: str, request: object, rest: Sequence[str]) -> "Experiment":
    """What the verb's module in `doors` makes of its request, with the flags that are left."""
    default, words = importlib.import_module(f"openpi_train.doors.{_MODULES[verb]}").experiment_of(request, rest)
    return with_flags(default, words, verb, "The experiment of a YAML config.")


def _read(what: Callable[[], Result]) -> Result:
    """What comes of reading files of a run or a config, on a file system that may fail for a moment."""
    return patiently(what, "reading what to train")


def _run(experiment: "Experiment", process: "TrainFlags") -> int:
    """Train, or with `--dry-run` say what it needs."""
    from openpi_train.training import dry_run, start

    in_their_keys = other_tools.errors_in_their_keys
    with in_their_keys():
        if (num_devices := preflight.devices()) is not None:
            return dry_run.check_ahead(experiment, num_devices)
        if process.dry_run:
            return dry_run.dry_run(experiment, process, process.devices_per_process)
    run_guarded(in_their_keys()(lambda: start.main(experiment, process, process.devices_per_process)))
