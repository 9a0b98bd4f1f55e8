"""A run on GPUs records what bounds its step. The program is a recorded one; a stand-in says what it compiled to."""

import dataclasses
import json
import types
from pathlib import Path

import pytest
from openpi_train_configs.debug import debug
from record_hlo import NUM_LAYERS, ROWS, WIDTH

from openpi_train.data.core.files import write_json
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.forecast import Machine
from openpi_train.planning.gpu.run_account import RECORD, run_account
from openpi_train.planning.gpu.step_account import GpuAccount
from openpi_train.runtime.device_kinds import UNKNOWN, find_kind
from openpi_train.tools import report_parts
from openpi_train.tools.page import page
from openpi_train.tools.run_files import RunFiles
from openpi_train.training.results import write_results

MACHINE = Machine(kind=find_kind("h100"), num_devices=2, num_hosts=1, available_bytes=0)
PRODUCTS = 3 * NUM_LAYERS * 2 * ROWS * WIDTH * WIDTH  # of the recorded program: FLOPs


@dataclasses.dataclass
class StandIn:
    """What a `jax.stages.Compiled` is asked."""

    text: str

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> types.SimpleNamespace:
        sizes = {"argument": 30, "temp": 20, "output": 12, "alias": 10, "host_argument": 0}
        return types.SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})


@pytest.fixture(scope="module")
def found() -> GpuAccount:
    recorded = Path(__file__).resolve().parent / "recorded" / "layers.hlo"
    account = run_account(StandIn(recorded.read_text()), MACHINE, compile_s=1.5)
    assert account is not None
    return account


def test_a_run_on_gpus_has_the_bound_of_its_own_program(found):
    assert found.flops == PRODUCTS
    assert found.matmul_s == pytest.approx(PRODUCTS / (0.81 * 989e12))
    assert (found.kind, found.compile_s, found.peak_bytes, found.buffers) == ("h100", 1.5, 52, [])


def test_devices_without_a_description_and_unknown_texts_have_none(caplog):
    assert run_account(StandIn("not even read"), dataclasses.replace(MACHINE, kind=UNKNOWN), 0.0) is None
    assert not caplog.records
    assert run_account(StandIn("another language"), MACHINE, 0.0) is None
    assert "cannot be read" in caplog.text


def test_results_and_report_show_the_record(found, tmp_path):
    directory = tmp_path / "debug" / "x"
    directory.mkdir(parents=True)
    nothing = {"last_metrics": {}, "evaluations": [], "proportions": {}, "bad_records": 0}
    plan = Plan(mesh=make_mesh(1), strategy="replicated")

    def results() -> dict:
        write_results(directory / "results.json", debug, plan, step=1, seconds=1, checkpoints=[], best=None, **nothing)
        return json.loads((directory / "results.json").read_text())

    run = RunFiles(directory)
    assert "gpu_step" not in results()
    assert not run.has_gpu_step
    write_json(directory / RECORD, found.as_json())
    assert results()["gpu_step"]["bound_s"] == found.bound_s
    assert run.has_gpu_step
    (directory / "metrics.jsonl").write_text('{"step": 1, "time/step_s": 0.25}\n')
    html = page("x", {"Bound": report_parts.gpu_step(run)}, "")
    assert f"less than {1e3 * found.bound_s:.1f} ms" in html
    assert "The last one took 250.0 ms" in html
    assert "backward" in html
    assert "mlp" in html
