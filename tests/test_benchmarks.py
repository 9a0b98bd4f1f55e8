"""What the benchmarks conclude and print, and that every command of their docs is understood."""

import argparse
import importlib
import json
import re
import shlex
import subprocess
import sys
import threading
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from scipy import stats

from benchmarks import __main__ as program
from benchmarks import (
    closed_loop,
    gpu_compile,
    gpu_steps,
    gpu_times,
    language,
    language_speed,
    long_run,
    real_time_delay,
    report,
    rl,
    rl_speed,
    rl_studies,
    step_time,
    steps,
)
from benchmarks.__main__ import BENCHMARKS
from benchmarks.report import Table, write_record
from openpi_train.planning.forecast import Machine
from openpi_train.planning.gpu import plugin
from openpi_train.runtime.device_kinds import find_kind
from openpi_train.runtime.exits import UsageError

ROOT = Path(__file__).resolve().parent.parent
F32 = ["--model.dtype", "float32"]


def test_a_flag_that_says_the_tiny_models_value_changes_the_medium_one():
    dtypes = [
        steps.parse(argparse.ArgumentParser(), ["--model", "medium", *flags])[1].model.dtype for flags in ([], F32)
    ]
    assert dtypes == ["bfloat16", "float32"]


@pytest.mark.parametrize(("remat", "references"), [("dots", ["dots", "full"]), ("full", ["full"])])
def test_step_time_sets_the_reference_to_the_same_recomputation_first(remat, references):
    experiment = steps.parse(argparse.ArgumentParser(), ["--model.remat", remat])[1]
    assert step_time.remats(experiment) == references


@pytest.mark.parametrize(
    ("untrained", "trained", "said"),
    [
        (0.0, 0.6, ""),
        (0.0, 0.59, "demo succeeds in 59% of the episodes, 60% are asked for"),
        (0.1, 0.9, "show nothing"),
    ],
)
def test_a_policy_that_fails_or_a_task_that_is_done_by_chance_is_a_failure(untrained, trained, said):
    study = closed_loop.Study(experiment="demo", dataset="", tasks=(), episodes_per_task=1, target=0.6)
    found = closed_loop.failure(study, [{"success/all": untrained}, {"success/all": 0.0}, {"success/all": trained}])
    assert said in found and bool(said) == bool(found)


PI0 = rl_studies.STUDIES["tabletop_pi0"]
METAWORLD = rl_studies.STUDIES["metaworld"]


def trained_to(before, after, *, clipped=0.1, imitated=None):
    return rl_studies.Trained({0: before, 4: 0.1, 8: after}, clipped, 9.0, imitated, imitated and 8.0)


def test_seeds_are_counted_together():
    lines = [{"step": 0, "success/all": 0.5}, {"step": 4, "clip_fraction": 0.3}, {"step": 8, "success/all": 0.6}]
    one = rl.read(lines, "success/all", 7.0)
    assert (one.before, one.after, one.clipped) == (0.5, 0.6, 0.3) and one.gain == pytest.approx(0.1)
    first, last = rl.curve("x", [one, trained_to(0.7, 0.5)], 100)
    # 110 of 200: Wilson's interval by hand.
    centre, half = (0.55 + 1.96**2 / 400) / (1 + 1.96**2 / 200), 1.96 / (1 + 1.96**2 / 200)
    half *= (0.55 * 0.45 / 200 + 1.96**2 / 160_000) ** 0.5
    assert last[:3] == ["x", "8", 200] and last[4].samples == (0.6, 0.5) and last[6] == pytest.approx(0.55)
    assert last[5] == f"{centre - half:.0%} to {centre + half:.0%}" and first[3] is None


def test_episodes_are_counted_by_the_flags_of_a_study_also_where_it_makes_its_data_first(tmp_path):
    assert rl.counted(rl_studies.STUDIES["tabletop_fast"], tmp_path) == 2 * 200


def test_gains_have_students_interval_over_seeds():
    found = [trained_to(0.5, 0.6, imitated=0.51), trained_to(0.5, 0.62, imitated=0.53), trained_to(0.5, 0.58)]
    own, more = rl.gained("x", found)
    # The quantile 0.975 for two degrees of freedom, from a table; the standard deviation is 2 points.
    half = 4.3027 * 0.02 / 3**0.5
    assert own[4] == f"{0.1 - half:.1%} to {0.1 + half:.1%}" and own[5] == pytest.approx(0.1)
    assert more[1] == "more imitation" and more[2].samples == (8.0, 8.0) and more[5] == pytest.approx(0.02)
    assert len(rl.gained("x", [trained_to(0.5, 0.6)])) == 1 and rl.gained("x", found[2:])[0][4] is None


@pytest.mark.parametrize(
    ("study", "found", "said"),
    [
        (PI0, [trained_to(0.5, 0.58, imitated=0.52), trained_to(0.6, 0.7, imitated=0.63)], []),
        (
            PI0,
            [trained_to(0.5, 0.57, imitated=0.53), trained_to(0.6, 0.68, imitated=0.64)],
            ["x gains 7.5% by RL; wanted: at least 8%", "x gains 3.5% by more imitation; wanted: less than 3%"],
        ),
        (PI0, [trained_to(0.5, 0.7)], ["x: more imitation is not measured"]),
        (rl_studies.STUDIES["tabletop_dp"], [trained_to(0.4, 0.5)], []),
        (
            rl_studies.STUDIES["tabletop_weighted"],
            [trained_to(0.5, 0.5, clipped=0.3)],
            ["x gains 0.0% by RL; wanted: more than 0", "x clips 0.3 of its units; wanted: at most 0.2"],
        ),
        (METAWORLD, [trained_to(0.35, 0.7), trained_to(0.47, 0.92)], []),
        (
            METAWORLD,
            [trained_to(0.35, 0.7), trained_to(0.43, 0.86)],
            ["x begins at 39.0%; wanted: 40% to 60%", "x ends at 78.0%; wanted: at least 80%"],
        ),
        (
            rl_studies.STUDIES["arithmetic_ppo"],
            [trained_to(0.62, 0.84)],
            ["x begins at 62.0%; wanted: 45% to 60%", "x ends at 84.0%; wanted: at least 85%"],
        ),
    ],
)
def test_what_rl_does_not_reach_is_a_failure(study, found, said):
    assert rl_studies.problems("x", study, found) == said


def test_rl_begins_at_the_checkpoint_that_is_half_trained(tmp_path):
    """Wanted is 0.5; the start of the run does not count, and of 0.4 and 0.6 the earlier does."""
    lines = [(0, 0.5), (50, 0.1), (100, 0.4), (150, 0.6), (200, 0.9)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "success/all": found}) + "\n" for step, found in lines))
    assert rl._begun_from(tmp_path, METAWORLD) == tmp_path / "100"
    assert rl._begun_from(tmp_path, PI0) == tmp_path


def test_a_run_of_rl_that_was_interrupted_goes_on_and_one_that_is_over_is_not_repeated(tmp_path, monkeypatch):
    """The second of three commands is interrupted."""
    seen, seconds = [], iter(range(0, 1000, 5))

    def run(words):
        seen.append(words)
        (tmp_path / "7" / words[0] / "x" / "20").mkdir(parents=True, exist_ok=True)
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(rl, "_run", run)
    monkeypatch.setattr(rl, "_children_s", lambda: next(seconds))
    runs = rl.Runs(METAWORLD, 7, tmp_path)
    assert runs.run("one", ["--a"]) == (tmp_path / "7" / "one" / "x", 5.0)
    with pytest.raises(KeyboardInterrupt):
        runs.run("two", [])
    again = rl.Runs(METAWORLD, 7, tmp_path)
    assert again.run("one", ["--a"])[1] == 5.0 and again.run("two", [])[1] == 10.0
    assert [(words[0], words[-1]) for words in seen] == [
        ("one", "--overwrite"),
        ("two", "--overwrite"),
        ("two", "--resume"),
    ]
    assert f"{tmp_path}/metaworld_reach.zarr" in seen[0]
    # More imitation begins with what is there.
    directory, _ = again.run("one", [], place="longer", copied=tmp_path / "7" / "one" / "x")
    assert directory == tmp_path / "7" / "longer" / "one" / "x" and (directory / "20").is_dir()
    assert seen[-1][-1] == "--resume" and rl.num_more(100.0, 0.7) == 150


def test_more_imitation_takes_at_least_as_long_as_rl(tmp_path):
    """A step was seen to take 0.5 s, and takes 0.3: 200 steps are 60 s of the 100, 100 more are 90, 50 more 105."""
    asked = []

    class FakeRuns:
        def run(self, name, flags, *, place, copied):
            steps = int(flags[flags.index("--num-train-steps") + 1])
            seconds = 0.3 * (steps - (asked[-1][0] if asked else 1000))
            asked.append((steps, place, copied))
            return tmp_path / place, seconds

    found = rl.imitated_for(FakeRuns(), PI0, (), tmp_path / "start", 100.0, num_steps=1000, step_s=0.5)
    assert [(steps, place) for steps, place, _ in asked] == [(1200, "longer/0"), (1300, "longer/1"), (1350, "longer/2")]
    assert [copied.name for *_, copied in asked] == ["start", "0", "1"]
    assert found[0] == tmp_path / "longer/2" and found[1] == pytest.approx(105)


def test_rl_speed_divides_an_iteration():
    """Two iterations of ten seconds, four of which act: three policy, two environment, one of them both."""
    lines = []
    for number in range(3):
        arrays = {"arrays": 7 + number // 2, "resident_mb": 100.0 + 6 * (number // 2)}
        lines.append({"when": "begin", "wall_s": 10.0 * number, "cpu_s": 30.0 * number, **arrays})
        lines.append({"when": "end", "wall_s": 10.0 * number + 4, "cpu_s": 30.0 * number + 8, **arrays})
    line = {"rl/rollouts": 16, "rl/control_steps": 5.5, "rl/overlap": 0.25}
    logged = [{**line, "time/policy_s": 3.0, "time/environment_s": 2.0}] * 3
    name, episodes, rate, *parts, overlap, most = rl_speed.speed_row("x", lines, logged, skipped=1)
    assert (name, episodes, rate.samples) == ("x", 16, (11.0,))
    assert [part.samples for part in parts] == [(0.3,), (0.2,), (0.6,)]
    assert overlap.samples == (0.25,) and most.median == pytest.approx(2 / 3)
    # Of eight iterations the third and the fourth are compared with the last two.
    begins = [{"arrays": 7 + number // 7, "resident_mb": 100.0 + 3 * number} for number in range(8)]
    row = rl_speed.memory_row("x", [line for begin in begins for line in (begin, {})])
    assert row == ["x", 8, 107.5, 119.5, 7, 7.5, 12.0]
    assert rl_speed.grown(row) == [
        "x: resident memory grows by 12.0 MB; wanted: at most 5",
        "x: 0.5 more arrays are alive at the end",
    ]
    assert not rl_speed.grown(["x", 8, 100.0, 104.0, 7, 7, 4.0])


def test_the_jump_is_where_a_chunk_begins_to_be_executed():
    """Actions rise by 0.1 a control step, and by 1 where the second chunk begins, after a delay of 2.

    The second pole has fallen, and counts no more.
    """
    rising = 0.1 * np.arange(real_time_delay.HORIZON)
    first, execute = np.stack([rising, 9 * rising])[..., None], real_time_delay.EXECUTE
    second = first + 0.1 * execute + np.where(np.arange(real_time_delay.HORIZON) < 2, 0, 0.9)[:, None]
    chunks = iter([first, second])
    watched = real_time_delay.Watched(lambda *_: next(chunks), delay=2)
    for angle in (0.0, 0.3):
        watched(types.SimpleNamespace(state=np.array([[0, 0.1, 0, 0], [0, angle, 0, 0]])), None)
    assert watched.at_seam == pytest.approx(1.0) and watched.beside == pytest.approx(0.1)


def test_success_against_delay_has_the_intervals_of_all_seeds_together():
    flags = real_time_delay.parse(["--episodes", "100", "--delays", "2", "--seeds", "1", "2"])
    found = {(2, method): [real_time_delay.Acted(n, 0.2, 0.1) for n in (50, 60)] for method in real_time_delay.METHODS}
    table = real_time_delay.table(found, flags)
    assert [row[1] for row in table.rows] == ["none", "guided", "trained"]
    # 110 of 200, as above.
    assert table.rows[0][2] == 200 and table.rows[0][6] == "48% to 62%" and table.rows[0][7] == pytest.approx(0.55)


def test_another_loss_than_the_peers_is_not_the_same_work():
    assert "differs by 5.0e-05" in language_speed.same_losses([9.0, 8.0], [9.00005, 7.0])
    with pytest.raises(RuntimeError, match="not the same work"):
        language_speed.same_losses([9.0], [9.001])


@pytest.mark.parametrize(
    ("solved", "said"),
    [
        ((0.5, 0.9, 0.76, 0.52), ""),
        ((0.44, 0.9, 0.7, 0.44), "supervised training solves 44.0%; wanted: 45% to 60%"),
        ((0.5, 0.84, 0.8, 0.5), "the reward model prefers 84.0% right answers; wanted: 85%"),
        ((0.5, 0.9, 0.74, 0.5), "DPO adds 24.0%; wanted: 25%"),
        ((0.5, 0.9, 0.8, 0.56), "more supervised training adds 6.0%; wanted: below 5%"),
    ],
)
def test_what_post_training_does_not_reach_is_a_failure(solved, said):
    stages = (language.SFT, language.REWARD, language.DPO, language.MORE)
    names = (language.SOLVED, language.PREFERRED, language.SOLVED, language.SOLVED)
    runs = [
        language.Trained(stage, [{name: 0.0}, {name: value}], 1.0)
        for stage, name, value in zip(stages, names, solved, strict=True)
    ]
    assert language.failure(*runs) == said


def test_what_grows_is_told_from_what_only_varies_and_from_what_a_start_fills():
    rng = np.random.default_rng(0)
    steps = [10 * number for number in range(1, 1001)]
    filling = [min(step, 1500) / 1500 for step in steps]
    flat = [(step, 400 + 50 * full + rng.normal()) for step, full in zip(steps, filling, strict=True)]
    leaking = [(step, value + step / 1000) for step, value in flat]
    row = long_run.row_of("flat", flat, 10_000)
    assert row[-1] == "flat" and row[1] == pytest.approx(400 + 50 / 1.5, abs=2)
    row = long_run.row_of("leaking", leaking, 10_000)
    assert row[-1] == "grows" and float(row[-3]) == pytest.approx(1, abs=0.1) and row[5] == pytest.approx(460, abs=2)
    assert long_run.row_of("shrinking", [(step, 900 - value) for step, value in leaking], 10_000)[-1] == "shrinks"
    assert long_run.row_of("short", flat[:15], 10_000)[-1] == "too short"
    assert long_run.row_of("short", leaking, long_run.LEAST_STEPS - 1)[-1] == "too short"
    # The interval of ten points, beside scipy's.
    points = [(float(x), y) for x, y in zip(range(1000, 21_000, 1000), rng.normal(size=20), strict=True)]
    slope, half, _ = long_run.fit(points)
    fitted = stats.linregress(
        [x / 1000 + 0.5 for x, _ in points[::2]], np.mean([[y for _, y in points[k::2]] for k in (0, 1)], axis=0)
    )
    assert slope == pytest.approx(fitted.slope) and half == pytest.approx(
        stats.t.ppf(0.975, 8) * fitted.stderr, rel=1e-3
    )


def test_a_table_shows_medians_with_their_spread():
    one, two = report.Spread((3.0, 1.0, 2.0)), report.Spread((6.0, 4.0, 2.0))
    assert str(one) == "2 (1 to 3)"
    # Pair by pair: the median of 2, 4 and 1, not the ratio of the medians.
    assert two.over(one).samples == (2.0, 4.0, 1.0)
    table = report.Table("Title", ("name", "value"), [["a", one], ["b", None]], ["A note."])
    lines = ["### Title", "", "| name | value      |", "|------|------------|", "| a    | 2 (1 to 3) |"]
    assert table.markdown() == "\n".join([*lines, "| b    | -          |", "", "A note.", ""])
    assert table.as_json()["rows"] == [{"name": "a", "value": [3.0, 1.0, 2.0]}, {"name": "b", "value": None}]
    assert [report.number(value) for value in (0.01234, 1.5, 123.4, 1234567)] == ["0.0123", "1.5", "123", "1,234,567"]


def test_a_table_that_says_what_is_wrong_ends_the_program_with_code_1(monkeypatch, capsys):
    wrong = report.Table("Title", ("name",), [["a"]], failure="the bits differ")
    monkeypatch.setitem(sys.modules, "benchmarks.tabletop", types.SimpleNamespace(main=lambda flags: [wrong]))
    monkeypatch.setattr(program, "_start", lambda: None)
    assert program.main(["tabletop"]) == 1
    assert "failed: the bits differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpu_compile", "gpu_compile needs jax's CUDA plugin: make gpu-compile"),
        ("gpu_steps", "gpu_steps needs a GPU, and jax finds none here"),
        ("gpu_serving", "gpu_serving needs a GPU, and jax finds none here"),
    ],
)
def test_what_this_machine_lacks_is_told_before_anything_runs(name, said, monkeypatch):
    monkeypatch.setattr(plugin, "PLUGINS", ("no_such_plugin",))
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(program, "_start", lambda: None)
    with pytest.raises(UsageError, match=re.escape(said)):
        program.main([name])


def test_all_benchmarks_are_those_that_this_machine_can_run(monkeypatch, capsys):
    monkeypatch.setattr(program, "BENCHMARKS", {"gpu_steps": "", "gpu_serving": ""})
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(program, "_start", lambda: None)
    assert program.main([]) == 0
    assert "gpu_serving is left out: it needs a GPU" in capsys.readouterr().err


def test_a_step_that_cannot_run_is_a_failure_and_does_not_keep_the_others_from_running(monkeypatch):
    class EvaluationContext:
        def __init__(self, _, case, is_traced):
            self.case = case

        def measure(self, state, _):
            if self.case.cameras == 3:
                raise MemoryError("too large")
            return [self.case.name, *[1.0] * (len(gpu_steps.COLUMNS) - 1)], state

    monkeypatch.setattr(gpu_steps, "EvaluationContext", EvaluationContext)
    monkeypatch.setattr(gpu_steps.gpu_times, "ceilings", lambda: report.Table("", (), []))
    _, table = gpu_steps.main(["--cases", "1", "2", "5"])
    assert [row[3] for row in table.rows] == [1.0, None, 1.0]
    assert table.failure == "3 cameras, remat full attention cudnn: MemoryError: too large"


def test_traced_kernels_stand_beside_their_bound_by_part_of_the_model():
    hlo = """
ENTRY %m (a: f32[1048576]) -> f32[1048576] {
  %a = f32[1048576]{0} parameter(0)
  %one = f32[1048576]{0} exponential(%a), metadata={op_name="jit(step)/gradient/jvp(loss)/mlp/exp"}
  ROOT %two = f32[1048576]{0} negate(%one), metadata={op_name="jit(step)/optimizer/neg"}
}
"""
    machine = Machine(kind=find_kind("h100"), num_devices=1, num_hosts=1, available_bytes=1)
    bound_ms = 1e3 * (2 * 4 * 2**20 / (0.9 * 3350e9) + 2e-6)
    kernels = [("one", 0.003), ("two", 0.002), ("one", 0.005), ("two", 0.002), ("other", 0.001)]
    rows = gpu_times.by_part(kernels, hlo, machine, 2, "a case").rows
    assert [row[:4] for row in rows] == [
        ["mlp", "forward", 1, pytest.approx(4)],
        ["optimizer", "update", 1, pytest.approx(2)],
        ["not in the program", "", 0.5, pytest.approx(0.5)],
        ["the others", "", 0, 0],
        ["all", "", 2.5, pytest.approx(6.5)],
    ]
    assert rows[0][4:] == pytest.approx([bound_ms, 4 / bound_ms, 4 - bound_ms])


def test_a_recorded_result_names_its_source_on_top(tmp_path):
    facts = {
        "date": "2026-11-29 15:00 UTC",
        "devices": "1 x cpu",
        "cpu": "A CPU, 2 cores",
        "load": "0.10 before the start",
    }
    facts |= {"versions": "jax 0.10.2", "commit": "1234567", "command": "python -m benchmarks feed --path 'a b'"}
    write_record(tmp_path / "feed.md", facts, [Table("Feed: rows", ["a", "b"], [[1, None]], ["A note."])])
    _, top, body = (tmp_path / "feed.md").read_text().split("---\n", 2)
    assert yaml.safe_load(top) == {
        "date": "2026-11-29",
        "commit": "1234567",
        "command": facts["command"],
        "hardware": facts["cpu"],
    }
    assert body.startswith("\n# Feed: rows\n\n| a | b |\n|---|---|\n| 1 | - |\n\nA note.\n")


def test_every_benchmark_is_listed():
    sources = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    assert {name for name, text in sources.items() if f'prog="python -m benchmarks {name}"' in text} <= set(BENCHMARKS)


@pytest.mark.slow
def test_documented_commands_are_understood():
    text = (ROOT / "docs" / "understand" / "benchmarks.md").read_text()
    commands = re.findall(r"^    python -m benchmarks (.*)$", text, re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        name, *flags = shlex.split(command, comments=True)
        if name in BENCHMARKS:
            flags = flags[: flags.index("--json")] if "--json" in flags else flags
            importlib.import_module(f"benchmarks.{name}").parse(flags)
        else:
            assert name in ("--quick", "--help") and not flags
    assert all(f"`{name}`" in text for name in BENCHMARKS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step_times"], "no benchmark step_times; there are step_time, traffic"),
        (["--model", "medium"], "need exactly one benchmark's name"),
        (["feed", "--json"], "--json needs the name of a file"),
    ],
)
def test_a_wrong_command_line_says_what_is_allowed(words, message):
    done = subprocess.run([sys.executable, "-m", "benchmarks", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr


def test_steps_are_compiled_at_the_same_time_and_told_in_their_order(monkeypatch):
    both, second_is_done = threading.Barrier(2, timeout=60), threading.Event()

    def compiled(case, args):
        both.wait()
        if case.experiment == "first":
            assert second_is_done.wait(60)
        second_is_done.set()
        return None, f"{case.experiment} on {args.device_kind}"

    monkeypatch.setattr(gpu_compile, "_compiled", compiled)
    cases = [gpu_compile.Case(name) for name in ("first", "second")]
    found = gpu_compile._all_compiled(cases, gpu_compile.parse(["--processes", "2", "--device-kind", "a100"]))
    assert list(found) == [(None, "first on a100"), (None, "second on a100")]
