"""DeepSpeed configs as flags: three full files key by key, contradictions, unknown keys, and every key of the table."""

import json
import math
import re

import pytest
from deepspeed_files import FILES, with_changes

from openpi_train import cli
from openpi_train.doors.deepspeed.flags import translate, translate_file
from openpi_train.doors.deepspeed.unmapped import UNMAPPED
from openpi_train.optim import SGD, Adafactor, AdamW, Lion, Muon
from openpi_train.runtime.exits import UsageError

SCHEDULE = "--lr-schedule.kind constant --lr-schedule.peak-lr 3e-05 --lr-schedule.warmup-lr 0"
SCHEDULE += " --lr-schedule.warmup-steps 500 --lr-schedule.warmup-shape log"


def experiment(config, tmp_path, *flags):
    """The debug experiment as a run with `--deepspeed` would have it."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    return cli.parse_experiment("debug", ["--exp-name", "x", "--deepspeed", str(file), *flags])


@pytest.mark.parametrize("stage", FILES)
def test_a_file_is_answered_key_by_key(stage, tmp_path):
    translation = translate(FILES[stage])
    text = "\n".join(translation.lines)
    for key, value in _flat(FILES[stage]):
        assert f"{key}: {json.dumps(value)}" in text
    assert not translation.missing
    result = experiment(FILES[stage], tmp_path)
    assert (result.batch_size, result.grad_accum, result.micro_batch_size) == (32, 8, 4)
    assert (result.sharding.strategy, result.fsdp_devices) == (f"zero{stage}", None)
    assert result.sharding.offload == ("optimizer" if stage == 3 else "none")
    assert result.optimizer == AdamW(b1=0.8, b2=0.999, eps=1e-8, weight_decay=3e-7, clip_gradient_norm=1.0)
    assert result.model.dtype == "float16"
    scaling = result.loss_scaling
    assert (scaling.initial, scaling.growth_interval, scaling.hysteresis, scaling.minimum) == (65536, 1000, 2, 1)
    assert result.log_interval == 10
    rates = result.lr_schedule.over(result.num_train_steps).create()
    for step in (0, 1, 100, 499, 500, 5000):  # DeepSpeed's WarmupLR, whose default warm-up is logarithmic
        want = 3e-5 * (math.log(step + 1) / math.log(500) if step < 500 else 1)
        assert float(rates(step)) == pytest.approx(want, rel=1e-5)
    result.check(1)
    with pytest.raises(UsageError, match=r"--micro-batch-size 4 .*--grad-accum 8 .*128 rows, not --batch"):
        result.check(4)


def test_flags_are_those_that_are_printed(tmp_path, capsys):
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps(FILES[2]))
    assert cli.run(["convert", "deepspeed", str(file), "--devices", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    line = printed[-1].removeprefix("the same as: ")
    assert SCHEDULE in line
    typed = cli.parse_experiment("debug", ["--exp-name", "x", *line.split()])
    assert typed == experiment(FILES[2], tmp_path)
    assert "zero_optimization.stage: 2" in printed[0]
    assert re.search(r"no flag for .*zero_optimization.overlap_comm: true", "\n".join(printed))


@pytest.mark.parametrize(
    ("section", "offload", "said"),
    [
        ({"cpu_offload": True}, "optimizer", "zero_optimization.cpu_offload: true .*--sharding.offload optimizer"),
        ({"cpu_offload": False}, "none", "zero_optimization.cpu_offload: false .*stays on the devices"),
        ({"offload_optimizer": {"device": "none"}}, "none", "stays on the devices"),
        (
            {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}},
            "none",
            "(?s)no flag for .*nvme.*drive is far",
        ),
    ],
)
def test_only_the_optimizer_is_offloaded_and_only_to_host_memory(section, offload, said, tmp_path):
    config = with_changes({f"zero_optimization.{key}": value for key, value in section.items()})
    assert experiment(config, tmp_path).sharding.offload == offload
    assert re.search(said, "\n".join(translate(config).lines))


def test_given_flags_win(tmp_path):
    flags = ["--optimizer.b1", "0.5", "--batch-size", "64", "--model.dtype", "bfloat16", "--fsdp-devices", "4"]
    result = experiment(FILES[1], tmp_path, *flags)
    assert (result.optimizer.b1, result.optimizer.b2, result.batch_size) == (0.5, 0.999, 64)
    assert (result.model.dtype, result.fsdp_devices) == ("bfloat16", 4)
    other = experiment(FILES[1], tmp_path, "--optimizer", "lion", "--optimizer.b2", "0.98")
    assert other.optimizer == Lion(b2=0.98, clip_gradient_norm=1.0)


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", AdamW), ("adafactor", Adafactor), ("lion", Lion), ("muon", Muon), ("sgd", SGD)]
)
def test_an_optimizer_is_chosen_by_name(name, kind):
    default = cli.parse_experiment("debug", ["--exp-name", "x", "--optimizer.clip-gradient-norm", "2"])
    assert default.optimizer == AdamW(clip_gradient_norm=2.0)
    chosen = cli.parse_experiment("debug", ["--exp-name", "x", "--optimizer", name, "--optimizer.decay-mask", "w"])
    assert chosen.optimizer == kind(decay_mask="w")
    with pytest.raises(ValueError, match="unknown optimizer 'adem'; allowed: adamw, adafactor, lion, muon, sgd"):
        cli.parse_experiment("debug", ["--exp-name", "x", "--optimizer", "adem"])


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize(
    ("numbers", "devices", "words"),
    [
        ((64, 4, 2), None, "--batch-size 64 --micro-batch-size 4 --grad-accum 2 .*--sharding.strategy zero2"),
        ((64, 4, 2), 8, "--batch-size 64 --micro-batch-size 4 --grad-accum 2 .*--sharding.strategy zero2"),
        ((64, 4, None), 4, "--batch-size 64 --micro-batch-size 4 --grad-accum 4 .*--sharding.strategy zero2"),
        ((64, "auto", 2), 4, "--batch-size 64 --grad-accum 2 "),
        ((None, 4, 2), 8, "--batch-size 64 --micro-batch-size 4 --grad-accum 2 "),
        ((None, 4, 2), None, "--batch-size 8 --no-keep-effective-batch-size --micro-batch-size 4 --grad-accum 2 "),
        (("auto", "auto", "auto"), 2, "^--sharding.strategy zero2 "),
    ],
)
def test_batch_sizes_follow_from_each_other(numbers, devices, words):
    config = with_changes(dict(zip(BATCH, numbers, strict=True)))
    assert re.search(words, translate(config, devices).command_line)


def test_without_accumulation_it_follows_from_the_devices(tmp_path):
    from openpi_train.elastic import adapt

    config = with_changes({"train_batch_size": 64, "gradient_accumulation_steps": None})
    fitted, lines = adapt(experiment(config, tmp_path), 4, None)
    fitted.check(4)
    assert (fitted.grad_accum, fitted.batch_size) == (4, 64)
    assert "grad_accum 4: micro_batch_size 4 on 4 devices" in lines
    resumed, _ = adapt(experiment(config, tmp_path), 32, 4)
    resumed.check(32)
    assert (resumed.grad_accum, resumed.micro_batch_size) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "devices", "message"),
    [
        ({"train_batch_size": 33}, None, "train_batch_size 33 is not a multiple of train_micro_batch_size_per_gpu 4 x"),
        ({}, 8, "train_batch_size 32 = .* x 1 devices, not 8; for 8 set train_batch_size 256"),
        ({"train_batch_size": 0}, None, "train_batch_size is 0; it must be a whole number of at least 1"),
        ({"train_batch_size": "32"}, None, 'train_batch_size is "32"; it must be a number, or "auto"'),
        ({"zero_optimization.stage": 4}, None, "zero_optimization.stage is 4; allowed: 0, 1, 2, 3"),
        ({"zero_optimization": True}, None, "zero_optimization must be an object"),
        ({"bf16.enabled": True}, None, "fp16.enabled and bf16.enabled exclude each other"),
        ({"optimizer.type": "Lamb"}, None, "optimizer.type is 'Lamb'; allowed: adam, adamw"),
        ({"optimizer.params.betas": [0.9]}, None, "betas is .*; it must be a list of two numbers"),
        ({"optimizer.params.adam_w_mode": False}, None, "adam_w_mode false adds weight_decay 3e-07 to the gradient"),
        ({"scheduler.type": "LRRangeTest"}, None, "scheduler.type is 'LRRangeTest'; allowed: WarmupLR, WarmupDecayLR"),
        ({"scheduler.type": "WarmupDecayLR"}, None, "scheduler.params.total_num_steps is missing"),
        ({"zero_optimization.overlap_com": True}, None, "unknown key .*overlap_com; did you mean .*overlap_comm?"),
        ({"communication_data_type": "int8"}, None, "communication_data_type is 'int8'; allowed: fp32, fp16, bf16"),
        ({"train_batchsize": 3}, None, "unknown key train_batchsize; did you mean train_batch_size?"),
        ({"optimizer.params.foo": 1}, None, "unknown key optimizer.params.foo; DeepSpeed has no such key"),
        ({"qqqqqq": 3}, None, "unknown key qqqqqq; DeepSpeed has no such key"),
    ],
)
def test_what_cannot_be_is_refused(changes, devices, message):
    with pytest.raises(UsageError, match=message):
        translate(with_changes(changes), devices)


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '"zero"', "\x00\xff", '{"lr": 1, "epochs": 3}'])
def test_a_file_that_is_none_is_said_to_be_none(text, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"ds.json(:| is not a DeepSpeed config)"):
        translate_file(file)
    with pytest.raises(UsageError, match=r"the DeepSpeed config .*absent.json cannot be read: No such file"):
        translate_file(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train_batch_size": 32, "train_batch_size": 64}', "train_batch_size appears in it more than once"),
        ('{"gradient_clipping": NaN}', "NaN is not a valid setting"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(text, message, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        translate_file(file)


def test_devices_of_a_tensor_group_have_the_same_rows():
    changes = {"tensor_parallel.autotp_size": 2, "train_batch_size": 32, "gradient_accumulation_steps": 1}
    found = translate(with_changes(changes | {"train_micro_batch_size_per_gpu": 4}), 16)
    assert "--sharding.tensor-devices 2" in " ".join(word for flag in found.flags for word in flag)
    with pytest.raises(UsageError, match="x 8 devices, not 16"):
        translate(with_changes({**changes, "train_micro_batch_size_per_gpu": 4, "tensor_parallel.autotp_size": 1}), 16)


@pytest.mark.parametrize(
    ("changes", "words", "absent"),
    [
        ({"fp16": None, "bf16.enabled": True}, "--model.dtype bfloat16", "--loss-scaling"),
        ({"fp16": None, "bfloat16": {"enabled": True}}, "--model.dtype bfloat16", "--loss-scaling"),
        ({"steps_per_print": math.inf}, "--grad-accum 8", "--log-interval"),
        ({"fp16.enabled": False}, "--model.dtype float32", "--loss-scaling"),
        ({"flops_profiler": {"enabled": True, "profile_step": 5}}, "--profile 10", "x"),
        ({"flops_profiler": {"enabled": False, "profile_step": 5}}, "--grad-accum 8", "--profile"),
        ({"fp16.enabled": "auto"}, "--sharding", "--model.dtype"),
        ({"fp16.loss_scale": 128}, "--loss-scaling.initial 128.0 --loss-scaling.minimum 128.0", "interval 1000"),
        ({"fp16": None, "bf16": {"enabled": True, "bf16_optimizer_states": True}}, "--optimizer.moment-dtype", "fp16"),
        ({"communication_data_type": "BF16"}, "--sharding.reduce-dtype bfloat16", "float32"),
        ({"communication_data_type": "fp32", "fp32_allreduce": True}, "--sharding.reduce-dtype float32", "bfloat16"),
        ({"communication_data_type": "fp16"}, "--sharding.strategy", "--sharding.reduce-dtype"),
        ({"gradient_clipping": 0}, "--optimizer.clip-gradient-norm 1000000000.0", "norm 1.0"),
        ({"zero_optimization.mics_shard_size": 4}, "--fsdp-devices 4", "--sharding.strategy zero1"),
        ({"zero_optimization.stage3_param_persistence_threshold": 2**18}, "--sharding.min-shard-mib 1.0", "auto"),
        ({"zero_optimization.stage": 0}, "--sharding.strategy replicated", "--fsdp-devices"),
        ({"scheduler": None}, "kind constant --lr-schedule.warmup-steps 0 --lr-schedule.peak-lr 3e-05", "warmup-lr"),
        ({"optimizer.params": {}, "scheduler": None}, "b1 0.9 --optimizer.b2 0.999 --optimizer.eps 1e-08", "0.8"),
        ({"optimizer.type": "Lion"}, "--optimizer lion --optimizer.b1 0.8", "--optimizer.eps"),
        ({"tensorboard.enabled": False, "wandb": {"enabled": True, "project": "p"}}, "--no-tensorboard --wandb", "q"),
    ],
)
def test_other_keys_become_flags(changes, words, absent):
    changes = {**changes, "optimizer.params.eps": None} if changes.get("optimizer.type") == "Lion" else changes
    line = translate(with_changes(changes)).command_line
    assert words in line
    assert absent not in line


@pytest.mark.slow
def test_null_is_deepspeeds_default():
    given = {"train_batch_size": 32, "communication_data_type": None, "gradient_clipping": None}
    found = translate(given, 1)
    assert found.command_line == translate({"train_batch_size": 32}, 1).command_line
    assert sum("null: DeepSpeed's default" in line for line in found.lines) == 2


def test_schedules_are_deepspeeds(tmp_path):
    """The formulas of its `lr_schedules.py`; its cosine ends one step earlier."""
    warm = {"warmup_num_steps": 10, "warmup_type": "linear", "total_num_steps": 110}

    def rates(kind, params):
        changes = {"scheduler": {"type": kind, "params": params}}
        schedule = experiment(with_changes(changes), tmp_path).lr_schedule
        return schedule.over(1000).create()

    decay = rates("WarmupDecayLR", {**warm, "warmup_max_lr": 1e-3})
    cosine = rates("WarmupCosineLR", {**warm, "cos_min_ratio": 0.1, "warmup_min_ratio": 0.5})
    cycle = rates(
        "OneCycle",
        {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 10, "cycle_second_step_size": 40},
    )
    for step in (0, 5, 10, 60, 109, 110, 200):
        left = max(0.0, (110 - step) / 100)
        assert float(decay(step)) == pytest.approx(1e-3 * (step / 10 if step < 10 else left), rel=1e-5, abs=1e-12)
        fall = 0.1 + 0.9 * (1 + math.cos(math.pi * (1 - left))) / 2
        assert float(cosine(step)) == pytest.approx(3e-5 * (0.5 + 0.05 * step if step < 10 else fall), rel=1e-4)
        share = step / 10 if step < 10 else max(0.0, (50 - step) / 40)
        assert float(cycle(step)) == pytest.approx(1e-4 + 9e-4 * share, rel=1e-4)
    params = {**warm, "total_num_steps": "auto"}
    auto = experiment(with_changes({"scheduler": {"type": "WarmupDecayLR", "params": params}}), tmp_path)
    assert auto.lr_schedule.decay_steps is None


@pytest.mark.parametrize("key", UNMAPPED)
def test_every_key_without_a_flag_has_its_reason(key):
    value = True if key.endswith("adam_w_mode") else {"something": 1} if "." not in key else 1
    lines = "\n".join(translate(with_changes({key: value})).lines)
    assert f"    {UNMAPPED[key]}" in lines


def _flat(config, prefix=""):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
