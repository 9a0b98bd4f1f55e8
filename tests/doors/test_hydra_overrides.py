"""Hydra's command line of RoboTwin's diffusion policy: every key a flag, a reason, or an error."""

from pathlib import Path

import pytest

from openpi_train import cli
from openpi_train.doors.hydra_overrides import translate
from openpi_train.runtime.exits import UsageError

STORE = Path(__file__).resolve().parent.parent / "data" / "formats" / "zarr" / "fixtures" / "arms_14.zarr"
# The command of the tool's guide, for a store of 14 dims.
GUIDE = ["--config-name=robot_dp_14.yaml", "task.name=six_tasks", f"task.dataset.zarr_path={STORE}"]
GUIDE += ["training.seed=0", "training.device=cuda:0"]


def experiment_of(*words):
    command, given = translate([*GUIDE, *words])
    return cli.parse_experiment(command.experiment, [*command.flags, *given])


def test_the_command_of_the_guide_is_an_experiment_with_its_old_meaning():
    command, given = translate(GUIDE)
    assert (command.experiment, given) == ("robot_dp_14", [])
    flags = f"--dataset {STORE} --seed 0 --resume --no-keep-effective-batch-size --exp-name six_tasks_seed0"
    assert " ".join(command.flags) == flags
    report = command.report()
    assert f"the same as: python -m openpi_train robot_dp_14 {flags}" in report
    assert "each GPU takes the batch size, as there" in report
    # The tool counts the GPUs, whatever number the device has.
    assert "every visible GPU takes part, as there" in report
    experiment = experiment_of()
    assert (experiment.name, experiment.batch_size, experiment.keep_effective_batch_size) == ("robot_dp_14", 128, False)
    assert experiment.demonstrations.datasets[0].source.path == str(STORE) and experiment.resume


def test_the_command_of_robotwins_guide_word_by_word():
    words = "--config-name=robot_dp_10.yaml task.name=six_tasks task.dataset.zarr_path=data/six_tasks.zarr"
    command, given = translate([*words.split(), "training.seed=0", "training.device=cuda:0"])
    flags = "--dataset data/six_tasks.zarr --seed 0 --resume --no-keep-effective-batch-size --exp-name six_tasks_seed0"
    assert (command.experiment, " ".join(command.flags), given) == ("robot_dp_10", flags, [])


def test_every_key_is_a_flag_and_flags_of_ours_may_follow():
    words = "dataloader.batch_size=64 dataloader.num_workers=0 optimizer.lr=2e-4 optimizer.betas=[0.9,0.99] horizon=16"
    words += " training.num_epochs=20 training.gradient_accumulate_every=2 training.resume=false ema.power=0.5"
    words += (
        " policy.num_inference_steps=10 policy.noise_scheduler.beta_schedule=linear logging.mode=online exp_name=mine"
    )
    found = experiment_of(*words.split(), "val_dataloader.batch_size=64", "--log-interval", "7")
    assert (found.batch_size, found.num_workers, found.lr_schedule.peak_lr) == (64, 0, 2e-4)
    assert (found.optimizer.b1, found.optimizer.b2, found.model.action_horizon) == (0.9, 0.99, 16)
    assert (found.num_epochs, found.grad_accum, found.ema_warmup.power, found.resume) == (20, 2, 0.5, False)
    assert found.robot_eval.num_sample_steps == 10 and found.objective.noise_schedule.beta_schedule == "linear"
    assert (found.wandb_enabled, found.exp_name, found.log_interval) == (True, "mine", 7)


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        # What the guide advises to change in its files.
        (
            "dataloader.batch_size=64 optimizer.lr=2.0e-4 dataloader.num_workers=4 dataloader.pin_memory=True "
            "dataloader.persistent_workers=True",
            "--batch-size 64 --num-workers 4 --lr-schedule.peak-lr 0.0002",
        ),
        ("training.lr_scheduler=constant", "--lr-schedule.kind constant --lr-schedule.warmup-steps 0"),
        ("training.lr_scheduler=constant_with_warmup training.lr_warmup_steps=5", "--lr-schedule.kind constant"),
        ("training.use_ema=False ema.power=0.5", "--ema-decay None --ema-warmup.power None"),
        ("training.freeze_encoder=True", "--freeze encoders/.*"),
        ("training.debug=True training.num_epochs=9", "--num-train-steps 6 --log-interval 1"),
        ("training.debug=False training.max_train_steps=null", "--resume"),
        ("policy.down_dims=[64,128] policy.kernel_size=3", "--model.unet.widths 64 128"),
        ("policy.noise_scheduler.clip_sample=False", "--objective.noise-schedule.no-clip-sample"),
        ("+policy.obs_encoder.share_rgb_model=True", "--model.share-encoder"),
        ("ema.inv_gamma=2 ema.update_after_step=3 ema.min_value=0.1", "--ema-warmup.inv-gamma 2"),
    ],
)
def test_keys_of_the_tools_own_config_are_flags_that_are_there(words, flags):
    command, _ = translate([*GUIDE, *words.split()])
    assert flags in " ".join(command.flags)


def test_these_flags_are_fields_of_the_experiment():
    words = "training.lr_scheduler=constant training.use_ema=False training.freeze_encoder=True training.debug=True"
    words += " policy.down_dims=[64,128] policy.kernel_size=3 policy.n_groups=4 policy.diffusion_step_embed_dim=64"
    words += " policy.noise_scheduler.clip_sample=False policy.noise_scheduler.beta_end=0.01"
    found = experiment_of(*words.split(), "+policy.obs_encoder.share_rgb_model=True")
    assert (found.lr_schedule.kind, found.ema_decay, found.ema_warmup.power) == ("constant", None, None)
    assert (found.num_train_steps, found.num_epochs, found.log_interval) == (6, None, 1)
    assert found.is_frozen("encoders/head_camera/stem") and found.model.share_encoder
    assert (found.model.unet.widths, found.objective.noise_schedule.clip_sample) == ((64, 128), False)
    found.check(1)


def test_the_configs_name_may_stand_anywhere():
    name, *overrides = GUIDE
    assert translate([*overrides, name]) == translate(GUIDE)
    assert translate([overrides[0], "-cn", "robot_dp_14", *overrides[1:]]) == translate(GUIDE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.sed=1"], "unknown key training.sed; did you mean training.seed"),
        (["dataloader.batch_size=many"], 'dataloader.batch_size is "many"; it must be a number'),
        (["training.device=tpu:0"], "training.device is tpu:0; allowed: cuda:NUMBER, cuda or cpu"),
        (["six_tasks"], "six_tasks is no override"),
        (["training.lr_scheduler=polynomial"], "training.lr_scheduler is polynomial; allowed: cosine, linear"),
        (["training.max_train_steps=3"], "training.max_train_steps is 3, of an epoch"),
        (["n_latency_steps=1"], "n_latency_steps is 1; allowed: 0"),
        (["policy.down_dims=256"], "policy.down_dims is 256; it must be a list of whole numbers"),
    ],
)
def test_what_cannot_be_is_an_error_with_its_key(words, message):
    with pytest.raises(UsageError, match=message):
        translate([*GUIDE, *words])
    with pytest.raises(UsageError, match="--config-name needs a name"):
        translate(["--config-name"])


def test_the_program_takes_hydras_words_and_names_the_closest_experiment(capsys):
    assert cli.run(["training.seed=1", "--config-name", "robot_dp_15", "--dry-run"]) == 2
    assert "robot_dp_1" in capsys.readouterr().err
