"""Policies that LeRobot and openpi's PyTorch wrote: read, run to the same outputs, written for them, read again."""

import dataclasses
import functools
import json
import pickle
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from torch_case import RECORDED, load_case, recorded_config

from openpi_train.checkpoints.checkpoint_formats import model_params, named, open_checkpoint
from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.data.robot.normalize import normalize, read_norm_stats
from openpi_train.interop.openpi_torch import layouts_of
from openpi_train.interop.place import Place
from openpi_train.interop.safetensors_file import open_model
from openpi_train.interop.stored_leaves import Stored, in_memory
from openpi_train.interop.torch_names import EMBEDDING, TIED_HEAD, UNUSED_HEAD
from openpi_train.models.pi0 import pi0_network
from openpi_train.parallel.params import merge_module
from openpi_train.runtime.exits import CheckpointError
from openpi_train.sampling.flow import FlowSampler

FLOW = ["lerobot_pi0", "lerobot_pi05", "openpi_torch_pi0", "openpi_torch_pi05"]
ALL = [*FLOW, "lerobot_pi0_fast"]
FORMS = {name: "lerobot" if name.startswith("lerobot") else "openpi_torch" for name in ALL}


def encoding_in_float64(position, width, min_period, max_period):
    """The flow time's encoding as PyTorch's models have it: angles in double precision."""
    fraction = np.linspace(0.0, 1.0, width // 2)
    period = min_period * (max_period / min_period) ** fraction

    def encode(position):
        angle = np.asarray(position, np.float64)[..., None] * (2 * np.pi / period)
        return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1).astype(np.float32)

    shape = jax.ShapeDtypeStruct((*position.shape, width), jnp.float32)
    return jax.pure_callback(encode, shape, position)


def compute(case, noisy, time, noise):
    """Velocity and sampled actions; compiled once for all cases of the same config and encoding."""
    return compiled(case.config, pi0_network.sincos_encoding)(case.arrays(), case.observation, noisy, time, noise)


@functools.cache
def compiled(config, encoding):
    del encoding  # what the network looks up when it is traced

    def outputs(params, observation, noisy, time, noise):
        model = merge_module(graphdef, params)
        return model.velocity(observation, noisy, time), FlowSampler().sample(model, observation, noise, None, 4)

    graphdef = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))[0]
    return jax.jit(outputs)


@pytest.mark.parametrize("name", FLOW)
@pytest.mark.slow
def test_loss_and_actions_are_those_of_the_original(name, monkeypatch):
    case = load_case(name)
    actions, noise, time = (jnp.asarray(case.io[f"in/{key}"]) for key in ("actions", "noise", "time"))
    noisy = time[:, None, None] * noise + (1 - time[:, None, None]) * actions

    def differences():
        velocity, sampled = compute(case, noisy[:, None], time[:, None], noise)
        found = {"out/loss": (velocity[:, 0] - (noise - actions)) ** 2, "out/sample_actions_4": sampled}
        return [float(np.abs(found[key] - case.io[key]).max() / np.abs(case.io[key]).max()) for key in found]

    # Angles of up to 250 turns are rounded to float32 here, as in openpi's JAX, so that sines are off by up to 1e-4 ...
    loss, sampled = differences()
    print(f"{name}: largest difference of loss {loss:.1e}, of sampled actions {sampled:.1e}, of their largest")
    assert loss < 1e-3 and sampled < 1e-3
    # ... and with their angles nothing is left but the rounding of sums.
    monkeypatch.setattr(pi0_network, "sincos_encoding", encoding_in_float64)
    loss, sampled = differences()
    print(f"{name}: with the original's flow time encoding {loss:.1e} and {sampled:.1e}")
    assert loss < 5e-6 and sampled < 5e-6


@pytest.mark.slow
def test_logits_of_action_tokens_are_lerobots():
    case = load_case("lerobot_pi0_fast")
    words, actions = case.io["in/tokens"], case.io["in/action_tokens"]
    there = np.concatenate([np.ones_like(words, bool), case.io["in/action_token_mask"]], axis=1)
    causal = np.arange(there.shape[1])[None] >= words.shape[1]
    observation = dataclasses.replace(
        case.observation,
        image_masks={camera: jnp.ones_like(mask) for camera, mask in case.observation.image_masks.items()},
        prompt_tokens=jnp.asarray(np.concatenate([words, actions], axis=1)),
        prompt_mask=jnp.asarray(there),
        token_ar_mask=jnp.asarray(np.broadcast_to(causal, there.shape)),
    )
    graphdef = nnx.split(nnx.eval_shape(lambda: case.config.build(nnx.Rngs(0))))[0]
    logits = np.asarray(merge_module(graphdef, case.arrays()).logits(observation))[:, words.shape[1] :]
    predicts = case.io["in/action_token_mask"][:, 1:]
    difference = np.abs(logits - case.io["out/logits"][:, :-1])[predicts].max()
    print(f"largest difference of logits {difference:.1e}, largest logit {np.abs(logits).max():.1f}")
    assert difference < 5e-6 * np.abs(logits).max()
    log_probs = jax.nn.log_softmax(logits)[predicts]
    loss = -np.mean(log_probs[np.arange(len(log_probs)), actions[:, 1:][predicts]])
    np.testing.assert_allclose(loss, case.io["out/loss"], rtol=2e-6)


@pytest.mark.parametrize("name", ALL)
def test_each_tensor_of_a_genuine_file_lies_in_one_parameter(name):
    case = load_case(name)
    layouts = layouts_of(case.config)
    named = [tensor for layout in layouts.values() for tensor in layout.tensors.values()]
    assert len(named) == len(set(named))
    prefix = "model." if name.startswith("lerobot") else ""
    stored = {tensor.removeprefix(prefix) for tensor in open_model(Place.of(case.folder))}
    assert stored - set(named) <= {EMBEDDING, UNUSED_HEAD}
    assert set(named) - stored == set()
    # Every value arrives, once: the sums of all numbers agree exactly, since each is rounded to bfloat16.
    sizes = {tensor: layout.tensor_shape for layout in layouts.values() for tensor in layout.tensors.values()}
    assert sum(map(np.prod, sizes.values())) == sum(value.size for value in case.params.values())


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_what_is_written_comes_back_bit_for_bit(name, dtype, tmp_path):
    case = load_case(name)
    form = FORMS[name]
    stored = published(case, dtype)
    named(form).write(tmp_path / "out", stored, case.config)
    again = open_checkpoint(tmp_path / "out", case.config)
    assert again.format == form
    for path, leaf in model_params(again, case.config).items():
        assert leaf.dtype == dtype
        np.testing.assert_array_equal(leaf.whole(), case.params[path].astype(dtype))
    assert again.norm_stats == stored.norm_stats


@pytest.mark.parametrize("name", ALL)
def test_what_is_written_is_the_genuine_file_again(name, tmp_path):
    """Byte for byte, tensor by tensor, but for two that no computation uses."""
    case = load_case(name)
    named(FORMS[name]).write(tmp_path / "out", published(case, np.float32), case.config)
    written, genuine = (open_model(Place.of(folder)) for folder in (tmp_path / "out", case.folder))
    prefix = "model." if name.startswith("lerobot") else ""
    both_kept = {f"{prefix}{EMBEDDING}"} if f"{prefix}{EMBEDDING}" in genuine else set()
    assert genuine.keys() - written.keys() == both_kept  # LeRobot 0.6.1 fills it from the other when it loads
    assert written.keys() <= genuine.keys()
    for tensor in written.keys() - {f"{prefix}{UNUSED_HEAD}"}:
        source = f"{prefix}{EMBEDDING}" if both_kept and tensor == f"{prefix}{TIED_HEAD}" else tensor
        np.testing.assert_array_equal(written[tensor].whole(), genuine[source].whole())
        assert written[tensor].shape == genuine[tensor].shape
    if f"{prefix}{UNUSED_HEAD}" in genuine:
        assert not written[f"{prefix}{UNUSED_HEAD}"].whole().any()


def test_a_part_is_read_as_from_the_whole():
    case = load_case("lerobot_pi05")
    rng = np.random.default_rng(0)
    for path, leaf in model_params(open_checkpoint(case.folder, case.config), case.config).items():
        for _ in range(3):
            ends = [np.sort(rng.choice(size + 1, 2, replace=False)) for size in leaf.shape]
            part = tuple(slice(int(begin), int(end)) for begin, end in ends)
            np.testing.assert_array_equal(leaf.read(part), case.params[path][part])


@pytest.mark.parametrize("name", ["lerobot_pi0", "lerobot_pi05"])
def test_the_policys_files_are_the_genuine_ones(name, tmp_path):
    """Every step, file name and field that a genuine folder has; what is left to LeRobot's defaults may be absent."""
    case = load_case(name)
    genuine = open_checkpoint(case.folder, case.config)
    named("lerobot").write(tmp_path / "out", genuine, case.config)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in case.folder.iterdir()} - {
        "io.npz",
        "recorded.json",
    }
    for file in ("policy_preprocessor.json", "policy_postprocessor.json"):
        ours, theirs = (json.loads((folder / file).read_text()) for folder in (tmp_path / "out", case.folder))
        for step in (step for pipeline in (ours, theirs) for step in pipeline["steps"]):
            step["config"].pop("eps", None)  # ours is openpi's
        assert ours == theirs
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", case.folder))
    assert {**theirs, **ours} == theirs


@pytest.mark.parametrize("name", ["lerobot_pi0", "lerobot_pi05"])
def test_norm_stats_give_what_lerobots_normaliser_gives(name, tmp_path):
    case = load_case(name)
    content = open_checkpoint(case.folder, case.config).norm_stats["lerobot"]
    (tmp_path / "norm_stats.json").write_text(json.dumps(content))
    stats = read_norm_stats(tmp_path)
    for key, ours in (("state", "state"), ("action", "actions")):
        normal = normalize(case.io[f"norm/{key}"], stats[ours], case.config.rows.normalization)
        # openpi divides by 1e-6 more than LeRobot, whose scales here are 0.5 and more; float32 does the rest.
        np.testing.assert_allclose(normal, case.io[f"norm/{key}_normalized"], rtol=4e-6, atol=1e-6)


def published(case, dtype) -> Stored:
    params = {
        case.config.param_rules.public_name(path): in_memory(value.astype(dtype)) for path, value in case.params.items()
    }
    stats = {"mean": [0.1, 0.2], "std": [1.0, 2.0], "q01": [-1 / 3, -2.0], "q99": [1.0, 2.5]}
    return Stored(
        where="memory",
        format="ours",
        params=params,
        norm_stats={"lerobot": {"norm_stats": {"state": stats, "actions": stats}}},
    )


def test_recorded_policies_are_recognised_by_their_content():
    for name, form in FORMS.items():
        assert open_checkpoint(RECORDED / name, recorded_config(RECORDED / name)).format == form


class Harmful:
    """An object that makes a file where it is unpickled."""

    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self):
        return Path.touch, (self.place,)


@pytest.fixture
def trainers_run(tmp_path) -> Path:
    """A run of openpi's PyTorch trainer with two steps, as `scripts/train_pytorch.py` saves them."""
    for step in ("1000", "2000"):
        folder = tmp_path / "run" / step
        (folder / "assets" / "robot").mkdir(parents=True)
        (folder / "assets" / "robot" / "norm_stats.json").write_text('{"norm_stats": {}}')
        shutil.copy(RECORDED / "openpi_torch_pi0" / "model.safetensors", folder)
        for name in ("optimizer.pt", "metadata.pt"):
            (folder / name).write_bytes(pickle.dumps(Harmful(tmp_path / "touched")))
    return tmp_path / "run"


def test_a_step_of_openpis_pytorch_trainer_gives_its_weights_and_its_pickles_are_not_read(trainers_run, caplog):
    caplog.set_level("INFO")
    case = load_case("openpi_torch_pi0")
    loader = CheckpointWeightLoader(params_path=str(trainers_run / "2000"))
    found = loader.load(case.config)
    assert found.keys() == case.params.keys()
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf.whole(), case.params[path], err_msg=path)
    assert re.search(r"pickles: optimizer\.pt, metadata\.pt.*optimizer begins anew", caplog.text)
    assert open_checkpoint(trainers_run / "2000", case.config).norm_stats == {"robot": {"norm_stats": {}}}
    with pytest.raises(CheckpointError, match="a trainer whose optimizer state is not read, as those in PyTorch"):
        dataclasses.replace(loader, continue_training=True).load_state(case.config)
    with pytest.raises(CheckpointError, match=r"a run's directory; give one of its steps, such as \S+/2000"):
        open_checkpoint(trainers_run, case.config)
    assert not (trainers_run.parent / "touched").exists()
