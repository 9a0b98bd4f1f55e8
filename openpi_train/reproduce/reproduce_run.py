"""The `reproduce` verb: make a result of the board again, with the functions of the commands that a user would type.

Process 0 makes the data, all processes train and evaluate in one session, and process 0 writes `record.json`. What is
done is noted in `stages.json`, so the same command goes on where it was. Read next: `board.py`, `result_record.py`.
"""

import dataclasses
import logging
import multiprocessing
import os
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from openpi_train.command_line import Own, ProcessFlags, TrainFlags, parse
from openpi_train.data.core.files import read_json, write_json
from openpi_train.experiment import Experiment
from openpi_train.experiment_flags import parse_experiment
from openpi_train.json_object import JsonObject
from openpi_train.reproduce import result_record
from openpi_train.reproduce.board import entry_of
from openpi_train.reproduce.reproduce_request import ReproduceRequest
from openpi_train.reproduce.reproduction import Reproduction, is_own
from openpi_train.runtime import agree, logs, session
from openpi_train.runtime.exits import DATA, DONE, DataError, UsageError
from openpi_train.runtime.phases import phase
from openpi_train.runtime.world import World, find_world
from openpi_train.tools import data, evaluate_policy
from openpi_train.tools.requests import EvaluateRequest, EvaluateTextRequest
from openpi_train.training import dry_run, start
from openpi_train.training.rundir import environment
from openpi_train.training.settling import require_early

logger = logging.getLogger(__name__)

# How long processes wait for process 0 to make the data.
_DATA_S = 24 * 3600.0
_RECORD = "record.json"


def main(request: ReproduceRequest, process: TrainFlags) -> int:
    """Make the result, or go on with it; returns the exit code. Every process of the run must call it.

    Raises UsageError for an unknown entry or a missing package, DataError for data that nothing here makes.
    """
    logs.configure(0)
    entry, folder = entry_of(request.name[0]), request.folder
    then = None if request.record is None else result_record.read_record(request.record)
    if then is not None and then["name"] != entry.name:
        raise UsageError(f"{request.record} is the record of {then['name']}, not of {entry.name}")
    if process.dry_run:
        return tell_needs(entry, folder, process)
    if entry.lacking:
        raise UsageError(entry.lacking)
    world = find_world(process, os.environ)
    logs.configure(world.process_index)
    is_first = world.process_index == 0
    if (folder / _RECORD).is_file():
        logger.info("%s is complete: another --out makes it anew", folder)
        return _tell(entry, folder, then) if is_first else DONE
    if is_first:
        _require_data(entry, folder)
    devices = process.devices_per_process or max(entry.cpu_devices // world.process_count, 1)
    facts = {"reproduce": dataclasses.asdict(entry), "out": str(folder)}
    session.start(world, facts=facts, devices_per_process=devices, shared_folder=folder)
    _Reproducing(entry, folder, world).run()
    code = _tell(entry, folder, then) if is_first else DONE
    session.stop()
    return code


def tell_needs(entry: Reproduction, folder: Path, process: TrainFlags) -> int:
    """Print what the entry runs, what is missing, and what the training needs. Returns 3 if data are to be fetched."""
    missing = {path: command for path, command in entry.data_commands(folder).items() if not path.exists()}
    for line in _commands(entry, folder):
        print(f"runs: python -m openpi_train {line}")
    if entry.lacking:
        print(f"missing: {entry.lacking}")
    for path, command in missing.items():
        print(f"missing: {path}: {'made by' if is_own(command) else 'get it with'}: {_typed(command)}")
    for words in entry.evaluation_words(folder).values():
        _evaluation(words)
    trainings = list(entry.training_words(folder).values())
    if trainings and not missing:  # the first one: the weights of the other are not there yet
        return dry_run.dry_run(
            parse_experiment(trainings[0][0], trainings[0][1:]), process, process.devices_per_process
        )
    for words in trainings:
        if "--dataset" in words:  # whose dims the experiment takes
            print("the training is checked when its data are there")
        else:
            require_early(parse_experiment(words[0], words[1:]), has_files=False)
            print("the training is valid, but for what its data say")
    return DATA if any(not is_own(command) for command in missing.values()) else DONE


class _Reproducing:
    """An entry being made in its folder, by processes that have met."""

    def __init__(self, entry: Reproduction, folder: Path, world: World):
        self._entry, self._folder, self._world = entry, folder, world
        self._is_first = world.process_index == 0
        done = read_json(folder / "stages.json") if (folder / "stages.json").is_file() else {}
        self._done: dict[str, float] = agree.broadcast("stages that are done", done)

    def run(self) -> None:
        """Do all stages that are not done, and write the record. Every process must call it."""
        entry, folder = self._entry, self._folder
        with phase("making the data"):
            self._stage("data", self._make_data, _DATA_S)
        experiment = None
        for stage, words in entry.training_words(folder).items():
            experiment = parse_experiment(words[0], words[1:])
            self._stage(stage, lambda experiment=experiment: start.run_met(experiment, self._world))
        for name, words in entry.evaluation_words(folder).items():
            with phase("evaluating"):
                self._stage(f"eval {name}", lambda words=words: evaluate_policy.run(*_evaluation(words)))
        if self._is_first:
            self._write_record(experiment)

    def _stage(self, name: str, work: Callable[[], object], timeout_s: float = agree.DEFAULT_TIMEOUT_S) -> None:
        """Do what is not done yet, and note it with the seconds that it took."""
        if name in self._done:
            return
        began = time.monotonic()
        work()
        self._done[name] = round(time.monotonic() - began, 1)
        if self._is_first:
            write_json(self._folder / "stages.json", self._done)
        agree.barrier(f"{name} is done", timeout_s)

    def _make_data(self) -> None:
        for path, command in self._entry.data_commands(self._folder).items() if self._is_first else ():
            if path.exists() and not is_own(command):
                continue
            step = f"data {path}"
            if step in self._done:
                continue
            logger.info("making %s: %s", path, _typed(command))
            began = time.monotonic()
            _in_own_process(shlex.split(command)[1:])
            self._done[step] = round(time.monotonic() - began, 1)
            write_json(self._folder / "stages.json", self._done)

    def _write_record(self, experiment: Experiment | None) -> None:
        entry, folder = self._entry, self._folder
        parts: dict[str, object] = {"data": None, "losses": None, "parameters": None}
        if experiment is not None:
            run = experiment.run_dir
            parts = {
                "data": result_record.data_digests(experiment),
                "losses": result_record.losses_digest(run / "metrics.jsonl"),
                "parameters": result_record.parameters_digest(run),
            }
        record = {
            "name": entry.name,
            "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "commands": [line.replace(str(folder), "OUT") for line in _commands(entry, folder)],
            **parts,
            "success": {name: result_record.success_of(entry.results(folder, name)) for name in entry.evaluations},
            "published": None if entry.published is None else dataclasses.asdict(entry.published),
            "minutes": {name: round(seconds / 60, 2) for name, seconds in self._done.items() if name[:5] != "data "},
            "environment": environment(),
        }
        write_json(folder / _RECORD, record)


def _tell(entry: Reproduction, folder: Path, then: JsonObject | None) -> int:
    """Print the record of the folder, and what differs from another one. Returns the exit code."""
    now = result_record.read_record(folder / _RECORD)
    print(f"{entry.name}: {folder / _RECORD}\n{result_record.in_words(now)}")
    return DONE if then is None else _tell_comparison(then, now)


def _tell_comparison(then: JsonObject, now: JsonObject) -> int:
    found = result_record.compare(then, now)
    print(f"\n{result_record.comparison(found)}\n")
    different = [one.name for one in found if one.verdict == "DIFFERS"]
    if not different:
        print("equal: every result, bit for bit")
        return DONE
    versions = any(one.name.startswith("versions") and one.then != one.now for one in found)
    print(
        f"different: {', '.join(different)}"
        + ("; versions differ, too, and bits need equal ones (constraints.txt)" if versions else "")
    )
    return DATA


def _require_data(entry: Reproduction, folder: Path) -> None:
    """Raise DataError for data that the user has to fetch."""
    for path, command in entry.data_commands(folder).items():
        if not is_own(command) and not path.exists():
            raise DataError(f"{path} is not there; where there is a network this gets it: {command}")


def _commands(entry: Reproduction, folder: Path) -> list[str]:
    """Every command line of this program, as it could be typed."""
    lines = [command for command in entry.data_commands(folder).values() if is_own(command)]
    lines += [shlex.join(words) for words in entry.training_words(folder).values()]
    return lines + [f"eval {shlex.join(words)}" for words in entry.evaluation_words(folder).values()]


def _typed(command: str) -> str:
    return f"python -m openpi_train {command}" if is_own(command) else command


def _evaluation(words: list[str]) -> tuple[EvaluateRequest, EvaluateTextRequest]:
    """The request of an `eval` command."""
    kind = tuple[Own[EvaluateRequest], Own[EvaluateTextRequest], Own[ProcessFlags]]
    request, texts, _ = parse(kind, words, "eval", EvaluateRequest.__doc__)
    return request, texts


def _in_own_process(words: list[str]) -> None:
    """Run a `data` command in a new process: it simulates on the CPU, in a precision of its own.

    Raises what it raises, DataError for an exit code other than 0.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        if code := pool.submit(_make, words).result():
            raise DataError(f"`data {shlex.join(words)}` ended with code {code}")


def _make(words: list[str]) -> int:
    logs.configure(0)
    return data.main(words, parse_experiment)
