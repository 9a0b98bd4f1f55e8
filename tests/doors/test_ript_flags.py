"""YAML configs of the RIPT trainers for pi0 as flags: the guide's sections, every key, contradictions."""

import re
from pathlib import Path

import pytest
from flag_words import each

from openpi_train.doors.ript.ript_flags import translate_ript
from openpi_train.doors.ript.without_ript_flag import WITHOUT_RIPT_FLAG
from openpi_train.doors.yaml_file import read_yaml
from openpi_train.runtime.exits import UsageError

GUIDE = read_yaml(Path(__file__).parent / "ript" / "distributed_train_pi0.yaml")


def command(config, **given):
    return " ".join(word for flag in translate_ript(config, given).flags for word in flag)


def algo(**keys):
    return {"algo": keys}


def test_the_guide_is_a_run_of_so_many_iterations_on_any_number_of_devices():
    translated = translate_ript(GUIDE)
    assert (translated.policy, translated.env) == ("checkpoints/pi0_libero", "tabletop")
    flags = {flag[0]: " ".join(flag[1:]) for flag in translated.flags}
    # 8 rollouts on a device, all in each of the 4 steps of an iteration.
    counts = {"rl.group-size": "2", "rl.num-groups": "4", "rl.epochs": "4", "batch-size": "8"}
    steps = {"num-train-steps": "80", "save-interval": "40", "log-interval": "4", "grad-accum": "1"}
    rates = {"lr-schedule.peak-lr": "1e-05", "lr-scaling": "sqrt", "reference-batch-size": "8"}
    others = {
        "exp-name": "pi0_distributed",
        "checkpoint-base-dir": "pi0/ript/output/distributed",
        "weight-loader.params-path": "checkpoints/pi0_libero",
        "data.datasets.0.norm-stats": "checkpoints/pi0_libero/norm_stats.json",
        "rl.mixed-only": "",
        # 20 tries of a group are 5 waves of 4.
        "rl.max-waves": "5",
        "rl.tasks": "0 1 2 3 4 5 6 7 8 9",
        "eval.closed-loop.tasks": "0 1 2 3 4 5 6 7 8 9",
        "rl.max-steps": "200",
        "eval.closed-loop.max-steps": "200",
        "rl.episodes-per-device": "2",
        "eval.closed-loop.episodes-per-task": "4",
        "model.dtype": "bfloat16",
        "model.remat": "none",
        "keep-last": "3",
        "resume": "",
        "no-keep-effective-batch-size": "",
        "optimizer": "adamw",
        "optimizer.clip-gradient-norm": "1.0",
        "profile": "0",
        "seed": "42",
    }
    betas = {"optimizer.weight-decay": "0.01", "optimizer.b1": "0.9", "optimizer.b2": "0.999"}
    assert flags == {f"--{name}": value for name, value in {**counts, **steps, **rates, **others, **betas}.items()}


def test_every_key_of_the_guide_has_its_line():
    lines = translate_ript(GUIDE).report()
    for section in ("distributed", "data_parallel", "task_distribution", "performance", "fault_tolerance", "debug"):
        for key in GUIDE[section]:
            assert f"{section}.{key}: " in lines, key
    assert re.search(r"sync_every_n_steps: 5\n +outcomes of all processes are gathered in every iteration", lines)
    assert re.search(r"enable_rollout_stats_tracking: true +no initial state is drawn twice", lines)
    assert re.search(r"resume_from_latest: true\n +the newest good checkpoint is used", lines)


DEFAULTS = "--rl.group-size 4 --rl.num-groups 2 --rl.epochs 4 --batch-size 8 "


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        # RIPT-VLA's names, with mini-batches.
        (
            {**algo(rloo_batch_size=8, ppo_batch_size=4, num_ppo_epochs=20), "train_dataloader": {"batch_size": 6}},
            "--rl.num-groups 6 --rl.epochs 20 --batch-size 4 --num-train-steps 4800 --save-interval 2400",
        ),
        ({"fault_tolerance": {"enable_checkpointing": False}}, "--num-train-steps 80 --save-interval 80"),
        ({"fault_tolerance": {"auto_resume": False}}, "--no-resume"),
        ({"rollout": {"interval": 5, "rollouts_per_env": 9}}, "--eval.interval 20 --eval.closed-loop.interval 20"),
        (
            {"rollout": {"max_episode_length": 9}, "task": {"max_episode_length": 7}},
            "--rl.max-steps 7 --eval.closed-loop.max-steps 9",
        ),
        ({"enhanced_sampling": {"save_videos": False}}, "--eval.closed-loop.num-videos 0"),
        ({"training": {"optimizer": {"type": "Adam"}}}, "--optimizer adamw --optimizer.weight-decay 0.0"),
        ({"training": {"optimizer": {"type": "SGD", "momentum": 0.5}}}, "--optimizer sgd --optimizer.momentum 0.5"),
        (algo(grad_norm_clip=0), "--optimizer.clip-gradient-norm 1000000000.0"),
        (algo(ppo_clip_range=0.1), "--objective.clip-low 0.1 --objective.clip-high 0.1"),
        (algo(ppo_clip_range=0.2, ppo_clip_high=0.28), "--objective.clip-low 0.2 --objective.clip-high 0.28"),
        (algo(lr_scaling="linear"), "--lr-scaling linear --reference-batch-size 8"),
        (algo(lr_scaling="none"), "--lr-scaling none"),
        (algo(enable_dynamic_sampling=False), "--rl.no-mixed-only"),
        (
            {**algo(enable_rollout_stats_tracking=True), "task": {"num_init_states": 50}},
            "--rl.states-per-task 50 --rl.skip-solved 3",
        ),
        (
            {**algo(rollout_skip_threshold=0), "task": {"num_init_states": 50}},
            "--rl.states-per-task 50",
        ),
        ({"task": {"task_name": 8}}, "--rl.tasks 8 --eval.closed-loop.tasks 8"),
        (
            {"task": {"task_name": 8, "task_names_to_use": ["a", "b"]}},
            "--rl.tasks a b --eval.closed-loop.tasks a b",
        ),
        ({"data_parallel": {"enable_gradient_checkpointing": True}}, "--model.remat full"),
        ({"training": {"use_amp": False}}, "--model.dtype float32"),
        ({"debug": {"profile_performance": True}}, "--profile 10"),
        ({"logging": {"mode": "disabled", "project": "p"}}, "--no-wandb-enabled --project-name p"),
    ],
)
def test_a_key_becomes_flags(config, flags):
    assert each(flags) <= each(command(config)), command(config)


def test_what_is_absent_is_as_in_the_trainer():
    shortest = "--no-keep-effective-batch-size --num-train-steps 80 --save-interval 40 --log-interval 4"
    assert each(command({})) == each(DEFAULTS + shortest)


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        ({"rollout": {"interval": 5, "enabled": False}}, "--eval.interval"),
        ({"task": {"task_names_to_use": []}}, "--rl.tasks"),
        ({"task": {"num_init_states": 50}, **algo(rollout_skip_threshold=0)}, "--rl.skip-solved"),
    ],
)
def test_a_key_becomes_no_flag(config, flag):
    assert flag not in command(config)


def test_what_the_command_line_gives_replaces_the_files():
    translated = translate_ript(GUIDE, {"task.benchmark_name": "gym:Pusher-v5"}, name="file")
    assert translated.env == "gym:Pusher-v5" and ("--exp-name", "pi0_distributed") in translated.flags
    assert ("--exp-name", "file") in translate_ript({}, name="file").flags


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"algo": {"rlo_batch_size": 4}}, "unknown key algo.rlo_batch_size; did you mean algo.rloo_batch_size?"),
        ({"fault_tolerance": {"checkpoint_intervall": 4}}, "did you mean fault_tolerance.checkpoint_interval?"),
        ({"distibuted": {"enabled": True}}, "unknown key distibuted.enabled; did you mean distributed.enabled?"),
        ({"wheels": 4}, "unknown key wheels; RIPT's trainer has no such key"),
        (algo(rloo_batch_size=0), "algo.rloo_batch_size is 0; it must be a whole number of at least 1"),
        (algo(rloo_batch_size="four"), 'algo.rloo_batch_size is "four"; it must be a number'),
        (algo(lr_scaling="cube"), "algo.lr_scaling is 'cube'; allowed: none, linear, sqrt"),
        (algo(ppo_batch_size=3), "algo.ppo_batch_size is 3, which does not divide the 8 rollouts of an iteration"),
        (algo(data_batch_size=2, demo_batch_size=3), "they contradict each other"),
        (
            {"fault_tolerance": {"auto_resume": True, "resume_from_latest": False}},
            "auto_resume is true and fault_tolerance.resume_from_latest is false",
        ),
        ({"training": {"seed": 1}, "seed": 2}, "training.seed is 1 and seed is 2: they contradict each other"),
        ({"training": {"optimizer": {"type": "Lion"}}}, "optimizer.type is 'Lion'; allowed: adamw, adam, sgd"),
        (
            {"training": {"optimizer": {"type": "Adam", "weight_decay": 0.1}}},
            "optimizer.type is Adam and the weight decay is 0.1: use AdamW, or 0",
        ),
        ({"task": {"task_names_to_use": [True]}}, "task.task_names_to_use has true; a task is its name, or its number"),
        ({"task": {"task_names_to_use": 3}}, "task.task_names_to_use is 3; it must be a list"),
        ({"logging": {"mode": "online"}, "training": {"use_wandb": False}}, "logging.mode is online and wandb is off"),
    ],
)
def test_what_cannot_be_is_refused(config, message):
    with pytest.raises(UsageError) as caught:
        translate_ript(config)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", WITHOUT_RIPT_FLAG)
def test_a_key_without_a_flag_says_why(key):
    *sections, name = key.split(".")
    config: dict = {name: 1}
    for section in reversed(sections):
        config = {section: config}
    lines = "\n".join(translate_ript(config).lines)
    assert f"no flag for {key}: 1\n    {WITHOUT_RIPT_FLAG[key]}" in lines
