"""A loaded policy against training's own evaluation: same rows, same numbers; and what it says when asked badly."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved_runs import save_run

from openpi_train import load_policy, registry
from openpi_train.data.tokenizers.tokenizer import train_tokenizer
from openpi_train.policy import restore
from openpi_train.policy.loading import choose_dataset
from openpi_train.policy.observation import ObservationError
from openpi_train.runtime.exits import CheckpointError, UsageError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS = 4
NOT_SEEN = ("actions", "action_mask", "dim_mask")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_run(registry.load("debug"), tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def policy(run):
    return load_policy(run.directory, batch_sizes=(NUM_ROWS,), devices=jax.devices()[:1])


def squared_error(run, policy):
    """Sum and count of squared errors of the policy's chunks, as `val/action_mse` counts them."""
    rows = run.held_out(NUM_ROWS)
    seen = [policy.prepare(run.observation(row))[0] for row in range(NUM_ROWS)]
    chunks = policy.sampler.sample(seen, range(NUM_ROWS))
    mask = rows["action_mask"][:, :, None] & rows["dim_mask"][:, None, :]
    return (mask * np.square(chunks - rows["actions"], dtype=np.float64)).sum(), mask.sum()


def test_an_observation_becomes_the_row_that_training_reads(run, policy):
    for number in range(NUM_ROWS):
        row, state, *_ = policy.prepare(run.observation(number))
        expected = run.held_out(NUM_ROWS)
        assert row.keys() == expected.keys() - set(NOT_SEEN)
        for name, value in row.items():
            wanted = expected[name][number]
            np.testing.assert_array_equal(value[: len(wanted)] if "prompt" in name else value, wanted, err_msg=name)
        np.testing.assert_array_equal(state, run.observation(number)["state"])


def test_programs_are_as_long_as_the_rows_of_the_run_and_as_the_model_allows(run, policy):
    lengths = run.data.text_length, run.experiment.model.rows.text_limit
    assert policy.sampler.text_lengths == lengths and lengths[0] < lengths[1]


def test_its_chunks_have_the_error_that_training_evaluates(run, policy):
    error, count = squared_error(run, policy)
    wanted, wanted_count = run.action_error(NUM_ROWS)
    assert count == wanted_count
    assert error == pytest.approx(wanted, rel=1e-6)  # the sum is in float32 there
    assert wanted != run.action_error(NUM_ROWS, average=False)[0]


def test_a_program_can_be_lowered_for_shapes_alone(policy):
    shapes = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for path, leaf in policy.sampler.params.items()
    }
    made = dataclasses.replace(policy.sampler, params=shapes, _programs={}).lower(NUM_ROWS)
    assert (made.out_info.shape, made.out_info.dtype) == ((NUM_ROWS, *policy.sampler.chunk), jnp.float32)


def test_a_draw_decides_and_the_others_of_a_batch_do_not(run, policy):
    observations = [run.observation(row) for row in range(3)]
    together = policy.infer_batch(observations, draws=[5, 6, 7])
    alone = policy.infer(observations[1], draw=6)
    np.testing.assert_array_equal(together[1]["actions"], alone["actions"])
    assert not np.array_equal(policy.infer(observations[1], draw=7)["actions"], alone["actions"])
    assert alone["actions"].shape == (8, 7) and alone["actions"].dtype == np.float32


BAD = {
    "missing image": (
        {"observation/image_0": None},
        "lacks 'observation/image_0'.*expected: observation/image_0, prompt",
    ),
    "missing prompt": ({"prompt": None}, "lacks 'prompt'"),
    "narrow state": ({"state": np.zeros(6)}, r"shape of 'state' \[6\]; expected \[7\]: x_m"),
    "state of text": ({"state": "zeros"}, "'state' is a str; expected numbers"),
    "state of objects": ({"state": [None, {}]}, "'state' is a list; expected numbers"),
    "state of NaN": ({"state": np.full(7, np.nan)}, "NaN or infinity"),
    "state without a number": ({"state": np.full(7, 3e38, np.float32)}, "so far outside .* value overflows"),
    "grey image": (
        {"observation/image_0": np.zeros((32, 32), np.uint8)},
        r"shape \[32, 32\]; expected \[height, width, 3\]",
    ),
    "wide image values": ({"observation/image_0": np.full((32, 32, 3), 7.0)}, "from 7.0 to 7.0; expected uint8"),
    "prompt of bytes": ({"prompt": b"go"}, "'prompt' is a bytes; expected a str"),
    "long prompt": ({"prompt": "go " * 50}, "the model reads 48: shorten it.*cut_prompts=True"),
    "number as key": ({3: 1}, "the key 3 is a int"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_observation_is_told_what_is_wrong_and_what_is_expected(run, policy, case):
    changes, message = BAD[case]
    observation = {**run.observation(0), **changes}
    with pytest.raises(ObservationError, match=message):
        policy.prepare({key: value for key, value in observation.items() if value is not None})


def test_images_may_come_with_channels_first_as_fractions_nested_or_under_the_slots_name(run, policy):
    given = run.observation(0)
    image = given.pop("observation/image_0")
    expected = policy.prepare({**given, "observation/image_0": image}).row
    fractions = (image / 255 + 1e-4).clip(0, 1).astype(np.float32)  # openpi rounds down
    for form in (
        {"image_0": image},
        {"observation": {"image_0": image}},
        {"base_0_rgb": np.moveaxis(image, -1, 0)},
        {"image_0": fractions},
    ):
        row = policy.prepare({**given, **form})[0]
        np.testing.assert_array_equal(row["image/base_0_rgb"], expected["image/base_0_rgb"])


def test_the_example_in_the_docs_runs(run, tmp_path, monkeypatch):
    # The first example; the others ask a server.
    example = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto" / "serve.md").read_text(), re.DOTALL)[0]
    (tmp_path / "checkpoints" / "debug").mkdir(parents=True)
    (tmp_path / "checkpoints" / "debug" / "x").symlink_to(run.directory)
    monkeypatch.chdir(tmp_path)
    first = jax.devices()[:1]
    monkeypatch.setattr(restore.jax, "local_devices", lambda: first)
    names: dict = {}
    exec(example, names)
    assert names["answer"]["actions"].shape == (8, 7)


def test_a_run_its_step_and_its_best_are_the_same_checkpoint(run, policy):
    (run.directory / "best").symlink_to("0")
    for directory in (run.directory / "0", f"{run.directory}/best"):
        found = load_policy(directory, devices=jax.devices()[:1])
        assert found.checkpoint == policy.checkpoint == str(run.directory / "0")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"dataset": "other"}, UsageError, r"has no dataset 'other'.*0 \(fake, Bridge\)"),
        ({"dataset": 1}, UsageError, "has no dataset 1"),
        ({"experiment": "nothing"}, registry.UnknownName, "unknown experiment 'nothing'"),
        ({"tokenizer": "/no/where.model"}, FileNotFoundError, "no tokenizer at /no/where.model"),
        ({"num_sample_steps": 0}, UsageError, "0 denoising steps are too few"),
        ({"guidance": 2.0}, UsageError, "guidance 2 is for policies that are told how good a chunk was"),
        ({"directory": "assets"}, CheckpointError, "no checkpoint at"),
    ],
)
def test_what_cannot_be_loaded_is_told(run, options, error, says):
    options = dict(options)
    directory = run.directory / "0" / options.pop("directory", "")
    with pytest.raises(error, match=says):
        load_policy(directory, **options)


def test_another_tokenizer_than_the_runs_is_refused(run, tmp_path):
    train_tokenizer(["pick up the cup"] * 3, tmp_path / "other.model", 300)
    with pytest.raises(CheckpointError, match=r"--data.tokenizer has .*the same words would give other tokens"):
        load_policy(run.directory, tokenizer=str(tmp_path / "other.model"))


def test_a_run_that_trained_with_cudnn_s_attention_is_served_where_there_is_none(run):
    stored, experiment = restore.open_run(run.directory)
    trained = experiment.model.with_compute(attention="cudnn")
    options: dict[str, Any] = {"average": True, "dtype": None, "merge_lora": False, "devices": jax.devices()[:1]}
    assert restore.restored(trained, stored, str(run.directory), **options)[0] == trained.with_compute(attention="auto")


def test_an_experiment_without_datasets_has_no_robot_to_act_for():
    with pytest.raises(UsageError, match=r"act has no dataset, and so no robot.* `--experiment`"):
        choose_dataset(registry.load("act"), None)
