"""What is said where compiled step and forecast differ; a run's real numbers are in `runs/test_planned_run.py`."""

import logging
import types

import pytest

from openpi_train.data.core.files import read_json, write_json
from openpi_train.planning.compiled import check_plan

PLAN = {"bytes_per_device": {"state": 900, "host": 100, "total": 1500}, "available_bytes_per_device": 2000}


def compiled(arguments: int, temporaries: int, on_host: int = 0):
    """An executable that says so: all its arguments but the batch are donated."""
    sizes = types.SimpleNamespace(
        argument_size_in_bytes=arguments - on_host,
        host_argument_size_in_bytes=on_host,
        temp_size_in_bytes=temporaries,
        output_size_in_bytes=1010,
        alias_size_in_bytes=1000,
    )
    return types.SimpleNamespace(memory_analysis=lambda: sizes)


@pytest.mark.parametrize(
    ("arguments", "temporaries", "warnings"),
    [
        (1100, 400, []),
        (1119, 400, []),
        (981, 400, []),
        (979, 400, ["the state takes 879 bytes on each device and not 1000"]),
        (1121, 400, ["the state takes 1021 bytes on each device and not 1000"]),
        (1100, 1000, ["may end for lack of memory"]),
        (1900, 400, ["the state takes 1800 bytes", "may end for lack of memory"]),
    ],
)
def test_what_differs_is_warned_of_and_both_are_written_down(tmp_path, caplog, arguments, temporaries, warnings):
    path = tmp_path / "plan.json"
    write_json(path, PLAN)
    with caplog.at_level(logging.INFO):
        check_plan(path, compiled(arguments, temporaries), batch_bytes=100)
    found = {"state": arguments - 100, "batch": 100, "temporaries": temporaries, "total": arguments + temporaries + 10}
    assert read_json(path) == {**PLAN, "compiled_bytes_per_device": found}
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == len(warnings) and all(part in text for part, text in zip(warnings, told, strict=True))


def test_state_in_host_memory_is_told_apart_where_the_backend_does(tmp_path, caplog):
    path = tmp_path / "plan.json"
    write_json(path, PLAN)
    check_plan(path, compiled(1100, 400, on_host=100), batch_bytes=100)
    found = {"state": 1000, "batch": 100, "temporaries": 400, "total": 1000 + 400 + 10}
    assert read_json(path)["compiled_bytes_per_device"] == found and not caplog.records


def test_a_backend_that_does_not_say_is_told_of(tmp_path, caplog):
    path = tmp_path / "plan.json"
    write_json(path, PLAN)
    with caplog.at_level(logging.INFO):
        check_plan(path, types.SimpleNamespace(memory_analysis=lambda: None), batch_bytes=100)
    assert read_json(path) == PLAN and "does not report the memory" in caplog.text
