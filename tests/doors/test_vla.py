"""The `vla` verb: the experiment that a YAML config of the trainer becomes, and what is refused."""

from pathlib import Path

import pytest
from vla_project import CONFIG, write_episodes, write_vla_project

from openpi_train import cli, train_verbs
from openpi_train.data.formats.parquet import Parquet
from openpi_train.elastic import adapt
from openpi_train.experiment import Experiment
from openpi_train.optim import AdamW
from openpi_train.robots.numbered import Numbered
from openpi_train.robots.tabletop import Tabletop
from openpi_train.runtime.exits import USAGE

STORE = Path(__file__).resolve().parents[1] / "data" / "formats" / "zarr" / "fixtures" / "arms_14.zarr"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Runs that would have been started, in the trainer's folder."""
    monkeypatch.chdir(write_vla_project(tmp_path))
    monkeypatch.delenv("WANDB_ENTITY", raising=False)
    runs = []
    monkeypatch.setattr(train_verbs, "_run", lambda experiment, process: runs.append(experiment) or 0)
    return runs


def run(started, *words) -> Experiment:
    assert cli.run(["vla", *words]) == 0
    return started[-1]


def test_a_run_trains_as_its_config_says(started):
    found = run(started)
    assert (found.name, found.exp_name, found.checkpoint_base_dir) == ("vla", "paligemma_vla_finetune", "./experiments")
    assert found.demonstrations.datasets[0].source == Parquet(path="dataset/training/")
    assert found.demonstrations.datasets[0].validation == Parquet(path="dataset/validation/")
    assert found.demonstrations.datasets[0].robot == Numbered(num_state_dims=7, num_action_dims=7)
    assert found.demonstrations.normalization == "min_max" and found.policy.action_dim == 7
    assert (found.policy.rows.window.horizon, found.num_epochs, found.batch_size) == (8, 10, 8)
    assert found.optimizer == AdamW(b2=0.999, weight_decay=0.01) and found.ema_decay is None
    assert (found.objective.num_flow_draws, found.objective.augment) == (1, False)
    # The rate falls over the whole run, from its first step on.
    rates = found.lr_schedule.over(100).create()
    assert [float(rates(step)) for step in (0, 50, 100)] == pytest.approx([2e-5, 1.01e-5, 2e-7])
    assert found.save_best and found.on_nan == "skip" and not found.wandb_enabled


@pytest.mark.parametrize(("words", "rows"), [((), 32), (("--keep_effective_batch_size",), 8)])
def test_each_gpu_takes_the_batch_size_unless_it_is_to_be_kept(started, words, rows):
    fitted, _ = adapt(run(started, *words), 4, None)
    fitted.check(4)
    assert fitted.batch_size == rows


def test_options_and_flags_go_first(started):
    found = run(started, "--batch_size", "4", "--epochs", "20", "--lr", "1e-4", "--use_wandb", "--log-interval", "3")
    assert (found.batch_size, found.num_epochs, found.lr_schedule.peak_lr, found.log_interval) == (4, 20, 1e-4, 3)
    assert found.wandb_enabled and found.project_name == "VLA_Project_paligemma_vla_finetune_DDP"
    assert run(started, "--num-train-steps", "7").num_epochs is None
    assert run(started, "--resume_checkpoint", "experiments/vla/paligemma_vla_finetune/7").resume_from == "7"
    # A run that was killed starts again with --resume: from its newest checkpoint.
    again = run(started, "--resume_checkpoint", "experiments/vla/paligemma_vla_finetune/7", "--resume")
    assert again.resume and again.resume_from is None


def config_with(old, new):
    """The name of a config with this change."""
    text = CONFIG.read_text()
    assert old in text
    Path("changed.yaml").write_text(text.replace(old, new))
    return "changed.yaml"


def test_another_dataset_has_the_robot_of_the_experiment_and_as_many_cameras_as_the_config(started):
    words = ("--experiment", "paligemma_tiny", "--train_data_override", str(STORE))
    robot = run(started, *words).demonstrations.datasets[0].robot
    assert isinstance(robot, Tabletop) and list(robot.cameras) == ["base_0_rgb"]
    both = run(started, *words, "--config", config_with("use_aux_camera: False", "use_aux_camera: True"))
    assert len(both.demonstrations.datasets[0].robot.cameras) == 2
    of_files = run(started, "--config", "changed.yaml").demonstrations.datasets[0].robot
    assert dict(of_files.cameras) == {"base_0_rgb": "image_1", "left_wrist_0_rgb": "image_2"}


def test_dims_that_the_config_lacks_are_those_of_the_files(started):
    write_episodes(Path("six"), dims=6)
    config = config_with("    horizon: 8\n    per_action_dim: 7\n    action_dim: 56\n    state_dim: 7\n", "")
    Path(config).write_text(Path(config).read_text().replace("    num_action_dims: 7\n", ""))
    robot = run(started, "--config", config, "--train_data_override", "six").demonstrations.datasets[0].robot
    assert robot == Numbered(num_state_dims=6, num_action_dims=6)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("state_dim: 7", "state_dim: 8", "state_dim is 8, and the Bridge robot has 7"),
        (
            "use_aux_camera: False",
            "use_aux_camera: True",
            "use_aux_camera is true, and the Bridge robot has one camera",
        ),
    ],
)
def test_a_config_for_another_robot_is_refused(started, old, new, message, capsys):
    assert cli.run(["vla", "--config", config_with(old, new), "--train_data_override", str(STORE)]) == USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--experiment", "pi0_bridge_traj"), "is for a PaliGemma with a flow head"),
        (("--experiment", "paligema_flow"), "paligemma_flow"),
        (("--config", "other.yaml"), "the config other.yaml cannot be read"),
        (("--train_data_override", "a,b"), "has 2 paths: put the files in one folder"),
        (("--deepspeed", "a"), "--deepspeed is for named experiments and runs"),
    ],
)
def test_what_cannot_be_is_an_error(started, words, message, capsys):
    assert cli.run(["vla", *words]) == USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("  seed: 123", "  seed: many", 'training.seed is "many"; it must be a number'),
        ("  epochs: 10", "  epochs: 0", "training.epochs is 0; it must be a whole number of at least 1"),
        ("  epochs: 10", "  epoch: 10", "unknown key training.epoch; did you mean training.epochs?"),
        ("  epochs: 10", "  epochs: 20", "lr_scheduler.T_max is 10 and training.epochs is 20"),
        ("  batch_size: 8", "  batch_size: many", 'data.batch_size is "many"'),
        ("dataset/training/", "dataset/none/", "data.train_parquet_files: "),
        ("dataset/validation/", "dataset/none/", "data.val_parquet_files: "),
    ],
)
def test_a_wrong_value_is_told_with_the_key_where_it_stands(started, capsys, old, new, told):
    assert cli.run(["vla", "--config", config_with(old, new)]) != 0
    assert f"error: {told}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"seed: \xff\xfe\n", "changed.yaml is not UTF-8 (invalid start byte at byte 6): save it as UTF-8"),
        (b"training:\n\tseed: 1\n", "YAML is indented by spaces, not tabs"),
        (b"", "changed.yaml is no YAML config: it must hold keys with values"),
        (b'{\n  // seed\n  "seed": 1}\n', "changed.yaml is no YAML config"),
    ],
)
def test_a_file_that_is_no_config_is_told_with_what_to_mend(started, capsys, content, told):
    Path("changed.yaml").write_bytes(content)
    assert cli.run(["vla", "--config", "changed.yaml"]) == USAGE
    assert told in capsys.readouterr().err
