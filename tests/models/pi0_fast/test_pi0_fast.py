"""pi0-FAST and the insulated pi0.5 beyond the golden numbers: positions, decoding, gradients, counts, checks."""

import dataclasses
import functools

import flops_by_hand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from pi0_case import LORA, SIZES, SLOTS, TINY, built, draws, observation, product_flops

from openpi_train import registry
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.vocabulary import log_probs, logits
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.insulated_flow import InsulatedFlow
from openpi_train.objectives.next_token import NextToken
from openpi_train.parallel.params import merge_module
from openpi_train.parallel.shard import Shard
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.decoding import choose_likeliest, decode
from openpi_train.sampling.flow import FlowSampler
from openpi_train.types import ActionBatch

FAST = Pi0FastConfig(
    paligemma_variant="dummy",
    language=GemmaOverrides(width=16, **SIZES),
    siglip=TINY.siglip,
    image_size=16,
    vocab_size=40,
    action_dim=5,
    action_horizon=4,
    max_token_len=8,
    max_decoding_steps=5,
    camera_slots=SLOTS,
    dtype="float32",
    remat="none",
)
INSULATED = dataclasses.replace(TINY, pi05=True, knowledge_insulation=True, max_token_len=8)


def seen_by(config, **changes):
    """Prompts of 3 and 5 tokens with 3 to say, in rows of 8; without masked images."""
    seen = observation(config, **changes)
    place, first = jnp.arange(8)[None], jnp.array([[3], [5]])
    said = (place >= first) & (place < first + 3)
    return dataclasses.replace(seen, prompt_mask=place < first + 3, token_ar_mask=said, token_loss_mask=said)


@pytest.mark.slow
def test_black_cameras_are_black_pictures_that_are_attended_to():
    config = dataclasses.replace(FAST, black_cameras=True)
    whole = seen_by(FAST)
    slot = sorted(whole.images)[0]
    there = {name: image for name, image in whole.images.items() if name != slot}
    masks = {name: whole.image_masks[name] for name in there}
    without = dataclasses.replace(whole, images=there, image_masks=masks)
    black = dataclasses.replace(
        whole,
        images={**there, slot: jnp.zeros(whole.images[slot].shape, jnp.uint8)},
        image_masks={**masks, slot: jnp.ones(2, bool)},
    )
    (plain, params), (filling, _) = built(FAST), built(config)
    outputs = {
        name: merge_module(graph, params).prompt(seen)
        for name, graph, seen in (("filled", filling, without), ("given", plain, black), ("left out", plain, without))
    }
    for field in ("tokens", "mask", "positions"):
        filled, given = (getattr(outputs[name], field) for name in ("filled", "given"))
        np.testing.assert_array_equal(filled, given)
    assert outputs["left out"].tokens.shape[1] < outputs["filled"].tokens.shape[1]
    assert config.num_tokens_seen(batch_of(config, without)) == FAST.num_tokens_seen(batch_of(FAST, black))
    scores = jax.jit(lambda params: merge_module(filling, params).token_log_probs(without)[0])
    expected = jax.jit(lambda params: merge_module(plain, params).token_log_probs(black)[0])
    np.testing.assert_array_equal(scores(params), expected(params))


def batch_of(config, seen):
    actions = jax.random.normal(jax.random.key(3), (2, config.action_horizon, config.action_dim))
    return ActionBatch(
        observation=seen,
        actions=actions,
        action_mask=jnp.ones(actions.shape[:2], bool),
        dim_mask=jnp.ones((2, config.action_dim), bool),
        row=jnp.arange(2),
    )


@pytest.fixture(scope="module")
def fast():
    """(parameters, model of them, compiled log-probabilities)."""
    graph, params = built(FAST)
    compiled = jax.jit(lambda params, seen: merge_module(graph, params).token_log_probs(seen)[0])
    return params, lambda params: merge_module(graph, params), compiled


@pytest.mark.slow
def test_an_absent_camera_gives_what_a_masked_one_gives_and_keeps_its_positions(fast):
    params, _, compiled = fast
    seen, absent = seen_by(FAST), "left_wrist_0_rgb"
    masked = dataclasses.replace(seen, image_masks=seen.image_masks | {absent: jnp.zeros(2, bool)})
    without = seen_by(FAST, slots=[slot for slot in SLOTS if slot != absent])
    counts = np.asarray(seen.prompt_mask)[:, 1:]
    expected = np.asarray(compiled(params, masked))[counts]
    # The sums of attention run over fewer zeros: float32 rounding.
    np.testing.assert_allclose(np.asarray(compiled(params, without))[counts], expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(np.asarray(compiled(params, seen))[counts], expected, atol=1e-3)


@pytest.mark.slow
def test_decoding_says_what_the_whole_sequence_makes_likeliest(fast):
    params, model, _ = fast
    seen = dataclasses.replace(seen_by(FAST), token_loss_mask=None)
    said = np.asarray(jax.jit(lambda params: model(params).sample_tokens(seen))(params))
    # The same tokens put behind the prompts: each must be the likeliest after those before it.
    place, first, steps = np.arange(10)[None], np.array([[3], [5]]), FAST.max_decoding_steps
    follows = (place >= first) & (place < first + steps)
    tokens = np.zeros((2, 10), np.int32)
    tokens[:, :8] = seen.prompt_tokens
    for row in range(2):
        tokens[row, first[row, 0] : first[row, 0] + steps] = said[row]
    whole = dataclasses.replace(
        seen,
        prompt_tokens=jnp.asarray(tokens),
        prompt_mask=jnp.asarray(place < first + steps),
        token_ar_mask=jnp.asarray(follows),
    )
    is_best = np.asarray(jax.jit(lambda params: model(params).token_log_probs(whole)[1])(params))
    ended = np.cumsum(said == 1, axis=1) - (said == 1) > 0  # behind the end there is padding
    assert (said[ended] == 0).all() and not ended.all()
    assert is_best[follows[:, 1:]][~ended.ravel()].all()


@pytest.mark.slow
def test_behind_the_end_of_a_row_there_is_padding_and_the_others_go_on(fast):
    params, model, _ = fast
    seen, steps = seen_by(FAST), FAST.max_decoding_steps

    @functools.partial(jax.jit, static_argnums=1)
    def decoded(params, end):
        policy = model(params)
        chosen = {"max_tokens": steps, "end": end, "choose": choose_likeliest}
        return decode(policy.transformer, policy.prompt(seen), **chosen)[0]

    free = np.asarray(decoded(params, -1))
    ends = [int(token) for token in free[0] if token not in free[1]]  # which the other row does not say
    found = np.asarray(decoded(params, ends[0]))
    place = free[0].tolist().index(ends[0])
    assert place < steps - 1
    assert found[0].tolist() == [*free[0][: place + 1], *[0] * (steps - 1 - place)]
    np.testing.assert_array_equal(found[1], free[1])


@pytest.mark.slow
def test_drawn_tokens_are_a_rows_own_and_a_low_temperature_takes_the_likeliest(fast):
    params, model, _ = fast
    seen = seen_by(FAST)

    @jax.jit
    def draw(params, keys, temperature_is_low):
        low, high = (model(params).sample_tokens(seen, keys, temperature) for temperature in (1e-4, 2.0))
        return jnp.where(temperature_is_low, low, high)

    keys = jax.random.split(jax.random.key(0), 2)
    greedy = jax.jit(lambda params: model(params).sample_tokens(seen))(params)
    np.testing.assert_array_equal(draw(params, keys, True), greedy)
    drawn = np.asarray(draw(params, keys, False))
    np.testing.assert_array_equal(draw(params, keys, False), drawn)
    # The other row's key changes, and this row's tokens do not.
    other = np.asarray(draw(params, keys.at[1].set(jax.random.key(7)), False))
    np.testing.assert_array_equal(other[0], drawn[0])
    assert (other[1] != drawn[1]).any()
    with pytest.raises(ValueError, match=r"temperature 1.0 draws tokens: give one key per row"):
        model(params).sample_tokens(seen, temperature=1.0)


@pytest.mark.slow
def test_a_table_cut_by_rows_gives_the_same_scores_and_gradients():
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (8, 37, 6))
    table = jax.random.normal(keys[1], (12, 6))
    tokens = jax.random.randint(keys[2], (8, 37), 0, 12)

    def total(x, table):
        found, is_best = log_probs(x, table, tokens)
        return (jnp.sin(found) * (1 + is_best)).sum(), (found, is_best, logits(x, table))

    def cut(x, part, tokens):
        def total(x, part):
            table = Shard(part, -2, "fsdp", jnp.float32)
            found, is_best = log_probs(x, table, tokens)
            return (jnp.sin(found) * (1 + is_best)).sum(), (found, is_best, logits(x, table))

        return jax.grad(total, (0, 1), has_aux=True)(x, part)

    cut_over = PartitionSpec("fsdp")
    run = jax.jit(jax.shard_map(cut, mesh=mesh, in_specs=cut_over, out_specs=cut_over))
    expected = jax.jit(jax.grad(total, (0, 1), has_aux=True))(x, table)
    for one, other in zip(jax.tree.leaves(run(x, table, tokens)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_next_token_counts_rows_or_tokens_and_no_filler():
    seen = seen_by(FAST)
    marked = seen.token_loss_mask.at[0, 4:].set(False)  # one token in the first row, three in the second
    batch = batch_of(FAST, dataclasses.replace(seen, token_loss_mask=marked))
    found = jnp.arange(14.0).reshape(2, 7)
    is_best = found > 9
    by_row, by_token = NextToken(), NextToken(mean_over="tokens")
    values = np.asarray(found)
    first, second = values[0, 2], values[1, 4:7]
    for objective, expected, accuracy in (
        (by_row, -(first + second.mean()) / 2, (0 + 1) / 2),
        (by_token, -(first + second.sum()) / 4, 3 / 4),
    ):
        loss, metrics = objective.loss_of(batch, objective.norms(batch), found, is_best)
        np.testing.assert_allclose((loss, metrics["token_accuracy"]), (expected, accuracy), rtol=1e-6)
    filler = dataclasses.replace(batch, action_mask=batch.action_mask.at[1].set(False))
    loss, _ = by_row.loss_of(filler, by_row.norms(filler), found, is_best)
    np.testing.assert_allclose(loss, -first, rtol=1e-6)


@pytest.fixture(scope="module")
def insulated():
    """(parameters, batch, InsulatedFlow's loss and the gradients of its parts, by name)."""
    graph, params = built(INSULATED)
    batch = batch_of(INSULATED, seen_by(INSULATED))
    objective = InsulatedFlow(flow=FlowMatching(augment=False, num_flow_draws=2), flow_weight=2.0, token_weight=0.5)
    keys = jax.random.split(jax.random.key(5), 2)

    def parts(params):
        loss, metrics = objective.loss(merge_module(graph, params), batch, objective.norms(batch), keys)
        return {"loss": loss, "flow_loss": metrics["flow_loss"], "token_loss": metrics["token_loss"]}

    values, gradients = jax.jit(lambda params: (parts(params), jax.jacrev(parts)(params)))(params)
    return params, batch, values, gradients


@pytest.mark.slow
def test_the_flow_loss_has_exactly_no_gradient_in_the_backbone_and_the_token_loss_none_in_the_expert(insulated):
    params, _, values, gradients = insulated
    np.testing.assert_allclose(values["loss"], 2.0 * values["flow_loss"] + 0.5 * values["token_loss"], rtol=1e-6)
    backbone = {path for path in params if path.startswith("image_encoder/") or "token_embedding" in path}
    backbone |= {path for path in params if "/language/" in path}
    assert len(backbone) > 20 and {"action_in_proj/kernel", "time_mlp_in/bias"} <= params.keys() - backbone
    for path in params:
        of_flow, of_tokens = gradients["flow_loss"][path], gradients["token_loss"][path]
        assert bool(jnp.any(of_flow)) != (path in backbone), path
        assert bool(jnp.any(of_tokens)) == (path in backbone), path


@pytest.mark.slow
def test_the_insulated_language_model_says_what_pi0_fast_says_with_its_parameters(insulated):
    """With all images there, positions are the same; and pi0-FAST is held to openpi's numbers (`tests/golden`)."""
    params, batch, _, _ = insulated
    seen = batch.observation
    plain = nnx.split(nnx.eval_shape(lambda: FAST.build(nnx.Rngs(0))))[0]
    own = {path: params[path] for path in built(FAST)[1]}
    expected, expected_best = jax.jit(lambda own: merge_module(plain, own).token_log_probs(seen))(own)
    graph, inputs = built(INSULATED)[0], draws(INSULATED, 1)
    said = jax.jit(lambda params: merge_module(graph, params).velocity_and_log_probs(seen, *inputs)[1:])
    found, best = said(params)
    counts = np.asarray(seen.prompt_mask)[:, 1:]
    np.testing.assert_allclose(np.asarray(found)[counts], np.asarray(expected)[counts], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(best)[counts], np.asarray(expected_best)[counts])


@pytest.mark.slow
def test_insulation_and_the_tokens_to_be_said_change_no_velocity(insulated):
    params, batch, _, _ = insulated
    seen, inputs = batch.observation, draws(INSULATED, 2)
    plain = dataclasses.replace(INSULATED, knowledge_insulation=False)
    prompt = dataclasses.replace(
        seen, prompt_mask=seen.prompt_mask & ~seen.token_ar_mask, token_ar_mask=None, token_loss_mask=None
    )

    def models(config):
        return nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))[0]

    expected = jax.jit(lambda params: merge_module(models(plain), params).velocity(prompt, *inputs))(params)
    ours = jax.jit(lambda params: merge_module(models(INSULATED), params).velocity(seen, *inputs))(params)
    # The sums of attention run over fewer zeros: float32 rounding.
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
    noise = inputs[0][:, 0]

    @jax.jit
    def sample(params, seen):
        return FlowSampler().sample(merge_module(models(INSULATED), params), seen, noise, None, 2)

    np.testing.assert_allclose(sample(params, seen), sample(params, prompt), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [FAST, INSULATED], ids=["pi0_fast", "insulated"])
def test_flops_are_those_of_the_traced_program(config):
    graph, params = built(config)
    seen, inputs = seen_by(config), draws(config, 3)

    def forward(params):
        model = merge_module(graph, params)
        return model.token_log_probs(seen) if config is FAST else model.velocity_and_log_probs(seen, *inputs)

    counted = product_flops(jax.make_jaxpr(forward)(params).jaxpr) / 2
    expected = flops_by_hand.pi0_fast(config, 3) if config is FAST else flops_by_hand.pi0(config, 3, 3)
    np.testing.assert_allclose(counted, expected, rtol=1e-6)


def test_a_flag_without_its_objective_and_an_objective_without_its_flag_are_refused():
    experiment = dataclasses.replace(registry.load("pi05_insulated_tiny"), exp_name="x")
    experiment.check(1)
    with pytest.raises(UsageError, match=r"--model\.knowledge-insulation .*FlowMatching.*InsulatedFlow"):
        dataclasses.replace(experiment, objective=FlowMatching()).check(1)
    plain = dataclasses.replace(experiment.model, knowledge_insulation=False)
    with pytest.raises(UsageError, match=r"InsulatedFlow .*--model\.knowledge-insulation"):
        dataclasses.replace(experiment, model=plain).check(1)
    fast = dataclasses.replace(registry.load("pi0_fast_tiny"), exp_name="x")
    with pytest.raises(UsageError, match=r"FlowMatching .*velocity.*Pi0FastConfig"):
        dataclasses.replace(fast, objective=FlowMatching()).check(1)
    with pytest.raises(ValueError, match=r"knowledge_insulation needs pi0.5's prompt.*: also set pi05"):
        dataclasses.replace(experiment.model, pi05=False)
    with pytest.raises(ValueError, match="flow_weight 0 and token_weight"):
        InsulatedFlow(flow_weight=0)
    with pytest.raises(ValueError, match=r"no camera slot right_wrist_0_rgb; it has base_0_rgb, left_wrist_0_rgb"):
        fast.model.rows.batch_spec(1, ["base_0_rgb", "right_wrist_0_rgb"])


@pytest.mark.slow
def test_merged_lora_computes_the_same():
    config = dataclasses.replace(FAST, language=GemmaOverrides(width=16, **SIZES, **LORA))
    graph, params = built(config)
    assert all(config.param_rules.frozen(path) == ("transformer" in path and "lora_" not in path) for path in params)
    plain, seen = config.without_lora(), seen_by(config)
    expected = jax.jit(lambda params: merge_module(graph, params).logits(seen))(params)
    merged_graph = nnx.split(nnx.eval_shape(lambda: plain.build(nnx.Rngs(0))))[0]
    result = jax.jit(lambda params: merge_module(merged_graph, params).logits(seen))(
        config.param_rules.merge_lora(params)
    )
    # Equal in exact arithmetic; two orders of multiplication round differently in float32.
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4 * float(jnp.abs(expected).max()))
