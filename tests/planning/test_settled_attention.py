"""What `--model.attention auto` means for a run: by kind of device, by heads, and by what its devices compute."""

import dataclasses
import logging

import jax.numpy as jnp
import pytest

from openpi_train import registry
from openpi_train.nn import attention, siglip
from openpi_train.nn.attention import Heads
from openpi_train.parallel.mesh import planned_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.choose import on_kind
from openpi_train.planning.forecast import Machine
from openpi_train.planning.gpu import plugin
from openpi_train.runtime.device_kinds import GIB, UNKNOWN, find_kind
from openpi_train.training import prepare, start_check


def machine(kind: str | None) -> Machine:
    return Machine(kind=find_kind(kind) if kind else UNKNOWN, num_devices=1, num_hosts=1, available_bytes=int(64 * GIB))


def typed(model, dtype: str):
    """The model, of whatever parts, computing in `dtype`."""
    part = next((name for name in ("policy", "language") if hasattr(getattr(model, name, None), "dtype")), None)
    if part is None:
        return dataclasses.replace(model, dtype=dtype)
    return dataclasses.replace(model, **{part: typed(getattr(model, part), dtype)})


def experiment(name: str, dtype: str = "bfloat16", kind: attention.Attention = "auto"):
    one = registry.load(name)
    return dataclasses.replace(one, model=typed(one.model, dtype).with_compute(attention=kind))


def chosen(name: str, device: str | None, dtype: str = "bfloat16", kind: attention.Attention = "auto") -> str:
    model = on_kind(experiment(name, dtype, kind), machine(device)).model
    return next(kind for kind in ("auto", "xla", "cudnn") if model == model.with_compute(attention=kind))


# A tiny experiment of each family; those of reward models and of a policy with a reference have a model within.
NAMES = (
    "debug",
    "pi05_insulated_tiny",
    "pi0_fast_tiny",
    "paligemma_tiny",
    "tabletop_smolvla",
    "arithmetic_sft",
    "arithmetic_reward",
    "arithmetic_dpo",
    "arithmetic_ppo",
)


@pytest.mark.parametrize("name", NAMES)
def test_hopper_has_cudnn_s_if_all_heads_are_known_to_it(name):
    assert [chosen(name, kind) for kind in ("h100", "h200", "gh200")] == ["cudnn"] * 3
    assert [chosen(name, kind) for kind in ("a100", "b200", "rtx4090", None)] == ["xla"] * 4
    assert chosen(name, "h100", "float32") == "xla"
    assert chosen(name, "h100", kind="xla") == "xla" and chosen(name, None, kind="cudnn") == "cudnn"


@pytest.mark.parametrize("tensor_devices", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_the_heads_are_those_that_cudnn_gets(name, tensor_devices, monkeypatch):
    one, seen = experiment(name, kind="cudnn"), set()
    if problem := one.model.compute.check_tensor(tensor_devices):
        pytest.skip(problem[0])
    one = dataclasses.replace(one, sharding=dataclasses.replace(one.sharding, tensor_devices=tensor_devices))

    forms = [(attention, attention.flash_attend), (siglip, siglip.flash_attend)]
    layout = prepare.whole_layout(one, Plan(mesh=planned_mesh(1, 1), strategy="replicated"))
    for module, form in forms:

        def spied(query, key, value, mask, scale=None, form=form):
            seen.add((Heads(query.shape[2], key.shape[2], query.shape[3]), query.dtype))
            return form(query, key, value, mask, scale)

        monkeypatch.setattr(module, "flash_attend", spied)
    with plugin.pretended(find_kind("h100")):
        prepare.traced_gradient(one, layout)
    heads = experiment(name).model.compute.open_heads
    assert len(heads) == (1 if name.startswith("arithmetic") else 2)
    assert seen == {(each.of_device(tensor_devices), jnp.dtype(jnp.bfloat16)) for each in heads}


def test_what_cudnn_cannot_compute_stays_with_xla():
    language = registry.load("arithmetic_sft").model
    capped = dataclasses.replace(language.sizes, attention_cap=50.0)
    odd = dataclasses.replace(language.sizes, head_dim=4)
    for sizes, kind in ((capped, "auto"), (odd, "xla")):
        one = dataclasses.replace(
            registry.load("arithmetic_sft"), model=dataclasses.replace(language, sizes=sizes, dtype="bfloat16")
        )
        assert on_kind(one, machine("h100")).model.attention == kind
    assert chosen("tabletop_act", "h100") == "auto"  # it drops weights
    assert attention.best_kind([Heads(8, 1, 256), Heads(16, 16, 72)], jnp.bfloat16, find_kind("h100")) == "cudnn"
    assert attention.best_kind([Heads(8, 1, 256), Heads(2, 2, 20)], jnp.bfloat16, find_kind("h100")) == "xla"


def test_a_plan_forecasts_the_program_that_a_run_there_has():
    one = experiment("debug")
    layout = prepare.whole_layout(one, Plan(mesh=planned_mesh(1, 1), strategy="replicated"))

    def activations(kind: str, way: attention.Attention) -> float:
        with plugin.pretended(find_kind(kind)):
            given = dataclasses.replace(one, model=one.model.with_compute(attention=way))
            [found] = prepare.forecasts(on_kind(given, machine(kind)), layout, machine(kind), [1])
        return found.policy.activation_bytes_per_row

    assert activations("h100", "auto") == activations("h100", "cudnn") != activations("h100", "xla")
    assert activations("a100", "auto") == activations("a100", "xla")


@pytest.mark.parametrize(("problems", "found"), [([None, None], "auto"), ([None, "no engine"], "xla")])
def test_a_run_has_xla_s_on_all_processes_if_one_finds_cudnn_s_wrong(problems, found, monkeypatch, caplog):
    one, asked = experiment("debug"), []
    monkeypatch.setattr(start_check, "flash_problem", lambda heads, dtype: asked.append((heads, dtype)) or problems[0])
    monkeypatch.setattr(start_check.agree, "gather", lambda name, value: [value, *problems[1:]])
    monkeypatch.setattr(start_check, "kind_of", lambda _: find_kind("h100"))
    with caplog.at_level(logging.INFO):
        assert start_check.with_checked_attention(one).model.attention == found
    assert asked == [(list(one.model.compute.open_heads), one.model.compute.dtype)]
    said = "cuDNN's is not right on process 1: no engine" if found == "xla" else "attention by cuDNN: its outputs"
    assert said in caplog.text


@pytest.mark.parametrize(("device", "kind"), [("a100", "auto"), (None, "auto"), ("h100", "cudnn"), ("h100", "xla")])
def test_nothing_is_checked_where_auto_is_xla_s_or_the_flag_says_which(device, kind, monkeypatch):
    monkeypatch.setattr(start_check, "flash_problem", lambda *_: pytest.fail("it was checked"))
    monkeypatch.setattr(start_check, "kind_of", lambda _: find_kind(device) if device else UNKNOWN)
    one = experiment("debug", kind=kind)
    assert start_check.with_checked_attention(one) is one
