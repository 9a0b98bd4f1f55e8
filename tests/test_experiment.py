"""Cross-field checks: every conflict at once, each with the flag to change."""

import dataclasses

import pytest
import toy

from openpi_train import cli, registry
from openpi_train.experiment import Experiment, LocalCheckpoints
from openpi_train.fields import as_json
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.parallel.strategy import ShardingConfig
from openpi_train.runtime.exits import UsageError


@pytest.fixture
def experiment() -> Experiment:
    return dataclasses.replace(registry.load("debug"), exp_name="x")


@pytest.mark.parametrize(
    ("change", "devices", "message"),
    [
        ({"batch_size": 12}, 8, r"--batch-size 12 is not a multiple of the 8 devices; try 8 or 16"),
        ({"batch_size": 8, "grad_accum": 4}, 4, r"4 devices x --grad-accum 4; try 16"),
        (
            {"local_checkpoints": LocalCheckpoints(dir="/runs/local"), "checkpoint_base_dir": "/runs"},
            1,
            "lie in each other",
        ),
        ({"local_checkpoints": LocalCheckpoints(dir="/runs"), "checkpoint_base_dir": "/runs"}, 1, "lie in each other"),
        ({"fsdp_devices": 3}, 8, r"--fsdp-devices 3 does not divide the 8 devices of this run; allowed: 1, 2, 4, 8"),
        (
            {"sharding": ShardingConfig(tensor_devices=2)},
            3,
            r"--sharding.tensor-devices 2 does not divide the 3 devices of this run; allowed: 1, 3",
        ),
        (
            {"sharding": ShardingConfig(tensor_devices=2), "fsdp_devices": 8},
            8,
            r"--fsdp-devices 8 does not divide the 4 groups of 2 devices \(--sharding.tensor-devices\) of this run; "
            r"allowed: 1, 2, 4",
        ),
        (
            {"sharding": ShardingConfig(tensor_devices=2), "batch_size": 6},
            8,
            r"--batch-size 6 is not a multiple of the 4 groups of 2 devices; try 4 or 8",
        ),
        (
            {"sharding": ShardingConfig(tensor_devices=4)},
            8,
            r"--sharding.tensor-devices 4 does not divide the model's siglip.num_heads 2; allowed: 1, 2",
        ),
        ({"sharding": ShardingConfig(tensor_devices=0)}, 8, "--sharding.tensor-devices 0 must be at least 1"),
        ({"resume": True, "overwrite": True}, 1, "exclude each other"),
        ({"num_train_steps": 0}, 1, "--num-train-steps 0 must be at least 1"),
        ({"ema_decay": 1.5}, 1, "--ema-decay 1.5 must lie in"),
        (
            {"ema_decay": None, "sharding": ShardingConfig(offload="optimizer+ema")},
            1,
            "--sharding.offload optimizer.ema with --ema-decay None",
        ),
        (
            {"sharding": ShardingConfig(strategy="replicated"), "fsdp_devices": 2},
            4,
            "--sharding.strategy replicated cuts nothing over --fsdp-devices 2",
        ),
        ({"sharding": ShardingConfig(min_shard_mib=-1)}, 1, "--sharding.min-shard-mib -1 must be at least 0"),
        ({"freeze": "("}, 1, "--freeze .* is no regular expression"),
    ],
)
def test_conflict_names_the_flag_and_what_is_allowed(experiment, change, devices, message):
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(experiment, **change).check(devices)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ema_decay": 1.0}, r"--ema-decay 1.0 must lie in \[0, 1\)"),
        (
            {"data": dataclasses.replace(registry.load("debug").data, validation_fraction=1.0)},
            r"--data.validation-fraction 1.0 must lie in \[0, 1\)",
        ),
    ],
)
def test_a_limit_itself_is_no_value(experiment, change, message):
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(experiment, **change).check(1)


def test_all_conflicts_are_told_at_once(experiment):
    schedule = dataclasses.replace(experiment.lr_schedule, warmup_steps=100, decay_steps=50, decay_lr=1.0)
    wrong = dataclasses.replace(experiment, batch_size=3, resume=True, overwrite=True, lr_schedule=schedule)
    with pytest.raises(UsageError) as caught:
        wrong.check(2)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert all("--" in line for line in lines)


def test_an_objective_that_the_model_cannot_serve_is_refused(experiment):
    class Bare(toy.LinearConfig):
        provides = frozenset({"logits"})

    with pytest.raises(UsageError, match="FlowMatching needs velocity, which model Bare does not provide"):
        dataclasses.replace(experiment, model=Bare(), objective=FlowMatching()).check(1)


def test_freeze_matches_our_path_and_openpis_name(experiment):
    frozen = dataclasses.replace(experiment, freeze=r"PaliGemma/img/.*")
    paths = [path for path in ("image_encoder/position_embedding", "action_in_proj/kernel") if frozen.is_frozen(path)]
    assert frozen.is_frozen("action_in_proj/kernel") is False
    assert dataclasses.replace(experiment, freeze="action_in_proj/.*").is_frozen("action_in_proj/kernel")
    assert "action_in_proj/kernel" not in paths


def test_freeze_takes_the_names_of_the_models_parts(experiment):
    paths = {
        "vision": "image_encoder/position_embedding",
        "language": "transformer/layers/experts/language/query/weight",
        "table": "transformer/token_embedding",
        "expert": "transformer/layers/experts/action/query/weight",
        "head": "action_out_proj/kernel",
    }
    expected = {
        "vision": {"vision"},
        "language": {"language", "table"},
        "backbone": {"vision", "language", "table"},
        None: set(),
    }
    for freeze, parts in expected.items():
        frozen = dataclasses.replace(experiment, freeze=freeze)
        assert {part for part, path in paths.items() if frozen.is_frozen(path)} == parts


def test_json_names_the_class_of_every_part(experiment):
    value = as_json(experiment)
    assert value["model"]["__class__"] == "Pi0Config"
    assert value["data"]["datasets"][0]["robot"]["__class__"] == "Bridge"


def test_a_named_experiment_shortens_its_own_warm_up_and_not_the_users():
    """robot_dp_14 warms up for 500 steps, and has no number of steps in which its rate falls."""

    def short(*flags):
        given = cli.parse_experiment("robot_dp_14", ["--exp-name", "x", "--num-train-steps", "132", *flags])
        return given.lr_schedule.over(132).warmup_steps, given.lr_schedule.check(132)

    assert short() == (13, []) and short("--lr-schedule.warmup-steps=40") == (40, [])
    assert "warmup_steps 500" in short("--lr_schedule.warmup_steps", "500")[1][0]
