"""The flags of `serve` that are the policy's, through the real `load_policy`: each is seen in what is computed.

Nothing is compiled, but in the last test: in place of the program stands a note of what it would have been given.
"""

import dataclasses
import types

import jax
import ml_dtypes
import numpy as np
import pytest
from command_line import answer, ask, serve
from saved_runs import save_run

from openpi_train import registry
from openpi_train.data.tokenizers.tokenizer import load_tokenizer, train_tokenizer
from openpi_train.evaluation.action_error import action_error
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.policy import loading, restore
from openpi_train.policy.policy import Policy
from openpi_train.policy.sampler import Sampler
from openpi_train.types import action_batch

pytestmark = pytest.mark.slow

# An experiment whose robot is a class of the user's own: `serve` cannot know it without `--experiment`.
OWN = """
import dataclasses
from openpi_train import registry
from openpi_train.data.robot.config import Dataset
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.robots.bridge import Bridge

@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(Bridge):
    pass

_debug = registry.load("debug")
_source = _debug.data.datasets[0].source
_datasets = (
    Dataset(source=_source, robot=Bridge(), asset_id="first"),
    Dataset(source=dataclasses.replace(_source, seed=1), robot=Mine(), asset_id="second", prompt="of the dataset"),
)
_sizes = GemmaOverrides(
    width=32, depth=2, mlp_dim=64, num_heads=2, head_dim=8, lora_attention_rank=2, lora_mlp_rank=2
)
mine = dataclasses.replace(
    _debug,
    seed=SEED,
    model=dataclasses.replace(_debug.model, language=_sizes, action_expert=_sizes, action_dim=8, action_horizon=4),
    data=dataclasses.replace(_debug.data, datasets=_datasets),
)
"""
BYTES = load_tokenizer("bytes")
# pi0's prompt is its text between the begin and a newline, and the model reads 48 tokens, here bytes.
FITS, LONG = "a" * 46, "a" * 47


def tokens(text):
    """A prompt as the row holds it."""
    return np.array([*BYTES.encode(text, bos=True), *BYTES.encode("\n")])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A saved run, and the flag that names its experiment: a later state of that file, with another seed in it."""
    folder = tmp_path_factory.mktemp("own")
    for name, seed in (("own_runs_then", 42), ("own_runs_now", 99)):
        (folder / f"{name}.py").write_text(OWN.replace("SEED", str(seed)))
    experiment = registry.load(f"{folder / 'own_runs_then.py'}:mine")
    small = dataclasses.replace(
        experiment.model, siglip=SiglipConfig(width=16, depth=1, mlp_dim=32, num_heads=2, patch_size=16)
    )
    saved = save_run(dataclasses.replace(experiment, model=small), tmp_path_factory.mktemp("run"))
    return types.SimpleNamespace(saved=saved, own=f"--experiment={folder / 'own_runs_now.py'}:mine")


@dataclasses.dataclass
class Served:
    """A policy that `serve` loaded, what it told, its answers to `PROMPTS`, and the prompts its program was given."""

    policy: Policy
    metadata: dict
    answers: list
    prompts: list


# What is asked, in this order: no prompt, one, the longest that fits, and one that is too long.
PROMPTS = (None, "of the request", FITS, LONG)


def observation(prompt=None):
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    given = {"observation/image_0": image, "state": np.zeros(7, np.float32)}
    return given if prompt is None else {**given, "prompt": prompt}


def opened(run, *words):
    """`Served` with these flags, the program's actions being zeros, the mean in the robot's units."""
    prompts, loaded = [], []

    def load(*given, **options):
        loaded.append(loading.load_policy(*given, **options))
        return loaded[-1]

    def program(self, size, length, columns, draws, *guides):
        prompts.append(columns["prompt_tokens"][0][columns["prompt_mask"][0]])
        return np.zeros((size, *self.chunk), np.float32)

    def talk(server):
        prompts.clear()  # those of the warm-up
        with server.connect() as connection:
            return answer(connection), [ask(connection, observation(prompt)) for prompt in PROMPTS]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "_run", program)
        ended = on_one_device(patch, run.saved.directory, *words, talk=talk, load=load)
    assert ended.code == 0 and ended.talked is not None
    return Served(loaded[0], *ended.talked, prompts)


def on_one_device(patch, *words, **options):
    first = jax.devices()[:1]
    patch.setattr(restore.jax, "local_devices", lambda: first)
    return serve(*words, "--port=0", **options)


@pytest.fixture(scope="module")
def plain(run):
    """With no flag that is not needed."""
    return opened(run, run.own, "--dataset=second")


@pytest.fixture(scope="module")
def flagged(run):
    """With a value for every flag that is not the default's."""
    words = "--dataset=0 --num-sample-steps=3 --dtype=float32 --no-average --no-merge-lora --seed=0 --cut-prompts"
    return opened(run, run.own, *words.split(), "--prompt=of the flag")


@pytest.fixture(scope="module")
def mixed(run):
    """A number in place of a name, an empty prompt, and a type for parameters that adapters are folded into."""
    return opened(run, run.own, "--dataset=1", "--prompt=", "--dtype=bfloat16")


def refused(run, capsys, *words):
    """What is said of a policy that is not loaded."""
    with pytest.MonkeyPatch.context() as patch:
        ended = on_one_device(patch, run.saved.directory, *words, load=loading.load_policy)
    assert ended.code not in (0, None) and ended.talked is None
    return capsys.readouterr().err


def test_a_run_with_classes_of_its_own_needs_its_experiment(run, plain, capsys):
    said = refused(run, capsys, "--dataset=second")
    assert "is a Mine, which openpi_train does not have" in said and "--experiment my_runs.py:NAME" in said
    assert plain.metadata["robot"] == "Mine" and plain.metadata["experiment"] == "mine"
    assert plain.policy.sampler.seed == 42  # the file says 99 by now


def test_a_checkpoint_that_does_not_say_whose_it_is_needs_an_experiment(run, tmp_path, capsys):
    (tmp_path / "params").symlink_to(run.saved.directory / "0" / "params")
    (tmp_path / "assets").symlink_to(run.saved.directory / "0" / "assets")
    other = types.SimpleNamespace(saved=types.SimpleNamespace(directory=tmp_path))
    assert "does not say whose model it is: name its experiment, --experiment NAME" in refused(other, capsys)
    assert "unknown experiment 'debgu'; did you mean debug" in refused(other, capsys, "--experiment=debgu")


def test_the_robot_and_its_norm_stats_are_the_datasets_by_name_or_number(run, plain, flagged, mixed, capsys):
    assert [one.metadata["robot"] for one in (plain, flagged, mixed)] == ["Mine", "Bridge", "Mine"]
    for one, asset in ((plain, "second"), (flagged, "first"), (mixed, "second")):
        mean = run.saved.data.norm_stats[asset]["actions"].mean.astype(np.float32)
        for given in one.answers[1:3]:
            np.testing.assert_array_equal(given["actions"], np.tile(mean, (4, 1)))
    said = refused(run, capsys, run.own)
    assert "choose the one whose robot is used with `dataset`" in said and "0 (first, Bridge), 1 (second, Mine)" in said
    for none in ("2", "third", "-1"):
        assert "the run has no dataset" in refused(run, capsys, run.own, f"--dataset={none}")


def test_a_prompt_stands_in_where_a_request_has_none(plain, flagged, mixed):
    for one, text in ((plain, "of the dataset"), (flagged, "of the flag"), (mixed, "")):
        np.testing.assert_array_equal(one.prompts[0], tokens(text))
        np.testing.assert_array_equal(one.prompts[1], tokens("of the request"))


def test_prompts_are_cut_only_where_that_is_asked_for(plain, flagged):
    for one in (plain, flagged):
        np.testing.assert_array_equal(one.prompts[2], tokens(FITS))
    assert "has 49 tokens; the model reads 48" in plain.answers[3] and len(plain.prompts) == 3
    np.testing.assert_array_equal(flagged.prompts[3], tokens(LONG)[:48])


def test_denoising_steps_are_those_of_the_flag_or_of_the_runs_evaluation(run, plain, flagged, capsys):
    assert (plain.policy.sampler.num_steps, flagged.policy.sampler.num_steps) == (2, 3)
    for number in ("0", "-1"):
        said = refused(run, capsys, run.own, "--dataset=0", f"--num-sample-steps={number}")
        assert f"{number} denoising steps are too few; give 1 or more" in said


def test_the_seed_is_that_of_the_flag_or_of_the_run(plain, flagged):
    assert (plain.policy.sampler.seed, flagged.policy.sampler.seed) == (42, 0)


def test_parameters_have_the_type_that_is_asked_for_rounded_to_nearest(run, flagged, mixed):
    assert {str(leaf.dtype) for leaf in stored(run).values()} == {"float32", "bfloat16"}  # trained and frozen ones
    for one, dtype in ((flagged, "float32"), (mixed, "bfloat16")):
        assert {str(leaf.dtype) for leaf in one.policy.sampler.params.values()} == {dtype}
    for path in not_folded(run):
        rounded = stored(run)[path].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(np.asarray(mixed.policy.sampler.params[path]), rounded, err_msg=path)


def test_parameters_are_the_average_unless_that_is_not_wanted(run, plain, flagged):
    for path in not_folded(run):
        average, own = stored(run)[path], stored(run, average=False)[path]
        found = plain.policy.sampler.params[path]
        assert found.dtype == average.dtype  # as it is stored
        np.testing.assert_array_equal(np.asarray(found), average, err_msg=path)
        np.testing.assert_array_equal(
            np.asarray(flagged.policy.sampler.params[path]), own.astype(np.float32), err_msg=path
        )
    assert any((stored(run)[path] != stored(run, average=False)[path]).all() for path in not_folded(run))


def test_low_rank_factors_are_folded_in_unless_that_is_not_wanted(run, plain, flagged):
    leaves = stored(run)
    assert flagged.policy.sampler.params.keys() == leaves.keys()
    assert plain.policy.sampler.params.keys() == {path for path in leaves if "lora" not in path}
    names = [path.removesuffix("/lora_a") for path in leaves if path.endswith("/mlp/down/lora_a")]
    assert len(names) == 2  # of the language model and of the action expert
    for name in names:
        weight, first, second = (leaves[f"{name}/{part}"].astype(np.float64) for part in ("weight", "lora_a", "lora_b"))
        # Half a unit in the last place of a float32 below 1 is 3e-8; the products are some 1e-4.
        np.testing.assert_allclose(plain.policy.sampler.params[f"{name}/weight"], weight + first @ second, atol=1e-7)


def stored(run, average=True):
    """The run's parameters by path: the frozen ones, and the others' average or themselves."""
    state = run.saved.state
    leaves = {**state.frozen, **(state.ema if average else state.params)}
    return {path: np.asarray(leaf) for path, leaf in leaves.items()}


def not_folded(run):
    """The parameters that low-rank factors leave alone."""
    leaves = stored(run)
    factors = {path.removesuffix("/lora_a") for path in leaves if path.endswith("/lora_a")}
    return [path for path in leaves if "lora" not in path and path.removesuffix("/weight") not in factors]


def test_the_tokenizer_may_lie_elsewhere_but_must_be_the_runs(run, tmp_path, capsys):
    train_tokenizer(["pick up the cup"] * 3, tmp_path / "other.model", 300)
    words = (run.own, "--dataset=second")
    said = refused(run, capsys, *words, f"--tokenizer={tmp_path / 'other.model'}")
    assert "was trained with a tokenizer of fingerprint" in said
    assert "no tokenizer at /no/where.model" in refused(run, capsys, *words, "--tokenizer=/no/where.model")
    (tmp_path / "same.model").write_bytes(BYTES.model)
    found = opened(run, *words, f"--tokenizer={tmp_path / 'same.model'}")
    np.testing.assert_array_equal(found.prompts[1], tokens("of the request"))


def test_answers_are_those_of_trainings_evaluation_with_these_flags(run, monkeypatch):
    saved, rows = run.saved, 4
    located = saved.data.validation.mixture.locate(np.arange(rows))[0]
    own = np.flatnonzero(located == 0)
    assert 0 < len(own) < rows

    def talk(server):
        with server.connect() as connection:
            answer(connection)
            return [ask(connection, saved.observation(row)) for row in range(rows)]  # drawn with 0, 1, ...

    monkeypatch.setattr(Policy, "warm_up", lambda self, **_: None)  # one program is enough
    flags = "--dataset=first --seed=7 --num-sample-steps=3 --no-average --no-merge-lora --max-batch=1"
    answers = on_one_device(
        monkeypatch, saved.directory, run.own, *flags.split(), talk=talk, load=loading.load_policy
    ).talked
    held_out, stats = saved.held_out(rows), saved.data.norm_stats["first"]["actions"]
    found = 0.0
    for row in own:
        chunk = (answers[row]["actions"].astype(np.float64) - stats.mean) / (stats.std + 1e-6)
        error = chunk - held_out["actions"][row][:, :7]
        found += (held_out["action_mask"][row][:, None] * np.square(error)).sum()
    mask = held_out["action_mask"] & (located == 0)[:, None]
    batch = action_batch({**held_out, "action_mask": mask, "row": np.arange(rows, dtype=np.int32)})
    trainer = dataclasses.replace(saved.trainer, seed=7)
    evaluated = jax.jit(lambda *given: action_error(trainer, 3, *given))
    wanted, _ = evaluated(saved.state.params, saved.state.frozen, batch, np.int32(0))
    # To the robot's units and back, and batches of another size: float32's rounding.
    assert found == pytest.approx(float(wanted), rel=1e-5)
