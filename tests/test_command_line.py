"""Flags from dataclasses: values, limits, refusals, and what is passed on; every request explains its flags."""

import dataclasses
import re
import subprocess
import sys
import typing
from typing import Annotated, Literal

import pytest
from tyro.conf import Positional, arg

from openpi_train import cli
from openpi_train.command_line import (
    OverrideFlags,
    Own,
    ProcessFlags,
    Request,
    TrainFlags,
    misspelt,
    one_word,
    parse,
    parse_fields,
    parse_known,
    whole_number,
)
from openpi_train.fields import at_least
from openpi_train.reproduce.reproduce_request import ReproduceRequest
from openpi_train.runtime.device_kinds import KINDS
from openpi_train.runtime.exits import UsageError
from openpi_train.serve.request import ServeRequest
from openpi_train.tools import data, requests

REQUESTS = [
    *(kind for kind in vars(requests).values() if isinstance(kind, type) and issubclass(kind, Request)),
    *(*typing.get_args(data.AnyDataRequest), ServeRequest, ReproduceRequest, TrainFlags, OverrideFlags),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Count(Request):
    """Count sheep."""

    # Where they are.
    place: Annotated[str, Positional, arg(metavar="PLACE")]
    # How many there are.
    sheep: int = at_least(2, 3)
    # Their colour.
    colour: Literal["white", "black"] | None = None
    # Their names.
    names: Annotated[tuple[str, ...], one_word(lambda text: tuple(text.split(",")), "A,B")] = ()
    # Count aloud.
    aloud: bool = True

    def check(self) -> list[str]:
        return ["--names are more than --sheep"] if len(self.names) > self.sheep else []


def refused(kind, argv, capsys) -> str:
    """What is said of a command line that ends with code 2, without frames and line breaks."""
    with pytest.raises(SystemExit) as ending:
        parse(kind, argv, "count")
    assert ending.value.code == 2
    return unframed(capsys.readouterr().err)


def unframed(text: str) -> str:
    """A box's text in one line."""
    return " ".join(re.sub(r"│|-{4,}|─+", " ", text).split())


def test_flags_are_the_fields_and_their_defaults():
    assert parse(Count, ["meadow"], "count") == Count(place="meadow")
    words = "--sheep 4 --colour=black meadow --names ann,bo --no-aloud".split()
    wanted = Count(place="meadow", sheep=4, colour="black", names=("ann", "bo"), aloud=False)
    assert parse(Count, words, "count") == wanted


def test_numbers_below_their_least_and_conflicts_are_told_together():
    with pytest.raises(UsageError) as error:
        parse(Count, ["meadow", "--sheep", "1", "--names", "ann,bo"], "count")
    assert str(error.value) == "--sheep 1 must be at least 2\n--names are more than --sheep"


def test_an_unknown_flag_gets_the_closest_one(capsys):
    said = refused(Count, ["meadow", "--sheeps", "3"], capsys)
    assert "Unrecognized options: --sheeps, 3" in said and "Perhaps you meant: --sheep INT How many there are." in said
    said = refused(Count, ["meadow", "--colour", "red"], capsys)
    assert "invalid choice 'red' for argument '--colour'" in said and "'white'" in said and "'black'" in said
    assert "PLACE" in refused(Count, [], capsys)


def test_a_misspelt_flag_that_is_no_field_gets_the_closest_one(capsys):
    words = ["--data.robots", "recorded", "--dry_rn", "--optimizer.b3=1", "--modl.path", "x", "--learning_rate=1", "y"]
    assert misspelt(words) == [
        ("--data.robots", "--data.robot"),
        ("--dry-rn", "--dry-run"),
        ("--modl.path", "--model.path"),
        ("--learning-rate", "--lr-schedule.peak-lr"),
    ]
    with pytest.raises(SystemExit):
        parse_fields(Count, Count(place="here"), ["--datast", "x"], "count", "Count.")
    assert capsys.readouterr().err.endswith("--datast: did you mean --dataset?\n")
    assert parse_fields(Count, Count(place="here"), ["there", "--sheep", "4"], "count", "Count.").sheep == 4


def test_words_of_others_are_passed_on_in_their_order():
    words = "--model.action_dim 8 --sheep 5 --seed=-1 --resume --x -2".split()
    found, rest = parse_known(Count, ["meadow", *words], "count")
    assert found == Count(place="meadow", sheep=5)
    assert rest == "--model.action_dim 8 --seed=-1 --resume --x -2".split()
    assert parse_known(TrainFlags, ["--dry-run", "--help"], "debug", add_help=False) == (
        TrainFlags(dry_run=True),
        ["--help"],
    )


def test_several_kinds_are_parsed_together_and_each_checked(capsys):
    kind = tuple[Own[Count], Own[ProcessFlags]]
    count, process = parse(kind, ["meadow", "--process-id", "1", "--sheep", "2"], "count", Count.__doc__)
    assert (count, process) == (Count(place="meadow", sheep=2), ProcessFlags(process_id=1))
    with pytest.raises(UsageError, match="--devices-per-process 0 must be at least 1"):
        parse(kind, ["meadow", "--devices-per-process", "0"], "count")
    with pytest.raises(SystemExit):
        parse(kind, ["--help"], "count", Count.__doc__)
    said = capsys.readouterr().out
    assert "Count sheep." in said and "CPU devices to make in this process." in said


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_every_flag_of_a_request_explains_itself(kind, capsys):
    with pytest.raises(SystemExit) as ending:
        parse(kind, ["--help"], "verb")
    assert ending.value.code == 0
    said = unframed(capsys.readouterr().out)
    assert said.count("[-h]") == 1
    assert not re.findall(r"--[\w-]+ (?:\S+ )?\((?:default|required)", said)


@pytest.mark.parametrize("verb", [name for name in cli.VERBS if name != "launch"])
def test_help_waits_neither_for_jax_nor_numpy(verb):
    program = (
        "import sys\nfrom openpi_train import cli\n"
        f"try: cli.run([{verb!r}, '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'jax', 'flax', 'orbax', 'numpy', 'matplotlib', 'websockets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_launching_and_the_list_of_verbs_need_no_tyro():
    for words in (["--help"], ["launch", "local", "--processes", "1", "--dry-run", "--", "debug", "--exp-name", "x"]):
        program = f"import sys\nfrom openpi_train import cli\nsys.exit(cli.run({words!r}) or 'tyro' in sys.modules)"
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_results_of_an_evaluation_do_not_go_into_a_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "results"):
        assert cli.run(["eval", "run", "--out", str(out)]) == 2
        assert f"--out {out}: {tmp_path}/file is a file; name a folder" in capsys.readouterr().err


def test_the_help_of_a_plan_lists_every_kind_of_device(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.run(["plan", "--help"])
    words = set(re.findall(r"[a-z0-9-]+", capsys.readouterr().out))
    assert {kind.name for kind in KINDS} <= words


@pytest.mark.parametrize(("word", "number"), [("12", 12), ("10_000", 10_000), ("1e4", 10_000), ("-2.0", -2)])
def test_whole_numbers_may_be_written_as_people_write_them(word, number):
    assert whole_number(word) == number and isinstance(whole_number(word), int)
    assert parse(Count, ["there", f"--sheep={word}"], "count").sheep == number if number > 1 else True


@pytest.mark.parametrize("word", ["1.5", "1e-4", "many", "inf", "nan"])
def test_other_words_are_no_whole_numbers(word, capsys):
    assert word in refused(Count, ["there", "--sheep", word], capsys)


def test_train_may_stand_before_the_experiment_and_alone_asks_which(capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(["train", "debug", "--help"])
    assert end.value.code == 0 and "A tiny pi0 on synthetic data" in capsys.readouterr().out
    for words in ([], ["plan", "debug"], ["--help"]):
        assert cli.run(["train", *words]) == 2 and "train what?" in capsys.readouterr().err
    assert cli.run(["train", "debgu"]) == 2 and "did you mean debug?" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys):
    assert cli.run(["--version"]) == 0
    assert re.fullmatch(r"openpi_train \d+\.\d+\S*\n", capsys.readouterr().out)


def test_the_list_groups_experiments_by_what_they_are(capsys):
    assert cli.run(["list"]) == 0
    groups = [group.splitlines()[0] for group in capsys.readouterr().out.strip().split("\n\n")]
    assert "Published language models on GSM8K" in groups and len(groups) == len(set(groups)) > 15
