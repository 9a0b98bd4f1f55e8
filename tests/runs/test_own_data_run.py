"""A stranger's own data: recorded, then trained on by the experiments for any data, with small models."""

import json
import textwrap

import numpy as np
import pytest
from runs.command import openpi_train, train
from text_models import write_model

from openpi_train.data.formats.lerobot import LeRobotWriter

pytestmark = pytest.mark.slow
SHORT = ("--num-train-steps", "2", "--batch-size", "4", "--save-interval", "2", "--num-workers", "0")
SMALL = {
    "act": "--model.image-height 32 --model.image-width 32 --model.backbone-widths 8 16 --model.dim-model 16 "
    "--model.n-heads 2 --model.dim-feedforward 16 --model.action-horizon 5 --eval.num-rows 4",
    "diffusion": "--model.image-height 32 --model.image-width 32 --model.encoder-widths 16 32 "
    "--model.unet.widths 16 32 --eval.num-rows 4 --eval.num-train-rows 4 --eval.num-sample-steps 2",
}
REWARD = """
    def right(prompts, completions, answer, **kwargs):
        assert all(prompt[-1]["role"] == "user" for prompt in prompts)
        return [float(len(one[0]["content"]) % (2 + len(truth))) for one, truth in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("a stranger's home")
    dims, random = ("lift_m", "turn_rad", "grip_fraction"), np.random.default_rng(0)
    writer = LeRobotWriter(
        home / "my_arm",
        fps=10,
        robot_type="my_arm",
        features={
            "observation.state": {"dtype": "float32", "shape": (3,), "names": dims},
            "action": {"dtype": "float32", "shape": (3,), "names": dims},
            "observation.images.side": {"dtype": "image", "shape": (24, 32, 3)},
        },
    )
    for _ in range(4):
        states = random.normal(size=(12, 3)).cumsum(0).astype(np.float32)
        pictures = list(random.integers(0, 255, (12, 24, 32, 3), dtype=np.uint8))
        writer.add_episode(
            {"observation.state": states, "action": states + 1}, {"observation.images.side": pictures}, task="lift"
        )
    writer.finish()
    write_model(home / "model", template=None, eos_token="</s>")
    words = ["two", "four", "Paris", "Tokyo"]
    talks = [
        [{"role": "user", "content": f"What {n}?"}, {"role": "assistant", "content": words[n % 4]}] for n in range(40)
    ]
    records = {
        "chat": [{"messages": talk} for talk in talks],
        "pairs": [{"prompt": talk[:1], "chosen": talk[1:], "rejected": "It is nine."} for talk in talks],
        "prompts": [{"prompt": talk[:1], "answer": talk[1]["content"]} for talk in talks],
    }
    for name, rows in records.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "my_rewards.py").write_text(textwrap.dedent(REWARD))
    return home


def losses(base, name):
    lines = map(json.loads, (base / "runs" / name / "x" / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("name", SMALL)
def test_a_policy_trains_on_a_recorded_dataset_and_acts(name, home, tmp_path):
    train(tmp_path, name, "--dataset", home / "my_arm", *SMALL[name].split(), *SHORT, "--log-interval", "1")
    assert len(losses(tmp_path, name)) == 2 and np.isfinite(losses(tmp_path, name)).all()
    run = tmp_path / "runs" / name / "x"
    assert (run / "2").is_dir()
    told = openpi_train("eval", run, "--out", tmp_path / "evaluated")
    assert told.returncode == 0, told.stderr[-3000:]


@pytest.mark.parametrize(("name", "file"), [("lm_sft", "chat"), ("lm_dpo", "pairs")])
def test_a_language_model_trains_on_a_file(name, file, home, tmp_path):
    data = ("--dataset", home / f"{file}.jsonl", "--model.path", home / "model", "--data.max-length", "128")
    done = train(tmp_path, name, *data, *SHORT, "--log-interval", "1")
    assert len(losses(tmp_path, name)) == 2 and np.isfinite(losses(tmp_path, name)).all()
    assert done.stderr.count("the built-in one is used") + done.stdout.count("the built-in one is used") == 1


GRPO = (
    *("--data.max-length", "96", "--rl.max-new-tokens", "6", "--rl.num-groups", "4", "--rl.group-size", "4"),
    *("--batch-size", "8", "--num-train-steps", "4", "--save-interval", "2", "--log-interval", "1"),
)


def test_a_reward_of_trls_form_gives_the_same_run_on_two_processes(home, tmp_path):
    data = ("--dataset", home / "prompts.jsonl", "--model.path", home / "model")
    reward = ("--reward", f"{home}/my_rewards.py:right")
    train(tmp_path / "one", "lm_grpo", *data, *reward, *GRPO, devices=2)
    train(tmp_path / "two", "lm_grpo", *data, *reward, *GRPO, processes=2)
    found = losses(tmp_path / "one", "lm_grpo")
    assert found == losses(tmp_path / "two", "lm_grpo") and any(found)


@pytest.mark.parametrize("name", ["pi0", "pi05", "smolvla"])
def test_the_full_sizes_are_planned(name, home):
    words = ("--exp-name", "x", "--dataset", home / "my_arm", "--dry-run")
    done = openpi_train(name, *words)
    # On a host with less memory than pi0 needs, that is all that is wrong.
    fits = done.returncode == 0 and "\nfits\n" in done.stdout
    assert fits or f"{name} does not fit" in done.stdout + done.stderr
    assert "state observation/state (3 dims), action action (3 dims, as recorded), 10 Hz" in done.stdout + done.stderr
