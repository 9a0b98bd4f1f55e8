"""ACT against what LeRobot computed and wrote: loss, gradients, chunks, ensembles; its folder, read and written."""

import dataclasses
import json

import act_case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from openpi_train.checkpoints.checkpoint_formats import model_params, named, open_checkpoint
from openpi_train.data.robot.normalize import normalize, parse_norm_stats, unnormalize
from openpi_train.envs.ensembling import ensemble
from openpi_train.interop.place import Place
from openpi_train.interop.safetensors_file import open_file, open_model, write_file
from openpi_train.interop.stored_leaves import Stored
from openpi_train.models.act import ActConfig
from openpi_train.models.act.lerobot_act import config_of, layout
from openpi_train.objectives.conditional_vae import ConditionalVae
from openpi_train.parallel.params import merge_module
from openpi_train.runtime.exits import CheckpointError, UsageError

CONFIG, IO = act_case.config(), act_case.RECORDED.arrays


@pytest.fixture(scope="module")
def stored() -> Stored:
    return open_checkpoint(act_case.RECORDED.folder, CONFIG)


@pytest.fixture(scope="module")
def ours(stored):
    """Losses, gradients of the recorded step, and the chunk that is sampled; one program."""
    objective, batch = ConditionalVae(), act_case.batch()
    graphdef = nnx.split(nnx.eval_shape(lambda: CONFIG.build(nnx.Rngs(0))))[0]
    noise = jnp.asarray(IO["in/latent_noise"])

    def compute(params):
        def loss(params):
            return objective.loss_at(merge_module(graphdef, params), batch, objective.norms(batch), noise)

        model = merge_module(graphdef, params)
        chunk = objective.action_sampler.sample(model, batch.observation, batch.actions, None, 10)
        return jax.grad(loss, has_aux=True)(params), chunk

    params = {path: jnp.asarray(leaf.whole()) for path, leaf in model_params(stored, CONFIG).items()}
    (grads, losses), chunk = jax.jit(compute)(params)
    return jax.tree.map(np.asarray, grads), {f"out/{name}": value for name, value in losses.items()} | {
        "out/chunk": chunk
    }


def test_losses_and_chunk_are_lerobots(ours):
    apart = {key: np.abs(value - IO[key]).max() / np.abs(IO[key]).max() for key, value in ours[1].items()}
    print(
        {key: f"{value:.1e}" for key, value in apart.items()}, "LeRobot's float32:", act_case.RECORDED.facts["float32"]
    )
    # Rounding of float32, of which LeRobot's own has up to 3e-7.
    assert max(apart.values()) < 2e-6


def test_gradient_of_every_parameter_has_lerobots_norm(ours):
    least, apart, seen = act_case.RECORDED.facts["sizes"]["least"], {}, []
    for path, grad in ours[0].items():
        for place, tensor in layout(path, grad.shape).tensors.items():
            if CONFIG.param_rules.frozen(path):
                assert f"grad/model.{tensor}" not in IO  # a buffer there
                continue
            wanted = IO[f"grad/model.{tensor}"]
            seen.append(float(wanted))
            apart[tensor] = abs(np.linalg.norm(grad[place]) - wanted) / max(wanted, least)
    print(f"largest difference of {len(apart)} norms {max(apart.values()):.1e}")
    assert len(apart) == sum(name.startswith("grad/") for name in IO)
    assert np.mean(np.array(seen) > least) > 0.9
    # As above; LeRobot's own float32 is 8e-7 from its float64.
    assert max(apart.values()) < 5e-6


def test_executed_actions_are_those_of_lerobots_temporal_ensemble():
    chunks, rate = IO["ensemble/chunks"], act_case.RECORDED.facts["sizes"]["coefficient"]
    for step, wanted in enumerate(IO["ensemble/executed"]):
        plans = list(chunks[max(0, step + 1 - chunks.shape[2]) : step + 1])
        executed = ensemble(plans, range(len(plans))[::-1], rate)[:, 0]
        # LeRobot adds chunk after chunk in float32, here the sum is in float64.
        np.testing.assert_allclose(executed, wanted, atol=1e-6)


def test_rows_are_normalised_as_lerobots_processors_do(stored):
    stats = parse_norm_stats(stored.norm_stats["lerobot"], "the folder")
    for name in ("state", "actions"):
        normal = normalize(IO[f"in/{name}"], stats[name], CONFIG.rows.normalization)
        # Here 1e-6 is added to a scale of 0.5 and more, there 1e-8.
        np.testing.assert_allclose(normal, IO[f"norm/{name}"], rtol=4e-6, atol=2e-6)
    back = unnormalize(IO["norm/actions"][:, 0], stats["actions"], CONFIG.rows.normalization)
    np.testing.assert_allclose(back, IO["norm/back"], rtol=4e-6, atol=4e-6)


def test_what_is_written_is_lerobots_folder_again(stored, tmp_path, caplog):
    named("lerobot").write(tmp_path / "out", stored, CONFIG)
    assert "LeRobot does not load this folder" in caplog.text  # the recorded backbone was made smaller by hand
    assert config_of(ActConfig())["vision_backbone"] == "resnet18"
    assert caplog.text.count("does not load") == 1
    names = {path.name for path in act_case.RECORDED.folder.iterdir()} - {"io.npz", "recorded.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    written, genuine = (open_model(Place.of(folder)) for folder in (tmp_path / "out", act_case.RECORDED.folder))
    assert list(written) == list(genuine)
    for tensor, leaf in genuine.items():
        np.testing.assert_array_equal(written[tensor].whole(), leaf.whole(), err_msg=tensor)
    for name in ("policy_preprocessor.json", "policy_postprocessor.json", "config.json"):
        ours, theirs = (
            json.loads((folder / name).read_text()) for folder in (tmp_path / "out", act_case.RECORDED.folder)
        )
        for step in (step for pipeline in (ours, theirs) for step in pipeline.get("steps", [])):
            step["config"].pop("eps", None)  # ours is 1e-6
        ours |= {"dropout": 0.0} if "dropout" in ours else {}  # the recorded policy was made without
        assert {**theirs, **ours} == theirs
    file = next(name for name in names if name.startswith("policy_preprocessor_step"))
    ours, theirs = (open_file(Place.of(folder), file) for folder in (tmp_path / "out", act_case.RECORDED.folder))
    for key, leaf in ours.items():
        added = 1e-6 * ("images" in key and key.endswith("std"))  # by our processors, to every divisor
        np.testing.assert_allclose(leaf.whole() + added, theirs[key].whole(), rtol=1e-6)
    again = open_checkpoint(tmp_path / "out", CONFIG)
    assert again.norm_stats == stored.norm_stats and again.params.keys() == stored.params.keys()


def test_statistics_among_the_tensors_are_those_of_older_versions(stored, tmp_path):
    """Their names are those of lerobot 0.3.3 (`policies/normalize.py`): published policies are older than 0.4."""
    tensors = dict(open_model(Place.of(act_case.RECORDED.folder)))
    now = open_file(Place.of(act_case.RECORDED.folder), "policy_preprocessor_step_3_normalizer_processor.safetensors")
    for name, leaf in now.items():
        feature, _, key = name.rpartition(".")
        parts = ("normalize_targets", "unnormalize_outputs") if feature == "action" else ("normalize_inputs",)
        tensors |= {
            f"{part}.buffer_{feature.replace('.', '_')}.{key}": leaf for part in parts if key in ("mean", "std")
        }
    write_file(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text((act_case.RECORDED.folder / "config.json").read_text())
    old = open_checkpoint(tmp_path, CONFIG)
    assert old.params.keys() == stored.params.keys()
    kept = ("mean", "std")
    assert old.norm_stats["lerobot"]["norm_stats"] == {
        name: {key: entry[key] for key in kept} for name, entry in stored.norm_stats["lerobot"]["norm_stats"].items()
    }
    with pytest.raises(CheckpointError, match=r"give --model.image-mean"):
        open_checkpoint(tmp_path, dataclasses.replace(CONFIG, image_mean=(0.5, 0.5, 0.5)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim_feedforward": 32}, "dim_feedforward is 24: give --model.dim-feedforward 24"),
        ({"use_vae": False}, "use_vae is True: give --model.use-vae"),
        ({"action_horizon": 7}, "chunk_size is 6: give --model.action-horizon 6"),
        ({"cameras": ("top",)}, "it has the cameras top, wrist: give --model.cameras top wrist"),
        ({"image_std": (0.5, 0.5, 0.5)}, "the std 0.229 0.224 0.225: give --model.image-std 0.229 0.224 0.225"),
    ],
)
def test_another_policy_is_refused_with_the_flag_to_give(changes, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(act_case.RECORDED.folder, dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("pre_norm", True, "pre_norm is True: ACT here has False, choose another policy"),
        ("vision_backbone", "resnet50", "vision_backbone is 'resnet50'"),
        ("type", "pi0", "holds a policy of type 'pi0' and the model is 'act': give an experiment of pi0"),
        ("type", "vqbet", "holds a policy of type 'vqbet'; allowed: pi0, pi05, pi0_fast, act"),
        ("normalization_mapping", {"ACTION": "MIN_MAX"}, "by mean and standard deviation"),
    ],
)
def test_what_is_not_implemented_is_refused(field, value, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(act_case.RECORDED.with_field(field, value, tmp_path), CONFIG)


def test_a_policy_without_cameras_is_not_lerobots(stored, tmp_path):
    blind = dataclasses.replace(CONFIG, cameras=())
    with pytest.raises(UsageError, match="reads at least one image"):
        named("lerobot").write(tmp_path / "out", stored, blind)
    assert not (tmp_path / "out").exists()
