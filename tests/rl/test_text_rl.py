"""A tiny language model learns from rollouts: what its batches hold, and what completions depend on."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from openpi_train_configs.arithmetic_rl import arithmetic_grpo
from rl.made import Made
from trainers import make_trainer, running_of

from openpi_train.data.text import arithmetic
from openpi_train.data.text.text_data import TextDataset
from openpi_train.evaluation.text_evaluations import TextEvaluations
from openpi_train.generation.completion_text import NewText
from openpi_train.generation.generator import Generator, NewTokens
from openpi_train.interop.openpi import parameter_names
from openpi_train.interop.stored_leaves import Stored, in_memory
from openpi_train.models.language import huggingface
from openpi_train.models.language.reward import RewardConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import merge_module, module_params
from openpi_train.parallel.strategy import Plan
from openpi_train.rl.rewards import reward_model
from openpi_train.rl.rewards.text_reward import TextReward
from openpi_train.rl.rollout_feed import RolloutFeed
from openpi_train.rl.rollout_samples import keep_some
from openpi_train.rl.text_actor import TextActor
from openpi_train.rl.text_rl import TextRL
from openpi_train.runtime.exits import DataError, UsageError
from openpi_train.sampling.token_distribution import TokenDistribution
from openpi_train.training import settling
from openpi_train.training.init import create_state

# Five tokens more than the tokenizer has.
SIZES = DecoderSizes(vocab_size=21, width=16, depth=2, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8)
PROBLEMS = ["1+2=", "33+4=", "5+66=", "77+88=", "9+9=", "10+1="]
PRACTICE = TextRL(
    num_groups=4, group_size=2, max_new_tokens=6, rewards=(TextReward(name="regex:.*[02468].*"),), epochs=2
)
STILL = LRSchedule(warmup_steps=0, peak_lr=0.0, decay_steps=10, decay_lr=0.0)
FEW = TokenDistribution(temperature=1.4, top_k=9, top_p=0.95)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, content in arithmetic.tokenizer_files().items():
        (folder / name).write_text(json.dumps(content))
    records = [{"prompt": problem, "completion": "8"} for problem in PROBLEMS]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def make(folder, tmp_path):
    def made(devices=1, distribution=FEW, schedule=STILL, rl=PRACTICE, **data):
        plan = Plan(mesh=make_mesh(1, jax.devices()[:devices]), strategy="replicated")
        experiment = dataclasses.replace(
            arithmetic_grpo,
            exp_name="x",
            model=dataclasses.replace(arithmetic_grpo.model, sizes=SIZES),
            objective=PolicyGradient(distribution=distribution),
            data=dataclasses.replace(
                arithmetic_grpo.data,
                **{
                    "datasets": (TextDataset(path=str(folder)),),
                    "tokenizer": str(folder),
                    "validation_fraction": 0.0,
                    "cache_dir": str(tmp_path),
                    **data,
                },
            ),
            rl=rl,
            batch_size=4,
            num_train_steps=8,
            save_interval=8,
        )
        experiment.check(devices)
        opened = experiment.open_data()
        trainer, layout = make_trainer(
            experiment.model, plan, AdamW(), schedule, objective=experiment.objective, ema=None
        )
        with jax.set_mesh(plan.real_mesh):
            state = create_state(layout, experiment.model, trainer.optimizer, lambda _: False, False, 7)
            running = dataclasses.replace(running_of(trainer, []), data=opened)
            feed = RolloutFeed(rl, rl.actor(running, experiment.data), trainer, batch_size=4)
        return Made(feed, state, trainer.jitted_step(layout.shardings), plan, experiment)

    return made


@pytest.mark.slow
def test_batches_have_the_shapes_that_programs_are_compiled_for(make):
    made = make()
    (batch,), _ = made.steps(1)
    opened = made.experiment.open_data()
    spec = made.experiment.batch_spec(4, opened)
    found = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch)
    assert found == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), spec)
    # The longest prompt is 77+88= with its begin token.
    assert batch.traces.texts.tokens.shape == (4, 7 + 6)


@pytest.mark.slow
def test_a_row_is_a_prompt_and_what_was_chosen_after_it(make):
    made = make()
    batches, _ = made.steps(2)
    tokenizer = made.experiment.open_data().words
    for batch in batches:
        texts = jax.device_get(batch.traces.texts)
        for tokens, segments, positions, weights in zip(
            texts.tokens, texts.segments, texts.positions, texts.weights, strict=True
        ):
            length, first = segments.sum(), int(np.argmax(weights))
            assert (segments[:length] == 1).all() and positions[:length].tolist() == list(range(length))
            assert weights.tolist() == [0.0] * first + [1.0] * (length - first) + [0.0] * (len(tokens) - length)
            prompt, completion = tokenizer.decode(tokens[1:first]), tokens[first:length]
            assert prompt in PROBLEMS and tokens[0] == tokenizer.begin[0]
            # It ended with the end token, or had as many tokens as it may have.
            assert completion[-1] == tokenizer.eos or len(completion) == 6
            assert tokenizer.eos not in completion[:-1] and completion.max() < tokenizer.num_tokens
        np.testing.assert_array_equal(batch.mask, texts.weights[:, 1:] > 0)


@pytest.mark.slow
def test_what_acts_is_scored_by_its_own_distribution(make, monkeypatch):
    """Recorded with the training step's forward pass: as the sampler says; and ratios stay 1 if nothing is learnt."""
    made, said = make(distribution=TokenDistribution(temperature=1.4)), []
    complete = Generator.step

    def step(self):
        events = complete(self)
        said.extend(events)
        return events

    monkeypatch.setattr(Generator, "step", step)
    _, found = made.steps(4)
    rollouts, columns = made.feed._collection.rollouts, made.feed._columns
    by_row = {}
    for event in said:
        ending = [] if event.ending is None else [event.ending[1]]
        by_row[event.id] = [*by_row.get(event.id, []), *event.log_probs, *ending]
    for row in range(len(rollouts)):
        recorded = columns["log_probs"][row][rollouts.mask[row]]
        np.testing.assert_allclose(recorded, by_row[row], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(columns["sampling_log_probs"][row][rollouts.mask[row]], np.float32(by_row[row]))
    assert found[0]["ratio"] == 1
    for one in found[1:]:
        assert one["ratio"] == pytest.approx(1, abs=1e-5) and one["approx_kl"] < 1e-10


@pytest.mark.slow
def test_with_limits_ratios_stay_one_where_nothing_is_learnt(make):
    _, found = make().steps(8)
    for one in found:
        assert one["ratio"] == pytest.approx(1, abs=1e-5) and one["clip_fraction"] == 0
        # The sampler tells the probabilities with which it drew, within its limits.
        assert one["sampling_difference"] < 1e-4 and one["sampling_far"] == 0


@pytest.mark.slow
def test_a_sampler_at_another_temperature_than_trainings_is_told(make, monkeypatch):
    """The difference is that of the same model's log-probabilities at both temperatures."""
    made = make(distribution=TokenDistribution(temperature=1.4))
    monkeypatch.setattr(made.feed._actor, "_settings", dataclasses.replace(made.feed._actor._settings, temperature=0.7))
    # The step donates its state.
    params = jax.tree.map(jnp.copy, {**made.state.frozen, **made.state.params})
    model = merge_module(made.feed._trainer.graphdef, params)
    (batch,), (found,) = made.steps(1)
    of_both = [TokenDistribution(temperature=one).scores(model, batch.traces).log_prob for one in (1.4, 0.7)]
    gap = np.asarray(of_both[0] - of_both[1], np.float64)[np.asarray(batch.mask)]
    assert np.abs(gap).mean() > 0.01
    assert found["sampling_difference"] == pytest.approx(np.abs(gap).mean(), rel=1e-4)
    assert found["sampling_ratio"] == pytest.approx(np.exp(gap).mean(), rel=1e-4)


@pytest.mark.slow
def test_completions_depend_on_their_draw_alone(make):
    one, four = make(), make(devices=4)
    actor = one.feed._actor
    with jax.set_mesh(one.plan.real_mesh):
        both = actor.act(one.state.params, [3, 5], 2)
        swapped = actor.act(one.state.params, [5, 3, 9], 2)
    with jax.set_mesh(four.plan.real_mesh):
        elsewhere = four.feed._actor.act(four.state.params, [3, 5], 2)
    np.testing.assert_array_equal(both.columns["tokens"], elsewhere.columns["tokens"])
    np.testing.assert_array_equal(both.columns["tokens"], swapped.columns["tokens"][[2, 3, 0, 1]])
    # Rollouts of a group differ, and a prompt that is drawn again is completed anew.
    assert (both.columns["tokens"][0] != both.columns["tokens"][1]).any()
    again = next(draw for draw in range(6, 20) if actor.prompt_id(draw) == actor.prompt_id(3))
    with jax.set_mesh(one.plan.real_mesh):
        later = actor.act(one.state.params, [again], 2)
    assert (later.columns["tokens"] != both.columns["tokens"][:2]).any()


def test_every_prompt_is_drawn_once_per_pass(make):
    actor = make().feed._actor
    passes = [sorted(actor.prompt_id(draw) for draw in range(first, first + 6)) for first in (0, 6)]
    assert passes == [list(range(6))] * 2
    assert [actor.prompt_id(draw) for draw in range(6)] != [actor.prompt_id(draw) for draw in range(6, 12)]


class Asked:
    """In place of a generator: with which settings and row numbers it is asked."""

    def __init__(self):
        self.generator, self.settings, self.rows = self, [], []

    def complete(self, prompts, settings, *, rows, after_step):
        self.settings.append(settings)
        self.rows += rows
        ended = NewTokens(id=0, tokens=[3], log_probs=[0.0], top=[[]], finish_reason="length")
        return [NewText(text="8", tokens=ended, num_made=1)] * len(prompts)

    def release(self): ...


def asked_for(made, seed, draws, monkeypatch):
    """The settings and row numbers with which a run of this seed completes the prompts of these draws."""
    trainer, opened, asked = dataclasses.replace(made.feed._trainer, seed=seed), made.experiment.open_data(), Asked()
    running = dataclasses.replace(running_of(trainer, []), data=opened)
    monkeypatch.setattr(TextActor, "_with", lambda self, params: asked)
    PRACTICE.actor(running, made.experiment.data).act({}, draws, 2)
    (settings,) = asked.settings
    return settings, asked.rows


def test_rl_draws_other_numbers_than_evaluations_and_than_runs_of_other_seeds(make, monkeypatch):
    """A completion's numbers are those of a seed and a row; evaluations number theirs from 0 on, too."""
    made, seeds = make(), (*range(10), 2**31)
    found = [asked_for(made, seed, [0, 3], monkeypatch) for seed in seeds]
    evaluated = {TextEvaluations().sampling.seed, *seeds, *range(100)}
    trained = [settings.seed for settings, _ in found]
    assert len(set(trained)) == len(seeds) and not evaluated & set(trained)
    assert all(0 <= seed < 2**32 for seed in trained)
    assert all(rows == [0, 1, 6, 7] for _, rows in found)
    assert asked_for(made, 7, [0], monkeypatch)[0].seed == trained[7]  # on every process, and after a restart


@pytest.mark.parametrize("names", [("a", "b"), ("a", "a")])
def test_prompts_of_several_datasets_are_contexts_of_their_own(folder, make, tmp_path, names):
    for name, problems in zip("ab", (PROBLEMS[:2], PROBLEMS[2:]), strict=True):
        records = [{"prompt": problem, "completion": "8"} for problem in problems]
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    datasets = tuple(TextDataset(path=str(tmp_path / name)) for name in names)
    actor = make(datasets=datasets).feed._actor
    by_context: dict[int, set] = {}
    for draw in range(60):
        by_context.setdefault(actor.prompt_id(draw), set()).add(actor._prompts.prompt(actor.prompt_id(draw)).place)
    # One prompt for each prompt, and one prompt for each prompt, also where a dataset is there twice.
    assert sorted(by_context) == list(range(actor._prompts.num_prompts))
    assert all(len(places) == 1 for places in by_context.values())
    assert actor._prompts.num_prompts == (6 if names == ("a", "b") else 4)
    if names == ("a", "b"):
        assert len(set.union(*by_context.values())) == 6


REWARDS = """
def length(completions, answer, **columns):
    return [float(len(text)) for text in completions]

def code(completions, **columns):
    return [sum(map(ord, text)) if text else None for text in completions]
"""


def test_a_line_of_rollouts_says_what_the_rewards_were_given_and_each_of_them(make, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    records = [{"prompt": problem, "answer": [number], "from": "a\nbook"} for number, problem in enumerate(PROBLEMS)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rewards = tuple(TextReward(name=f"{tmp_path}/rewards.py:{name}") for name in ("length", "code"))
    datasets = (TextDataset(path=str(tmp_path / "asked.jsonl")),)
    made = make(datasets=datasets, kind="prompts", rl=dataclasses.replace(PRACTICE, rewards=rewards))
    with jax.set_mesh(made.plan.real_mesh):
        keep_some(tmp_path, made.feed._actor, made.feed._collector.collect(made.state.params), 8)
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    names = "prompt_id reward outcome is_cut prompt completion tokens rewards columns"
    assert [*lines[0]] == names.split() and len(lines) >= 4
    for line in lines:
        text, given = line["completion"], line["rewards"]
        assert given == {"0_length": len(text), "1_code": sum(map(ord, text)) or None}
        assert line["reward"] == len(text) + (given["1_code"] or 0) and line["outcome"] == len(text)
        # A character is a token, and the end of a text is one more; so are special ones, which have no text.
        assert len(text) + (not line["is_cut"]) <= line["tokens"] <= PRACTICE.max_new_tokens
        problem = line["prompt"].removeprefix("<s>")
        assert line["columns"] == {"answer": [PROBLEMS.index(problem)], "from": "a\nbook"}
    made.feed.close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1 / 0 for _ in completions]", r"division by zero"),
        ("return [1.0]", r"it returned 1 rewards, and there are 2 completions"),
        ("return [float('nan')] * len(completions)", r"is nan; needed is a finite number"),
        ("return 1 / min(map(len, completion_ids))", r"it returned 0\.\d+; needed is a list"),
    ],
)
def test_a_function_with_a_fault_is_told_before_training(make, tmp_path, body, message):
    (tmp_path / "faulty.py").write_text(f"def reward(completions, completion_ids, **columns):\n    {body}\n")
    faulty = dataclasses.replace(PRACTICE, rewards=(TextReward(name=f"{tmp_path}/faulty.py:reward"),))
    with pytest.raises(DataError, match=rf"(?s)before training, a trial of the reward: .*{message}"):
        make(rl=faulty)


@pytest.mark.parametrize("completion", ["8", None])
def test_a_line_of_rollouts_has_the_reference_if_there_is_one(make, tmp_path, completion):
    records = [{"prompt": problem, **({"completion": completion} if completion else {})} for problem in PROBLEMS]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    made = make(datasets=(TextDataset(path=str(tmp_path / "asked.jsonl")),), kind="texts" if completion else "prompts")
    with jax.set_mesh(made.plan.real_mesh):
        rollouts = made.feed._actor.act(made.state.params, [0], 2)
    line = made.feed._actor.shown(rollouts, 1)
    assert [*line] == ["prompt", "completion", "tokens", *(["reference"] if completion else [])]
    assert line.get("reference") == completion


def test_prompts_that_leave_no_room_are_left_out_or_refused(make, caplog):
    made = make(max_length=11)
    assert "4 of 6 samples have no prompt of at most 5 tokens" in caplog.text
    assert made.feed._actor._prompts.longest == 5
    with pytest.raises(DataError, match="has no prompt of at most 2 tokens"):
        make(max_length=8)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_completions_are_rewarded_by_a_reward_model(make, tmp_path, devices, monkeypatch):
    model = RewardConfig(language=dataclasses.replace(arithmetic_grpo.model, sizes=SIZES))
    params = module_params(model.build(nnx.Rngs(0)))
    head = np.random.default_rng(0).normal(size=(1, SIZES.width)).astype(np.float32)
    params = {path: jnp.asarray(head) if path == "score/weight" else leaf * 3 for path, leaf in params.items()}
    names = parameter_names(model)
    leaves = {names[path]: in_memory(np.asarray(leaf)) for path, leaf in params.items()}
    huggingface.write(tmp_path / "model", Stored(where="memory", format="ours", params=leaves), model)
    stored, config = reward_model._opened(f"{tmp_path}/model")
    # Trained where there is cuDNN, which is not here.
    monkeypatch.setattr(reward_model, "_opened", lambda _: (stored, config.with_compute(attention="cudnn")))
    reward = TextReward(name=f"model:{tmp_path}/model")
    made = make(devices, rl=dataclasses.replace(PRACTICE, rewards=(reward,)))
    with jax.set_mesh(made.plan.real_mesh):
        rollouts = made.feed._actor.act(made.state.params, [0, 1, 2], 2)
    module = merge_module(nnx.split(model.build(nnx.Rngs(0)))[0], params)
    columns = [jnp.asarray(rollouts.columns[name]) for name in ("tokens", "positions", "segments")]
    expected = module.rewards(*columns, num_segments=1)[:, 0]
    np.testing.assert_allclose(rollouts.rewards, expected, rtol=1e-4, atol=1e-5)
    assert np.std(rollouts.rewards) > 0


def test_what_is_no_reward_model_is_refused(make, tmp_path):
    language = dataclasses.replace(arithmetic_grpo.model, sizes=SIZES)
    names = parameter_names(language)
    params = module_params(language.build(nnx.Rngs(0)))
    leaves = {names[path]: in_memory(np.asarray(leaf)) for path, leaf in params.items()}
    huggingface.write(tmp_path / "model", Stored(where="memory", format="ours", params=leaves), language)
    with pytest.raises(UsageError, match="has no score head: it is no reward model"):
        make(rl=dataclasses.replace(PRACTICE, rewards=(TextReward(name=f"model:{tmp_path}/model"),)))


@pytest.mark.parametrize(("most_tokens", "steps"), [(13, 24), (12, 20)])
def test_epochs_are_passes_over_the_prompts_in_whole_iterations(make, most_tokens, steps):
    """Six prompts, of which the longest has seven tokens, are drawn four at a time; an iteration is four steps."""
    experiment = make(max_length=most_tokens).experiment
    assert settling._in_steps(4, experiment, experiment.open_data()) == steps
    # Also where the length in steps, which is not used, could be none.
    dataclasses.replace(experiment, num_epochs=4, num_train_steps=7).check(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl": dataclasses.replace(PRACTICE, group_size=1, num_groups=8)}, "every advantage would be 0"),
        (
            {"rl": dataclasses.replace(PRACTICE, num_groups=5)},
            "10 rollouts, which --batch-size 4 does not divide",
        ),
        ({"rl": dataclasses.replace(PRACTICE, num_groups=0)}, "--rl.num-groups 0 must be at least 1"),
        ({"rl": dataclasses.replace(PRACTICE, epochs=0)}, "--rl.epochs 0 must be at least 1"),
        ({"rl": None}, "has no `rl`"),
        ({"save_interval": 6}, "--save-interval 6 is not a multiple of the 4 optimizer steps of an iteration"),
        ({"num_train_steps": 10}, "--num-train-steps 10 is not a multiple of the 4"),
        ({"objective": PolicyGradient(kl_weight=0.1)}, "compares with a reference"),
        (
            {"objective": PolicyGradient(distribution=TokenDistribution(temperature=0.0))},
            "temperature 0.0 must be above 0",
        ),
        (
            {"objective": PolicyGradient(distribution=TokenDistribution(temperature=1e-9))},
            "distribution.temperature 1e-09 must be at least 1e-06",
        ),
        (
            {"objective": PolicyGradient(distribution=TokenDistribution(top_k=2**31))},
            "distribution.top-k 2147483648 must be at most 2147483647",
        ),
        ({"rl": dataclasses.replace(PRACTICE, stop_ids=(2**31,))}, "--rl.stop-ids 2147483648 must be"),
        ({"rl": dataclasses.replace(PRACTICE, max_new_tokens=16)}, "leave none for the prompt"),
        ({"rl": dataclasses.replace(PRACTICE, rewards=())}, "completions have no reward: give --reward"),
        (
            {"rl": dataclasses.replace(PRACTICE, rewards=(TextReward(name="overlong:7"),))},
            "--rl.rewards.0.name overlong:7: every completion would lose some",
        ),
        (
            {
                "rl": dataclasses.replace(PRACTICE, rewards=(TextReward(name="number_match"),)),
                "data": dataclasses.replace(arithmetic_grpo.data, kind="prompts"),
            },
            "--rl.rewards number_match: --data.kind prompts has no references to compare with",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(make, changes, message):
    with pytest.raises(UsageError) as caught:
        dataclasses.replace(make().experiment, **changes).check(1)
    assert message in str(caught.value)


def test_epochs_of_a_run_that_goes_on_with_other_sizes_count_what_was_done(make):
    """Two iterations of four prompts and four steps are done; of six prompts, four times, 16 remain."""
    experiment = make().experiment
    data = experiment.open_data()
    assert settling._in_steps(4, experiment, data, (8, {"iteration": 2, "draws": 8})) == 8 + 4 * 4
