"""YAML configs of the PaliGemma VLA's trainer as flags: its own file, every key, contradictions, checkpoints."""

import re
from pathlib import Path

import pytest

from openpi_train.doors.vla.vla_flags import translate_vla
from openpi_train.doors.vla.without_vla_flag import WITHOUT_VLA_FLAG
from openpi_train.doors.yaml_file import read_yaml
from openpi_train.runtime.exits import UsageError

FILE = Path(__file__).parent / "vla" / "vla_config.yaml"
GUIDE = read_yaml(FILE)
# What is said in any case: the batch is that of a GPU, nothing is held out, wandb is off.
ALWAYS = "--no-keep-effective-batch-size --data.validation-fraction 0.0 --eval.interval 0 --no-wandb-enabled"


def command(config, **given):
    return " ".join(word for flag in translate_vla(config, given).flags for word in flag)


def head(**keys):
    return {"model": {"action_head_config": keys}}


def vlm(**keys):
    return {"model": {"vlm_config": keys}}


def schedule(**keys):
    return {"training": {"epochs": 10}, "lr_scheduler": {"type": "CosineAnnealingLR", **keys}}


def test_the_trainers_file_is_a_run_with_its_old_meaning():
    translated = translate_vla(GUIDE)
    flags = {flag[0]: " ".join(flag[1:]) for flag in translated.flags}
    assert flags == {
        "--exp-name": "paligemma_vla_finetune",
        "--checkpoint-base-dir": "./experiments",
        "--seed": "123",
        "--num-epochs": "10",
        "--log-interval": "10",
        "--optimizer.clip-gradient-norm": "1.0",
        "--batch-size": "8",
        "--no-keep-effective-batch-size": "",
        "--num-workers": "8",
        "--lr-schedule.peak-lr": "2e-05",
        "--lr-schedule.kind": "cosine",
        "--lr-schedule.decay-lr": "2e-07",
        "--optimizer": "adamw",
        "--optimizer.weight-decay": "0.01",
        "--weight-loader.params-path": "./weight/paligemma-3b-pt-224",
        "--model.image-size": "224",
        "--data.tokenizer": "./weight/paligemma-3b-pt-224",
        "--model.dtype": "bfloat16",
        "--freeze": "None",
        "--model.action-horizon": "8",
        "--model.action-dim": "7",
        "--model.max-token-len": "77",
        "--no-wandb-enabled": "",
    }
    assert (translated.datasets, translated.validation) == (("dataset/training/",), ("dataset/validation/",))
    assert translated.lines[-1].startswith("each GPU takes the batch size")
    assert (translated.state_dims, translated.action_dims, translated.cameras) == (7, 7, 1)


def test_every_key_of_the_file_has_its_line_and_the_batch_is_explained():
    report = translate_vla(GUIDE).report()
    for key in re.findall(r"^ +(\w+): \S", FILE.read_text(), re.M):
        if key != "hidden_dim":  # null
            assert re.search(rf"\b{key}: ", report), key
    assert re.search(r"T_max: 10 +all epochs of the run", report)
    assert "each GPU takes the batch size, as there" in report
    assert "counts the rows of all GPUs, as there" in translate_vla(GUIDE, {"keep_effective_batch_size": True}).report()


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ({}, f"^{ALWAYS}$"),
        ({"lr_scheduler": {"type": "none"}}, f"^{ALWAYS}$"),
        (schedule(), "--lr-schedule.kind cosine --lr-schedule.decay-lr 0.0 "),
        # The tool takes a step of the schedule after each batch.
        (schedule(T_max=5000), "--lr-schedule.decay-steps 5000 "),
        ({"optimizer": {"type": "Adam", "betas": [0.8, 0.9], "eps": 1e-6}}, "adamw --optimizer.weight-decay 0.0 .*"),
        ({"optimizer": {"betas": [0.8, 0.9]}}, "--optimizer.b1 0.8 --optimizer.b2 0.9 "),
        ({"training": {"grad_clip_norm": 0}}, "--optimizer.clip-gradient-norm 1000000000.0 "),
        ({"training": {"gradient_accumulation_steps": 2}}, "--grad-accum 2 "),
        (
            vlm(model_name_or_path="google/paligemma-3b-pt-448"),
            "--weight-loader.params-path hub:google/paligemma-3b-pt-448 --model.image-size 448 "
            "--data.tokenizer google/paligemma-3b-pt-448 ",
        ),
        (vlm(dtype="torch.float16"), "--model.dtype float16 "),
        (vlm(freeze_vision_tower=True), "--freeze vision "),
        (vlm(freeze_language_model=True), "--freeze language "),
        (vlm(freeze_vision_tower=True, freeze_language_model=True), "--freeze backbone "),
        (head(num_action_dims=7, action_dim=21), "--model.action-horizon 3 --model.action-dim 7 "),
        (head(per_action_dim=7, state_dim=9), "--model.action-dim 9 "),
        (head(num_layers=4, num_heads=8), "--model.head.depth 4 --model.head.num-heads 8 "),
        (head(embed_dim=512), "--model.head.width 512 --model.head.mlp-dim 2048 "),
        (head(num_inference_timesteps=50), "--eval.num-sample-steps 50 "),
        ({"data": {"val_parquet_files": "v"}}, "^--no-keep-effective-batch-size --no-wandb-enabled$"),
    ],
)
def test_a_key_becomes_flags(config, flags):
    assert re.search(flags, command(config)), command(config)


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({"data.batch_size": 4}, "--batch-size 4 .*--no-keep-effective-batch-size"),
        ({"keep_effective_batch_size": True}, "--batch-size 8 .*--keep-effective-batch-size"),
        # The schedule ends with the run, as the file's does.
        ({"epochs": 20}, "--num-epochs 20 (?!.*decay-steps).*--lr-schedule.kind cosine"),
        ({"use_wandb": True}, "--wandb-enabled --project-name VLA_Project_paligemma_vla_finetune_DDP"),
        ({"use_wandb": True, "wandb_project_name": "p"}, "--wandb-enabled --project-name p"),
        ({"data.train_parquet_files": ["a", "b"]}, "--exp-name"),
    ],
)
def test_options_of_the_trainers_commands_replace_keys(given, flags):
    assert re.search(flags, command(GUIDE, **given)), command(GUIDE, **given)
    assert translate_vla({}, {"wandb_entity": "team"}, name="file").entity == "team"
    assert ("--exp-name", "file") in translate_vla({}, name="file").flags


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"data": {"batchsize": 8}}, "unknown key data.batchsize; did you mean data.batch_size?"),
        (head(horizn=8), "did you mean model.action_head_config.horizon?"),
        ({"wheels": 4}, "unknown key wheels; the trainer has no such key"),
        ({"data": {"batch_size": 0}}, "data.batch_size is 0; it must be a whole number of at least 1"),
        (
            {"data": {"train_parquet_files": [3]}},
            "data.train_parquet_files is [3]; it must be a path, or a list of paths",
        ),
        (
            head(horizon=8, per_action_dim=7, action_dim=50),
            "action_dim is 50, and model.action_head_config.per_action_dim",
        ),
        (head(per_action_dim=7, num_action_dims=8), "they contradict each other"),
        ({"data": {"state_dim": 7}, **head(state_dim=8)}, "they contradict each other"),
        (head(use_state_input=False), "use_state_input is false; allowed: true"),
        (head(dropout=0.1), "dropout is 0.1; allowed: 0"),
        (head(num_categories=2), "num_categories is 2; allowed: 1"),
        (vlm(dtype="torch.int8"), "dtype is 'torch.int8'; allowed: torch.bfloat16, torch.float16, torch.float32"),
        (schedule(T_max=5), "lr_scheduler.T_max is 5 and training.epochs is 10: the rate would rise again"),
        ({"lr_scheduler": {"type": "StepLR"}}, "lr_scheduler.type is 'StepLR'; allowed: cosineannealinglr, none"),
        ({"lr_scheduler": {"T_max": 5}}, "lr_scheduler.type is missing"),
        ({"optimizer": {"type": "SGD"}}, "optimizer.type is 'SGD'; allowed: adamw, adam"),
        ({"optimizer": {"type": "Adam", "weight_decay": 0.1}}, "the weight decay is 0.1: use AdamW, or 0"),
        ({"training": {"seed": 1}, "seed": 2}, "training.seed is 1 and seed is 2: they contradict each other"),
    ],
)
def test_what_cannot_be_is_refused(config, message):
    with pytest.raises(UsageError) as caught:
        translate_vla(config)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", WITHOUT_VLA_FLAG)
def test_a_key_without_a_flag_says_why(key):
    *sections, name = key.split(".")
    config: dict = {name: 1}
    for section in reversed(sections):
        config = {section: config}
    lines = "\n".join(translate_vla(config).lines)
    assert re.search(rf"no flag for .*{re.escape(key)}: 1.*\n    {re.escape(WITHOUT_VLA_FLAG[key])}", lines)


@pytest.mark.parametrize(
    ("path", "point"),
    [
        # The guide's: the run's name, and the time at which the trainer began it.
        ("experiments/paligemma_vla_finetune_20241201_120000/checkpoints/best_model.pth", "best"),
        ("./experiments/paligemma_vla_finetune/checkpoints/best_model.pth", "best"),
        ("experiments/vla/paligemma_vla_finetune", "latest"),
        ("experiments/vla/paligemma_vla_finetune/latest", "latest"),
        ("experiments/vla/paligemma_vla_finetune/4000", "4000"),
        # Other runs.
        ("experiments/vla/other/latest", f"{Path.cwd()}/experiments/vla/other"),
        ("experiments/vla/other/best", f"{Path.cwd()}/experiments/vla/other/best"),
        ("path/to/single_gpu_checkpoint.pth", "path/to/single_gpu_checkpoint.pth"),
    ],
)
def test_a_checkpoint_is_this_runs_or_anothers(path, point):
    assert ("--resume-from", point) in translate_vla(GUIDE, {"resume_checkpoint": path}).flags


def test_a_file_of_the_trainer_is_refused(tmp_path):
    file = tmp_path / "best_model.pth"
    file.touch()
    with pytest.raises(UsageError, match="its flow head is another network") as error:
        translate_vla(GUIDE, {"resume_checkpoint": str(file)})
    assert f"in place of it give --weight-loader.params-path {file}" in str(error.value)
