"""The loop waits for nothing: it reads no array between log lines, which the CPU's own guard would not notice."""

import dataclasses
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
import toy
from jax._src.array import ArrayImpl
from trainers import NoData

from openpi_train import registry
from openpi_train.data.core.files import write_json
from openpi_train.data.core.interface import Data
from openpi_train.experiment import EvalConfig
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.training.crash_loop import CrashLoop
from openpi_train.training.guard import no_implicit_transfers
from openpi_train.training.init import create_state
from openpi_train.training.loop import train
from openpi_train.training.metrics import MetricWriters
from openpi_train.training.profiler import Profiler
from openpi_train.training.progress_report import ProgressReport
from openpi_train.training.recorder import Recorder
from openpi_train.training.run import Run
from openpi_train.training.slow_hosts import SlowDevices, SlowHosts

STEPS, INTERVAL, ROWS = 8, 4, 8


def nothing(*_, **__):
    return None


class EndlessFeed:
    """One batch for ever."""

    def __init__(self, batch):
        self._batch = batch
        self.start = self.tune = self.close = self.position = nothing
        self.bad_records, self.wait_s = 0, 0.0

    can_be_saved = True

    def next(self, state):
        return self._batch

    def proportions(self):
        return {"toy": 1.0}

    def metrics(self):
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyData(Data):
    """The shapes of the toy's batches; there is nothing to open."""

    def batch_spec(self, model, batch_size):
        return model.rows.batch_spec(batch_size, ())

    def open(self, request):
        raise NotImplementedError


@pytest.fixture(scope="module")
def parts():
    """The toy's trainer, layout, compiled step and a batch on the devices."""
    trainer, layout = strategies.prepare(toy.LinearConfig(), "replicated", 1, 1, jax.devices()[:1])
    batch = jax.device_put(toy.batch(ROWS), trainer.plan.batch)
    return trainer, layout, batch


@pytest.fixture
def run(parts, tmp_path):
    """A run whose steps, recorder, metrics and profiler are real, and which neither evaluates nor saves."""
    trainer, layout, batch = parts
    experiment = registry.load("debug")
    fields = {"model": trainer.model, "objective": FlowMatching(augment=False), "batch_size": ROWS, "profile": 2}
    fields |= {"num_train_steps": STEPS, "log_interval": INTERVAL, "save_interval": 100, "eval": EvalConfig(interval=0)}
    experiment = dataclasses.replace(experiment, **fields, data=ToyData())
    recorder = Recorder(
        batch_size=ROWS,
        peak_flops=None,
        counted_s={"data": lambda: 0.0},
        row_names=lambda step: ["row"],
        stop_on_nan=True,
    )
    run = Run.__new__(Run)  # with stand-ins, which its type-checked constructor would refuse
    vars(run).update(
        experiment=experiment,
        directory=tmp_path,
        trainer=trainer,
        layout=layout,
        state=create_state(layout, trainer.model, trainer.optimizer, trainer.model.param_rules.frozen, True, 7),
        data=NoData(num_samples=0),
        feed=EndlessFeed(batch),
        recorder=recorder,
        metrics=MetricWriters(tmp_path, process_index=0),
        progress=ProgressReport(STEPS),
        profiler=Profiler(tmp_path / "profile", 2, 1, recorder.wait),
        step=0,
        crash_loop=CrashLoop(),
        goodput=None,
        slow_hosts=SlowHosts(),
        slow_devices=SlowDevices(),
        device_speed=None,
        catch_up=nothing,
        stop_requested=nothing,
        evaluate=lambda step, state: True,
        save=nothing,
    )
    run.finish = nothing
    plan = {"bytes_per_device": {"state": 1, "host": 0, "total": 1}, "available_bytes_per_device": 2**40}
    write_json(tmp_path / "plan.json", plan)  # which the compiled step is held against
    with jax.set_mesh(trainer.plan.real_mesh):
        yield run
    run.metrics.close()


def reads_by_step(run, monkeypatch):
    """Trains; how many arrays the host read while it took each step."""
    reads, taking = dict.fromkeys(range(1, STEPS + 1), 0), run.taking
    step_under_way = []
    value = ArrayImpl._value

    def counted(array):
        if step_under_way:
            reads[step_under_way[-1]] += 1
        return value.fget(array)

    class Taking:
        def __init__(self, step):
            self.step, self.inner = step, taking(step)

        def __enter__(self):
            self.inner.__enter__()
            step_under_way.append(self.step)

        def __exit__(self, *error):
            step_under_way.pop()
            return self.inner.__exit__(*error)

    run.taking = Taking
    monkeypatch.setattr(ArrayImpl, "_value", property(counted))
    assert train(run).step == STEPS
    return reads


@pytest.mark.slow
def test_the_loop_reads_from_the_devices_at_log_lines_alone(run, monkeypatch):
    reads = reads_by_step(run, monkeypatch)
    assert [step for step, count in reads.items() if count] == [4, 8]
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    traced = [line for line in lines if "time/traced_step_s" in line]
    assert [line["step"] for line in lines if line not in traced] == [4, 8]
    assert [(line["step"], line["time/communication_s"]) for line in traced] == [(5, 0.0)], "one device sends nothing"


@pytest.mark.slow
def test_such_a_read_would_be_counted(run, monkeypatch):
    note = run.note

    def reading(step, metrics):
        note(step, metrics)
        float(metrics["loss"])

    run.note = reading
    assert all(reads_by_step(run, monkeypatch).values())


@pytest.mark.slow
def test_a_value_that_goes_to_the_devices_within_a_step_ends_the_run_and_says_what_to_do(run):
    def sending(step, metrics):
        run.recorder.add(step, {**metrics, "loss": metrics["loss"] + np.float32(1)})

    run.note = sending
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer") as raised:
        train(run)
    assert "jax.device_get or jax.device_put" in "".join(raised.value.__notes__)


def test_transfers_that_are_asked_for_pass_and_other_errors_stay_as_they_are():
    x = jnp.arange(3.0)
    with no_implicit_transfers():
        assert np.array_equal(jax.device_get(x), np.arange(3.0))
        jax.device_put(np.ones(3))
    with pytest.raises(ValueError, match="mine") as raised, no_implicit_transfers():
        raise ValueError("mine")
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.slow
def test_a_profile_holds_the_steps_that_were_asked_for(run):
    train(run)
    assert json.loads((run.directory / "program.json").read_text())["model_flops"] > 0
    (trace,) = (run.directory / "profile").rglob("*.trace.json.gz")
    (_,) = (run.directory / "profile").rglob("*.xplane.pb")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert [event["args"]["step_num"] for event in events if event.get("name") == "train"] == ["4", "5"]


@pytest.mark.parametrize(("steps", "says"), [(4, "wrote a profile"), (3, "the run ended before step 4")])
@pytest.mark.slow
def test_a_run_that_ends_early_writes_what_was_traced_or_says_that_nothing_was(tmp_path, caplog, steps, says):
    caplog.set_level("INFO")
    profiler = Profiler(tmp_path, 5, 1, nothing)
    for step in range(1, steps + 1):
        with profiler.step(step):
            pass
    profiler.close()
    profiler.close()
    assert says in caplog.text
    assert bool(list(tmp_path.rglob("*.xplane.pb"))) == (steps == 4)
    jax.profiler.start_trace(tmp_path / "again")  # none is under way
    jax.profiler.stop_trace()
