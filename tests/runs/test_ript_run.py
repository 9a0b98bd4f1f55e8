"""A YAML config of the RIPT trainers for pi0, through its script, in two processes; and the same again, resumed."""

import json
import subprocess
import sys

import pytest
from rl.reaching import REACHING
from runs.command import ROOT, check, environment, openpi_train
from saved_runs import save_run

from openpi_train import registry
from openpi_train.training.iterations import FILE

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
# One group of two on a device; groups need not be mixed, so that something is learnt from in every iteration.
CONFIG = """
exp_name: x
output_dir: {base}/output
policy_path: {base}/runs/reaching/x
algo:
  {{rloo_batch_size: 2, data_batch_size: 1, num_epochs: 2, lr: 1e-4, lr_scaling: sqrt, enable_dynamic_sampling: false}}
task: {{task_names_to_use: [1], max_episode_length: 4, rollouts_per_env: 2, num_parallel_envs: 2}}
training: {{num_train_steps: {iterations}}}
fault_tolerance: {{checkpoint_interval: 1, auto_resume: true}}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with an untrained policy, which has then learnt from rollouts for two iterations in two processes."""
    base = tmp_path_factory.mktemp("ript")
    save_run(registry.load(REACHING), base / "runs")
    (base / "config.yaml").write_text(CONFIG.format(base=base, iterations=2))
    launcher = [ROOT / "scripts" / "launch_distributed_training.sh", "--config", base / "config.yaml", "--gpus", "2"]
    flags = ["--", "--assets-base-dir", base / "assets"]
    done = subprocess.run(
        list(map(str, [*launcher, "--log-dir", base / "launch", *flags])),
        env=environment(PYTHON=sys.executable),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = "starting 2 processes", "so one begins there", "2 rows x 2 devices", "0.000141421 = 0.0001 x 1.41421 (sqrt"
    check(done, 0, *told)
    return base


def results(base):
    return json.loads((base / "output" / "ript" / "x" / FILE).read_text())


def test_every_iteration_has_its_results(base):
    found = results(base)
    assert [(one["iteration"], one["step"]) for one in found["training_metrics"]] == [(1, 2), (2, 4)]
    for one in found["training_metrics"]:
        assert one["total_episodes"] == 4 and one["success_rates"] == {"reach_blue": one["success_rate"]}
        assert one["mean_reward"] == one["success_rate"] and one["mean_loss"] is not None
        assert one["learning_rate"] == pytest.approx(1e-4 * 2**0.5)
    assert (found["distributed_info"]["processes"], found["distributed_info"]["devices"]) == (2, 2)
    assert found["experiment_summary"]["total_episodes"] == 8


def test_it_goes_on_by_itself_with_the_same_groups_on_one_device(base):
    before = results(base)["training_metrics"]
    (base / "config.yaml").write_text(CONFIG.format(base=base, iterations=3))
    words = ("ript", "--config", base / "config.yaml", "--assets-base-dir", base / "assets")
    done = openpi_train(*words, "--devices-per-process", "1")
    check(done, 0, "continuing from step 4 of 6", "the run began on 2 devices and goes on on 1")
    found = results(base)
    assert found["training_metrics"][:2] == before and found["training_metrics"][2]["total_episodes"] == 4
    assert (found["distributed_info"]["processes"], found["experiment_summary"]["total_iterations"]) == (1, 3)
