import pytest

from openpi_train.runtime import xla
from openpi_train.runtime.exits import UsageError


def test_what_the_user_set_is_never_changed():
    environ = {"XLA_CLIENT_MEM_FRACTION": "0.5"}
    lines = xla.apply_settings("gpu", environ)
    assert environ == {"XLA_CLIENT_MEM_FRACTION": "0.5"}
    assert lines == ["XLA_CLIENT_MEM_FRACTION=0.5 (yours)"]


def test_a_cpu_run_gets_no_gpu_settings():
    environ: dict[str, str] = {}
    assert xla.apply_settings("cpu", environ) == [] and environ == {}


def test_a_gpu_run_gets_most_of_the_memory():
    environ: dict[str, str] = {}
    xla.apply_settings("gpu", environ)
    assert environ == {"XLA_CLIENT_MEM_FRACTION": "0.9"}


def test_the_old_name_of_the_memory_fraction_is_translated():
    environ = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8"}
    xla.apply_settings("gpu", environ)
    assert environ == {"XLA_CLIENT_MEM_FRACTION": "0.8"}


def test_both_names_of_the_memory_fraction_are_refused():
    with pytest.raises(UsageError, match="both set"):
        xla.apply_settings("gpu", {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8", "XLA_CLIENT_MEM_FRACTION": "0.9"})


@pytest.mark.parametrize(
    ("platforms", "kind"), [("cpu", "cpu"), ("cuda,cpu", "gpu"), ("rocm", "gpu"), ("gpu", "gpu"), ("tpu", "tpu")]
)
def test_the_first_platform_is_the_kind(platforms, kind):
    assert xla.device_kind(platforms, {}) == kind


@pytest.mark.parametrize(("visible", "count"), [("0,1,2", 3), ("", 0), ("-1", 0), ("GPU-8932f937", 1)])
def test_visible_gpus_are_counted(visible, count):
    assert xla.num_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_the_compilation_cache_is_the_users_or_one_per_kind_of_machine():
    assert xla.compilation_cache_dir({"JAX_COMPILATION_CACHE_DIR": "/x"}) == "/x"
    assert xla.compilation_cache_dir({"XDG_CACHE_HOME": "/y"}).startswith("/y/openpi_train/compiled/")
