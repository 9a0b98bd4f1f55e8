"""Reinforcement learning in YAML configs of the PyTorch post-training tool: every key, rewards, files of prompts."""

import json
import re

import pytest
from deepspeed_files import with_changes

from openpi_train.doors.posttraining.prompt_files import prompt_datasets
from openpi_train.doors.posttraining.rl_without_flag import INSTEAD, ONLY, WITHOUT
from openpi_train.doors.posttraining.text_sources import TextSource
from openpi_train.doors.posttraining.training_flags import translate_config
from openpi_train.runtime.exits import UsageError

AROUND = {
    "model": {"model_name_or_path": "Qwen/Qwen2.5-0.5B"},
    "data": {"datasets": {"rlhf": {"train_files": ["prompts.jsonl"]}}},
}
LENGTHS = "--rl.max-new-tokens 256 --eval.sampling.max-new-tokens 256"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def translated(config, algorithm="grpo"):
    return translate_config({**AROUND, **config}, algorithm)


def command(config, algorithm="grpo"):
    return " ".join(word for flag in translated(config, algorithm).flags for word in flag)


# The tool's main config.
MAIN = {
    "training": {"algorithm": "ppo", "num_epochs": 3, "learning_rate": 5e-5, "warmup_steps": 100, "save_steps": 500},
    "ppo": {
        "ppo_epochs": 4,
        "clip_range": 0.2,
        "value_loss_coef": 0.5,
        "entropy_coef": 0.01,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "reward_model_path": "./output/reward/final_model",
    },
    "grpo": {"group_size": 4, "beta": 0.1, "clip_range": 0.2, "vf_coef": 0.5, "ent_coef": 0.01},
    "dpo": {"beta": 0.1, "loss_type": "sigmoid", "label_smoothing": 0.0},
    "data": {"dataset_path": "./data", "max_length": 2048, "max_prompt_length": 1024},
    "generation": {"max_new_tokens": 1024, "temperature": 1.0, "top_k": 50, "top_p": 1.0},
}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_every_key_of_the_tools_main_config_is_answered(algorithm):
    found = translated(MAIN, algorithm)
    for section, keys in MAIN.items():
        for name, value in keys.items():
            key = name if section == "training" else f"{section}.{name}"
            assert f"{key}: {json.dumps(value)}" in found.report()
    assert "--rl.max-new-tokens 1024 " in command(MAIN, algorithm) and found.with_reference
    assert "--data.max-length 2048 " in command(MAIN, algorithm)


def test_absent_keys_leave_what_the_experiment_has():
    # A step of a device has 4 rows: one group of 8 completions is learnt from in two steps.
    assert command({}) == f"{LENGTHS} --rl.num-groups 1"
    assert command({}, "ppo") == f"{LENGTHS} --rl.num-groups 4"
    assert (translated({}).with_reference, translated({}, "ppo").with_reference) == (False, True)


@pytest.mark.parametrize(
    ("algorithm", "keys", "flags"),
    [
        ("ppo", {"ppo_epochs": 2}, "--rl.epochs 2"),
        ("ppo", {"num_ppo_epochs": 2}, "--rl.epochs 2"),
        ("grpo", {"num_iterations": 2}, "--rl.epochs 2"),
        *(
            (algorithm, {name: 0.1}, "--objective.clip-low 0.1 --objective.clip-high 0.1")
            for algorithm in ("ppo", "grpo")
            for name in ("clip_range", "cliprange", "clip_epsilon", "clip_eps", "clip_ratio", "eps_clip", "epsilon")
        ),
        ("grpo", {"epsilon": 0.1, "epsilon_high": 0.28}, "--objective.clip-low 0.1 --objective.clip-high 0.28"),
        ("grpo", {"epsilon_high": 0.28}, "--objective.clip-high 0.28"),
        ("grpo", {"delta": 2.0}, "--objective.clip-most 2.0"),
        ("grpo", {"clip_ratio_c": 3.0}, "--objective.clip-most 3.0"),
        ("ppo", {"clip_ratio_c": 3.0}, "--objective.clip-most 3.0"),
        *(
            ("ppo", {name: 0.5}, "--objective.value-weight 0.5")
            for name in ("vf_coef", "value_loss_coef", "value_coef", "vf_coeff")
        ),
        *(
            ("ppo", {name: 0.3}, "--objective.value-clip 0.3")
            for name in ("value_clip_range", "cliprange_value", "clip_range_value", "clip_range_vf")
        ),
        ("ppo", {"gamma": 0.99, "gae_lambda": 0.9}, "--rl.advantages.gamma 0.99 --rl.advantages.lam 0.9"),
        ("ppo", {"lam": 0.9}, "--rl.advantages.lam 0.9"),
        ("ppo", {"whiten_advantages": False}, "--rl.advantages.no-whiten"),
        ("ppo", {"whiten_rewards": True}, "--rl.advantages.whiten-rewards"),
        ("ppo", {"adap_kl_ctrl": True}, "--rl.advantages.kl-target 6.0"),
        (
            "ppo",
            {"adap_kl_ctrl": True, "target": 3.0, "horizon": 500},
            "--rl.advantages.kl-target 3.0 --rl.advantages.kl-horizon 500",
        ),
        (
            "ppo",
            {"kl_target": 3.0, "kl_horizon": 500},
            "--rl.advantages.kl-target 3.0 --rl.advantages.kl-horizon 500",
        ),
        ("ppo", {"entropy_coef": 0.01}, "--objective.entropy-weight 0.01"),
        ("grpo", {"ent_coef": 0.01}, "--objective.entropy-weight 0.01"),
        *(("ppo", {name: 0.2}, "--rl.advantages.kl-weight 0.2") for name in ("kl_coef", "init_kl_coef", "beta")),
        ("grpo", {"kl_coef": 0.2, "kl_estimator": "k2"}, "--objective.kl-weight 0.2 --objective.kl-kind k2"),
        ("grpo", {"beta": 0.2}, "--objective.kl-weight 0.2"),
        *(
            (algorithm, {name: 4}, "--rl.group-size 4")
            for algorithm in ("ppo", "grpo")
            for name in ("num_generations", "group_size", "n_samples_per_prompt")
        ),
        ("grpo", {"loss_type": "grpo"}, "--objective.average rollouts"),
        ("grpo", {"loss_type": "dapo"}, "--objective.average units"),
        ("grpo", {"loss_type": "dr_grpo"}, "--objective.average constant --objective.max-units 256"),
        ("grpo", {"importance_sampling_level": "sequence"}, "--objective.ratio mean"),
        ("grpo", {"scale_rewards": False}, "--rl.advantages.scale none"),
        ("grpo", {"scale_rewards": True}, "--rl.advantages.scale group"),
        ("grpo", {"scale_rewards": "batch"}, "--rl.advantages.scale batch"),
        ("grpo", {"advantage_estimator": "rloo"}, "--rl.advantages.kind rloo"),
        ("grpo", {"dynamic_sampling": True}, "--rl.mixed-only"),
        ("grpo", {"mask_truncated_completions": True}, "--rl.mask-cut"),
        ("ppo", {"local_rollout_forward_batch_size": 32}, "--rl.completions-per-device 32"),
        (
            "ppo",
            {"temperature": 0.9, "top_p": 0.95, "min_p": 0.02, "top_k": -1},
            "--objective.distribution.temperature 0.9 --objective.distribution.top-p 0.95 "
            "--objective.distribution.min-p 0.02 --objective.distribution.top-k 0",
        ),
        *(
            ("grpo", {name: 12}, "--rl.max-new-tokens 12 --eval.sampling.max-new-tokens 12")
            for name in ("max_new_tokens", "response_length", "max_completion_length", "generate_max_len")
        ),
        (
            "grpo",
            {"max_new_tokens": 12, "max_prompt_length": 20},
            "--rl.max-new-tokens 12 --eval.sampling.max-new-tokens 12 --data.max-length 32",
        ),
        # Half of what there is.
        (
            "grpo",
            {"max_length": 64},
            "--rl.max-new-tokens 32 --eval.sampling.max-new-tokens 32 --data.max-length 64",
        ),
        (
            "ppo",
            {"learning_rate": 1e-5, "critic_learning_rate": 2e-5},
            "--lr-schedule.peak-lr 1e-05 --optimizer.rate-mask critic/ --optimizer.rate-factor 2.0",
        ),
        ("ppo", {"learning_rate": 1e-5, "critic_learning_rate": 1e-5}, "--lr-schedule.peak-lr 1e-05"),
    ],
)
def test_a_key_of_the_training_becomes_flags_and_so_does_that_of_the_section(algorithm, keys, flags):
    found = command({"training": keys}, algorithm)
    assert all(flag in re.split(" (?=--)", found) for flag in re.split(" (?=--)", flags))
    assert command(keys, algorithm) == found
    assert command({algorithm: keys}, algorithm) == command({"rlhf": keys}, algorithm) == found
    # No other flag.
    base = command({}, algorithm).split()
    differ = [word for word in found.split() if word.startswith("--") and word not in base]
    assert set(differ) <= {word for word in flags.split() if word.startswith("--")} | {"--rl.num-groups"}


@pytest.mark.parametrize(
    ("algorithm", "keys", "groups", "steps"),
    [
        # Completions of a device: those of a step, times the mini-batches.
        ("ppo", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, 8, 4),
        ("ppo", {"per_device_train_batch_size": 2, "num_mini_batches": 3, "num_ppo_epochs": 2}, 6, 6),
        ("ppo", {"ppo": {"mini_batch_size": 4, "batch_size": 16}}, 16, 16),
        ("grpo", {"per_device_train_batch_size": 16}, 2, 1),
        ("grpo", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 8}, 2, 4),
        # As many as are whole groups.
        ("grpo", {"per_device_train_batch_size": 12}, 3, 2),
        ("grpo", {"per_device_train_batch_size": 2}, 1, 4),
    ],
)
def test_an_iteration_has_whole_groups_and_its_steps_are_whole(algorithm, keys, groups, steps):
    found = command({**keys, "max_steps": steps + 1, "save_steps": 3 * steps}, algorithm)
    assert f"--rl.num-groups {groups} " in found
    assert f"--num-train-steps {2 * steps} " in found and f"--save-interval {3 * steps}" in found
    report = translated({**keys, "max_steps": steps + 1}, algorithm).report()
    assert (f"max_steps: {steps + 1} " in report) and (f"whole iterations, of {steps} steps" in report) == (steps > 1)
    # 500 steps, if no key says when to save.
    interval = -(-500 // steps) * steps
    assert (f"--save-interval {interval}" in command(keys, algorithm)) == (interval != 500)


def test_rows_of_all_devices_are_those_of_the_deepspeed_file(folder):
    (folder / "ds.json").write_text(json.dumps(with_changes({})))
    found = command({"deepspeed_config": "ds.json", "num_mini_batches": 2})
    assert re.search("^(?=.*--batch-size 32)(?!.*keep-effective).*--rl.num-groups 8", found)
    with pytest.raises(UsageError, match=r"grpo.batch_size counts the completions of one device and the DeepSpeed"):
        command({"deepspeed_config": "ds.json", "grpo": {"batch_size": 32}})


def test_completions_are_as_the_section_of_generation_says_unless_the_algorithm_has_its_own():
    general = {"max_new_tokens": 64, "temperature": 0.9, "top_k": 50, "top_p": 1.0, "do_sample": True}
    found = command({"generation": general})
    assert found.startswith(
        "--objective.distribution.temperature 0.9 --objective.distribution.top-p 1.0 --objective.distribution.top-k 50 "
        "--rl.max-new-tokens 64 "
    )
    both = {"generation": general, "ppo": {"temperature": 0.5, "response_length": 32}}
    assert command(both, "ppo") == found.replace("0.9", "0.5").replace(" 64", " 32").replace("groups 1", "groups 4")
    report = translated(both, "ppo").report()
    assert re.search(r"generation.temperature: 0.9 +for the command `generate`: ppo has its own", report)


@pytest.mark.parametrize(
    ("algorithm", "keys", "has_one"),
    [
        ("ppo", {"kl_coef": 0.0}, False),
        ("ppo", {"kl_coef": 0.1}, True),
        ("grpo", {"beta": 0.1}, True),
        ("grpo", {"beta": 0}, False),
    ],
)
def test_there_is_a_reference_where_the_policy_is_held_to_it(algorithm, keys, has_one):
    assert translated(keys, algorithm).with_reference == has_one


@pytest.mark.parametrize(
    ("config", "rewards"),
    [
        ({"ppo": {"reward_model_path": "./outputs/rm/x"}}, [("model:./outputs/rm/x", 1.0)]),
        ({"model": {**AROUND["model"], "reward_model_path": "me/judge"}}, [("model:hub:me/judge", 1.0)]),
        ({"rlhf": {"reward_model": "folder"}}, [("model:folder", 1.0)]),
        ({"reward_funcs": "exact_match"}, [("exact_match", 1.0)]),
        (
            {"reward_functions": ["own.py:good", "overlong:64", "folder"], "reward_weights": [1, 0.5, 2]},
            [("own.py:good", 1.0), ("overlong:64", 0.5), ("model:folder", 2.0)],
        ),
        (
            {"reward_functions": ["number_match"], "reward_model_path": "me/judge"},
            [("number_match", 1.0), ("model:hub:me/judge", 1.0)],
        ),
        ({}, []),
    ],
)
def test_rewards_are_functions_and_models(config, rewards, folder):
    (folder / "folder").mkdir()
    found = translated(config, "ppo")
    assert found.rewards == tuple(rewards)
    for number, (name, _) in enumerate(rewards):
        assert f"--rl.rewards.{number}.name {name}" in found.report()


@pytest.mark.parametrize("name", [*ONLY, *INSTEAD, *(name for names in WITHOUT.values() for name in names.split())])
@pytest.mark.parametrize("section", ["training", "ppo"])
def test_a_key_without_a_flag_has_its_reason_or_one_value(name, section):
    if name not in ONLY and name not in INSTEAD:
        reason = next(text for text, names in WITHOUT.items() if name in names.split())
        report = translated({section: {name: 1}}, "ppo").report()
        assert re.search(rf"{name}: 1 +{re.escape(reason)}", report)
        return
    if name in ONLY:
        assert re.search(
            rf"{name}: .* no flag: always so", translated({section: {name: ONLY[name][0]}}, "ppo").report()
        )
    why = ONLY[name][1] if name in ONLY else INSTEAD[name]
    with pytest.raises(UsageError, match=f"{name} is 7.*{re.escape(why)}"):
        translated({section: {name: 7}}, "ppo")


def test_a_constant_weight_of_the_divergence_says_so():
    for keys in ({"adap_kl_ctrl": False, "kl_target": 3.0}, {"target": 3.0, "horizon": 500}):
        assert command(keys, "ppo") == command({}, "ppo")
        lines = [line for line in translated(keys, "ppo").report().splitlines() if "divergence is constant" in line]
        assert len(lines) == 2


@pytest.mark.parametrize("name", ["adap_kl_ctrl", "whiten_rewards"])
def test_grpo_refuses_what_changes_a_reward_by_unit(name):
    assert re.search(rf"{name}: false +no flag: always so", translated({"grpo": {name: False}}).report())
    with pytest.raises(UsageError, match=rf"{name} is true; allowed: false"):
        translated({"grpo": {name: True}})


def test_grpo_has_no_critic_and_says_so():
    report = translated({"grpo": {"vf_coef": 0.5, "critic_learning_rate": 1.0}}).report()
    assert len(re.findall("no flag: grpo has no critic", report)) == 2


@pytest.mark.parametrize(
    ("algorithm", "keys", "message"),
    [
        ("ppo", {"clip_rnage": 0.2}, "unknown key clip_rnage; did you mean clip_range?"),
        (
            "grpo",
            {"grpo": {"num_generation": 4}},
            "unknown key grpo.num_generation; did you mean grpo.num_generations?",
        ),
        ("ppo", {"num_iterations": 2}, "unknown key num_iterations"),
        (
            "ppo",
            {"clip_range": 0.1, "ppo": {"cliprange": 0.2}},
            "clip_range is 0.1 and ppo.cliprange is 0.2: they contr",
        ),
        ("ppo", {"gamma": "high"}, 'gamma is "high"; it must be a number'),
        ("grpo", {"loss_type": "cispo"}, "loss_type is 'cispo'; allowed: grpo, dapo, bnpo, dr_grpo"),
        ("grpo", {"scale_rewards": "all"}, "scale_rewards is 'all'; allowed: group, batch, none"),
        ("ppo", {"kl_estimator": "k3"}, "kl_estimator is 'k3'; allowed: k1"),
        ("ppo", {"advantage_estimator": "rloo"}, "advantage_estimator is 'rloo'; allowed: gae"),
        (
            "ppo",
            {"num_mini_batches": 2, "ppo": {"batch_size": 4}},
            "num_mini_batches gives 2 .* and ppo.batch_size gives 1",
        ),
        ("ppo", {"ppo": {"batch_size": 6}}, "ppo.batch_size is 6, which is no multiple of the 4 rows of a step"),
        (
            "grpo",
            {"gradient_accumulation_steps": 4, "steps_per_generation": 6},
            "steps_per_generation is 6, which is no multiple of the 4 micro-batches of a step",
        ),
        (
            "ppo",
            {"value_model_path": "me/judge"},
            "value_model_path is me/judge and .*; the critic starts from the start",
        ),
        (
            "grpo",
            {"ref_model_path": "me/old"},
            "ref_model_path is me/old and the model is .*; the reference is the start",
        ),
        ("grpo", {"reward_functions": [1]}, "reward_functions has 1; needed are names"),
        (
            "grpo",
            {"reward_functions": ["a", "b"], "reward_weights": [1]},
            "a number for each of the 2 reward_functions",
        ),
        ("grpo", {"reward_model_path": "a/b", "reward_weights": [1]}, "a number for each of the 0 reward_functions"),
        ("ppo", {"data": {}}, "no training data for ppo: give data.datasets.ppo.train_files"),
    ],
)
def test_what_cannot_be_is_refused(algorithm, keys, message):
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        translated(keys, algorithm)


def test_the_start_weights_may_be_named_again():
    again = {"sft_model_path": "Qwen/Qwen2.5-0.5B", "value_model_path": "Qwen/Qwen2.5-0.5B"}
    assert translated(again, "ppo").report().count("the start weights") == 2


def test_prompts_are_those_of_the_algorithm_or_of_rlhf():
    kinds = {kind: {"train_files": [f"{kind}.jsonl"]} for kind in ("sft", "reward", "rlhf", "grpo")}
    data = {"data": {"datasets": kinds}}
    assert [translated(data, name).sources[0].path for name in ("ppo", "grpo")] == ["rlhf.jsonl", "grpo.jsonl"]
    assert re.search(r"rlhf.train_files: .*not read by grpo", translated(data).report())


TALK = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("records", "kind", "columns"),
    [
        ([{"prompt": "a"}], "prompts", [("prompt=prompt",)]),
        ([{"prompt": "a", "response": "b"}], "texts", [("prompt=prompt", "completion=response")]),
        ([{"question": "a", "answer": "b"}], "texts", [("prompt=question", "completion=answer")]),
        # Of a preference only the prompt.
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "prompts", [("prompt=prompt",)]),
        # A conversation may be answered by a text, a text by no conversation.
        ([{"prompt": TALK, "solution": "b"}], "texts", [("prompt=prompt", "completion=solution")]),
        ([{"prompt": TALK, "solution": TALK}], "texts", [("prompt=prompt", "completion=solution")]),
        ([{"prompt": "a", "solution": TALK}], "prompts", [("prompt=prompt",)]),
        # verl's.
        (
            [{"data_source": "openai/gsm8k", "prompt": TALK, "reward_model": {"style": "rule", "ground_truth": "2"}}],
            "texts",
            [("prompt=prompt", "completion=reward_model.ground_truth")],
        ),
        # References are of no use unless every file has some.
        ([{"prompt": "a", "answer": "b"}, {"query": "a"}], "prompts", [("prompt=prompt",), ("prompt=query",)]),
    ],
)
def test_columns_of_prompts_are_known(records, kind, columns, folder):
    for number, record in enumerate(records):
        (folder / f"{number}.jsonl").write_text(json.dumps(record) + "\n")
    found, datasets = prompt_datasets([TextSource(path=f"{number}.jsonl") for number in range(len(records))])
    assert (found, [one.columns for one in datasets]) == (kind, columns)


def test_a_file_without_prompts_is_named(folder):
    (folder / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UsageError, match=r"a.jsonl has no prompts to complete: .*; its first record has text"):
        prompt_datasets([TextSource(path="a.jsonl")])
