"""The whole report of runs whose files are written here: words, escaping, and what a browser makes of the page."""

import html
import json
import re
import shutil
import subprocess

import pytest

from openpi_train.data.core.files import write_json
from openpi_train.interop.manifest import write_manifest
from openpi_train.tools.page import Chart, DataTable, Line, Note, page
from openpi_train.tools.report import html_of
from openpi_train.tools.report_curves import curves
from openpi_train.tools.report_parts import own_rollouts
from openpi_train.tools.report_verdict import verdicts
from openpi_train.tools.run_files import RunFiles


def run_with(folder, lines, num_train_steps=10, **experiment):
    """A run of these lines of metrics, which reached its last step."""
    folder.mkdir(parents=True)
    record = {"__class__": "Experiment", "name": "e", "num_train_steps": num_train_steps, "rl": None, **experiment}
    write_json(folder / "experiment.json", record)
    write_json(folder / "results.json", {"summary": {"step": lines[-1]["step"] if lines else 0}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunFiles.at(folder)


def said(run):
    return [(one.style, one.text) for one in verdicts(run)]


def test_a_policy_that_is_better_than_the_mean_action_has_learned(tmp_path):
    lines = [
        {"step": step, "val/action_mse": error, "val/action_mse_of_mean_action": 0.62}
        for step, error in ((0, 3.0), (10, 0.2))
    ]
    (ended, error) = said(run_with(tmp_path / "x", lines))
    assert ended == ("neutral", "Ended at step 10 of 10.")
    assert error[0] == "good"
    assert error[1] == (
        "This run has learned: the action error on held-out data, 0.4472 (root mean square), is better than the mean "
        "action of the training data by a factor 1.76 (0.7874)."  # the root of 3.1
    )


def test_a_policy_that_is_worse_and_whose_loss_has_not_fallen_has_not_learned(tmp_path):
    lines = [
        {"step": 0, "val/loss": 2.0, "val/action_mse_ema": 3.0, "val/action_mse_of_mean_action": 1.0},
        {"step": 9, "loss": "NaN", "skipped_steps": 2.0},
        {
            "step": 10,
            "val/loss": 2.1,
            "val/action_mse": 4.0,
            "val/action_mse_ema": 2.0,
            "val/action_mse_of_mean_action": 1.0,
        },
    ]
    found = dict(reversed(pair) for pair in said(run_with(tmp_path / "x", lines)))
    assert [*found.values()] == ["neutral", "bad", "bad", "bad", "neutral"]
    words = " ".join(found)
    for part in (
        "The loss is not a number at 1 logged steps, first at 9.",
        "2 updates were skipped",
        "This run has not learned: the held-out loss is 2.1, and was 2 before the first step",
        "1.414 (root mean square), is worse than the mean action of the training data by a factor 1.41 (1).",
    ):
        assert part in words


def test_where_the_weights_of_a_clearly_lower_held_out_loss_are(tmp_path):
    lines = [{"step": step, "val/loss": loss} for step, loss in ((0, 6.055), (100, 0.9597), (375, 1.1958))]
    run = run_with(tmp_path / "x", lines, num_train_steps=375)
    assert said(run)[1] == (
        "good",
        "This run has learned: the held-out loss fell from 6.055 to 1.196 (lowest: 0.9597 at step 100).",
    )
    nowhere = "The held-out loss was lowest at step 100, of which there is no checkpoint (--save-best)."
    assert said(run)[2:] == [("neutral", nowhere)]
    # A checkpoint of a step near it, as saved.
    write_json(run.path / "best.json", {"step": 150, "value": 0.97})
    (run.path / "150").mkdir()
    write_manifest(run.path / "150")
    there = f"{run.path}/best has the checkpoint of the lowest one that was saved, step 150."
    assert said(run)[2:] == [("neutral", f"The held-out loss was lowest at step 100: {there}")]


def test_the_former_baseline_is_shown_as_what_it_is(tmp_path):
    lines = [{"step": 10, "val/action_mse": 2.457, "val/action_mse_mean_baseline": 0.8107}]
    (_, (style, text)) = said(run_with(tmp_path / "x", lines))
    assert style == "bad" and "2.457, is not below that of the mean of the evaluated actions, 0.8107" in text


def test_a_run_that_failed_says_with_what(tmp_path):
    run = run_with(tmp_path / "x", [{"step": 4, "loss": 1.0}])
    (run.path / "logs").mkdir()
    line = "2026-11-30 07:06:56,446 E process 0 step 4 [training] openpi_train.runtime.session: DataError: no frame 7"
    (run.path / "logs" / "process_0.log").write_text(f"{line}\n")
    (style, text) = said(run)[0]
    assert style == "bad" and "Interrupted at step 4 of 10" in text and "DataError: no frame 7" in text
    assert f"resume {run.path}" in text


def test_every_text_is_escaped(tmp_path):
    evil = "</script><script>alert(1)</script>"
    run = run_with(tmp_path / "e" / "<script>x", [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}], name=evil)
    text = html_of([run], with_batches=False)
    chart = Chart(evil, evil, [Line(evil, [1, 2], [1.0, 2.0])])
    blocks = [chart, DataTable([evil], [[evil]]), Note(f"say `{evil}`")]
    for shown in (text, page(evil, {evil: blocks}, evil)):
        assert "<script>x" not in shown and "<script>alert" not in shown and "alert(1)</script>" not in shown
    assert html.escape("<script>x") in text
    assert f'<p class="note ">say <code>{html.escape(evil)}</code></p>' in shown


def test_curves_of_several_runs_share_a_chart_and_what_differs_is_listed(tmp_path):
    runs = [
        run_with(tmp_path / "e" / name, [{"step": 5, "loss": 1.0, "lonely": 1}, {"step": 10, "loss": loss}], seed=seed)
        for name, loss, seed in (("a", 0.5, 1), ("b", 0.25, 2))
    ]
    ((group,), shown) = curves(runs), html_of(runs, with_batches=False)
    (chart,) = group.blocks
    assert [(line.label, line.y, line.colour) for line in chart.lines] == [
        ("e/a: training", [1.0, 0.5], 0),
        ("e/b: training", [1.0, 0.25], 1),
    ]
    (row,) = re.findall(r"<td>seed</td>(.*?)</tr>", shown, re.DOTALL)
    assert re.findall(r"<td>(\d)</td>", row) == ["1", "2"]


def test_a_value_that_was_measured_once_is_no_empty_chart(tmp_path):
    heading, table = curves([run_with(tmp_path / "x", [{"step": 5, "loss": 1.5}])])
    assert heading.text == "Measured once" and table.rows == [["Training loss", "training", 5, 1.5]]


def test_kept_rollouts_of_texts_are_shown_with_what_they_were_rewarded_for(tmp_path):
    line = {"prompt_id": 3, "reward": 0.75, "outcome": 0.5, "is_cut": True, "prompt": "1+\n2=", "completion": "3\n"}
    more = {"tokens": 8, "rewards": {"0_right": 0.5, "1_short": None}, "columns": {"answer": "drei ß"}}
    run = run_with(tmp_path / "x", [{"step": 1, "rl/reward": 0.1}])
    for iteration, one in ((1, {**line, **more}), (11, {**line, "tokens": 8, "reference": "3"})):
        (run.path / "rollouts" / str(iteration)).mkdir(parents=True)
        (run.path / "rollouts" / str(iteration) / "rollouts.jsonl").write_text(json.dumps(one))
    blocks = own_rollouts(run)
    assert [block.rows for block in blocks if block.kind == "table"] == [[[3, 0.75, 8, "yes"]]] * 2
    assert [(block.title, block.text) for block in blocks if block.kind == "preformatted"] == [
        ("prompt 3", "1+\n2="),
        ("completion: reward 0.75, 0_right 0.5, 1_short None", "3\n"),
        ("columns", '{"answer": "drei ß"}'),
        ("prompt 3", "1+\n2="),
        ("completion: reward 0.75", "3\n"),
        ("columns", '{"reference": "3"}'),
    ]


_PROBE = """<script>window.onload = () => {
  const plots = [...document.querySelectorAll(".plot")];
  const said = () => [...document.querySelectorAll(".u-value")].map((one) => one.textContent);
  const inked = plots.map((plot) => {
    const canvas = plot.querySelector("canvas");
    return canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value);
  });
  const last = said(), box = document.querySelector(".log:not(:disabled)"), wide = document.documentElement.scrollWidth;
  const over = document.querySelector(".u-over"), place = over.getBoundingClientRect();
  const at = { clientX: place.left + 3, clientY: place.top + 50, bubbles: true };
  over.dispatchEvent(new MouseEvent("mouseenter", at));
  over.dispatchEvent(new MouseEvent("mousemove", at));
  setTimeout(() => {
    const hovered = said();
    box.click();
    const slider = document.getElementById("smoothing");
    slider.value = "0.5"; slider.dispatchEvent(new Event("input"));
    setTimeout(() => document.body.insertAdjacentHTML("beforeend", "<pre id=probe>" + JSON.stringify(
      { inked, last, hovered, smoothed: said(), isLog: box.checked, wide: wide > innerWidth }) + "</pre>"), 500);
  }, 500);
};</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 500])
def test_a_browser_draws_the_curves_without_a_network(tmp_path, width):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    run = run_with(tmp_path / ("a_long_name_" * 8), [{"step": 5, "loss": 4.0}, {"step": 10, "loss": 1.0}])
    text = html_of([run], with_batches=False)
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
    console, _ = look(browser, text, tmp_path, width)  # under the page's own policy
    assert "CONSOLE" not in console, console
    allowed = re.sub(r"script-src [^\"]*", "script-src 'unsafe-inline'", text, count=1)
    console, found = look(browser, allowed.replace("</body>", _PROBE + "</body>"), tmp_path, width)
    assert "CONSOLE" not in console, console
    assert found["inked"] == [True] and not found["wide"] and found["isLog"]
    assert found["last"] == ["10", "1"] and found["hovered"] == ["5", "4"]  # below the cursor: the first step
    # Weights 1/4 and 1/2 of 4 and 1, over their sum.
    assert found["smoothed"][-1] == "2"


def look(browser, text, folder, width):
    """What the browser says, and the probe's findings if there is a probe."""
    (folder / "page.html").write_text(text)
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --enable-logging=stderr"
    place = (f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}", f"file://{folder / 'page.html'}")
    command = [browser, *flags.split(), "--virtual-time-budget=5000", "--dump-dom", *place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)
    return done.stderr, json.loads(match[1]) if match else None
