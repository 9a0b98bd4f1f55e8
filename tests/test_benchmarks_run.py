"""Benchmarks run once, as `python -m benchmarks --quick`, and print their tables. No speed is asserted.

All but `tabletop_dp`: it is `demo`'s training and closed loop with another policy, which takes as long to compile;
`drill.under_slurm`, which mostly waits for Slurm; and `fault_drill`, which `test_fault_drill.py` runs.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.__main__ import BENCHMARKS
from openpi_train.planning.gpu import plugin

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
NAMES = [name for name in BENCHMARKS if name not in ("tabletop_dp", "drill.under_slurm", "fault_drill")]


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> tuple[str, dict]:
    """What `python -m benchmarks NAMES --quick` prints, and what it writes."""
    file = tmp_path_factory.mktemp("benchmarks") / "all.json"
    # With the suite's XLA_FLAGS: compiling is most of the time, and the speed of what is compiled matters nothing here.
    words = [sys.executable, "-m", "benchmarks", *NAMES, "--quick", "--json", str(file)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def rows(quick: tuple[str, dict], title: str) -> list[dict]:
    (table,) = [table for table in quick[1]["tables"] if table["title"].startswith(title)]
    assert f"### {table['title']}\n" in quick[0]
    return table["rows"]


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


def test_feed_compares_numbers_of_workers(quick):
    found = rows(quick, "Feed")
    assert [row["workers"] for row in found] == [0, 1]
    assert found[0]["samples/s vs first row"] == [1.0]
    assert all(row["samples/s"][0] > 0 and row["time to first batch s"][0] > 0 for row in found)


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


def test_checkpoint_tells_the_stall_of_both_kinds_of_save(quick):
    found = rows(quick, "Checkpoint")
    assert [(row["state"], row["save"]) for row in found] == [("debug", "synchronous"), ("debug", "asynchronous")]
    assert all(row["MB"] == pytest.approx(2.91, rel=0.01) for row in found)
    for row in found:
        (stall,), (call,), (extra,) = (row[name] for name in ("stall ms", "save call ms", "all following extra ms"))
        assert stall == pytest.approx(call + extra)
        share = 100 * stall / (100 * row["step ms"][0])
        assert row["stall / 100 steps"] == f"{report.number(share)} %"


def test_tabletop_compares_numbers_of_scenes(quick):
    found = rows(quick, "Tabletop")
    assert [row["scenes"] for row in found] == [1, 2]


@pytest.mark.sim
def test_metaworld_sets_success_against_cpu_time(quick):
    pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'openpi_train[sim]'")
    first, last = rows(quick, "Meta-World")
    assert [first["step"], last["step"]] == ["0", "4"] and 0 < first["CPU s"] < last["CPU s"]
    assert first["loss"] is None and last["loss"] > 0 and last["held-out loss"] != first["held-out loss"]
    assert first["success (95 % interval)"] == "0% (0% to 43%)"
    assert "2 demonstrations per task took " in quick[0]


def test_a_policy_is_rolled_out_untrained_and_at_every_checkpoint(quick):
    found = rows(quick, "Demo:")
    assert [row["step"] for row in found] == [0, 1, 2]
    assert all(row["share"] in (0, 0.25, 0.5, 0.75, 1) and row["held-out loss"] > 0 for row in found)


def test_a_client_acts_through_the_socket(quick):
    found = rows(quick, "Demo, served")
    assert [(row["task"], row["successes"].split(" of ")[1]) for row in found] == [
        ("reach_red", "1"),
        ("reach_blue", "1"),
        ("all", "2"),
    ]


def test_language_counts_problems_before_and_after_every_stage(quick):
    found = rows(quick, "Language")
    stages = [("supervised", "0"), ("supervised", "2"), ("DPO + likelihood", "0"), ("DPO + likelihood", "2")]
    assert [(row["stage"], row["step"]) for row in found] == stages
    assert all(0 <= row["solved"] <= 1 and row["held-out loss"] > 0 for row in found)
    assert found[2]["solved"] == found[1]["solved"]  # DPO starts from its weights
    assert [row["right answer preferred"] is None for row in found] == [True, True, False, False]


def test_rl_counts_problems_before_and_after(quick):
    found = rows(quick, "RL: success")
    assert [(row["study"], row["step"], row["episodes"]) for row in found] == [
        ("arithmetic_grpo", "0", 8),
        ("arithmetic_grpo", "1", 8),
    ]
    assert all(0 <= row["success"] <= 1 for row in found)
    assert found[0]["CPU s"] is None and found[1]["CPU s"][0] > 0


def test_rl_speed_understands_its_runs(quick):
    assert not rows(quick, "RL: control steps") and "metaworld: not run." in quick[0]


def test_real_time_delay_understands_its_runs(quick):
    assert not rows(quick, "Balancing a pole") and "Not run: its runs are understood." in quick[0]


def test_language_speed_says_how_to_have_torch_beside_it(quick):
    for kind in ("completions", "SFT step"):
        (row,) = rows(quick, f"Beside torch, {kind}")
        assert row["tokens/CPU s"][0] > 0 and row["peer tokens/CPU s"] is None
    assert "Not measured beside torch: give --peer-python" in quick[0]


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


def test_serving_of_texts_is_measured_under_openais_client_and_survives_hostile_requests(quick):
    found = rows(quick, "Serving texts: latency")
    assert [row["clients"] for row in found] == [1, 2]
    assert all(row["tokens/s"][0] > 0 and row["answer p50 ms"][0] >= row["first text p50 ms"][0] for row in found)
    (survived,) = rows(quick, "Serving texts: hostile requests")
    assert (survived["hostile requests"], survived["same answer after"]) == (60, "yes")


def test_startup_tells_the_parts_of_cold_and_warm_starts(quick):
    found = rows(quick, "Start-up")
    assert [(row["processes"], row["compilation cache"]) for row in found] == [(1, "cold"), (1, "warm")]
    for row in found:
        *parts, (whole,) = list(row.values())[2:]
        assert sum(part for (part,) in parts) == pytest.approx(whole)


def test_a_long_run_is_watched_from_outside(quick):
    found = {row["what"]: row for row in rows(quick, "Long run")}
    for who in ("process 0", "launcher"):
        assert found[f"{who}, RSS MB"]["100%"] >= found[f"{who}, PSS MB"]["100%"] > 10
        assert all(found[f"{who}, {what}"]["100%"] > 3 for what in ("descriptors", "threads", "mapped regions"))
    assert found["checkpoints, MB"]["100%"] > 0 and found["process 0, RSS MB"]["verdict"] == "too short"


def test_many_processes_meet_agree_save_restore_lose_one_and_meet_again(quick):
    found = rows(quick, "Many processes, ")
    assert [row["stage"] for row in found] == [
        "start: meet, start jax",
        "13 gathers",
        "broadcast",
        "save: checksums, manifest",
        "restart: check of all files",
        "save: one element a leaf",
        "restart: restore them",
        "again, start: meet, start jax",
    ]
    assert all(row["processes"] == 8 and row["CPU s of another"] > 0 for row in found)
    (held,) = rows(quick, "Many processes: what")
    assert held["exit codes"] == "1 x -9, 7 x 70"
    assert held["open files of process 0"] > held["open files of another"]


def test_results_say_when_on_what_and_with_which_code_they_were_measured(quick):
    facts = quick[1]["provenance"]
    assert set(facts) == {"date", "devices", "cpu", "load", "versions", "commit", "command"}
    assert facts["command"].startswith(f"python -m benchmarks {' '.join(NAMES)} --quick --json ")
    assert all(f"{name}: {value}" in quick[0] for name, value in facts.items())
