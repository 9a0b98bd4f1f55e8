"""SmolVLA against what LeRobot computed and wrote: loss, gradients, chunks, rows; its folder, read and written."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import smolvla_case
from flax import nnx

from openpi_train.checkpoints.checkpoint_formats import model_params, named, open_checkpoint
from openpi_train.data.robot.normalize import normalize, parse_norm_stats, unnormalize
from openpi_train.data.robot.tokens import open_tokenizer, token_files
from openpi_train.data.robot.transforms import ResizeImages
from openpi_train.interop.openpi import published_params
from openpi_train.interop.openpi_torch import layouts_of
from openpi_train.interop.place import Place
from openpi_train.interop.safetensors_file import open_file, open_model, write_file
from openpi_train.interop.stored_leaves import Stored
from openpi_train.models.smolvla import SmolVlaConfig
from openpi_train.models.smolvla.lerobot_smolvla import layout
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.parallel.params import merge_module
from openpi_train.runtime.exits import CheckpointError

CONFIG, IO = smolvla_case.config(), smolvla_case.RECORDED.arrays
OBJECTIVE = FlowMatching(mask_action_dims=True, augment=False)
# What LeRobot trains of a published policy.
TRAINED = ("state_proj", "action_", "expert")


@pytest.fixture(scope="module")
def stored() -> Stored:
    return open_checkpoint(smolvla_case.RECORDED.folder, CONFIG)


@pytest.fixture(scope="module")
def ours(stored):
    """Gradients of the recorded step, of all parameters and with a fixed backbone; loss; and the chunk; one program."""
    batch = smolvla_case.batch()
    norms = OBJECTIVE.norms(batch)
    noise, time = (jnp.asarray(IO[f"in/{name}"])[:, None] for name in ("noise", "time"))
    abstract = nnx.eval_shape(lambda: CONFIG.build(nnx.Rngs(0)))
    whole = nnx.split(abstract)[0]
    abstract.fixed_backbone = True
    fixed = nnx.split(abstract)[0]

    def compute(params):
        trained = {path: leaf for path, leaf in params.items() if path.startswith(TRAINED)}

        def loss(params, graphdef):
            return OBJECTIVE.loss_at(merge_module(graphdef, params), batch, norms, noise, time)[0]

        value, grads = jax.value_and_grad(loss)(params, whole)
        of_expert = jax.grad(lambda trained: loss({**params, **trained}, fixed))(trained)
        model = merge_module(whole, params)
        chunk = OBJECTIVE.action_sampler.sample(model, batch.observation, noise[:, 0], None, 10)
        return grads, of_expert, {"out/loss": value, "out/chunk": chunk[..., : IO["out/chunk"].shape[-1]]}

    params = {path: jnp.asarray(leaf.whole()) for path, leaf in model_params(stored, CONFIG).items()}
    return jax.tree.map(np.asarray, jax.jit(compute)(params))


def test_loss_and_chunk_are_lerobots(ours):
    apart = {key: np.abs(value - IO[key]).max() / np.abs(IO[key]).max() for key, value in ours[2].items()}
    float32 = smolvla_case.RECORDED.facts["float32"]
    print({key: f"{value:.1e}" for key, value in apart.items()}, "LeRobot's float32:", float32)
    assert apart["out/loss"] < 2e-6  # rounding of float32, of which LeRobot's own has 2e-7
    # And that of the flow times, which are summed up in float32 as openpi's are: 250 turns make 1e-4 of 1e-7.
    assert apart["out/chunk"] < 2e-5


def test_gradient_of_every_parameter_has_lerobots_norm(ours):
    least, apart, seen = smolvla_case.RECORDED.facts["sizes"]["least"], {}, []
    for path, grad in ours[0].items():
        for place, tensor in layout(CONFIG, path, grad.shape).tensors.items():
            wanted = IO[f"grad/model.{tensor}"]
            seen.append(float(wanted))
            apart[tensor] = abs(np.linalg.norm(grad[place]) - wanted) / max(wanted, least)
    print(f"largest difference of {len(apart)} norms {max(apart.values()):.1e}")
    assert len(apart) == sum(name.startswith("grad/") for name in IO)
    assert np.mean(np.array(seen) > least) > 0.8
    # Rounding of float32, of which LeRobot's own has up to 6e-5.
    assert max(apart.values()) < 5e-5


def test_a_fixed_backbone_changes_no_gradient_of_the_others(ours):
    assert {path.split("/")[0] for path in ours[1]} == {"expert", "expert_norm", "state_proj"} | {
        f"action_{name}" for name in ("in_proj", "out_proj", "time_mlp_in", "time_mlp_out")
    }
    for path, grad in ours[1].items():
        np.testing.assert_allclose(grad, ours[0][path], rtol=1e-4, atol=1e-6, err_msg=path)


def test_rows_are_normalised_as_lerobots_processors_do(stored):
    stats = parse_norm_stats(stored.norm_stats["lerobot"], "the folder")
    for name in ("state", "actions"):
        normal = normalize(IO[f"in/{name}"], stats[name], CONFIG.rows.normalization)
        # Here 1e-6 is added to a scale of 0.5 and more, there 1e-8.
        np.testing.assert_allclose(normal, IO[f"norm/{name}"], rtol=4e-6, atol=2e-6)
    back = unnormalize(IO["norm/actions"][:, 0], stats["actions"], CONFIG.rows.normalization)
    np.testing.assert_allclose(back, IO["norm/back"], rtol=4e-6, atol=4e-6)


def test_images_are_scaled_as_lerobots_but_for_rounding_to_bytes():
    names = [name.removeprefix("scale/in/") for name in IO if name.startswith("scale/in/")]
    resize = ResizeImages(CONFIG.image_size, into_corner=True)
    assert sorted(names) == ["high", "small", "square", "wide"]
    for name in names:
        found = resize({"image/x": IO[f"scale/in/{name}"]})["image/x"]
        # Half a byte, and the rounding of float32 at ties.
        np.testing.assert_allclose(found, 255 * IO[f"scale/out/{name}"], atol=0.5001, err_msg=name)


def test_prompts_are_tokenized_as_lerobots_and_kept_with_checkpoints(tmp_path):
    folder, texts = smolvla_case.RECORDED.folder / "tokenizer", smolvla_case.RECORDED.facts["texts"]
    words = open_tokenizer(CONFIG, str(folder))
    for text, tokens, mask in zip(texts, IO["text/tokens"], IO["text/mask"], strict=True):
        found, valid = words.prompt(text, CONFIG.max_token_len)
        np.testing.assert_array_equal(valid, mask)
        np.testing.assert_array_equal(found[valid], tokens[mask])
    assert CONFIG.rows.text_length(words, [(text, 4) for text in texts]) == CONFIG.max_token_len
    assert words.longest_prompt(texts[1]) == IO["text/mask"][1].sum()
    with pytest.raises(ValueError, match=r"has \d+ tokens; the model reads 8"):
        words.without_cuts().prompt(texts[2], CONFIG.max_token_len)
    with pytest.raises(ValueError, match="no state in them"):
        words.prompt(texts[0], CONFIG.max_token_len, np.zeros(3))
    for path, content in token_files(CONFIG, words).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    again = open_tokenizer(CONFIG, str(tmp_path / "tokenizer"))
    assert again.fingerprint == words.fingerprint and again.prompt_tokens(texts[0]) == words.prompt_tokens(texts[0])
    with pytest.raises(ValueError, match="the model's vocabulary only 10"):
        open_tokenizer(dataclasses.replace(CONFIG, vocab_size=10), str(folder))


def test_names_and_shapes_of_the_published_size_are_lerobots():
    model = SmolVlaConfig()
    layouts = layouts_of(model, lambda name, shape: layout(model, name, shape))
    shapes = {f"model.{tensor}": list(one.tensor_shape) for one in layouts.values() for tensor in one.tensors.values()}
    assert shapes == json.loads((smolvla_case.RECORDED.folder / "published.json").read_text())
    assert sum(np.prod(leaf.shape) for leaf in published_params(model).values()) == sum(map(np.prod, shapes.values()))


def test_what_is_written_is_lerobots_folder_again(stored, tmp_path):
    named("lerobot").write(tmp_path / "out", stored, CONFIG)
    others = {"io.npz", "recorded.json", "published.json", "tokenizer"}
    names = {path.name for path in smolvla_case.RECORDED.folder.iterdir()} - others
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    written, genuine = (open_model(Place.of(folder)) for folder in (tmp_path / "out", smolvla_case.RECORDED.folder))
    assert list(written) == list(genuine)
    for tensor, leaf in genuine.items():
        np.testing.assert_array_equal(written[tensor].whole(), leaf.whole(), err_msg=tensor)
    for name in ("policy_preprocessor.json", "policy_postprocessor.json", "config.json"):
        ours, theirs = (
            json.loads((folder / name).read_text()) for folder in (tmp_path / "out", smolvla_case.RECORDED.folder)
        )
        for step in (step for pipeline in (ours, theirs) for step in pipeline.get("steps", [])):
            step["config"].pop("eps", None)  # ours is 1e-6
        assert {**theirs, **ours} == theirs
    for file in (name for name in names if "normalizer_processor" in name):
        ours, theirs = (
            open_file(Place.of(folder), file) for folder in (tmp_path / "out", smolvla_case.RECORDED.folder)
        )
        for key, leaf in ours.items():
            np.testing.assert_allclose(leaf.whole(), theirs[key].whole(), rtol=1e-6)
    again = open_checkpoint(tmp_path / "out", CONFIG)
    assert again.norm_stats == stored.norm_stats and again.params.keys() == stored.params.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_horizon": 7}, "chunk_size is 5: give --model.action-horizon 5"),
        ({"action_dim": 8}, "max_state_dim is 6: give --model.action-dim 6"),
        ({"num_vlm_layers": 2}, "num_vlm_layers is 4: give --model.num-vlm-layers 4"),
        ({"image_size": 32}, r"resize_imgs_with_padding is \[16, 16\]: give --model.image-size 16"),
        ({"mlp_dim": 48}, r"mlp.down_proj.weight is \(32, 40\), the model wants \(32, 48\)"),
    ],
)
def test_another_policy_is_refused_with_the_flag_to_give(changes, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(smolvla_case.RECORDED.folder, dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("attention_mode", "self_attn", "attention_mode is 'self_attn': SmolVLA here has 'cross_attn'"),
        ("num_expert_layers", 2, "num_expert_layers is 2"),
        ("resize_imgs_with_padding", None, "the images of SmolVLA here are squares"),
        ("use_peft", True, "its weights are adapters"),
        ("normalization_mapping", {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX"}, "it normalises images by MEAN_STD"),
        ("type", "act", "holds a policy of type 'act' and the model is 'smolvla': give an experiment of act"),
    ],
)
def test_what_is_not_implemented_is_refused(field, value, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(smolvla_case.RECORDED.with_field(field, value, tmp_path), CONFIG)


def test_a_tensor_that_is_not_the_models_is_named(stored, tmp_path):
    tensors = dict(open_model(Place.of(smolvla_case.RECORDED.folder)))
    known = "model.vlm_with_expert.lm_expert.layers.3.self_attn.k_proj.weight"
    tensors["model.vlm_with_expert.lm_expert.lm_head.weight"] = tensors.pop(known)
    write_file(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text((smolvla_case.RECORDED.folder / "config.json").read_text())
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path, CONFIG)
    assert "vlm_with_expert.lm_expert.layers.3.self_attn.k_proj.weight" in str(error.value)
    assert "vlm_with_expert.lm_expert.lm_head.weight" in str(error.value)
