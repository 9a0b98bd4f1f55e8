"""Models that language models are parts of: a reward model, and a policy beside its reference."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from openpi_train.interop.openpi import parameter_names, parameter_shapes
from openpi_train.models.language import LanguageConfig
from openpi_train.models.language.language_part import with_language
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.lora import AdapterConfig, without_additions
from openpi_train.parallel.params import Gathering, module_params, param_kinds
from openpi_train.training.init import initial_state

SIZES = DecoderSizes(vocab_size=24, width=16, depth=2, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, tied=False)
LANGUAGE = LanguageConfig(sizes=SIZES, dtype="float32", remat="none")
ADAPTED = dataclasses.replace(LANGUAGE, adapter=AdapterConfig(rank=2))
REWARD = RewardConfig(language=LANGUAGE)
COPIED = ReferencedConfig(policy=LANGUAGE)


@pytest.mark.slow
def test_reward_is_the_score_of_each_texts_last_token():
    """In whichever place of the row it is, and with padding that has a token's number."""
    model = REWARD.build(nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 24, (2, 12)).astype(np.int32)
    segments = np.array([[1] * 5 + [2] * 4 + [0] * 3, [2] * 3 + [1] * 9])
    positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0], [0, 1, 2, *range(9)]])
    assert not model.rewards(*map(jnp.asarray, (tokens, positions, segments))).any()  # zero at first
    model.score.weight[...] = jnp.asarray(np.random.default_rng(1).normal(size=(1, 16)), jnp.float32)
    found = model.rewards(*map(jnp.asarray, (tokens, positions, segments)))
    for row, number in ((0, 1), (0, 2), (1, 1), (1, 2)):
        alone = jnp.asarray(tokens[row, segments[row] == number])[None]
        x = model.decoder(alone)[:, -1]
        np.testing.assert_allclose(found[row, number - 1], (x @ model.score.weight[...].T)[0, 0], rtol=1e-4)


def test_reward_model_is_published_as_one_of_sequence_classification():
    names = parameter_names(REWARD)
    assert names["score/weight"] == "score/weight" and parameter_shapes(REWARD)["score/weight"] == (1, 16)
    assert names["decoder/token_embedding"] == "model/embed_tokens/weight"
    # No table scores tokens: nothing would train it.
    assert "lm_head/weight" not in names.values() and not REWARD.language.sizes.tied


def test_reward_models_adapter_and_head_train_and_fold():
    model = RewardConfig(language=ADAPTED)
    trained = {path for path in parameter_shapes(model) if not model.param_rules.frozen(path)}
    assert "score/weight" in trained and all("lora" in path for path in trained - {"score/weight"})
    assert len(trained) == 11 and not any(map(REWARD.param_rules.frozen, parameter_shapes(REWARD)))
    params = {path: jnp.ones(shape) for path, shape in parameter_shapes(model).items()}
    merged = model.param_rules.merge_lora(params)
    assert {path: leaf.shape for path, leaf in merged.items()} == parameter_shapes(model.without_lora())
    assert float(merged["decoder/layers/mlp/down/weight"][0, 0, 0]) == 1 + 2 * 8.0  # rank 2, alpha 16


@pytest.mark.parametrize("model", [REWARD, COPIED])
def test_parts_layers_are_gathered_one_by_one_and_its_groups_are_frozen_by_name(model):
    module = nnx.eval_shape(lambda: model.build(nnx.Rngs(0)))
    paths = set(parameter_shapes(model))
    stacked = {path for path, kind in param_kinds(module).items() if kind.gathering is Gathering.BY_LAYER}
    assert stacked == {path for path in paths if "/layers/" in path}
    groups = {
        name: {path for path in paths if re.fullmatch(pattern, path)}
        for name, pattern in model.param_rules.groups.items()
    }
    part = "decoder/" if model is REWARD else "policy/"
    assert f"{part}token_embedding" in groups["embeddings"] and f"{part}final_norm/scale" in groups["norms"]
    assert set().union(*groups.values()) == {path for path in paths if path.startswith((part, "score"))}
    is_open = with_language(model, dataclasses.replace(LANGUAGE, remat="auto"))
    assert set(is_open.compute.remat_choices) == {"none", "products", "dots", "attention", "full"}
    assert model.compute.check_tensor(1) == [] and model.compute.check_tensor(3)


def test_reference_is_a_copy_that_is_frozen_and_not_rounded():
    names = parameter_names(COPIED)
    assert names["policy/token_embedding"] == "model/embed_tokens/weight"
    assert names["reference/token_embedding"] == "reference/model/embed_tokens/weight"

    def state(model):
        return initial_state(model, optax.sgd(0.1), model.param_rules.frozen, False, 3)

    found = jax.jit(lambda: state(COPIED))()
    assert all(path.startswith("policy/") for path in found.params) and len(found.params) == len(found.frozen)
    for path, leaf in found.params.items():
        reference = found.frozen[path.replace("policy/", "reference/")]
        assert reference.dtype == jnp.float32
        np.testing.assert_array_equal(reference, leaf)
    # Of all other models, what is frozen is rounded.
    assert {leaf.dtype for leaf in jax.eval_shape(lambda: state(ADAPTED)).frozen.values()} == {jnp.dtype("bfloat16")}


@pytest.mark.slow
def test_policy_with_an_adapter_is_its_own_reference():
    adapted = ADAPTED.build(nnx.Rngs(0))
    params = module_params(adapted)
    tokens = jnp.arange(10)[None]
    plain = adapted(tokens)  # its additions are zero at first
    for path, variable in nnx.to_flat_state(nnx.state(adapted, nnx.Param)):
        if path[-1] == "lora_b":
            variable.set_value(jnp.ones_like(variable.get_value()))
    assert np.abs(adapted(tokens) - plain).max() > 0.1
    nnx.update(adapted, nnx.state(adapted))
    np.testing.assert_array_equal(adapted.reference(tokens), plain)
    assert adapted.layers.mlp.down.rank == 2  # still switched on
    assert params.keys() == module_params(adapted.reference).keys()
    with pytest.raises(ValueError, match="Decoder has no low-rank additions"):
        without_additions(LANGUAGE.build(nnx.Rngs(0)))


def test_models_without_a_reference_are_named():
    needs = frozenset({"token_scores", "reference"})
    assert not ADAPTED.check_objective("PreferencePairs", needs)
    assert not COPIED.check_objective("PreferencePairs", needs)
    (problem,) = LANGUAGE.check_objective("PreferencePairs", needs)
    assert "has none: train an adapter (--model.adapter.rank 16)" in problem
    (problem,) = REWARD.check_objective("PreferencePairs", needs)
    assert re.search("reference, token_scores, .*RewardConfig", problem)
    with pytest.raises(ValueError, match="is its own reference"):
        ReferencedConfig(policy=ADAPTED)
