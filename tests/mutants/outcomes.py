"""A pytest plugin that writes what came of every test, as JSON, to the file that MUTANTS_OUTCOMES names."""

import json
import os
from pathlib import Path

import pytest

_outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test failed where any of its phases did; else it is what the last phase but clearing up was."""
    known = _outcomes.get(report.nodeid)
    if report.failed or known is None or (report.when == "call" and known == "passed"):
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    Path(os.environ["MUTANTS_OUTCOMES"]).write_text(json.dumps(_outcomes), encoding="utf-8")
