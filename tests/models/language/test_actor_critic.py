"""A policy beside a critic of its own: values, starts, what trains, what is said of a missing reference."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from openpi_train.interop.openpi import parameter_names, parameter_shapes
from openpi_train.models.language import LanguageConfig
from openpi_train.models.language.accompanied import policy_of
from openpi_train.models.language.actor_critic import ActorCriticConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.parallel.params import module_params

SIZES = DecoderSizes(vocab_size=24, width=16, depth=2, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, tied=False)
LANGUAGE = LanguageConfig(sizes=SIZES, dtype="float32", remat="none")
PAIR, TRIO = ActorCriticConfig(policy=LANGUAGE), ActorCriticConfig(policy=LANGUAGE, with_reference=True)


@pytest.mark.slow
def test_a_value_is_the_head_of_the_critics_own_activations():
    model = PAIR.build(nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (2, 6)))
    positions, segments = jnp.broadcast_to(jnp.arange(6), (2, 6)), jnp.ones((2, 6), jnp.int32)
    assert not model.values(tokens, positions, segments).any()  # zero at first
    model.critic.score.weight[...] = jnp.asarray(np.random.default_rng(1).normal(size=(1, 16)), jnp.float32)
    found = model.values(tokens, positions, segments)
    x = model.critic.decoder(tokens)
    np.testing.assert_allclose(found, (x @ model.critic.score.weight[...].T)[..., 0], rtol=1e-5, atol=1e-6)
    # Tokens that follow change no value, and the policy is another network.
    later = model.values(tokens.at[:, 4:].set(0), positions, segments)
    np.testing.assert_array_equal(later[:, :4], found[:, :4])
    assert (np.asarray(model(tokens)) != np.asarray(x)).any()


def test_all_parts_start_from_one_checkpoint_but_the_critics_head():
    start = module_params(LANGUAGE.build(nnx.Rngs(3)))
    for model, parts in ((PAIR, ("policy/",)), (TRIO, ("policy/", "reference/"))):
        found = model.base.start(start)
        assert found.keys() == parameter_shapes(model).keys() - {"critic/score/weight"}
        for path, leaf in start.items():
            assert all(found[part + path] is leaf for part in parts)
            assert path == "head" or found[f"critic/decoder/{path}"] is leaf


def test_policy_and_critic_train_and_the_reference_does_not():
    frozen = {path for path in parameter_shapes(TRIO) if TRIO.param_rules.frozen(path)}
    assert frozen == {path for path in parameter_shapes(TRIO) if path.startswith("reference/")} != set()
    names = parameter_names(TRIO)
    assert names["critic/score/weight"] == "critic/score/weight"
    assert names["critic/decoder/token_embedding"] == "critic/model/embed_tokens/weight"
    assert names["policy/token_embedding"] == "model/embed_tokens/weight"
    assert names["reference/token_embedding"] == "reference/model/embed_tokens/weight"
    assert policy_of(TRIO) == (LANGUAGE, "policy/")


def test_a_reference_that_is_not_there_is_named():
    needs = frozenset({"token_scores", "value", "reference"})
    assert "--model.with-reference" in PAIR.check_objective("PolicyGradient", needs)[0]
    assert not TRIO.check_objective("PolicyGradient", needs)
    assert not PAIR.check_objective("PolicyGradient", needs - {"reference"})
