"""jax's private names, which only `plugin.py` has; what is set for the plugin, and what is said where it is missing."""

import importlib
import inspect
import re

import jax
import pytest
from jax.experimental import topologies

from openpi_train.nn import attention
from openpi_train.planning.gpu import plugin
from openpi_train.planning.gpu.targets import TARGETS, GpuTarget
from openpi_train.runtime.exits import UsageError

BY_KIND = {target.kind: target for target in TARGETS}


def asked(name: str):
    return getattr(importlib.import_module(plugin.ASKING_MODULE), name)


def test_jax_still_asks_these_functions_what_a_gpu_can_do():
    """If this fails, jax has renamed them or asks something else: look how `check_is_flash_attention` asks now."""
    assert [list(inspect.signature(asked(name)).parameters) for name in plugin.ASKED] == [
        [],
        ["capability"],
        ["capability"],
    ]
    source = inspect.getsource(importlib.import_module(plugin.ASKING_MODULE))
    in_bodies = set(re.findall(r"\b((?:check|is)_(?:cudnn|cuda|compute)\w+)\(", source))
    assert in_bodies == set(plugin.ASKED)
    assert "kwargs" in inspect.signature(topologies.get_topology_desc).parameters


@pytest.mark.parametrize(("kind", "is_hopper_or_later"), [("a100", False), ("rtx4090", False), ("h100", True)])
def test_what_jax_asks_is_answered_for_the_target_and_only_inside(kind, is_hopper_or_later):
    before = [asked(name) for name in plugin.ASKED]
    with plugin.pretended(BY_KIND[kind]):
        assert asked("check_cudnn_version")() == 91000
        assert asked("check_compute_capability")("9.0") == is_hopper_or_later
        assert not asked("is_cuda_compute_capability_equal")("10.3")
        assert asked("is_cuda_compute_capability_equal")(BY_KIND[kind].compute_capability)
    assert [asked(name) for name in plugin.ASKED] == before


def test_a_jax_that_asks_nobody_is_traced_as_it_is(monkeypatch):
    monkeypatch.setattr(plugin, "ASKING_MODULE", "jax._src.no_such.module")
    with plugin.pretended(BY_KIND["h100"]):
        assert attention.uses_cudnn("cudnn", 256, "bfloat16")


@pytest.mark.parametrize(("kind", "can"), [("h100", True), ("b200", False), ("a100", False)])
def test_models_ask_the_target_for_wide_heads(kind, can):
    with plugin.pretended(BY_KIND[kind]):
        if can:
            assert attention.uses_cudnn("cudnn", 256, "bfloat16")
        else:
            with pytest.raises(UsageError, match=f"up to 128 on a {BY_KIND[kind].device_kind}"):
                attention.uses_cudnn("cudnn", 256, "bfloat16")
    with pytest.raises(UsageError, match="this is a cpu device"):
        attention.uses_cudnn("cudnn", 64, "bfloat16")


def test_without_the_plugin_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setattr(plugin, "PLUGINS", ("no_such_plugin",))
    assert not plugin.is_installed()
    with pytest.raises(UsageError, match=re.escape(f"pip install 'jax[cuda13]=={jax.__version__}'")):
        plugin.set_environment({}, 8, 1)


def test_the_environment_keeps_the_users_flags(monkeypatch):
    monkeypatch.setattr(plugin, "PLUGINS", ("no_such_plugin", "jax"))  # as if it were installed
    environ = {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true", "JAX_PLATFORMS": "cpu"}
    plugin.set_environment(environ, 8, 1)
    flags = environ["XLA_FLAGS"].split()
    assert flags[0] == "--xla_gpu_enable_triton_gemm=true" and len([one for one in flags if "triton" in one]) == 1
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in flags
    assert environ["CUDA_VISIBLE_DEVICES"] == "-1" and environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] == "1"
    assert environ["JAX_ENABLE_COMPILATION_CACHE"] == "false"


def test_a_target_is_a_device_for_the_models_questions():
    target: GpuTarget = BY_KIND["l40s"]
    assert attention.cudnn_problem(72, "bfloat16", target) is None
