"""The experiments for one's own data: what `--dataset` alone makes of each, and what is refused."""

import dataclasses
import json
import logging
import re
import shlex
from pathlib import Path

import pytest
from text_models import write_model

from openpi_train import registry
from openpi_train.choice import require_robots
from openpi_train.cli import list_experiments
from openpi_train.data.text.text_data import TextDataset
from openpi_train.experiment_flags import parse_experiment
from openpi_train.robots.dataset_arm import GRIPPERS, DatasetArm
from openpi_train.runtime.exits import DataError, UsageError

FIXTURES = Path(__file__).parent / "data" / "formats"
LEROBOT = FIXTURES / "lerobot" / "fixtures" / "v30_image"
ZARR = FIXTURES / "zarr" / "fixtures"
POLICIES = ("act", "diffusion", "pi0", "pi05", "pi0_lora", "pi05_lora", "smolvla")
LANGUAGE = ("lm_sft", "lm_dpo", "lm_grpo")
JOINTS = (*(f"joint_{number}" for number in range(6)), "gripper")
FRONT, WRIST = "observation/images/front", "observation/images/wrist"


def parsed(name, *words):
    return parse_experiment(name, ["--exp-name", "x", *map(str, words)])


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_they_are_listed_first_under_their_title(capsys):
    list_experiments([])
    title, *lines = capsys.readouterr().out.strip().splitlines()[: 1 + len(POLICIES) + len(LANGUAGE)]
    assert title == "Your own data"
    assert tuple(line.split()[0] for line in lines) == (*POLICIES, *LANGUAGE)


@pytest.mark.parametrize("name", POLICIES)
def test_a_lerobot_dataset_says_which_robot_it_is(name):
    found = parsed(name, "--dataset", LEROBOT)
    found.check(8)
    (dataset,) = found.demonstrations.datasets
    own = {"front": FRONT, "wrist": WRIST}
    assert dataset.robot == DatasetArm(
        cameras=own if name in ("act", "diffusion") else {"base_0_rgb": FRONT, "left_wrist_0_rgb": WRIST},
        state_columns=("observation/state",),
        action_columns=("action",),
        state_dims=JOINTS,
        action_dims=JOINTS,
        rate_hz=10.0,
        grippers=GRIPPERS,
    )
    assert (dataset.asset_id, dataset.norm_stats) == (None, None)  # of the dataset itself
    found.demonstrations.check_dims(found.policy)
    if name in ("act", "diffusion"):
        assert (found.model.action_dim, found.model.state_dim, found.model.cameras) == (7, 7, ("front", "wrist"))
    require_robots(found)


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_adapters_are_openpis(name):
    """As in openpi's `pi0_libero_low_mem_finetune`, whose values tests/test_openpi_experiments.py compares."""
    own, openpi = registry.load(f"{name}_lora"), registry.load("pi0_libero_low_mem_finetune")
    variants = [(one.model.paligemma_variant, one.model.action_expert_variant, one.ema_decay) for one in (own, openpi)]
    assert variants[0] == variants[1]
    assert own.model.pi05 == (name == "pi05") and own.weight_loader == registry.load(name).weight_loader


def test_only_the_robot_that_is_trained_is_told(caplog):
    caplog.set_level("INFO")
    parsed("act", "--dataset", LEROBOT, "--data.robot", "relative")
    (line,) = [record.message for record in caplog.records if record.message.startswith("the robot of")]
    assert "(7 dims, relative to the state but grippers)" in line


@pytest.mark.parametrize("name", [*POLICIES, *LANGUAGE])
@pytest.mark.parametrize("steps", [1, 50, 20_000, 40_000])
def test_the_learning_rate_ends_with_a_run_of_any_length(name, steps):
    own = dataclasses.replace(registry.load(name), num_train_steps=steps, num_epochs=None)
    schedule = dataclasses.replace(own.lr_schedule, shorten_warmup=True)  # as without --lr-schedule.warmup-steps
    assert schedule.check(steps) == [] and schedule.misfit(steps) == ""
    if name in ("act", "lm_grpo"):
        return
    rates = schedule.over(steps).create()
    assert float(rates(steps)) == pytest.approx(schedule.decay_lr, abs=1e-12)


def test_openpis_and_lerobots_published_schedules_stay():
    """openpi's default: 1,000 steps to 2.5e-5, then by a cosine to 2.5e-6 at step 30,000, in a run of 20,000."""
    for name, peak in (("pi0_aloha_pen_uncap", 2.5e-5), ("pi05_aloha_pen_uncap", 2.5e-5), ("smolvla_bridge", 1e-4)):
        found = registry.load(name)
        schedule = found.lr_schedule
        assert (schedule.decay_steps, schedule.warmup_steps, schedule.peak_lr) == (30_000, 1_000, peak), name
        assert found.num_train_steps == 20_000
        assert schedule.misfit(20_000).startswith("this run ends at step 20000, at ")


def test_each_way_to_name_a_dataset_does_the_same():
    found = parsed("act", "--dataset", LEROBOT)
    assert parsed("act", "--data.mixture", LEROBOT) == parsed("act", "--data.repo-id", LEROBOT) == found
    relative = parsed("act", "--dataset", LEROBOT, "--data.robot", "relative").demonstrations.datasets[0].robot
    assert relative == dataclasses.replace(found.demonstrations.datasets[0].robot, relative=True)
    two = parsed("pi0", "--data.mixture", f"{LEROBOT}:2", LEROBOT.with_name("v21_image"))
    assert [(one.weight, type(one.robot)) for one in two.demonstrations.datasets] == [(2, DatasetArm), (1, DatasetArm)]


@pytest.mark.parametrize(
    ("store", "state", "action", "cameras"),
    [("arms_14.zarr", 14, 14, ("head_camera",)), ("push_t.zarr", 5, 2, ("img",))],
)
def test_a_zarr_store_says_dims_and_cameras(store, state, action, cameras, caplog):
    found = parsed("diffusion", "--dataset", ZARR / store)
    robot = found.demonstrations.datasets[0].robot
    assert isinstance(robot, DatasetArm)
    assert robot.state_dims == tuple(f"state_{number}" for number in range(state))
    assert robot.action_dims == tuple(f"action_{number}" for number in range(action))
    assert dict(robot.cameras) == {name: name for name in cameras} and robot.control_hz == 10
    assert (found.model.action_dim, found.model.state_dim, found.model.cameras) == (action, state, cameras)
    data = found.demonstrations.datasets[0].source.open()
    steps = robot.read(data.columns, data.episode_ends)
    assert (steps.state.shape[1], steps.actions.shape[1]) == (state, action) and {*cameras} <= {*data.cameras}


@pytest.mark.parametrize("name", [*POLICIES, *LANGUAGE])
def test_without_a_dataset_they_say_how_to_give_one(name):
    with pytest.raises(UsageError, match="there is no dataset to train on: give --dataset"):
        parsed(name).check(8)


def test_what_does_not_describe_its_robot_is_refused(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    pq.write_table(pa.table({"action": [[1.0]], "episode_index": [0]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"act is for LeRobot datasets and zarr stores.* is Parquet: convert it"):
        parsed("act", "--dataset", tmp_path)


@pytest.mark.parametrize(
    ("name", "neutral"), [("act_aloha_sim", "act"), ("pi05_libero", "pi05"), ("robot_dp_14", "diffusion")]
)
def test_another_robot_is_told_the_command_that_takes_the_datasets(name, neutral):
    found = parsed(name, "--dataset", LEROBOT)
    with pytest.raises(DataError, match="if this is another robot, take the one that the dataset describes") as caught:
        require_robots(found)
    told = str(caught.value)
    # Both commands, as they stand there.
    first, second = (part.partition(", or")[0].split("python -m openpi_train ")[1] for part in told.split(": ")[-2:])
    for command, expected in ((first, name), (second, neutral)):
        word, *rest = shlex.split(command)
        assert word == expected
        trained = parse_experiment(word, rest)
        require_robots(trained)
        assert trained.demonstrations.datasets[0].robot.action_dims == JOINTS


@pytest.mark.parametrize("file", ["", "configs/robot_dp.py:"])
@pytest.mark.parametrize("name", ["robot_dp_10", "robot_dp_16"])
def test_a_store_of_other_dims_is_told_the_experiment_of_its_dims(name, file, monkeypatch):
    monkeypatch.chdir(FIXTURES.parents[2])
    store = ZARR / "arms_14.zarr"
    found = parsed(file + name, "--dataset", store)
    typed = registry.typed(found.name)
    with pytest.raises(DataError) as caught:
        require_robots(found, typed, registry.of_other_dims(typed))
    (told,) = re.findall(r"With 14 action dims: python -m openpi_train (.+?)\. ", str(caught.value))
    word, *rest = shlex.split(told)
    assert word == f"{file}robot_dp_14"
    require_robots(parse_experiment(word, rest))


def test_dims_of_no_other_experiment_are_told_nothing_more():
    found = parsed("robot_dp_14", "--dataset", LEROBOT)
    with pytest.raises(DataError) as caught:
        require_robots(found, None, registry.of_other_dims("robot_dp_14"))
    assert "action dims:" not in str(caught.value)
    assert registry.of_other_dims("robot_dp") == registry.of_other_dims("vla") == {}


def test_a_language_model_takes_chats_pairs_and_prompts(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat, pairs = write(tmp_path / "chat.jsonl", {"messages": talk}), tmp_path / "pairs.jsonl"
    write(pairs, {"prompt": "a", "chosen": "b", "rejected": "c"})
    for name, path, kind in (("lm_sft", chat, "texts"), ("lm_dpo", pairs, "preferences")):
        found = parsed(name, "--dataset", path)
        assert found.data.datasets == (TextDataset(path=str(path)),) and found.data.kind == kind
        found.check(1)


@pytest.mark.parametrize(
    ("record", "kind"), [({"prompt": "a", "answer": "b"}, "prompts"), ({"prompt": "a", "completion": "b"}, "texts")]
)
def test_prompts_may_have_completions_that_rewards_compare_with(tmp_path, record, kind):
    path = write(tmp_path / "prompts.jsonl", record)
    found = parsed("lm_grpo", "--dataset", path, "--reward", "regex:.*[0-9]", "overlong:8")
    assert found.data.kind == kind and [one.name for one in found.rl.rewards] == ["regex:.*[0-9]", "overlong:8"]
    found.check(1)


def test_another_model_and_other_texts_go_together(tmp_path):
    path = write(tmp_path / "chat.jsonl", {"text": "a"})
    model = write_model(tmp_path / "model")
    found = parsed("lm_sft", "--dataset", path, "--model.path", model)
    assert found.data.tokenizer == found.weight_loader.params_path == str(model)
    own = registry.load("lm_sft")
    assert own.data.tokenizer == own.weight_loader.params_path == "hub:HuggingFaceTB/SmolLM2-135M"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lm_sft", "--reward", "exact_match"), "--reward is for language models that learn from rewards"),
        (("lm_grpo", "--reward", "exact_mach"), "'exact_mach' is no reward"),
        (("lm_grpo",), "completions have no reward: give --reward"),
    ],
)
def test_rewards_that_cannot_be_are_refused(words, message):
    with pytest.raises(UsageError, match=message):
        parsed(*words).check(1)


def test_a_file_of_ones_own_is_told_as_it_was_typed(tmp_path):
    file = tmp_path / "my_cam.py"
    file.write_text(
        "import dataclasses\nfrom openpi_train_configs.openpi_libero import pi05_libero\n"
        "pi0_mine = dataclasses.replace(pi05_libero)\n'''Mine.'''\n"
    )
    found = parsed(f"{file}:pi0_mine", "--dataset", LEROBOT)
    with pytest.raises(DataError) as caught:
        require_robots(found, registry.typed(found.name))
    told = str(caught.value)
    assert (
        f"python -m openpi_train {file}:pi0_mine --exp-name" in told and "python -m openpi_train pi0_mine" not in told
    )
    words = re.findall(r"set (--data\.datasets\.0\.robot\.cameras\.\S+) (\S+)\. ", told)
    assert len(words) == 1, "the number of the dataset, and a feature that it has"
    named = parsed(f"{file}:pi0_mine", "--dataset", LEROBOT, *words[0])
    assert {FRONT, WRIST} & {*named.demonstrations.datasets[0].robot.cameras.values()}


@pytest.mark.parametrize(
    ("name", "words", "left"),
    [
        ("act", ("--model.cameras", "front"), {"front": FRONT}),
        ("act", ("--data.datasets.0.robot.cameras.wrist", "none"), {"front": FRONT}),
        ("diffusion", ("--model.cameras", "wrist"), {"wrist": WRIST}),
        ("pi0", ("--data.datasets.0.robot.cameras.left-wrist-0-rgb", "none"), {"base_0_rgb": FRONT}),
    ],
)
def test_a_camera_is_left_out_by_a_flag(name, words, left, caplog):
    with caplog.at_level(logging.INFO):
        found = parsed(name, "--dataset", LEROBOT, *words)
    assert found.demonstrations.datasets[0].robot.cameras == left
    assert getattr(found.model, "cameras", tuple(left)) == tuple(left)
    found.data.batch_spec(found.model, 2)  # which refuses a camera that the model has not, or the robot
    assert len([line for line in caplog.messages if "left out by the flags: the camera" in line]) == 1


def test_a_camera_that_the_robot_does_not_have_is_left_in_nobodys_place():
    found = parsed("act", "--dataset", LEROBOT, "--model.cameras", "front", "top")
    assert set(found.demonstrations.datasets[0].robot.cameras) == {"front", "wrist"}
    with pytest.raises(ValueError, match="the run's robots fill front, wrist"):
        found.data.batch_spec(found.model, 2)
