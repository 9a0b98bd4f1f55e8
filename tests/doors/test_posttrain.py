"""The `posttrain` verb: the experiment that a YAML config becomes, and what is refused."""

import dataclasses
import importlib.util
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import text_models
from flax import nnx
from posttraining_project import write_project

from openpi_train import cli, train_verbs
from openpi_train.data.core.files import write_json
from openpi_train.data.text.text_data import TextDataset
from openpi_train.doors.door_requests import PosttrainRequest
from openpi_train.doors.posttraining import posttrain
from openpi_train.elastic import adapt
from openpi_train.experiment import Experiment
from openpi_train.fields import as_json
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.models.language import LanguageConfig
from openpi_train.models.language.actor_critic import ActorCriticConfig
from openpi_train.models.language.hf_names import hf_name
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.nn.lora import AdapterConfig
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.objectives.preference_pairs import PreferencePairs
from openpi_train.objectives.reward_pairs import RewardPairs
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.optim import AdamW, Lion
from openpi_train.parallel.params import module_params
from openpi_train.rl.estimator import AdvantageEstimator
from openpi_train.rl.rewards.text_reward import TextReward
from openpi_train.rl.text_rl import TextRL
from openpi_train.runtime.exits import USAGE, CheckpointError, UsageError
from openpi_train.sampling.token_distribution import TokenDistribution


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_project(tmp_path_factory.mktemp("project"))


@pytest.fixture
def project(written, monkeypatch):
    monkeypatch.chdir(written)
    return written


@pytest.fixture
def started(project, monkeypatch):
    """Runs that would have been started."""
    runs = []
    monkeypatch.setattr(train_verbs, "_run", lambda experiment, process: runs.append(experiment) or 0)
    return runs


def run(started, *words) -> Experiment:
    assert cli.run(["posttrain", *words]) == 0
    return started[-1]


@pytest.mark.parametrize(
    ("algorithm", "model", "objective", "kind"),
    [
        ("sft", LanguageConfig, SupervisedText(), "texts"),
        ("rm", RewardConfig, RewardPairs(), "preferences"),
        ("reward", RewardConfig, RewardPairs(), "preferences"),
        ("dpo", ReferencedConfig, PreferencePairs(beta=0.2), "preferences"),
    ],
)
def test_an_algorithm_is_a_model_an_objective_and_data(started, algorithm, model, objective, kind):
    found = run(started, "--config", "config.yaml", "--mode", "train", "--algorithm", algorithm)
    assert found.name == {"reward": "rm"}.get(algorithm, algorithm)
    assert type(found.model) is model and found.objective == objective
    assert (found.data.kind, found.data.tokenizer, found.data.max_length) == (kind, "./model", 64)
    language = {"sft": "", "rm": "language", "reward": "language", "dpo": "policy"}[algorithm]
    inner = getattr(found.model, language) if language else found.model
    assert (inner.dtype, inner.remat, inner.sizes.depth) == ("float32", "none", 1)
    assert found.weight_loader.params_path == "./model"
    assert (found.exp_name, found.checkpoint_base_dir, found.num_epochs) == ("one_device", "./outputs", 3)
    assert (found.batch_size, found.grad_accum, found.keep_effective_batch_size) == (8, 2, False)
    assert (found.keep_last, found.keep_period, found.ema_decay) == (2, None, None)
    # 4 rows x 4 devices x 2.
    fitted, _ = adapt(found, 4, None)
    fitted.check(4)
    assert fitted.batch_size == 32


PRACTISED = ("--config", "config_rlhf_example.yaml", "--algorithm")


def test_ppo_is_a_policy_with_a_critic_and_a_reference_that_learns_from_rollouts(started):
    found = run(started, *PRACTISED, "ppo")
    assert found.model == ActorCriticConfig(policy=found.model.policy, with_reference=True)
    assert found.objective == PolicyGradient(
        distribution=TokenDistribution(temperature=1.0, top_k=50), value_weight=0.5, entropy_weight=0.01
    )
    assert found.rl == TextRL(
        num_groups=8,
        group_size=1,
        epochs=2,
        advantages=AdvantageEstimator(kind="gae", gamma=0.99, kl_weight=0.05),
        rewards=(TextReward(name="model:./outputs/rm/one_device"),),
        max_new_tokens=12,
    )
    assert (found.data.kind, found.data.max_length, found.data.on_no_targets) == ("texts", 44, "drop")
    assert found.data.datasets[0].columns == ("prompt=prompt", "completion=answer")
    assert (found.num_train_steps, found.num_epochs, found.save_interval) == (4, None, 2)
    assert (found.eval.num_prompts, found.eval.scores) == (256, ("exact_match",))
    assert found.eval.sampling == SamplingSettings(temperature=0.0, max_new_tokens=12)
    with pytest.raises(UsageError, match=r"rewards.0.name model:./outputs/rm/one_device: there is no ./outputs"):
        found.check(1)


def test_grpo_compares_completions_of_a_prompt(started, project):
    found = run(started, *PRACTISED, "grpo")
    assert type(found.model) is ReferencedConfig and found.objective.kl_weight == 0.1
    rewards = (TextReward(name="./rewards.py:vowels"), TextReward(name="number_match", weight=2.0))
    assert found.rl == TextRL(num_groups=2, group_size=4, epochs=1, rewards=rewards, max_new_tokens=12)
    assert found.eval.scores == ("number_match",)
    fitted, _ = adapt(found, 4, None)
    fitted.check(4)
    assert (fitted.batch_size, fitted.rl.num_groups) == (32, 8)
    # A reward that compares needs what it compares with.
    (project / "only.yaml").write_text(
        "model: {name: ./model}\ngrpo: {reward_functions: [exact_match]}\ndata: {train_file: data/pairs.jsonl}\n"
    )
    pairs = run(started, "--config", "only.yaml", "--algorithm", "grpo")
    assert pairs.data.kind == "prompts" and pairs.eval.scores == ()
    with pytest.raises(UsageError, match=r"rewards exact_match: --data.kind prompts has no references"):
        pairs.check(1)


@pytest.mark.parametrize(
    ("algorithm", "model", "objective", "rl", "rate"),
    [
        (
            "ppo",
            ActorCriticConfig,
            PolicyGradient(distribution=TokenDistribution(temperature=0.7), value_weight=0.1),
            {
                "num_groups": 4,
                "group_size": 1,
                "epochs": 4,
                "advantages": AdvantageEstimator(kind="gae", kl_weight=0.05),
            },
            3e-6,
        ),
        ("grpo", LanguageConfig, PolicyGradient(), {"num_groups": 1, "group_size": 8}, 1e-6),
    ],
)
def test_absent_keys_of_rl_have_published_values(started, project, algorithm, model, objective, rl, rate):
    (project / "short.yaml").write_text(
        "model: {name: ./model}\nreward_functions: [number_match]\ndata: {train_file: data/prompts.jsonl}\n"
    )
    found = run(started, "--config", "short.yaml", "--algorithm", algorithm, "--data.max-length", "256")
    rewards = (TextReward(name="number_match"),)
    assert type(found.model) is model and found.objective == objective
    assert found.rl == TextRL(max_new_tokens=256, rewards=rewards, **rl)
    assert (found.lr_schedule.peak_lr, found.num_epochs, found.eval.num_prompts) == (rate, 3, 0)
    with pytest.raises(UsageError, match="leave none for the prompt"):  # in this model's context
        found.check(1)


def test_a_policy_with_an_adapter_has_no_critic_and_is_its_own_reference(project):
    language = posttrain.experiment_of(PosttrainRequest(algorithm="sft"), [])[0].model
    step = checkpoint(project, dataclasses.replace(language, adapter=AdapterConfig(rank=2)))
    text = (project / "config_rlhf_example.yaml").read_text().replace("./model", str(step))
    (project / "adapted.yaml").write_text(text)
    request = PosttrainRequest(config="adapted.yaml", algorithm="grpo")
    assert type(posttrain.experiment_of(request, [])[0].model) is LanguageConfig
    with pytest.raises(UsageError, match="has an adapter, which a policy beside a critic cannot have: merge it"):
        posttrain.experiment_of(dataclasses.replace(request, algorithm="ppo"), [])


def test_absent_keys_have_the_values_of_the_tools_example(started, project):
    (project / "short.yaml").write_text("model: {name: ./model}\ndata: {train_file: data/sums.jsonl}\n")
    found = run(started, "--config", "short.yaml", "--algorithm", "sft")
    assert found.data.datasets == (
        TextDataset(path="data/sums.jsonl", columns=("prompt=prompt", "completion=response")),
    )
    assert found.data.validation_fraction == 0 and found.eval.interval == 0
    assert found.data.max_length == 256  # the model's context
    assert found.optimizer == AdamW(b2=0.999, weight_decay=0.0, decay_mask=posttrain.DECAYING)
    assert (found.exp_name, found.batch_size, found.num_epochs, found.save_interval) == ("short", 4, 3, 500)
    rates = found.lr_schedule.over(100).create()
    assert [float(rates(step)) for step in (0, 50, 100)] == pytest.approx([5e-5, 2.5e-5, 0])
    found.check(1)


def test_what_is_given_on_the_command_line_goes_first(started, capsys):
    words = ("--config", "config.yaml", "--algorithm", "dpo", "--output_dir", "o", "--experiment_name", "e")
    found = run(started, *words, "--local_rank=0", "--num-train-steps", "7", "--model.policy.dtype", "bfloat16")
    assert (found.checkpoint_base_dir, found.exp_name) == ("o", "e")
    assert (found.num_train_steps, found.num_epochs, found.model.policy.dtype) == (7, None, "bfloat16")
    rows = run(started, "--config", "config.yaml", "--algorithm", "sft", "--batch-size", "32")
    fitted, _ = adapt(rows, 4, None)
    fitted.check(4)
    assert (fitted.batch_size, fitted.micro_batch_size, fitted.grad_accum) == (32, 4, 2)
    latest = ("--resume_from_checkpoint", "o/e/checkpoints/latest")
    assert cli.run(["posttrain", *words, *latest]) == USAGE
    told = capsys.readouterr().err
    assert f"there is no folder {Path('o/dpo/e').absolute()} to continue from" in told and "give `true`" in told
    assert run(started, *words, "--resume_from_checkpoint", "true").resume
    Path("o/dpo/e").mkdir(parents=True)
    found = run(started, *words, *latest)
    assert found.resume and found.weight_loader.params_path == "./model"
    older = ("--resume_from_checkpoint", "o/dpo/e/500")
    found = run(started, *words, *older)
    assert (found.resume_from, found.resume) == ("500", True)
    # Given when a run that was killed starts again: it must not go back again.
    found = run(started, *words, *older, "--resume")
    assert (found.resume_from, found.resume) == (None, True)
    found = run(started, *words, "--optimizer", "lion", "--optimizer.b1", "0.8")
    assert found.optimizer == Lion(b1=0.8, weight_decay=0.0, decay_mask=posttrain.DECAYING)


def decaying_in_transformers():
    """The patterns of names that do not decay, as the installed transformers has them; its Trainer needs torch."""
    file = Path(importlib.util.find_spec("transformers").origin).parent / "trainer.py"
    (line,) = [line for line in file.read_text().splitlines() if "forbidden_name_patterns = [" in line]
    return [re.compile(pattern) for pattern in re.findall(r'r"([^"]+)"', line)]


def test_what_decays_is_what_transformers_decays():
    patterns = decaying_in_transformers()
    assert len(patterns) >= 4
    optimizer = AdamW(weight_decay=0.1, decay_mask=posttrain.DECAYING)
    for sizes in (
        dataclasses.replace(text_models.MODEL.sizes, biases=True),  # as Qwen2
        dataclasses.replace(text_models.MODEL.sizes, post_norms=True, query_key_norms=True),  # as Gemma 3
    ):
        language = dataclasses.replace(text_models.MODEL, sizes=sizes)
        own = jax.eval_shape(lambda language=language: module_params(language.build(nnx.Rngs(0))))
        theirs = {path: hf_name(path, sizes).replace("/", ".").lower() for path in own}
        expected = {path: not any(one.search(name) for one in patterns) for path, name in theirs.items()}
        assert sum(expected.values()) == 7 and optimizer.decays(own) == expected
        # Beside a critic or a reference, too, and in a stack that is layers.
        around = optimizer.decays({f"policy/{path}": None for path in own} | {"critic/score/weight": None})
        assert around == {f"policy/{path}": one for path, one in expected.items()} | {"critic/score/weight": True}


def test_biases_and_norms_keep_their_values_where_only_weights_decay(started, project):
    config = "model: {name: ./model}\ndata: {train_file: data/sums.jsonl}\ntraining: {weight_decay: 0.5}\n"
    (project / "decay.yaml").write_text(config)
    found = run(started, "--config", "decay.yaml", "--algorithm", "sft").optimizer
    params = {name: jnp.ones(2) for name in ("layers/mlp_norm/scale", "layers/mlp/down/weight")}
    rule = found.create(lambda _: 0.1)
    updates, _ = rule.update({name: jnp.zeros(2) for name in params}, rule.init(params), params)
    assert {name: float(one[0]) for name, one in updates.items()} == pytest.approx(
        {"layers/mlp_norm/scale": 0.0, "layers/mlp/down/weight": -0.05}
    )


def test_a_deepspeed_file_is_used_and_another_may_be_named(started):
    config = ("--config", "config_deepspeed_example.yaml")
    found = run(started, *config)
    assert (found.sharding.strategy, found.model.dtype, found.batch_size) == ("zero2", "float16", 32)
    assert (found.micro_batch_size, found.grad_accum, found.optimizer.b1) == (4, 8, 0.8)
    assert found.exp_name == "config_deepspeed_example"
    adapt(found, 1, None)[0].check(1)
    with pytest.raises(UsageError, match=r"--micro-batch-size 4 .*--grad-accum 8 .*128 rows, not --batch"):
        adapt(found, 4, None)[0].check(4)
    # The rows of all devices together.
    more = adapt(run(started, *config, "--batch-size", "128"), 4, None)[0]
    more.check(4)
    assert more.batch_size == 128
    other = run(started, *config, "--deepspeed_config", "configs/deepspeed/zero3.json")
    assert (other.sharding.strategy, other.sharding.offload) == ("zero3", "optimizer")


@pytest.mark.parametrize(
    ("width", "strategy"), [(64, "replicated"), (2048, "replicated"), (4096, "zero2"), (12288, "zero3")]
)
def test_the_tools_rule_chooses_by_the_number_of_parameters(started, project, monkeypatch, caplog, width, strategy):
    # A layer of q, k, v and o (4 width^2, all heads), three products of 4 width, and two tables of 400 rows.
    sizes = dataclasses.replace(
        text_models.MODEL.sizes,
        depth=10,
        width=width,
        mlp_dim=4 * width,
        num_heads=1,
        num_kv_heads=1,
        head_dim=width,
        vocab_size=400,
    )
    large = dataclasses.replace(text_models.MODEL, sizes=sizes)
    about = 10 * 16 * width**2
    assert strategy == ("replicated" if about < 1e9 else "zero2" if about <= 7e9 else "zero3")
    monkeypatch.setattr(posttrain, "_language_model", lambda where: (large, "model"))
    text = (project / "config_distributed_example.yaml").read_text().replace('strategy: "ddp"', 'strategy: "rule"')
    (project / "rule.yaml").write_text(text)
    with caplog.at_level("INFO"):
        assert run(started, "--config", "rule.yaml").sharding.strategy == strategy
    (told,) = re.findall(r"distributed_strategy is rule, and the model has ([\d,]+) parameters", caplog.text)
    assert int(told.replace(",", "")) == pytest.approx(about, rel=0.5)


def test_without_an_algorithm_it_is_sft(started, project, caplog):
    text = (project / "config_distributed_example.yaml").read_text().replace('  algorithm: "sft"\n', "")
    (project / "plain.yaml").write_text(text)
    with caplog.at_level("INFO"):
        found = run(started, "--config", "plain.yaml")
    assert (found.name, type(found.objective)) == ("sft", SupervisedText)
    assert "no algorithm is given: sft" in caplog.text


@pytest.fixture
def on_the_hub(project, monkeypatch):
    """Addresses that were asked for, with the files; the hub has the project's model."""
    asked = []

    def folder(address, *, repo_type, patterns, raised):
        assert raised is CheckpointError  # code 4, as for any model that is missing
        asked.append((address, repo_type, patterns))
        return project / "model"

    monkeypatch.setattr(posttrain, "hub_folder", folder)
    return asked


def test_only_the_sizes_of_a_model_on_the_hub_are_fetched_at_first(started, project, on_the_hub):
    (project / "hub.yaml").write_text("model: {name: me/tiny}\ndata: {train_file: data/sums.jsonl}\n")
    found = run(started, "--config", "hub.yaml", "--algorithm", "sft")
    assert on_the_hub == [("hub:me/tiny", "model", ["config.json"])]
    assert found.model.sizes.vocab_size == 400
    assert found.data.tokenizer == found.weight_loader.params_path == "hub:me/tiny"


def checkpoint(project, model):
    """What a run of this model records of itself beside its checkpoint."""
    step = project / "runs" / type(model).__name__ / "10"
    shutil.rmtree(step, ignore_errors=True)
    (step / "tokenizer").mkdir(parents=True)
    shutil.copy(project / "model" / "tokenizer.json", step / "tokenizer")
    request = PosttrainRequest(algorithm="sft")
    experiment = dataclasses.replace(posttrain.experiment_of(request, [])[0], model=model)
    write_json(step / "meta.json", {"experiment": as_json(experiment)})
    return step


def test_a_run_is_a_model_too(started, project):
    language = posttrain.experiment_of(PosttrainRequest(algorithm="sft"), [])[0].model
    adapted = dataclasses.replace(language, adapter=AdapterConfig(rank=2), dtype="bfloat16", remat="full")
    config = "model: {{name: {}}}\ndata: {{train_file: data/pairs.jsonl}}\n"
    for model, expected in ((ReferencedConfig(policy=language), ReferencedConfig), (adapted, LanguageConfig)):
        step = checkpoint(project, model)
        (project / "next.yaml").write_text(config.format(step))
        found = run(started, "--config", "next.yaml", "--algorithm", "dpo")
        # A policy with an adapter is its own reference.
        assert type(found.model) is expected
        assert found.data.tokenizer == str(step / "tokenizer") and found.weight_loader.params_path == str(step)
    assert (found.model.adapter.rank, found.model.dtype, found.model.remat) == (2, "float32", "auto")
    step = checkpoint(project, RewardConfig(language=language))
    (project / "next.yaml").write_text(config.format(step))
    with pytest.raises(UsageError, match="is no language model of ours: name a run of sft or dpo"):
        posttrain.experiment_of(PosttrainRequest(config="next.yaml", algorithm="dpo"), [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "ppo"], "no training data for ppo: give data.datasets.ppo.train_files"),
        (["--config", "prompts.yaml", "--algorithm", "ppo"], "no reward for ppo: give ppo.reward_model_path, a run of"),
        (["--config", "texts.yaml", "--algorithm", "grpo"], "texts.jsonl has no prompts to complete"),
        (["--algorithm", "kto"], "--algorithm kto: allowed: sft, rm, reward, dpo, ppo, grpo"),
        (["--mode", "eval"], "--mode eval: the loss on validation files is measured during training"),
        (
            ["--algorithm", "sft", "--deepspeed", "x"],
            "posttrain takes a DeepSpeed file with --deepspeed-config",
        ),
        (["--config", "absent.yaml"], "the config absent.yaml cannot be read: No such file or directory"),
        (["--config", "none.yaml"], "no algorithm is given: sft, as in the tool's guide"),
        (["--config", "lost.yaml", "--algorithm", "sft"], "absent.jsonl"),
    ],
)
def test_what_cannot_be_is_refused(started, project, capsys, words, message):
    (project / "none.yaml").write_text("model: {name: ./model}\n")
    (project / "lost.yaml").write_text("model: {name: ./model}\ndata: {train_file: absent.jsonl}\n")
    (project / "prompts.yaml").write_text("model: {name: ./model}\ndata: {train_file: data/prompts.jsonl}\n")
    (project / "texts.jsonl").write_text('{"text": "x"}\n')
    (project / "texts.yaml").write_text(
        "model: {name: ./model}\nreward_functions: [overlong:8]\ndata: {train_file: texts.jsonl}\n"
    )
    config = [] if "--config" in words else ["--config", "config.yaml"]
    assert cli.run(["posttrain", *config, *words]) in (USAGE, 3)
    assert message in capsys.readouterr().err and not started


@pytest.mark.slow
def test_data_of_every_algorithm_or_of_one_are_prepared(project, monkeypatch):
    prepared = []
    monkeypatch.setattr(posttrain, "prepare_data", lambda found: prepared.append([one.name for one in found]))
    command = ["posttrain", "--mode", "data_process", "--config"]
    assert cli.run([*command, "config.yaml"]) == 0
    assert cli.run([*command, "config.yaml", "--algorithm", "reward"]) == 0
    (project / "only.yaml").write_text("model: {name: ./model}\ndata: {sft: {train_files: [data/sums.jsonl]}}\n")
    assert cli.run([*command, "only.yaml"]) == 0
    assert prepared == [["sft", "rm", "dpo"], ["rm"], ["sft"]]
    # The reward model is not there yet, and prompts are no preferences.
    assert cli.run([*command, "config_rlhf_example.yaml"]) == 0
    (project / "only.yaml").write_text("model: {name: ./model}\ndata: {train_file: data/pairs.jsonl}\n")
    assert cli.run([*command, "only.yaml"]) == 0
    assert prepared[3:] == [["ppo", "grpo"], ["rm", "dpo", "ppo", "grpo"]]
    # What is wrong with files that nobody can read is said where they are read.
    (project / "no.jsonl").write_text('{"x": 1}\n')
    (project / "only.yaml").write_text("model: {name: ./model}\ndata: {sft: {train_files: [no.jsonl]}}\n")
    assert cli.run([*command, "only.yaml"]) == 0 and prepared[5:] == [["sft"]]
    (project / "only.yaml").write_text("model: {name: ./model}\n")
    assert cli.run([*command, "only.yaml"]) == USAGE
