"""YAML configs of the PyTorch post-training tool as flags: the guide's sections, every key, contradictions."""

import json
import re
from pathlib import Path

import pytest
import yaml
from deepspeed_files import FILES, with_changes
from flag_words import each

from openpi_train.doors.posttraining.training_flags import translate_config
from openpi_train.doors.posttraining.without_flag import WITHOUT_FLAG
from openpi_train.doors.yaml_file import read_yaml
from openpi_train.runtime.exits import UsageError

GUIDE = read_yaml(Path(__file__).parent / "posttraining" / "guide.yaml")
AROUND = GUIDE["around"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A current folder with the guide's DeepSpeed files."""
    for stage, config in FILES.items():
        file = tmp_path / "configs" / "deepspeed" / f"zero{stage}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def translated(config, algorithm="sft", **given):
    return translate_config({**AROUND, **config}, algorithm, given)


def command(config, algorithm="sft", **given):
    return " ".join(word for flag in translated(config, algorithm, **given).flags for word in flag)


def training(**keys):
    return {"training": keys}


DEVICE_ROWS = "--batch-size {} --no-keep-effective-batch-size"
ZERO2 = "--batch-size 32 --sharding.strategy zero2 --model.dtype float16 --lr-schedule.peak-lr 3e-05"


@pytest.mark.parametrize(
    ("section", "flags"),
    [
        ("ddp", "--sharding.strategy replicated --micro-batch-size 8 --grad-accum 4 " + DEVICE_ROWS.format(32)),
        ("ddp", "--num-workers 4 --optimizer.clip-gradient-norm 1.0 --model.dtype float16"),
        ("deepspeed", ZERO2 + " --micro-batch-size 4 --grad-accum 8 --num-workers 4"),
        ("distributed", "--micro-batch-size 4 --grad-accum 2 " + DEVICE_ROWS.format(8) + " --num-workers 4"),
        ("distributed", "--model.dtype bfloat16 --model.remat full"),
        ("less_memory_ddp", DEVICE_ROWS.format(8) + " --model.dtype bfloat16 --model.remat full"),
        (
            "rate_ddp",
            "--lr-schedule.peak-lr 5e-05 --lr-schedule.kind cosine --lr-schedule.warmup-ratio 0.1",
        ),
        ("rate_deepspeed", "--lr-schedule.peak-lr 3e-05 --lr-schedule.warmup-ratio 0.1"),
        ("out_of_memory", DEVICE_ROWS.format(8) + " --model.dtype bfloat16 --model.remat full"),
        ("management", "--exp-name sft_4gpu_experiment --save-interval 500 --keep-last 3 --log-interval 50"),
        ("management", "--wandb-enabled --tensorboard"),
        (
            "recovery",
            "--save-interval 1000 --weight-loader.params-path outputs/experiment --weight-loader.continue-training",
        ),
        ("out_of_memory_ddp", DEVICE_ROWS.format(16) + " --model.dtype float16"),
    ],
)
def test_a_section_of_the_guide_becomes_flags(section, flags):
    assert each(flags) <= each(command(GUIDE[section]))


@pytest.mark.parametrize(
    ("section", "flags"),
    [
        ("strategy", "--sharding.strategy auto"),
        ("traffic_ddp", "--num-workers 4"),
        ("traffic_deepspeed", "--num-workers 4"),
        ("same_seed", "--seed 42"),
        ("slow_loading", "--num-workers 8"),
    ],
)
def test_a_section_of_the_guide_becomes_these_flags_alone(section, flags):
    assert command(GUIDE[section]) == flags


@pytest.mark.parametrize(
    ("section", "message"),
    [
        # The section's rows are not those of the file that it names.
        (
            "less_memory_deepspeed",
            "per_device_train_batch_size is 1, and in configs/deepspeed/zero3.json train_micro_batch_size_per_gpu is "
            "4; gradient_accumulation_steps is 16, and in configs/deepspeed/zero3.json gradient_accumulation_steps is "
            '8: they contradict each other; make them equal, or give "auto" for train_batch_size, '
            "train_micro_batch_size_per_gpu, gradient_accumulation_steps in the DeepSpeed file",
        ),
        ("precision", "fp16 is true and bf16 is true: they contradict each other; keep one of them"),
    ],
)
def test_a_section_of_the_guide_that_contradicts_itself_is_refused(section, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        translated(GUIDE[section])


@pytest.mark.parametrize("section", [name for name in GUIDE if name != "around"])
def test_every_key_of_the_guide_is_answered(section):
    if section in ("less_memory_deepspeed", "precision"):
        return
    config = GUIDE[section]
    report = translated(config).report()
    for key, value in _flat(config.get("training", config)):
        assert f"{key}: {json.dumps(value)}" in report


def _flat(config, prefix=""):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.mark.parametrize(
    ("algorithm", "keys", "flags"),
    [
        ("sft", {"num_epochs": 2}, "--num-epochs 2"),
        ("sft", {"num_train_epochs": 2, "num_epochs": 2, "max_steps": -1}, "--num-epochs 2"),
        ("sft", {"max_steps": 9}, "--num-train-steps 9"),
        ("sft", {"per_device_train_batch_size": 3}, "--micro-batch-size 3 " + DEVICE_ROWS.format(3)),
        ("sft", {"gradient_accumulation_steps": 3}, "--grad-accum 3 " + DEVICE_ROWS.format(12)),
        (
            "sft",
            {"dataloader": {"batch_size": 3, "num_workers": 0}},
            "--micro-batch-size 3 " + DEVICE_ROWS.format(3) + " --num-workers 0",
        ),
        ("sft", {"seed": 0}, "--seed 0"),
        ("sft", {"learning_rate": 1e-4}, "--lr-schedule.peak-lr 0.0001"),
        ("sft", {"lr_scheduler_type": "linear"}, "--lr-schedule.kind linear"),
        (
            "sft",
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 7, "warmup_ratio": 0.0},
            "--lr-schedule.kind constant --lr-schedule.warmup-steps 7",
        ),
        ("sft", {"warmup_ratio": 0.03, "warmup_steps": 0}, "--lr-schedule.warmup-ratio 0.03"),
        ("sft", {"max_grad_norm": 0.5}, "--optimizer.clip-gradient-norm 0.5"),
        ("sft", {"max_grad_norm": 0}, "--optimizer.clip-gradient-norm 1000000000.0"),
        (
            "sft",
            {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6},
            "--optimizer.weight-decay 0.1 --optimizer.b1 0.8 --optimizer.b2 0.9 --optimizer.eps 1e-06",
        ),
        ("sft", {"mixed_precision": "bf16", "bf16": True, "fp16": False}, "--model.dtype bfloat16"),
        ("sft", {"mixed_precision": "no"}, "--model.dtype float32"),
        ("sft", {"fp16": True}, "--model.dtype float16"),
        ("sft", {"bf16": False}, "--model.dtype float32"),
        ("sft", {"gradient_checkpointing": False}, "--model.remat none"),
        ("sft", {"output_dir": "out", "experiment_name": "a"}, "--exp-name a --checkpoint-base-dir out"),
        ("sft", {"report_to": "none"}, "--no-wandb-enabled --no-tensorboard"),
        ("sft", {"report_to": ["wandb"]}, "--wandb-enabled --no-tensorboard"),
        ("sft", {"report_to": "all"}, "--wandb-enabled --tensorboard"),
        ("sft", {"eval_steps": 5, "eval_strategy": "steps"}, "--eval.interval 5"),
        ("sft", {"eval_steps": 5, "evaluation_strategy": "no"}, "--eval.interval 0"),
        ("sft", {"max_length": 128, "packing": True}, "--data.max-length 128 --data.packing"),
        ("sft", {"truncation_side": "left"}, "--data.truncation keep_end"),
        ("sft", {"distributed_strategy": "deepspeed", "deepspeed_zero_stage": 3}, "--sharding.strategy zero3"),
        ("sft", {"deepspeed_zero_stage": 0}, "--sharding.strategy replicated"),
        ("sft", {"deepspeed_cpu_offload": True}, "--sharding.offload optimizer"),
        ("sft", {"resume_from_checkpoint": True}, "--resume"),
        ("sft", {"resume_from_checkpoint": False}, ""),
        ("dpo", {"beta": 0.3, "loss_type": "ipo"}, "--objective.beta 0.3 --objective.variant ipo"),
        ("dpo", {"label_smoothing": 0.1, "reference_free": False}, "--objective.label-smoothing 0.1"),
        ("rm", {"margin": 0.0, "ranking_loss_type": "log_sigmoid", "freeze_base_model": True}, "--freeze decoder/.*"),
    ],
)
def test_a_key_of_the_training_becomes_a_flag(algorithm, keys, flags):
    found = command(training(**keys), algorithm)
    assert each(found) == each(flags)
    # The same at the top of the file.
    assert command(keys, algorithm) == found


@pytest.mark.parametrize(
    ("algorithm", "config", "flags"),
    [
        ("dpo", {"dpo": {"beta": 0.3}, "ppo": {"beta": 0.1}}, "--objective.beta 0.3"),
        ("sft", {"sft": {"max_length": 64}, "data": {"max_length": 64}}, "--data.max-length 64"),
        ("sft", {"reward": {"max_length": 64}}, ""),
        ("rm", {"reward": {"max_length": 64}}, "--data.max-length 64"),
        ("sft", {"hardware": {"distributed": {"strategy": "ddp"}}}, "--sharding.strategy replicated"),
        ("sft", {"logging": {"tensorboard": False, "level": "INFO"}}, "--no-tensorboard"),
        ("sft", {"data": {"cache_dir": "cache"}}, "--data.cache-dir cache"),
    ],
)
def test_a_key_of_another_section_becomes_a_flag(algorithm, config, flags):
    data = {**AROUND["data"], **config.get("data", {})}
    assert command({**config, "data": data}, algorithm) == flags


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mixed_precision": "fp16", "bf16": True}, "mixed_precision is 'fp16' and bf16 is true"),
        ({"mixed_precision": "fp16", "fp16": False}, "mixed_precision is 'fp16' and fp16 is false"),
        ({"mixed_precision": "no", "fp16": True}, "mixed_precision is 'no' and fp16 is true"),
        (
            {"per_device_train_batch_size": 4, "dataloader": {"batch_size": 8}},
            "training.per_device_train_batch_size is 4 and training.dataloader.batch_size is 8",
        ),
        ({"num_epochs": 2, "max_steps": 5}, "max_steps is 5 and num_epochs is 2"),
        ({"num_epochs": 2, "num_train_epochs": 3}, "training.num_epochs is 2 and training.num_train_epochs is 3"),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "warmup_steps is 5 and warmup_ratio is 0.1"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "constant has no warm-up, and warmup_steps is 5"),
        (
            {"distributed_strategy": "ddp", "deepspeed": {"config_path": "configs/deepspeed/zero2.json"}},
            "distributed_strategy is ddp and deepspeed.config_path is configs/deepspeed/zero2.json",
        ),
        ({"distributed_strategy": "ddp", "deepspeed_zero_stage": 2}, "ddp and deepspeed_zero_stage is 2"),
        ({"distributed_strategy": "ddp", "distributed": False}, "distributed is false and distributed_strategy is ddp"),
        (
            {"experiment_name": "a", "resume_from_checkpoint": "output/sft/a/500/params"},
            "in this run's folder, and no checkpoint of it",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        translated(training(**keys))


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        ({"gradient_accumulation_steps": 2}, {}, "is 2, and in ds.json gradient_accumulation_steps is 8"),
        ({"max_grad_norm": 0.5}, {}, "max_grad_norm is 0.5, and in ds.json gradient_clipping is 1.0: they"),
        ({"bf16": True}, {}, "bf16 is true, and in ds.json fp16.enabled is true"),
        ({"weight_decay": 0.1}, {}, "weight_decay is 0.1, and in ds.json optimizer.params.weight_decay is 3e-07"),
        ({"adam_beta1": 0.9}, {}, "adam_beta1 is 0.9, and in ds.json optimizer.params.betas is [0.8, 0.999]"),
        ({"deepspeed_zero_stage": 3}, {}, "deepspeed_zero_stage is 3, and in ds.json zero_optimization.stage is 2"),
        (
            {"report_to": "none"},
            {"tensorboard": {"enabled": True}},
            'report_to is "none", and in ds.json tensorboard.enabled is true',
        ),
        ({}, {"fp16.enabled": True, "bf16": {"enabled": True}}, "ds.json: fp16.enabled and bf16.enabled exclude"),
    ],
)
def test_a_config_that_contradicts_its_deepspeed_file_is_refused(keys, changes, message, folder):
    (folder / "ds.json").write_text(json.dumps(with_changes(changes)))
    with pytest.raises(UsageError, match=re.escape(message)):
        translated(training(distributed_strategy="deepspeed", deepspeed={"config_path": "ds.json"}, **keys))


@pytest.mark.parametrize(
    ("keys", "told", "not_told"),
    [
        (
            {"warmup_ratio": 0.1, "lr_scheduler_type": "linear"},
            {
                "scheduler.type": "replaced by lr_scheduler_type",
                "scheduler.params.warmup_num_steps": "replaced by lr_scheduler_type, warmup_ratio",
                "scheduler.params.warmup_max_lr": "--lr-schedule.peak-lr 3e-05",
            },
            ("warmup-steps 500", "kind constant"),
        ),
        (
            {"learning_rate": 1e-4, "logging_steps": 50},
            {
                "scheduler.type": "--lr-schedule.kind constant",
                "scheduler.params.warmup_max_lr": "replaced by learning_rate",
                "steps_per_print": "replaced by logging_steps",
            },
            ("peak-lr 3e-05", "log-interval 10"),
        ),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 500},
            {"scheduler.type": "--lr-schedule.kind constant", "scheduler.params.warmup_num_steps": "warmup-steps 500"},
            (),
        ),
        ({"distributed_strategy": "auto"}, {"zero_optimization.stage": "replaced by distributed_strategy"}, ("zero2",)),
        ({"per_device_train_batch_size": 4}, {"train_batch_size": "--batch-size 32"}, ()),
    ],
)
def test_what_is_told_of_a_deepspeed_file_is_what_the_run_gets(keys, told, not_told, folder):
    (folder / "ds.json").write_text(json.dumps(with_changes({"steps_per_print": 10})))
    given = {"distributed_strategy": "deepspeed", "deepspeed": {"config_path": "ds.json"}, **keys}
    report = translated(training(**given)).report()
    _, _, of_file = report.partition("ds.json:\n")
    for key, what in told.items():
        (line,) = [line for line in of_file.splitlines() if line.startswith(f"{key}:")]
        assert what in line
    assert not any(text in report for text in not_told)
    # Every flag that is told of the file is one of those that the run gets.
    *lines, together = of_file.splitlines()
    flags = [flag for line in lines for flag in re.findall(r"  (--[a-z0-9.-]+(?: [^,\s]+)?)$", line)]
    assert len(flags) > 5 and all(flag in together for flag in flags)


@pytest.mark.parametrize(
    ("keys", "changes", "flags"),
    [
        # The total of the file holds for all devices, whatever their number is.
        ({"per_device_train_batch_size": 4}, {}, "^(?=.*--batch-size 32)(?!.*keep-effective).*--micro-batch-size 4$"),
        # Without a total the rows are those of one device, from whichever file has them.
        (
            {"gradient_accumulation_steps": 3},
            {"train_batch_size": "auto", "gradient_accumulation_steps": "auto"},
            "--grad-accum 3 --batch-size 12 --no-keep-effective-batch-size$",
        ),
        (
            {"per_device_train_batch_size": 2},
            {"train_batch_size": None, "train_micro_batch_size_per_gpu": "auto"},
            "--micro-batch-size 2 --batch-size 16 --no-keep-effective-batch-size$",
        ),
        # The rate alone, or the whole schedule.
        ({"learning_rate": 1e-4}, {}, "kind constant .*--lr-schedule.warmup-steps 500 .*--lr-schedule.peak-lr 0.0001$"),
        ({"lr_scheduler_type": "linear"}, {}, "^(?!.*warmup).*--lr-schedule.peak-lr 3e-05.*--lr-schedule.kind linear$"),
        ({"logging_steps": 50}, {}, "^(?!.*interval 10 ).*--log-interval 50$"),
        ({"max_grad_norm": 1}, {}, "--optimizer.clip-gradient-norm 1$"),
        ({"mixed_precision": "fp16"}, {}, "--model.dtype float16$"),
        ({"distributed_strategy": "auto"}, {}, "^(?!.*zero2).*--sharding.strategy auto$"),
    ],
)
def test_a_config_goes_before_its_deepspeed_file(keys, changes, flags, folder):
    (folder / "ds.json").write_text(json.dumps(with_changes(changes)))
    given = {"distributed_strategy": "deepspeed", "deepspeed": {"config_path": "ds.json"}, **keys}
    assert re.search(flags, command(training(**given)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (training(learing_rate=1), "unknown key training.learing_rate; did you mean training.learning_rate?"),
        (
            training(dataloader={"num_worker": 1}),
            "did you mean training.dataloader.num_work",
        ),
        (
            training(deepspeed={"config": "x"}),
            "did you mean training.deepspeed.config_path?",
        ),
        ({"modell": {"x": 1}}, "unknown key modell.x; the tool has no such key"),
        ({"data": {"datasets": {"sft": {"train_file": ["a"]}}}}, "did you mean data.datasets.sft.train_files?"),
        (training(bf16="yes"), 'bf16 is "yes"; it must be true or false'),
        (training(save_steps=0), "save_steps is 0; it must be a whole number of at least 1"),
        (training(warmup_steps=-1), "warmup_steps is -1; it must be a whole number of at least 0"),
        (training(learning_rate="5e-5x"), 'learning_rate is "5e-5x"; it must be a number'),
        (training(lr_scheduler_type="polynomial"), "allowed: linear, cosine, constant, constant_with_warmup"),
        (training(mixed_precision="fp8"), "mixed_precision is 'fp8'; allowed: fp16, bf16, fp32, no"),
        (training(distributed_strategy="fsdp"), "distributed_strategy is 'fsdp'; allowed: ddp, deepspeed, auto"),
        (training(save_strategy="epoch"), "save_strategy is 'epoch'; allowed: steps"),
        (training(report_to=["mlflow"]), "report_to has 'mlflow'; allowed: tensorboard, wandb, all, none"),
        (training(report_to=3), "report_to is 3; it must be a list"),
        (training(deepspeed_zero_stage=4), "deepspeed_zero_stage is 4; allowed: 0, 1, 2, 3"),
        (training(deepspeed={"config_path": "absent.json"}), "absent.json cannot be read: No such file"),
        (training(seed=1) | {"seed": 2}, "training.seed is 1 and seed is 2: they contradict each other"),
        ({"training": 3}, "training is 3; it must hold keys"),
        ({"model": {}}, "no model: give model.model_name_or_path"),
        ({"model": {"model_name_or_path": "./absent"}}, "no model at ./absent: give a folder"),
        ({"model": {"model_name_or_path": "gpt2"}}, "no model at gpt2: give a folder"),
        ({"model": {"model_name_or_path": "a/b", "name_or_path": "c/d"}}, "model_name_or_path is .* and model.name_or"),
        ({"data": {}}, "no training data for sft: give data.datasets.sft.train_files"),
    ],
)
def test_what_cannot_be_is_refused(config, message):
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        translated(config)


@pytest.mark.parametrize(
    ("keys", "algorithm", "message"),
    [
        ({"reference_free": True}, "dpo", "losses without a reference are --objective.variant simpo and orpo"),
        ({"reference_model_path": "c/d"}, "dpo", "the reference is the start weights"),
        ({"loss_type": "kto"}, "dpo", "loss_type is 'kto'; allowed: sigmoid, hinge, ipo"),
        ({"loss_type": "regression"}, "rm", "loss_type is 'regression'; allowed: ranking"),
        ({"ranking_loss_type": "hinge"}, "rm", "ranking_loss_type is 'hinge'; allowed: log_sigmoid"),
        ({"margin": 0.5}, "rm", "margin is 0.5; allowed: 0 (margins are a column `margin` of the pairs)"),
        ({"beta": 0.1}, "sft", "unknown key training.beta"),
    ],
)
def test_a_loss_that_is_not_there_is_refused(keys, algorithm, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        translated(training(**keys), algorithm)


@pytest.mark.parametrize("key", WITHOUT_FLAG)
def test_every_key_without_a_flag_has_its_reason(key):
    config: dict = {}
    node, (*parents, name) = config, key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[name] = 1
    config |= {section: AROUND[section] | config[section] for section in AROUND.keys() & config.keys()}
    lines = "\n".join(translated(config).lines)
    assert re.search(rf"no flag for .*{re.escape(key)}: 1.*\n    {re.escape(WITHOUT_FLAG[key])}", lines)


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        ("outputs/mine/checkpoints/latest", "--resume"),
        ("./outputs/sft/mine/", "--resume"),
        ("latest", "--resume"),
        # An older checkpoint of this run, by our names and by transformers'.
        ("outputs/sft/mine/500", "--resume-from 500"),
        ("outputs/mine/checkpoints/checkpoint-500", "--resume-from 500"),
        ("./outputs/sft/mine/best", "--resume-from best"),
        ("elsewhere/latest", "--weight-loader.params-path elsewhere --weight-loader.continue-training"),
        ("elsewhere/1500", "--weight-loader.params-path elsewhere/1500 --weight-loader.continue-training"),
    ],
)
def test_a_checkpoint_is_of_this_run_or_of_another(value, flags):
    config = training(output_dir="outputs", experiment_name="mine")
    found = command(config, resume_from_checkpoint=value)
    assert found == f"--exp-name mine --checkpoint-base-dir outputs {flags}"
    unnamed = {**AROUND, **training(output_dir="outputs", resume_from_checkpoint=value)}
    assert set(translate_config(unnamed, "sft", name="mine").flags) == set(
        translated(config, resume_from_checkpoint=value).flags
    )
    # The output folder and the name may be given on the command line.
    assert command({}, resume_from_checkpoint=value, output_dir="outputs", experiment_name="mine") == found


@pytest.mark.parametrize("key", ["deepspeed_config", "deepspeed"])
def test_the_deepspeed_file_has_two_names_and_the_command_lines_goes_first(key):
    file = "configs/deepspeed/zero1.json"
    value = {"config_path": file} if key == "deepspeed" else file
    found = command(training(**{key: value}))
    assert "--sharding.strategy zero1 " in found
    other = dict.fromkeys(("deepspeed.config_path", "deepspeed_config"), "configs/deepspeed/zero3.json")
    assert "--sharding.strategy zero3 " in command(training(**{key: value}), **other)
    assert "configs/deepspeed/zero1.json:\n" in translated(training(**{key: value})).report()


def test_the_rule_of_the_tool_is_quoted_where_the_plan_chooses():
    report = translated(GUIDE["strategy"]).report()
    assert "under 1B ddp, 1B to 7B ZeRO-2, above ZeRO-3" in report


@pytest.mark.parametrize("name", ["folder", "run"])
def test_a_model_is_a_folder_or_an_address(name, folder):
    (folder / "models" / name).mkdir(parents=True)
    assert translated({"model": {"name_or_path": f"models/{name}"}}).model == f"models/{name}"
    assert translated({"model": {"name_or_path": f"other/{name}"}}).model == f"hub:other/{name}"
    both = {"name": "a/base", "model_name_or_path": f"./models/{name}"}
    assert translated({"model": both}).model == f"./models/{name}"
    assert translated({"model": {"name": "a/base"}}).model == "hub:a/base"


def sources(data, algorithm="sft"):
    return [(one.path, one.weight, one.validation) for one in translated({"data": data}, algorithm).sources]


A, B = {"path": "a.jsonl", "weight": 1.0, "name": "a"}, {"path": "b.jsonl", "weight": 0.5}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"dataset_path": "a.jsonl"}, [("a.jsonl", 1.0, None)]),
        ({"train_file": "a.jsonl", "validation_file": "v.jsonl"}, [("a.jsonl", 1.0, "v.jsonl")]),
        ({"datasets": ["a.jsonl"]}, [("a.jsonl", 1.0, None)]),
        ({"datasets": {"sft": {"train_files": [B]}}}, [("b.jsonl", 1.0, None)]),
        (
            {
                "datasets": {"sft": {"train_files": [A, B], "validation_files": ["v.jsonl"], "merge_datasets": True}},
                "merge_config": {"strategy": "weighted_sampling", "seed": 1, "shuffle": True},
            },
            [("a.jsonl", 1.0, "v.jsonl"), ("b.jsonl", 0.5, None)],
        ),
        (
            {"sft": {"train_files": ["a.jsonl", "b.jsonl"], "merge_datasets": True}},
            [("a.jsonl", None, None), ("b.jsonl", None, None)],
        ),
        (
            {"train_files": ["a.jsonl", "b.jsonl"], "merge_config": {"strategy": "balanced"}},
            [("a.jsonl", 1.0, None), ("b.jsonl", 1.0, None)],
        ),
    ],
)
def test_training_files_are_datasets(data, expected):
    assert sources(data) == expected


def test_a_validation_file_is_a_path_and_never_a_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"train_file": "a.jsonl", "validation_file": "heldout"}
    with pytest.raises(UsageError, match=r"validation file heldout \(data\.validation_file, or .* does not exist"):
        sources(given)
    (tmp_path / "heldout").mkdir()
    assert sources(given) == [("a.jsonl", 1.0, "./heldout")]


def test_each_algorithm_has_its_datasets():
    kinds = {kind: {"train_files": [f"{kind}.jsonl"]} for kind in ("sft", "reward", "rlhf")}
    found = {name: sources({"datasets": kinds}, name)[0][0] for name in ("sft", "rm", "dpo")}
    assert found == {"sft": "sft.jsonl", "rm": "reward.jsonl", "dpo": "reward.jsonl"}
    assert sources({"datasets": {"rlhf": kinds["rlhf"]}}, "dpo") == [("rlhf.jsonl", 1.0, None)]
    kinds["rlhf"] |= {"merge_datasets": True, "merged_cache_path": "x"}
    for name, other in (("sft", "reward"), ("dpo", "rlhf"), ("dpo", "sft")):
        report = translated({"data": {"datasets": kinds}}, name).report()
        assert re.search(rf"{other}.train_files: .*not read by {name}", report)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train_file": "a", "datasets": {"sft": {"train_files": [A]}}}, "name the training files: they contradict"),
        ({"train_file": "a", "dataset_path": "b"}, "data.train_file and data.dataset_path name the training files"),
        ({"datasets": {"sft": {"train_files": [A, B]}}}, "so that the older tool reads the first one only"),
        (
            {"sft": {"train_files": [A, B], "merge_datasets": True}},
            "the files have weights [1.0, 0.5] and data.merge_config.strategy is concat, which ignores them",
        ),
        ({"sft": {"train_files": [A], "validation_files": ["v", "w"]}}, "2 validation files for 1 training files"),
        ({"sft": {"train_files": []}}, "data.sft.train_files is empty"),
        ({"sft": {"train_files": [{"file": "a"}]}}, "needed is a path, or a mapping with a path"),
        ({"sft": {"train_files": [{"path": "a", "weigth": 1}]}}, "unknown key weigth in .*; did you mean weight?"),
        ({"sft": {"train_files": [{"path": "a", "weight": 0}]}}, "it must be a number above 0"),
        ({"train_file": "a", "merge_config": {"strategy": "mix"}}, "allowed: concat, weighted_sampling, balanced"),
    ],
)
def test_training_files_that_cannot_be_meant_are_refused(data, message):
    with pytest.raises(UsageError, match=re.escape(message).replace(re.escape(".*"), ".*")):
        sources(data)


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"prompt": "a", "response": "b"}, ("prompt=prompt", "completion=response")),
        ({"prompt": "a", "completion": "b", "response": "c"}, ()),
        ({"conversations": [{"role": "user", "content": "a"}]}, ()),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ()),
        ({"text": "a"}, ()),
    ],
)
def test_columns_of_the_tools_files_are_known(record, columns, folder):
    (folder / "a.jsonl").write_text(json.dumps(record) + "\n")
    (source,) = translated({"data": {"train_file": "a.jsonl"}}).sources
    assert source.dataset().columns == columns


def test_files_that_are_joined_have_shares_by_their_records(folder):
    for name, count in (("a", 2), ("b", 6)):
        (folder / f"{name}.jsonl").write_text('{"text": "x"}\n' * count)
    data = {"sft": {"train_files": ["a.jsonl", "b.jsonl"], "merge_datasets": True}}
    assert [source.dataset().weight for source in translated({"data": data}).sources] == [2.0, 6.0]


def test_numbers_are_those_of_yaml_1_2(folder):
    file = folder / "c.yaml"
    file.write_text("a: 5e-5\nb: 1e9\nc: 1.5\nd: -3E+2\ne: 12\nf: 2024-01-02\ng: .nan\nh: 1.2.3\ni: null\n")
    found = read_yaml(file)
    assert found == {"a": 5e-5, "b": 1e9, "c": 1.5, "d": -300.0, "e": 12, "f": "2024-01-02", "g": ".nan", "h": "1.2.3"}
    # PyYAML itself reads the first as a word.
    assert yaml.safe_load(file.read_text())["a"] == "5e-5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it must hold keys with values"),
        ("- a\n- b\n", "it must hold keys with values"),
        ("a: 1\nb: {c: 1, c: 2}\n", "line 2: c stands twice; keep one of them"),
        ("a: [\n", "c.yaml is no YAML config: while parsing"),
        ("a: !!python/object:os.system {}\n", "c.yaml is no YAML config: could not determine a constructor"),
        ("a: &a [*a]\n", "c.yaml is no YAML config"),
        ("? [a]\n: 1\n", "line 1: a key must be a word"),
    ],
)
def test_a_file_that_is_no_config_is_said_to_be_none(text, message, folder):
    (folder / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        read_yaml(folder / "c.yaml")
    with pytest.raises(UsageError, match=r"absent.yaml cannot be read: No such file"):
        read_yaml(folder / "absent.yaml")
