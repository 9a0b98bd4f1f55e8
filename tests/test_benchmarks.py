"""Every benchmark runs and prints its table, and every command of its docs is understood. No speed is asserted."""

import argparse
import importlib
import json
import random
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import (
    closed_loop,
    faults,
    language,
    language_speed,
    practice,
    practice_speed,
    practice_studies,
    report,
    step_time,
    steps,
)
from benchmarks.__main__ import BENCHMARKS
from openpi_train.planning.gpu import plugin

ROOT = Path(__file__).resolve().parent.parent
F32 = ["--model.dtype", "float32"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> tuple[str, dict]:
    """What `python -m benchmarks --quick` prints, and what it writes."""
    file = tmp_path_factory.mktemp("benchmarks") / "all.json"
    done = run("--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def run(*words: str) -> subprocess.CompletedProcess[str]:
    # With the suite's XLA_FLAGS: compiling is most of the time, and the speed of what is compiled matters nothing here.
    program = [sys.executable, "-m", "benchmarks", *words]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=1800)


def rows(quick: tuple[str, dict], title: str) -> list[dict]:
    (table,) = [table for table in quick[1]["tables"] if table["title"].startswith(title)]
    assert f"### {table['title']}\n" in quick[0]
    return table["rows"]


def test_a_flag_that_says_the_tiny_models_value_changes_the_medium_one():
    dtypes = [
        steps.parse(argparse.ArgumentParser(), ["--model", "medium", *flags])[1].model.dtype for flags in ([], F32)
    ]
    assert dtypes == ["bfloat16", "float32"]


@pytest.mark.slow
def test_step_time_compares_numbers_of_cameras_at_equal_loss_like_for_like_first(quick):
    titles = [table["title"] for table in quick[1]["tables"] if table["title"].startswith("Step time, ")]
    assert [title.split(":")[0] for title in titles] == [
        "Step time, like for like, both remat dots",
        "Step time, ours remat dots, reference full as openpi",
    ]
    tables = [rows(quick, title) for title in titles]
    for found in tables:
        assert [row["cameras"] for row in found] == [3, 1]
        for row in found:
            assert len(row["time reference / ours"]) == len(row["step ms"]) == len(row["reference step ms"]) == 2
            assert row["FLOPs reference / ours"] > 1
            difference, loss = map(float, row["loss difference"].split(" of "))
            # Float32, and sums over another number of tokens.
            assert difference < 1e-5 * loss
        ratios = [row["FLOPs reference / ours"] for row in found]
        assert ratios == sorted(ratios)
        assert found[1]["program MiB"] < found[0]["program MiB"]
        assert len({row["reference program MiB"] for row in found}) == 1
    # What the reference computes twice is all that sets the tables apart.
    for same, full in zip(*tables, strict=True):
        assert same["FLOPs reference / ours"] < full["FLOPs reference / ours"]


@pytest.mark.parametrize(("remat", "references"), [("dots", ["dots", "full"]), ("full", ["full"])])
def test_step_time_sets_the_reference_to_the_same_recomputation_first(remat, references):
    experiment = steps.parse(argparse.ArgumentParser(), ["--model.remat", remat])[1]
    assert step_time.remats(experiment) == references


@pytest.mark.slow
def test_feed_compares_numbers_of_workers(quick):
    found = rows(quick, "Feed")
    assert [row["workers"] for row in found] == [0, 1]
    assert found[0]["samples/s vs first row"] == [1.0]
    assert all(row["samples/s"][0] > 0 and row["time to first batch s"][0] > 0 for row in found)


@pytest.mark.slow
def test_feed_measures_lerobot_data_and_says_how_to_have_lerobots_own_loader_beside_it(quick):
    found = rows(quick, "LeRobot: 3 cameras")
    pictures = ("scaled to 224 px", "as stored")
    assert [(row["workers"], row["pictures"]) for row in found] == [(n, name) for n in (0, 1) for name in pictures]
    assert all(row["samples/s"][0] > 0 and row["lerobot samples/s"] is None for row in found)
    assert "not measured: give --peer-python" in quick[0]
    decoding = rows(quick, "Decoding")
    assert {(row["picture"].split()[0], row["decoder"]) for row in decoding} == {
        ("JPEG", "ours"),
        ("JPEG", "Pillow"),
        ("AV1", "ours"),
    }
    assert all((row["CPU time / ours"] is None) == (row["decoder"] == "ours") for row in decoding)


@pytest.mark.slow
def test_gpu_compile_compiles_or_says_what_it_needs(quick):
    found = rows(quick, "Compiled for h100")
    if plugin.is_installed():
        assert [row["forecast / compiled"] > 0 and row["bound ms"] > 0 for row in found] == [True]
    else:
        assert not found and "see make gpu-compile" in quick[0]


def test_weights_sets_the_peak_against_the_share(quick):
    (row,) = rows(quick, "Start weights")
    assert row["processes"] == 2
    for peak, share, ratio in zip(
        row["peak above start MB"], row["share of each MB"], row["peak / share"], strict=True
    ):
        assert share == pytest.approx(1.76 / 2, rel=0.01)  # 440,704 parameters, none large enough to be cut
        assert ratio == pytest.approx(peak / share)


@pytest.mark.slow
def test_checkpoint_tells_the_stall_of_both_kinds_of_save(quick):
    found = rows(quick, "Checkpoint")
    assert [(row["state"], row["save"]) for row in found] == [("debug", "synchronous"), ("debug", "asynchronous")]
    assert all(row["MB"] == pytest.approx(7.05, rel=0.01) for row in found)
    for row in found:
        (stall,), (call,), (extra,) = (row[name] for name in ("stall ms", "save call ms", "all following extra ms"))
        assert stall == pytest.approx(call + extra)
        share = 100 * stall / (100 * row["step ms"][0])
        assert row["stall / 100 steps"] == f"{report.number(share)} %"


@pytest.mark.slow
def test_tabletop_compares_numbers_of_scenes(quick):
    found = rows(quick, "Tabletop")
    assert [row["scenes"] for row in found] == [1, 2]


@pytest.mark.sim
@pytest.mark.slow
def test_metaworld_sets_success_against_cpu_time(quick):
    pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'openpi_train[sim]'")
    first, last = rows(quick, "Meta-World")
    assert [first["step"], last["step"]] == ["0", "4"] and 0 < first["CPU s"] < last["CPU s"]
    assert first["loss"] is None and last["loss"] > 0 and last["held-out loss"] != first["held-out loss"]
    assert first["success (95 % interval)"] == "0% (0% to 43%)"
    assert "2 demonstrations per task took " in quick[0]


@pytest.mark.slow
@pytest.mark.parametrize("title", ["Demo:", "Diffusion policy from images"])
def test_policies_are_rolled_out_untrained_and_at_every_checkpoint(quick, title):
    found = rows(quick, title)
    assert [row["step"] for row in found] == [0, 1, 2]
    assert all(row["share"] in (0, 0.25, 0.5, 0.75, 1) and row["held-out loss"] > 0 for row in found)


@pytest.mark.slow
def test_a_client_acts_through_the_socket(quick):
    found = rows(quick, "Demo, served")
    assert [(row["task"], row["successes"].split(" of ")[1]) for row in found] == [
        ("reach_red", "1"),
        ("reach_blue", "1"),
        ("all", "2"),
    ]


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


@pytest.mark.slow
def test_language_counts_problems_before_and_after_every_stage(quick):
    found = rows(quick, "Language")
    stages = [("supervised", "0"), ("supervised", "2"), ("DPO + likelihood", "0"), ("DPO + likelihood", "2")]
    assert [(row["stage"], row["step"]) for row in found] == stages
    assert all(0 <= row["solved"] <= 1 and row["held-out loss"] > 0 for row in found)
    assert found[2]["solved"] == found[1]["solved"]  # DPO starts from its weights
    assert [row["right answer preferred"] is None for row in found] == [True, True, False, False]


@pytest.mark.slow
def test_practice_counts_problems_before_and_after(quick):
    found = rows(quick, "Practice: success")
    assert [(row["study"], row["step"], row["episodes"]) for row in found] == [
        ("arithmetic_grpo", "0", 8),
        ("arithmetic_grpo", "1", 8),
    ]
    assert all(0 <= row["success"] <= 1 for row in found)
    assert found[0]["CPU s"] is None and found[1]["CPU s"][0] > 0


PI0 = practice_studies.STUDIES["tabletop_pi0"]
METAWORLD = practice_studies.STUDIES["metaworld"]


def practised_to(before, after, *, clipped=0.1, imitated=None):
    return practice_studies.Practised({0: before, 4: 0.1, 8: after}, clipped, 9.0, imitated, imitated and 8.0)


def test_seeds_are_counted_together():
    lines = [{"step": 0, "success/all": 0.5}, {"step": 4, "clip_fraction": 0.3}, {"step": 8, "success/all": 0.6}]
    one = practice.read(lines, "success/all", 7.0)
    assert (one.before, one.after, one.clipped) == (0.5, 0.6, 0.3) and one.gain == pytest.approx(0.1)
    first, last = practice.curve("x", [one, practised_to(0.7, 0.5)], 100)
    # 110 of 200: Wilson's interval by hand.
    centre, half = (0.55 + 1.96**2 / 400) / (1 + 1.96**2 / 200), 1.96 / (1 + 1.96**2 / 200)
    half *= (0.55 * 0.45 / 200 + 1.96**2 / 160_000) ** 0.5
    assert last[:3] == ["x", "8", 200] and last[4].samples == (0.6, 0.5) and last[6] == pytest.approx(0.55)
    assert last[5] == f"{centre - half:.0%} to {centre + half:.0%}" and first[3] is None


def test_gains_have_students_interval_over_seeds():
    found = [practised_to(0.5, 0.6, imitated=0.51), practised_to(0.5, 0.62, imitated=0.53), practised_to(0.5, 0.58)]
    own, more = practice.gained("x", found)
    # The quantile 0.975 for two degrees of freedom, from a table; the standard deviation is 2 points.
    half = 4.3027 * 0.02 / 3**0.5
    assert own[4] == f"{0.1 - half:.1%} to {0.1 + half:.1%}" and own[5] == pytest.approx(0.1)
    assert more[1] == "more imitation" and more[2].samples == (8.0, 8.0) and more[5] == pytest.approx(0.02)
    assert len(practice.gained("x", [practised_to(0.5, 0.6)])) == 1 and practice.gained("x", found[2:])[0][4] is None


@pytest.mark.parametrize(
    ("study", "found", "said"),
    [
        (PI0, [practised_to(0.5, 0.58, imitated=0.52), practised_to(0.6, 0.7, imitated=0.63)], []),
        (
            PI0,
            [practised_to(0.5, 0.57, imitated=0.53), practised_to(0.6, 0.68, imitated=0.64)],
            ["x gains 7.5% by practice; wanted: at least 8%", "x gains 3.5% by more imitation; wanted: less than 3%"],
        ),
        (PI0, [practised_to(0.5, 0.7)], ["x: more imitation is not measured"]),
        (practice_studies.STUDIES["tabletop_dp"], [practised_to(0.4, 0.5)], []),
        (
            practice_studies.STUDIES["tabletop_weighted"],
            [practised_to(0.5, 0.5, clipped=0.3)],
            ["x gains 0.0% by practice; wanted: more than 0", "x clips 0.3 of its units; wanted: at most 0.2"],
        ),
        (METAWORLD, [practised_to(0.35, 0.7), practised_to(0.47, 0.92)], []),
        (
            METAWORLD,
            [practised_to(0.35, 0.7), practised_to(0.43, 0.86)],
            ["x begins at 39.0%; wanted: 40% to 60%", "x ends at 78.0%; wanted: at least 80%"],
        ),
        (
            practice_studies.STUDIES["arithmetic_ppo"],
            [practised_to(0.62, 0.84)],
            ["x begins at 62.0%; wanted: 45% to 60%", "x ends at 84.0%; wanted: at least 85%"],
        ),
    ],
)
def test_what_practice_does_not_reach_is_a_failure(study, found, said):
    assert practice_studies.problems("x", study, found) == said


def test_a_run_of_practice_that_was_interrupted_goes_on_and_one_that_is_over_is_not_repeated(tmp_path, monkeypatch):
    """The second of three commands is interrupted."""
    seen, seconds = [], iter(range(0, 1000, 5))

    def run(words):
        seen.append(words)
        (tmp_path / "7" / words[0] / "x" / "20").mkdir(parents=True, exist_ok=True)
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(practice, "_run", run)
    monkeypatch.setattr(practice, "_children_s", lambda: next(seconds))
    runs = practice.Runs(METAWORLD, 7, tmp_path)
    assert runs.run("one", ["--a"]) == (tmp_path / "7" / "one" / "x", 5.0)
    with pytest.raises(KeyboardInterrupt):
        runs.run("two", [])
    again = practice.Runs(METAWORLD, 7, tmp_path)
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
    assert seen[-1][-1] == "--resume" and practice.num_more(100.0, 0.7) == 150


def test_practice_speed_understands_its_runs(quick):
    assert not rows(quick, "Practice: control steps") and "metaworld: not run." in quick[0]


def test_practice_speed_divides_an_iteration():
    """Two iterations of ten seconds, four of which act: three policy, two environment, one of them both."""
    lines = []
    for number in range(3):
        arrays = {"arrays": 7 + number // 2, "resident_mb": 100.0 + 6 * (number // 2)}
        lines.append({"when": "begin", "wall_s": 10.0 * number, "cpu_s": 30.0 * number, **arrays})
        lines.append({"when": "end", "wall_s": 10.0 * number + 4, "cpu_s": 30.0 * number + 8, **arrays})
    line = {"practice/attempts": 16, "practice/control_steps": 5.5, "practice/overlap": 0.25}
    logged = [{**line, "time/policy_s": 3.0, "time/environment_s": 2.0}] * 3
    name, episodes, rate, *parts, overlap, most = practice_speed.speed_row("x", lines, logged, skipped=1)
    assert (name, episodes, rate.samples) == ("x", 16, (11.0,))
    assert [part.samples for part in parts] == [(0.3,), (0.2,), (0.6,)]
    assert overlap.samples == (0.25,) and most.median == pytest.approx(2 / 3)
    # Of eight iterations the third and the fourth are compared with the last two.
    begins = [{"arrays": 7 + number // 7, "resident_mb": 100.0 + 3 * number} for number in range(8)]
    row = practice_speed.memory_row("x", [line for begin in begins for line in (begin, {})])
    assert row == ["x", 8, 107.5, 119.5, 7, 7.5, 12.0]
    assert practice_speed.grown(row) == [
        "x: resident memory grows by 12.0 MB; wanted: at most 5",
        "x: 0.5 more arrays are alive at the end",
    ]
    assert not practice_speed.grown(["x", 8, 100.0, 104.0, 7, 7, 4.0])


@pytest.mark.slow
def test_language_speed_says_how_to_have_torch_beside_it(quick):
    for kind in ("completions", "SFT step"):
        (row,) = rows(quick, f"Beside torch, {kind}")
        assert row["tokens/CPU s"][0] > 0 and row["peer tokens/CPU s"] is None
    assert "Not measured beside torch: give --peer-python" in quick[0]


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


@pytest.mark.slow
def test_serving_is_measured_under_openpis_client_and_survives_bad_messages(quick):
    found = rows(quick, "Serving: latency")
    if not found:
        pytest.skip(re.search("not measured: .*", quick[0]).group())
    assert [row["clients"] for row in found] == [1, 2]
    assert all(row["requests/s"][0] > 0 and row["latency p95 ms"][0] >= row["latency p50 ms"][0] for row in found)
    (survived,) = rows(quick, "Serving: bad messages")
    assert (survived["bad messages"], survived["kinds"], survived["answered after"]) == (40, 27, 2)
    largest = rows(quick, "Serving: the largest messages")
    assert {row["message"]: row["refused"] for row in largest if "by" in row["message"] or "map" in row["message"]} == {
        "a map of 5.5 million keys": "yes",
        "8 million maps": "yes",
        "maps of lists of maps": "yes",
        "bytes as a key": "yes",
        "plain bytes": "yes",
        "a picture of 11 million by 1": "yes",
        "a picture of 4,000 by 2,700": "no",
    }


@pytest.mark.slow
def test_serving_of_texts_is_measured_under_openais_client_and_survives_hostile_requests(quick):
    found = rows(quick, "Serving texts: latency")
    assert [row["clients"] for row in found] == [1, 2]
    assert all(row["tokens/s"][0] > 0 and row["answer p50 ms"][0] >= row["first text p50 ms"][0] for row in found)
    (survived,) = rows(quick, "Serving texts: hostile requests")
    assert (survived["hostile requests"], survived["same answer after"]) == (60, "yes")


@pytest.mark.slow
def test_startup_tells_the_parts_of_cold_and_warm_starts(quick):
    found = rows(quick, "Start-up")
    assert [(row["processes"], row["compilation cache"]) for row in found] == [(1, "cold"), (1, "warm")]
    for row in found:
        *parts, (whole,) = list(row.values())[2:]
        assert sum(part for (part,) in parts) == pytest.approx(whole)


@pytest.mark.slow
def test_the_fault_drill_ends_with_the_bits_of_an_undisturbed_run(quick):
    found = rows(quick, "Fault drill")
    assert [(row["fault"], row["number"], row["survived"]) for row in found] == [
        ("damaged checkpoint", 1, 1),
        ("all", 1, 1),
    ]
    assert all(row["run ended with"] == f"137 ({row['number']} x)" for row in found)
    assert found[0]["steps trained again"] >= [1]
    assert "every array of the last checkpoint and every loss the same bits" in quick[0]


def test_faults_come_as_often_as_their_weights_say():
    order = faults.sequence(50, list(faults.FAULTS), random.Random(0))
    numbers = {kind: order.count(kind) for kind in faults.FAULTS}
    assert sum(numbers.values()) == 50
    for kind, number in numbers.items():
        assert abs(number - faults.WEIGHTS[kind] * 50 / sum(faults.WEIGHTS.values())) < 1
    assert order == faults.sequence(50, list(faults.FAULTS), random.Random(0))
    assert order != faults.sequence(50, list(faults.FAULTS), random.Random(1))


@pytest.mark.slow
def test_results_say_when_on_what_and_with_which_code_they_were_measured(quick):
    facts = quick[1]["provenance"]
    assert set(facts) == {"date", "devices", "cpu", "load", "versions", "commit", "command"}
    assert facts["command"].startswith("python -m benchmarks --quick --json ")
    assert all(f"{name}: {value}" in quick[0] for name, value in facts.items())


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


@pytest.mark.slow
def test_documented_commands_are_understood():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    commands = re.findall(r"^    python -m benchmarks (.*)$", text, re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        name, *flags = shlex.split(command, comments=True)
        if name in BENCHMARKS:
            flags = flags[: flags.index("--json")] if "--json" in flags else flags
            importlib.import_module(f"benchmarks.{name}").parse(flags)
        else:
            assert name == "--quick" and not flags
    assert all(f"| `{name}` |" in text for name in BENCHMARKS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step_times"], "no benchmark step_times; there are step_time, traffic"),
        (["--model", "medium"], "need exactly one benchmark's name"),
        (["feed", "--json"], "--json needs the name of a file"),
    ],
)
def test_a_wrong_command_line_says_what_is_allowed(words, message):
    done = run(*words)
    assert done.returncode == 2 and message in done.stderr
