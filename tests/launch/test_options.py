"""Fields of a dataclass as options of a command line."""

import argparse
import dataclasses
from pathlib import Path

import pytest

from openpi_train.launch.options import add_options, at_least, option, read_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Where:
    hosts: str | None = option("names", None, one_of="hosts")
    hosts_file: Path | None = option("a file", None, one_of="hosts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    words: tuple[str, ...]
    num_nodes: int = option("how many", flags=["--nodes"], type=at_least(1))
    where: Where
    names: tuple[str, ...] = option("may be repeated", ())
    dry_run: bool = option("start nothing", False)
    limit_s: float = option("seconds (%(default)s)", 1.5)


def read(*words: str) -> Run:
    parser = argparse.ArgumentParser()
    add_options(parser, Run)
    return read_options(Run, vars(parser.parse_args(words)), words=("x",))


def test_what_is_given_and_what_is_not():
    least = read("--nodes", "2", "--hosts", "a")
    assert least == Run(words=("x",), num_nodes=2, where=Where(hosts="a"))
    most = read("--nodes=1", "--hosts-file=f", "--names=a", "--names=b", "--dry-run", "--limit-s=3")
    where = Where(hosts_file=Path("f"))
    assert most == Run(words=("x",), num_nodes=1, where=where, names=("a", "b"), dry_run=True, limit_s=3.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hosts a", "the following arguments are required: --nodes"),
        ("--nodes 2", "one of the arguments --hosts --hosts-file is required"),
        ("--nodes 2 --hosts a --hosts-file b", "not allowed with argument --hosts"),
        ("--nodes 0 --hosts a", "argument --nodes: '0' is not a number of at least 1"),
        ("--nodes 2 --hosts a --words y", "unrecognized arguments: --words y"),
    ],
)
def test_what_cannot_be_is_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        read(*words.split())
    assert message in capsys.readouterr().err


def test_help_has_the_defaults():
    parser = argparse.ArgumentParser()
    add_options(parser, Run)
    assert "seconds (1.5)" in parser.format_help() and "--num-nodes" not in parser.format_help()
