"""Every kind of model as a policy: its rows are training's, and its chunks have the error that training evaluates."""

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from saved_runs import save_run

from openpi_train import load_policy, registry
from openpi_train.data.formats.zarr import Zarr
from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.transforms import Unnormalize
from openpi_train.data.tokenizers.fast_tokenizer import fit_fast
from openpi_train.data.tokenizers.tokenizer import load_tokenizer
from openpi_train.experiment import EvalConfig
from openpi_train.models.diffusion_policy.diffusion_policy import UnetSizes
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.policy import restore
from openpi_train.policy.observation import ObservationError, stack_history
from openpi_train.robots.bridge import Bridge
from openpi_train.runtime.exits import CheckpointError
from openpi_train.tools.convert_checkpoint import plan
from openpi_train.tools.requests import ConvertRequest

pytestmark = pytest.mark.slow

NUM_ROWS = 2
STORES = Path(__file__).resolve().parents[1] / "data" / "formats" / "zarr" / "fixtures"
SIZES = GemmaOverrides(width=32, depth=2, mlp_dim=64, num_heads=2, head_dim=8)
TOWER = SiglipConfig(width=16, depth=1, mlp_dim=32, num_heads=2, patch_size=16)
DATA = DataConfig(
    datasets=(Dataset(source=FakeData(image_height=32, image_width=48), robot=Bridge(), asset_id="fake"),),
    tokenizer="bytes",
)
EVAL = EvalConfig(interval=0, num_rows=NUM_ROWS, num_sample_steps=2)


def pi(name, **fields):
    """An experiment of the pi family, as small as can be, on made-up data."""
    found = registry.load(name)
    small = {"siglip": TOWER, "image_size": 32, "action_horizon": 4, "dtype": "float32", "remat": "none", **fields}
    return dataclasses.replace(found, model=dataclasses.replace(found.model, **small), data=DATA, eval=EVAL)


def pi05(_):
    return pi("debug", pi05=True, language=SIZES, action_expert=SIZES, action_dim=8, max_token_len=80)


def lora(_):
    adapted = dataclasses.replace(SIZES, lora_attention_rank=2, lora_mlp_rank=2)
    return pi("debug", language=adapted, action_expert=adapted, action_dim=8)


def paligemma(_):
    return pi("paligemma_tiny", language=SIZES, head=SIZES, action_dim=8, max_token_len=48)


def pi0_fast(folder):
    chunks = np.clip(np.random.default_rng(0).normal(scale=0.5, size=(200, 4, 7)), -1, 1)
    fit_fast(chunks, vocab_size=384).save(folder / "fast")
    sizes = {"language": SIZES, "max_token_len": 136, "vocab_size": 800, "max_decoding_steps": 16}
    return pi("pi0_fast_tiny", **sizes, fast_tokenizer=str(folder / "fast"))


def diffusion(folder):
    source = Zarr(path=str(STORES / "arms_14.zarr"), cache_dir=str(folder / "cache"))
    found = registry.load("robot_dp_tiny", on=lambda _: source)
    small = {"encoder_widths": (16,), "unet": UnetSizes(widths=(16,)), "diffusion_step_embed_dim": 16}
    (dataset,) = found.data.datasets
    data = dataclasses.replace(found.data, datasets=(dataclasses.replace(dataset, source=source),))
    return dataclasses.replace(found, model=dataclasses.replace(found.model, **small), data=data, eval=EVAL)


def one_device(run, **options):
    return load_policy(run.directory, batch_sizes=(NUM_ROWS,), devices=jax.devices()[:1], **options)


def squared_error(run, policy):
    """Sum and count of squared errors of the policy's chunks, as `val/action_mse` counts them."""
    rows = run.held_out(NUM_ROWS)
    seen = [policy.prepare(run.observation(row))[0] for row in range(NUM_ROWS)]
    chunks = policy.sampler.sample(seen, range(NUM_ROWS))
    mask = rows["action_mask"][:, :, None] & rows["dim_mask"][:, None, :]
    return (mask * np.square(chunks - rows["actions"], dtype=np.float64)).sum(), mask.sum()


@pytest.mark.parametrize("make", [pi05, paligemma, pi0_fast, diffusion])
def test_rows_and_chunks_are_those_of_trainings_evaluation(make, tmp_path):
    run = save_run(make(tmp_path), tmp_path)
    policy = one_device(run)
    expected = run.held_out(NUM_ROWS)
    for number in range(NUM_ROWS):
        row = policy.prepare(run.observation(number)).row
        said = expected.get("token_ar_mask", np.zeros((NUM_ROWS, 0), bool))[number]
        for name, value in row.items():
            wanted = expected[name][number]
            if name in ("prompt_tokens", "prompt_mask", "token_ar_mask", "token_loss_mask"):
                # Evaluation's rows go on with the recorded chunk's tokens, which the sampler passes over.
                value, wanted = value[: len(wanted)], np.where(said, 0, wanted) if said.size else wanted
            np.testing.assert_array_equal(value, wanted, err_msg=name)
    error, count = squared_error(run, policy)
    wanted, wanted_count = run.action_error(NUM_ROWS)
    assert count == wanted_count
    assert error == pytest.approx(wanted, rel=1e-6)  # the sum is in float32 there


def test_a_diffusion_policy_sees_the_last_steps_and_answers_from_the_present_one(tmp_path):
    run = save_run(diffusion(tmp_path), tmp_path)
    policy = one_device(run)
    assert policy.metadata["history"] == 3 and policy.metadata["action_horizon"] == 6
    assert policy.metadata["num_executed"] == run.experiment.model.n_action_steps
    assert policy.metadata["observation"]["head_camera"]["shape"] == [3, 24, 32, 3]
    whole = run.observation(0)
    steps = [{"head_camera": whole["head_camera"][n], "state": whole["state"][n]} for n in range(3)]
    stacked = stack_history([{"head_camera": 1, "state": 1}, *steps], 3)
    np.testing.assert_array_equal(policy.prepare(stacked)[0]["state"], policy.prepare(whole)[0]["state"])
    first = policy.prepare(stack_history(steps[:1], 3))[0]["state"]
    np.testing.assert_array_equal(first[0], first[2])
    with pytest.raises(ObservationError, match=r"expected \[3, height, width, 3\]: the last 3 control steps"):
        policy.prepare(steps[-1])
    chunk = policy.sampler.sample([policy.prepare(whole)[0]], [4])[0]
    answer = policy.infer(whole, draw=4)
    known = policy.translation.normalize
    expected = Unnormalize(known.stats, known.form)({"actions": chunk})["actions"][2:]
    np.testing.assert_array_equal(answer["actions"], expected)
    np.testing.assert_array_equal(answer["state"], whole["state"][-1])


def test_adapters_are_folded_in_and_parameters_take_the_type_asked_for(tmp_path):
    run = save_run(lora(None), tmp_path)
    merged, apart = one_device(run), one_device(run, merge_lora=False)
    assert any("lora" in path for path in apart.sampler.params)
    assert not any("lora" in path for path in merged.sampler.params)
    rows = [merged.prepare(run.observation(0))[0]]
    # The products of two sums in place of one: float32 rounding through two layers and two steps.
    np.testing.assert_allclose(merged.sampler.sample(rows, [0]), apart.sampler.sample(rows, [0]), rtol=1e-3, atol=1e-4)
    assert {leaf.dtype for leaf in one_device(run, dtype="bfloat16").sampler.params.values()} == {np.dtype("bfloat16")}
    raw = one_device(run, average=False, merge_lora=False).sampler.params
    for path, leaf in run.state.params.items():
        np.testing.assert_array_equal(raw[path], leaf)
        np.testing.assert_array_equal(apart.sampler.params[path], run.state.ema[path])


def test_parameters_that_do_not_fit_one_device_are_cut_over_all(tmp_path, monkeypatch):
    run = save_run(pi05(None), tmp_path)
    rows = [one_device(run).prepare(run.observation(row))[0] for row in range(NUM_ROWS)]
    expected = one_device(run).sampler.sample(rows, range(NUM_ROWS))
    monkeypatch.setattr(restore, "memory_bytes", lambda device: 1)
    monkeypatch.setattr(restore, "_MIN_SHARD_MIB", 0.0)
    policy = load_policy(run.directory, batch_sizes=(1,), devices=jax.devices()[:2])
    assert policy.sampler.sizes == (2,)
    held = sum(leaf.addressable_shards[0].data.size for leaf in policy.sampler.params.values())
    assert held < 0.6 * sum(leaf.size for leaf in policy.sampler.params.values())
    # The same numbers in other programs: float32 rounding.
    np.testing.assert_allclose(policy.sampler.sample(rows, range(NUM_ROWS)), expected, rtol=1e-3, atol=1e-4)


def test_a_run_of_ones_own_experiment_is_opened_by_its_name(tmp_path):
    run = save_run(dataclasses.replace(pi05(None), name="pi0_my_arm"), tmp_path)
    stored, opened = restore.open_run(run.directory, "pi0_my_arm")
    assert opened.name == "pi0_my_arm" and stored.experiment is not None
    with pytest.raises(
        registry.UnknownName, match=r"is a run of pi0_my_arm, and knows its experiment: leave --experiment .*out"
    ):
        restore.open_run(run.directory, "pi0_my_army")
    with pytest.raises(registry.UnknownName, match=r"unknown experiment 'pi0_my_army'.*is given as FILE\.py:NAME"):
        restore.open_run(tmp_path / "nowhere", "pi0_my_army")


def test_a_checkpoint_answers_wherever_it_is_copied_to(tmp_path):
    made = save_run(pi0_fast(tmp_path), tmp_path / "runs")
    moved = shutil.copytree(made.directory / "0", tmp_path / "robot" / "checkpoint")
    shutil.rmtree(tmp_path / "fast")
    shutil.rmtree(tmp_path / "runs")
    policy = load_policy(moved, devices=jax.devices()[:1])
    assert policy.sampler.model.fast_tokenizer == str(moved / "tokenizer" / "fast")
    again = plan(
        ConvertRequest(source=str(moved), target=tmp_path / "again", target_format="ours", outputs=False),
        made.experiment,
    )
    assert (
        load_policy(again.run(), devices=jax.devices()[:1])
        .sampler.model.rows.chunk_tokenizer(load_tokenizer(str(moved / "tokenizer")))
        .fingerprint.startswith(made.data.tokenizer.partition("+")[2])
    )
    with (moved / "tokenizer" / "fast" / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(CheckpointError, match=r"tokenizer/fast/tokenizer.json"):
        load_policy(moved)
