"""A small run that acts while it trains, evaluated and reported afterwards: the same on any number of processes."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from command import ROOT, check, openpi_train, train
from debian import install

from openpi_train import train_verbs
from openpi_train.runtime.exits import DataError, UsageError
from openpi_train.tools import evaluate_policy, report
from openpi_train.tools.requests import EvaluateRequest, ReportRequest
from openpi_train.tools.run_files import RunFiles

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
RUNS = Path(__file__).with_name("acting_runs.py")
NAME = f"{RUNS}:drift"


def outcomes(folder):
    return json.loads((folder / "closed_loop.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run's directory, of one process; and what it said."""
    base = tmp_path_factory.mktemp("one")
    done = train(base, NAME, "--batch-size", "6")
    return base / "runs" / "drift" / "x", done.stdout + done.stderr


@pytest.fixture(scope="module")
def evaluated(trained):
    """The same run after `eval` on one process."""
    done = openpi_train("eval", trained[0], *FLAGS)
    check(done, 0, "open loop, 2 held-out episodes", "delta_x_m", "closed loop, Drift, 10 episodes", "far")
    return trained[0]


FLAGS = ("--experiment", NAME, "--held-out", "2", "--batch-size", "4")


def test_processes_and_devices_change_no_episode_and_both_ends_are_evaluated(trained, tmp_path):
    one, said = trained
    train(tmp_path, NAME, "--batch-size", "6", processes=3)
    three = tmp_path / "runs" / "drift" / "x" / "eval"
    first, last = (outcomes(one / "eval" / str(step)) for step in (0, 2))
    # The untrained policy is the same to the bit, on one device or on three; the trained one but for rounding.
    assert outcomes(three / "0") == first
    assert outcomes(three / "2")["overall"]["trials"] == 10
    assert [episode["task"] for episode in last["episodes"]] == ["near", "far"] * 5
    assert len({episode["steps"] for episode in first["episodes"]}) > 2
    assert first["overall"]["successes"] > 0
    lines = map(json.loads, (one / "metrics.jsonl").read_text().splitlines())
    logged = [line for line in lines if "success/all" in line]
    assert [line["step"] for line in logged] == [0, 2]
    assert logged[1]["success/near"] == last["tasks"]["near"]["rate"] and "val/loss" in logged[1]
    assert "success in the environment" in said


def test_eval_on_two_processes_writes_what_one_writes(evaluated, tmp_path):
    launch = ("launch", "local", "--processes", "2", "--log-dir", tmp_path, "--")
    check(openpi_train(*launch, "eval", evaluated, *FLAGS, "--out", tmp_path / "two"), 0, "closed loop")
    for name in ("closed_loop.json", "open_loop.json"):
        one, two = (json.loads((folder / name).read_text()) for folder in (evaluated / "eval" / "2", tmp_path / "two"))
        assert one == two
    assert len(one["plots"]) == 2 and all((tmp_path / "two" / name).is_file() for name in one["plots"])
    videos = outcomes(tmp_path / "two")["videos"]
    assert len(videos) == 4 and all((tmp_path / "two" / name).is_file() for name in videos)


def test_chunks_may_be_joined_in_two_ways_but_not_in_both(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    request = EvaluateRequest(checkpoint=str(trained[0]), experiment=NAME, held_out=0, episodes=2, batch_size=4)
    plain = outcomes(evaluate_policy.run(_with(request, out=tmp_path / "plain", seed=1)))
    steps = {"plain": [episode["steps"] for episode in plain["episodes"]]}
    ways = {
        "ensemble": {"ensemble": 0.1},
        "real_time": {"real_time_delay": 1},
        "none": {"real_time_delay": 1, "real_time_method": "none"},
    }
    for name, option in ways.items():
        found = outcomes(evaluate_policy.run(_with(request, out=tmp_path / name, seed=1, **option)))
        assert found["settings"]["ensemble"] == option.get("ensemble")
        steps[name] = [episode["steps"] for episode in found["episodes"]]
    assert steps["plain"] != steps["ensemble"] and steps["plain"] != steps["real_time"]
    assert steps["none"] != steps["real_time"]
    with pytest.raises(UsageError, match="give one of them"):
        evaluate_policy.run(_with(request, out=tmp_path, ensemble=0.1, real_time_delay=1))
    with pytest.raises(UsageError, match=r"--real-time-guidance 10 .*--real-time-delay"):
        evaluate_policy.run(_with(request, out=tmp_path, real_time_guidance=10.0))
    with pytest.raises(UsageError, match=r"--real-time-method none is for .*: give --real-time-delay"):
        evaluate_policy.run(_with(request, out=tmp_path, real_time_method="none"))
    with pytest.raises(UsageError, match=r"a policy that was trained with --objective.max-delay; .*: give guided"):
        evaluate_policy.run(_with(request, out=tmp_path, real_time_delay=1, real_time_method="trained"))
    with pytest.raises(UsageError, match=r"--real-time-guidance 10 is for chunks that are joined by guidance"):
        evaluate_policy.run(
            _with(request, out=tmp_path, real_time_delay=1, real_time_method="none", real_time_guidance=10.0)
        )
    with pytest.raises(UsageError, match="the delay may be at most 5"):
        evaluate_policy.run(_with(request, out=tmp_path, real_time_delay=6))
    with pytest.raises(UsageError, match=r"--execute 99: the policy's chunks have \d+ actions"):
        evaluate_policy.run(_with(request, out=tmp_path, execute=99))
    with pytest.raises(UsageError, match="--data and --only: for the open loop, which --held-out 0 leaves out"):
        evaluate_policy.run(_with(request, out=tmp_path, data=str(tmp_path), only="moving"))
    with pytest.raises(DataError, match=r"absent does not exist"):
        evaluate_policy.run(_with(request, out=tmp_path, held_out=1, data=str(tmp_path / "absent")))
    with pytest.raises(DataError, match=r"^--only moving: the dataset has no such feature"):
        evaluate_policy.run(_with(request, out=tmp_path, held_out=1, only="moving"))
    with pytest.raises(UsageError, match="did you mean tabletop"):
        evaluate_policy.run(_with(request, out=tmp_path, env="table_top"))


def _with(request, **changes):
    return dataclasses.replace(request, **changes)


def test_the_report_holds_everything_and_asks_the_network_for_nothing(evaluated, tmp_path):
    assert report.main(ReportRequest(runs=(evaluated,), out=tmp_path / "report.html", experiment=NAME)) == 0
    page = (tmp_path / "report.html").read_text()
    for title in ("Training loss", "Held-out loss", "Success in the environment", "Where the time"):
        assert f"<figcaption>{title}" in page
    for word in ("delta_x_m", "95 % interval", "compiled", "prompt: ", "--exp-name x", "video/mp4"):
        assert word in page
    assert page.count('class="note missing"') == 1, "that for a browser without JavaScript"
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    _look_with_a_browser(page, tmp_path)


def _look_with_a_browser(page, folder):
    """Open it in headless Chromium: all pictures and videos load, the console is empty, nothing is fetched."""
    found, said = _in_browser(page, folder)
    assert len(found["images"]) == 2 and all(found["images"])
    assert len(found["plots"]) >= 6 and all(found["plots"])
    assert len(found["videos"]) == 4 and all(found["videos"])
    assert len(found["tables"]) >= 8 and all(found["tables"])
    assert not found["wide"], "the page is wider than the window"
    assert found["fetched"] == [] and "CONSOLE" not in said, said
    # The console does tell where a page asks for more than is in it.
    _, said = _in_browser(page.replace("<h1>", '<img src="http://127.0.0.1:9/more.png"><h1>'), folder)
    assert "CONSOLE" in said and "127.0.0.1:9" in said


_PROBE = """<script>window.onload = () => {
  const of = (name, good) => [...document.querySelectorAll(name)].map(good);
  document.body.insertAdjacentHTML("beforeend", "<pre id=probe>" + JSON.stringify({
    images: of("img", one => one.naturalWidth > 0),
    plots: of(".plot", one => one.querySelector("canvas") !== null),
    videos: of("video", one => one.error === null && one.duration > 0),
    tables: of("table", one => one.rows.length > 1),
    wide: document.documentElement.scrollWidth > innerWidth,
    fetched: performance.getEntriesByType("resource").map(one => one.name).filter(name => !name.startsWith("data:")),
  }) + "</pre>"); };</script>"""


def _in_browser(page, folder):
    """What the probe found in the opened page, and what the browser wrote to its console."""
    install("chromium")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here; as root on a Debian, OPENPI_TRAIN_INSTALL_PACKAGES=1 installs it")
    probed = re.sub(r"script-src [^\"]*", "script-src 'unsafe-inline'", page, count=1).replace(
        "</body>", _PROBE + "</body>"
    )
    (folder / "probed.html").write_text(probed)
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --enable-logging=stderr"
    place = (f"--user-data-dir={folder / 'profile'}", f"file://{folder / 'probed.html'}")
    command = [browser, *flags.split(), "--window-size=1280,900", "--virtual-time-budget=10000", "--dump-dom", *place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)
    assert match, done.stderr
    return json.loads(match[1]), done.stderr


def test_a_run_that_has_only_begun_has_a_report_that_says_so(trained, tmp_path):
    run = tmp_path / "begun"
    run.mkdir()
    shutil.copy(trained[0] / "experiment.json", run)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    page = report.html_of([RunFiles.at(run), RunFiles.at(trained[0])], with_batches=False)
    assert page.count('class="note missing"') >= 4 and "plan.json is not there" in page
    assert "Interrupted at step 1 of 2" in page and "<figcaption>Training loss" in page
    with pytest.raises(report.RunError, match="not a run's directory"):
        RunFiles.at(tmp_path)


def test_the_documented_experiment_acts():
    page = (ROOT / "docs" / "howto" / "evaluate.md").read_text().replace("\\\n", " ")
    command = re.search(r"^python -m openpi_train (\S+ --exp-name acts .*)", page, re.MULTILINE)
    assert command
    acts = train_verbs.typed(command[1].split())
    config = acts.robot_eval.closed_loop
    assert config.num_episodes == 5 * len(config.env.tasks) and config.interval % acts.eval.interval == 0
