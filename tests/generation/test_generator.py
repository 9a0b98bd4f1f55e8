"""`Generator`: completions are those of the model run without a cache; rows do not depend on each other."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from openpi_train.generation.generator import GenerationRequest, Generator
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.nn.decoder import Decoder
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.lora import AdapterConfig
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import merge_module, module_params
from openpi_train.parallel.strategy import Plan

VOCABULARY, LONGEST = 29, 48
SIZES = DecoderSizes(
    vocab_size=VOCABULARY,
    width=16,
    depth=2,
    mlp_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    window=6,
    sliding_layers=(0,),
    tied=False,
)
GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=12)


@functools.cache
def model():
    """Graph, and parameters with a head large enough that tokens differ in probability."""
    module = Decoder(SIZES, AdapterConfig(), dtype=jnp.float32, remat="none", rngs=nnx.Rngs(3))
    params = module_params(module)
    return nnx.split(module)[0], {
        path: leaf * 30 if path in ("token_embedding", "head") else leaf for path, leaf in params.items()
    }


@functools.cache
def generator(num_devices=1, tensor=1, num_rows=4, **given):
    graph, params = model()
    mesh = make_mesh(num_devices // tensor, jax.devices()[:num_devices], tensor)
    plan = Plan(mesh=mesh, strategy="zero3", min_shard_mib=0)
    params = jax.device_put(params, plan.tree("state", params))
    settings = {"max_length": LONGEST, "end_ids": (0, 24), "chunk": 3} | given
    return Generator(graph, params, Devices(plan, jnp.float32, graph), num_rows=num_rows, **settings)


PROMPTS = [list(np.random.default_rng(seed).integers(1, VOCABULARY, 1 + 5 * seed % 19)) for seed in range(7)]
PROMPTS = [[int(token) for token in prompt] for prompt in PROMPTS]


def requests(settings=GREEDY, prompts=PROMPTS, **given):
    return [
        GenerationRequest(id=n, prompt=prompt, settings=settings, row=n, **given) for n, prompt in enumerate(prompts)
    ]


@jax.jit
def all_log_probs(tokens):
    graph, params = model()
    decoder = merge_module(graph, params)
    return jax.nn.log_softmax(decoder.logits(decoder(tokens)))


def log_probs_of(tokens):
    """Of the next token after each, without a cache [t, v]."""
    padded = np.zeros((1, LONGEST), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(all_log_probs(padded))[0, : len(tokens)]


@functools.cache
def greedy():
    return generator().complete(requests())


@pytest.mark.slow
def test_completions_of_many_lengths_are_those_of_the_model_without_a_cache():
    ended = 0
    for prompt, found in zip(PROMPTS, greedy(), strict=True):
        made = [*found.tokens, *([found.ending[0]] if found.ending else [])]
        values = [*found.log_probs, *([found.ending[1]] if found.ending else [])]
        after = log_probs_of([*prompt, *made])[len(prompt) - 1 : -1]
        np.testing.assert_array_equal(made, after.argmax(axis=1))
        np.testing.assert_allclose(values, after.max(axis=1), rtol=1e-4, atol=1e-5)
        assert found.finish_reason == ("stop" if found.ending else "length")
        assert len(made) == GREEDY.max_new_tokens or found.ending[0] in (0, 24)
        ended += found.ending is not None
    assert 0 < ended < len(PROMPTS)


SAMPLED = SamplingSettings(temperature=1.3, top_k=20, top_p=0.95, max_new_tokens=10, seed=5)


@functools.cache
def sampled():
    return generator().complete(requests(SAMPLED))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(4, 1), (4, 2)], ids=["4 devices", "2 groups of 2"])
def test_devices_and_tensor_groups_change_no_token(layout):
    many = generator(*layout)
    for settings, expected in ((GREEDY, greedy()), (SAMPLED, sampled())):
        for one, alone in zip(many.complete(requests(settings)), expected, strict=True):
            assert one.tokens == alone.tokens and one.finish_reason == alone.finish_reason
            np.testing.assert_allclose(one.log_probs, alone.log_probs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "sent"), [((4, 1), set()), ((4, 2), {"all_reduce"})], ids=["4 devices", "groups"])
def test_parameters_are_gathered_before_the_first_token_and_then_only_tensor_groups_send(layout, sent):
    many = generator(*layout)
    many.complete(requests())
    assert all(leaf.sharding.is_fully_replicated for leaf in many._params.values()) == (layout[1] == 1)
    decode = next(program for key, program in many._programs.items() if key[0] == "decode")
    with jax.set_mesh(many._devices.plan.real_mesh):
        text = decode.lower(many._params, None, many._rows).as_text()
    assert set(re.findall(r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)", text)) == sent


@pytest.mark.slow
def test_rows_do_not_depend_on_their_order_or_company():
    for order in ([6, 2, 4, 0, 5, 1, 3], [3]):
        some = [requests(SAMPLED)[number] for number in order]
        for number, one in zip(order, generator().complete(some), strict=True):
            assert one.tokens == sampled()[number].tokens


def test_seed_and_row_decide_what_is_drawn():
    prompt = [PROMPTS[2]] * 2
    other = generator().complete(requests(dataclasses.replace(SAMPLED, seed=6), prompt))
    same = generator().complete(requests(SAMPLED, prompt))
    assert len({tuple(one.tokens) for one in (*other, *same)}) == 4
    # The temperature of log-probabilities is the request's.
    made = same[0].tokens
    after = log_probs_of([*prompt[0], *made])[len(prompt[0]) - 1 : -1] / 1.3
    expected = after - np.log(np.exp(after).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(same[0].log_probs, expected[np.arange(len(made)), made], rtol=1e-4, atol=1e-4)


def test_each_token_has_random_numbers_of_its_own():
    """At a temperature at which all tokens are nearly equally probable, a row rarely has the same one twice running."""
    settings = dataclasses.replace(SAMPLED, temperature=1000.0, top_k=0, top_p=1.0, max_new_tokens=30)
    made = [token for one in generator().complete(requests(settings)) for token in one.tokens]
    repeated = np.mean(np.equal(made[1:], made[:-1]))
    assert repeated < 0.2, repeated


def test_a_long_prompt_beside_a_short_one_is_read_whole():
    prompts = [[5], [int(token) for token in np.random.default_rng(9).integers(1, VOCABULARY, 40)]]
    settings = dataclasses.replace(GREEDY, max_new_tokens=6)
    for prompt, found in zip(prompts, generator().complete(requests(settings, prompts)), strict=True):
        after = log_probs_of([*prompt, *found.tokens])[len(prompt) - 1 :]
        np.testing.assert_array_equal(found.tokens, after.argmax(axis=1)[: len(found.tokens)])
        np.testing.assert_allclose(found.log_probs, after.max(axis=1)[: len(found.tokens)], rtol=1e-4, atol=1e-5)


def test_steps_tell_what_each_request_got_and_a_cancelled_one_leaves_its_row():
    one = generator()
    for request in requests():
        one.submit(request)
    assert (one.num_running, one.num_waiting) == (0, 7)
    first = one.step()
    assert [event.id for event in first] == [0, 1, 2, 3] and one.num_waiting == 3
    assert all(len(event.tokens) == 3 for event in first if event.finish_reason is None)
    one.cancel(1)
    one.cancel(5)
    one.cancel("unknown")
    found = {event.id: [event] for event in first}
    while one.num_running or one.num_waiting:
        for event in one.step():
            found.setdefault(event.id, []).append(event)
    assert set(found) == {0, 1, 2, 3, 4, 6} and len(found[1]) == 1
    for number in (0, 2, 3, 4, 6):
        assert [token for event in found[number] for token in event.tokens] == greedy()[number].tokens


def test_what_is_released_is_used_again():
    one, (_, params) = generator(), model()
    held = len(jax.live_arrays())
    one.release()
    rows = 13  # arrays of `TokenRows`
    assert len(jax.live_arrays()) <= held - rows
    one.use(params)
    assert [found.tokens for found in one.complete(requests())] == [found.tokens for found in greedy()]
    one.submit(requests()[0])
    one.step()
    with pytest.raises(RuntimeError, match="1 completions are not finished"):
        one.release()
    one.cancel(0)
    one.cancel(0)


def test_stop_tokens_of_a_request_end_it():
    stop = greedy()[3].tokens[4]
    (found,) = generator().complete(
        [GenerationRequest(id="a", prompt=PROMPTS[3], settings=dataclasses.replace(GREEDY, stop_ids=(stop,)))]
    )
    first = greedy()[3].tokens.index(stop)
    assert found.tokens == greedy()[3].tokens[:first] and found.finish_reason == "stop"
    assert found.ending[0] == stop and len(found.log_probs) == first


def test_a_completion_ends_where_the_length_does():
    prompt = [3] * (LONGEST - 5)
    (found,) = generator().complete(requests(dataclasses.replace(GREEDY, max_new_tokens=99, seed=1), [prompt]))
    assert found.finish_reason == "stop" or len(found.tokens) == 5


def test_most_probable_tokens_are_told_where_asked_for():
    (found,) = generator().complete(requests(prompts=PROMPTS[2:3], num_top=4))
    after = log_probs_of([*PROMPTS[2], *found.tokens])[len(PROMPTS[2]) - 1 : -1]
    for place, top in enumerate(found.top):
        order = np.argsort(-after[place], kind="stable")[:4]
        np.testing.assert_array_equal([token for token, _ in top], order)
        np.testing.assert_allclose([value for _, value in top], after[place][order], rtol=1e-4, atol=1e-5)
    assert len(found.top) == len(found.tokens) and greedy()[2].top == [[]] * len(greedy()[2].tokens)


@pytest.mark.slow
def test_tokens_that_the_tokenizer_lacks_are_never_chosen():
    few = generator(vocab_size=9)
    settings = dataclasses.replace(SAMPLED, temperature=50.0, top_k=0, top_p=1.0)
    found = few.complete(requests(settings, [[1, 2], [3], [8]]))
    assert max(token for one in found for token in one.tokens) < 9
    with pytest.raises(ValueError, match=r"tokens from 9 to 9; allowed are 0 to 8"):
        few.submit(GenerationRequest(id=0, prompt=[9]))


@pytest.mark.parametrize(
    ("prompt", "changed", "told"),
    [
        ([], {}, "the prompt has no token"),
        ([1] * LONGEST, {}, f"has {LONGEST} tokens, which leaves no room"),
        ([1, -1], {}, "tokens from -1 to 1; allowed are 0 to 28"),
        ([1], {"temperature": float("nan")}, "temperature nan must be at least 0"),
        ([1], {"temperature": 1.3e-38}, "temperature 1.3e-38 must be 0, which takes .* or at least 1e-06"),
        ([1], {"top_k": 5 * 10**9}, "top_k 5000000000 must be from 0 to 2147483647"),
        ([1], {"stop_ids": (3 * 10**9,)}, r"stop_ids \[3000000000\] must be tokens, which are from 0 to 2147483647"),
        ([1], {"top_p": 0.0}, r"top_p 0.0 must be above 0 and at most 1"),
        ([1], {"min_p": 1.5}, "min_p 1.5 must be from 0 to 1"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens 0 must be at least 1"),
        ([1], {"seed": 2**32}, "seed 4294967296 must be from 0 to 4294967295"),
        ([1], {"stop_ids": tuple(range(9))}, "stop_ids has 9 tokens; the most are 8"),
        ([1], {"stop": ("",)}, "stop has an empty text"),
    ],
)
def test_what_cannot_be_is_named(prompt, changed, told):
    with pytest.raises(ValueError, match=told):
        generator().submit(GenerationRequest(id=0, prompt=prompt, settings=dataclasses.replace(GREEDY, **changed)))
    assert generator().num_waiting == 0
