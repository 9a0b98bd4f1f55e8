"""What was written or typed before names changed is read as if it had the present ones.

`former_experiments.json` is what commit f4f83118 recorded of these experiments (`fields.as_json`).
"""

import json
import logging

import pytest

from openpi_train import registry
from openpi_train.data.core.files import write_json
from openpi_train.experiment_flags import parse_experiment
from openpi_train.fields import as_json
from openpi_train.policy.experiment_json import experiment_from_json
from openpi_train.tools import list_runs, report_parts
from openpi_train.tools.run_files import RunFiles
from openpi_train.training.rundir import _changes
from tests.conftest import ROOT

FORMER = json.loads((ROOT / "tests" / "former_experiments.json").read_text())
GRPO = "arithmetic_grpo"


@pytest.mark.parametrize("name", FORMER)
def test_an_experiment_that_was_recorded_is_the_present_one(name):
    assert as_json(experiment_from_json(FORMER[name])) == as_json(registry.load(name))


def test_a_run_that_goes_on_differs_in_nothing(tmp_path):
    given = parse_experiment(GRPO, ["--exp-name", "x", "--checkpoint-base-dir", str(tmp_path)])
    recorded = {**FORMER[GRPO], "exp_name": "x", "checkpoint_base_dir": str(tmp_path)}
    given.run_dir.mkdir(parents=True)
    write_json(given.run_dir / "experiment.json", recorded)
    assert _changes(given) == {}


def test_flags_are_taken_by_their_former_names(caplog):
    former = ("--practice.num-groups", "16", "--practice.mixed-only", "--objective.law.top-k=5")
    present = ("--rl.num-groups", "16", "--rl.mixed-only", "--objective.distribution.top-k=5")
    with caplog.at_level(logging.WARNING):
        found = parse_experiment(GRPO, ["--exp-name", "x", *former, "--objective.average", "attempts"])
    assert found == parse_experiment(GRPO, ["--exp-name", "x", *present, "--objective.average", "rollouts"])
    assert found.rl.num_groups == 16 and found.rl.mixed_only and found.objective.distribution.top_k == 5
    assert found.objective.average == "rollouts"
    assert "--practice.num-groups is called --rl.num-groups now" in caplog.text
    assert "--objective.law.top-k is called --objective.distribution.top-k now" in caplog.text


def test_the_curves_and_rollouts_of_an_old_run_are_shown(tmp_path):
    write_json(tmp_path / "experiment.json", FORMER[GRPO])
    lines = [
        {"step": 4, "loss": 0.5, "practice/reward": 0.25, "practice/attempts": 32},
        {"step": 8, "loss": 0.5, "rl/reward": 0.75, "rl/rollouts": 64},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = {"context": 7, "reward": 1.0, "outcome": 1.0, "units": 5, "is_cut": False, "what": "2+2=4", "video": None}
    for number, (folder, line) in enumerate((("attempts", kept), ("rollouts", {**kept, "prompt_id": 8}))):
        file = tmp_path / folder / str(number) / f"{folder}.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(line))
    run = RunFiles.at(tmp_path)
    assert run.learns_from_rollouts
    assert run.series("rl/reward") == ([4, 8], [0.25, 0.75]) and run.series("rl/rollouts")[1] == [32, 64]
    assert list_runs.summary(tmp_path, run).reward == 0.75
    shown = report_parts.own_rollouts(run)
    assert {"prompt 7", "prompt 8"} <= {block.title for block in shown if block.kind == "preformatted"}
