import json

import pytest

from openpi_train.runtime import xla, xla_flags
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.world import World

SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler"
MERGER = "--xla_gpu_dot_merger_threshold_mb"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Answers of jaxlib are asked anew, and not left in the home of whoever runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def world(index=0, count=1, local_index=0, local_count=1):
    return World(
        process_index=index,
        process_count=count,
        local_index=local_index,
        local_count=local_count,
        coordinator="node0:1234",
        source="flags",
    )


@pytest.mark.slow
def test_what_the_user_set_is_never_changed():
    flags = f"{MERGER}=32 {SCHEDULER}=false"
    environ = {"XLA_CLIENT_MEM_FRACTION": "0.5", "NCCL_DEBUG": "INFO", "XLA_FLAGS": flags}
    before = dict(environ)
    lines = xla.apply_settings("gpu", environ, "hosts")
    assert environ == before
    told = ["XLA_CLIENT_MEM_FRACTION=0.5", f"{MERGER}=32", f"{SCHEDULER}=false", "NCCL_DEBUG=INFO"]
    assert lines == [f"{one} (yours)" for one in told]


def test_a_cpu_run_gets_no_gpu_settings():
    environ: dict[str, str] = {}
    assert xla.apply_settings("cpu", environ, "hosts") == [] and environ == {}


def test_a_gpu_run_gets_most_of_the_memory():
    environ: dict[str, str] = {}
    xla.apply_settings("gpu", environ)
    assert environ == {"XLA_CLIENT_MEM_FRACTION": "0.9", "XLA_FLAGS": f"{MERGER}=0"}


@pytest.mark.parametrize(
    ("extent", "names"),
    [
        ("device", ["XLA_CLIENT_MEM_FRACTION", MERGER]),
        ("devices", ["XLA_CLIENT_MEM_FRACTION", MERGER, SCHEDULER]),
        ("hosts", ["XLA_CLIENT_MEM_FRACTION", MERGER, SCHEDULER, "NCCL_DEBUG"]),
    ],
)
def test_a_run_gets_what_is_for_its_extent_or_smaller_ones(extent, names):
    decisions = xla.decide("gpu", {}, extent, rejected=lambda flags: "")
    assert [decision.setting.name for decision in decisions] == names
    assert all(decision.applied for decision in decisions)


@pytest.mark.parametrize(
    ("place", "visible", "extent"),
    [
        (world(), "0", "device"),
        (world(), "0,1", "devices"),
        (world(1, 2, 1, 2), "0", "devices"),
        (world(1, 2, 0, 1), "0", "hosts"),
        (world(3, 4, 1, 2), "0,1", "hosts"),
        (world(3, 4, 1, None), "0,1", "hosts"),
    ],
)
def test_the_extent_of_a_run_follows_from_its_processes_and_gpus(place, visible, extent):
    assert xla.extent_of(place, {"CUDA_VISIBLE_DEVICES": visible}) == extent


@pytest.mark.slow
def test_flags_are_added_to_the_users(tmp_path):
    environ = {"XLA_FLAGS": "--xla_gpu_autotune_level=2"}
    xla.apply_settings("gpu", environ, "devices")
    assert environ["XLA_FLAGS"] == f"--xla_gpu_autotune_level=2 {MERGER}=0 {SCHEDULER}=true"
    file = tmp_path / "flags.txt"
    file.write_text("--xla_gpu_autotune_level=2\n")
    environ = {"XLA_FLAGS": str(file)}
    xla.apply_settings("gpu", environ, "devices")
    assert environ["XLA_FLAGS"] == f"--xla_gpu_autotune_level=2 {MERGER}=0 {SCHEDULER}=true"


@pytest.mark.slow
def test_a_flag_that_this_jaxlib_does_not_know_is_left_out_and_said_so():
    unknown = xla.Setting("gpu", "device", "--xla_gpu_enable_pipelined_collectives", "true", "a reason", "a source")
    (decision,) = xla.decide("gpu", {}, "device", settings=[unknown])
    assert not decision.applied
    assert "left out: jaxlib" in decision.line
    assert "does not know --xla_gpu_enable_pipelined_collectives=true" in decision.line


@pytest.mark.slow
def test_the_installed_jaxlib_takes_every_flag_of_the_table():
    """Fails when a release drops one: a row that is never applied should go."""
    flags = [f"{setting.name}={setting.value}" for setting in xla.SETTINGS if setting.name.startswith("--")]
    assert flags and {flag: xla_flags.rejected(flag) for flag in flags} == dict.fromkeys(flags, "")


@pytest.mark.slow
def test_an_answer_is_remembered_per_release_of_jaxlib(tmp_path, monkeypatch):
    assert xla_flags.rejected(f"{SCHEDULER}=true", tmp_path) == ""
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == {f"{SCHEDULER}=true": ""}
    monkeypatch.setattr(xla_flags, "_ask", lambda flags, version: pytest.fail("asked again"))
    assert xla_flags.rejected(f"{SCHEDULER}=true", tmp_path) == ""
    monkeypatch.setattr(xla_flags, "_ask", lambda flags, version: None)
    assert xla_flags.rejected("--other", tmp_path) is None
    assert json.loads(file.read_text()) == {f"{SCHEDULER}=true": ""}, "no answer is no answer to keep"


def test_a_torn_file_of_answers_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(xla_flags, "_ask", lambda flags, version: "")
    xla_flags.rejected("--a", tmp_path)
    next(tmp_path.iterdir()).write_text('{"--a')
    assert xla_flags.rejected("--a", tmp_path) == ""


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"XLA_FLAGS": "--xla_not_a_flag=1"}, "does not know --xla_not_a_flag=1. Take it out"),
        ({"XLA_FLAGS": "--xla_gpu_autotune_level=high"}, "cannot read --xla_gpu_autotune_level=high"),
        ({"XLA_FLAGS": "xla_gpu_autotune_level=2"}, "neither flags nor a file"),
        ({"XLA_CLIENT_MEM_FRACTION": "90%"}, "'90%' is not a share of the GPU's memory such as 0.9"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8", "XLA_CLIENT_MEM_FRACTION": "0.9"}, "both set"),
    ],
)
def test_what_would_end_the_process_uncatchably_is_refused(environ, message):
    with pytest.raises(UsageError, match=message):
        xla.apply_settings("gpu", environ)


def test_the_old_name_of_the_memory_fraction_is_translated():
    environ = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8"}
    xla.apply_settings("gpu", environ)
    assert environ["XLA_CLIENT_MEM_FRACTION"] == "0.8" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environ


def test_every_row_has_a_reason_and_a_source_and_a_flag_what_it_was_seen_to_do_by_version():
    for setting in xla.SETTINGS:
        assert setting.reason and ("docs." in setting.source or "docs/" in setting.source)
        assert not setting.name.startswith("--") or all(version in setting.seen for version in ("0.10", "0.12"))


@pytest.mark.parametrize(
    ("platforms", "kind"), [("cpu", "cpu"), ("cuda,cpu", "gpu"), ("rocm", "gpu"), ("gpu", "gpu"), ("tpu", "tpu")]
)
def test_the_first_platform_is_the_kind(platforms, kind):
    assert xla.device_kind(platforms, {}) == kind


@pytest.mark.parametrize(("visible", "count"), [("0,1,2", 3), ("", 0), ("-1", 0), ("GPU-8932f937", 1)])
def test_visible_gpus_are_counted(visible, count):
    assert xla.num_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count
