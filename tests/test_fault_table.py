"""The table of faults: each error has its line, and every launcher does what the line says."""

from pathlib import Path

import pytest

from openpi_train import faults
from openpi_train.faults import Restart
from openpi_train.launch.processes import LaunchOutcome
from openpi_train.launch.supervise import can_be_mended
from openpi_train.runtime import exits

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "exit_codes.md"
# What the goal says: a run ends for good only for its own mistake.
ENDS = {1, 2, 3, 4, 5, 72, 130, 141}
GOES_ON = {70, 71, 75, 129, 134, 137, 139, 143}


def leaves(kind: type) -> list[type]:
    return [kind, *(leaf for sub in kind.__subclasses__() for leaf in leaves(sub))]


def test_every_error_of_ours_has_a_line():
    known = {fault.code for fault in faults.FAULTS}
    assert {kind.exit_code for kind in leaves(exits.RunError)} <= known


@pytest.mark.parametrize("code", sorted(ENDS | GOES_ON | {6, 0}))
def test_a_run_ends_for_good_only_for_its_own_mistake(code):
    fault = faults.fault_of(code)
    assert (fault is None) == (code == 0)
    assert can_be_mended(LaunchOutcome(code=code)) == (code in GOES_ON)
    if fault is not None:
        assert (fault.restart is Restart.FEWER_HOSTS) == (code == 6)


def test_a_code_that_nobody_knows_is_a_bug_and_ends_the_run():
    assert faults.fault_of(42) == faults.fault_of(1)


def test_the_page_shows_the_table():
    assert faults.as_markdown() in PAGE.read_text()
