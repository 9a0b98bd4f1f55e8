"""openpi's own step through our account: a process that stands for openpi's jax writes a recorded program."""

from pathlib import Path

import pytest

from benchmarks import gpu_compile, gpu_openpi

RECORDED = Path(__file__).resolve().parent / "planning" / "gpu" / "recorded" / "layers.hlo"
NAME = "module_0002.jit_step.sm_9.0_gpu_after_optimizations"


@pytest.fixture
def checkout(tmp_path):
    place = tmp_path / "openpi"
    (place / "scripts").mkdir(parents=True)
    (place / "scripts" / "train.py").touch()
    return place


def python_that(tmp_path, *lines):
    """A program that stands for Python, and keeps what it is told."""
    place = tmp_path / "python"
    told = f'echo "$2 $3 $4 $CUDA_VISIBLE_DEVICES $PYTHONPATH" > {tmp_path}/told; cat > {tmp_path}/description'
    place.write_text("\n".join(("#!/bin/sh", told, "FOLDER=${XLA_FLAGS##*--xla_dump_to=}", *lines)))
    place.chmod(0o755)
    return place


def writes(total, program=RECORDED):
    return (
        f"cp {program} $FOLDER/{NAME}.txt",
        f"echo 'Total bytes used: {total} (1MiB)' > $FOLDER/{NAME}-memory-usage-report.txt",
        f"echo small > $FOLDER/{NAME.replace('0002', '0001')}.txt",
    )


def test_the_largest_program_of_the_process_is_read_as_ours_are(tmp_path, checkout, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/this/project")
    found, problem = gpu_openpi.compiled(checkout, python_that(tmp_path, *writes(12_345)), "h100", 2)
    assert not problem and found is not None
    account = found["account"]
    assert account["peak_bytes"] == 12_345 and account["matmul_s"] > 0 and account["exposed_s"] > 0
    assert (tmp_path / "told").read_text().split() == [str(checkout), "2", "64", "-1"]
    assert "NVIDIA H100" in (tmp_path / "description").read_text()


def test_it_begins_the_set_where_a_checkout_is_given_and_no_other(tmp_path, checkout, monkeypatch):
    monkeypatch.setattr(gpu_compile.plugin, "is_installed", lambda: True)
    whose = []

    def all_compiled(cases, args):
        whose.append([case.whose for case in cases])
        return [(None, "not here") for _ in cases]

    monkeypatch.setattr(gpu_compile, "_all_compiled", all_compiled)
    for more in ([], ["--openpi", str(checkout)]):
        gpu_compile.main(["--sets", "openpi", "attention", *more])
    assert [one[:2] for one in whose] == [
        ["reference", "ours"],
        ["ours", "ours"],
        ["openpi", "reference"],
        ["ours", "ours"],
    ]


def test_a_problem_is_told_in_the_words_of_the_process(tmp_path, checkout):
    python = python_that(tmp_path, "echo Traceback >&2", "echo no module named flax >&2", "exit 1")
    assert gpu_openpi.compiled(checkout, python, "h100", 8) == (None, "no module named flax")
    missing = tmp_path / "nowhere"
    assert gpu_openpi.compiled(checkout, missing, "h100", 8) == (None, f"{missing}: No such file or directory")


@pytest.mark.parametrize(
    ("written", "says"), [(writes("many"), "memory report has no total"), ((), "XLA wrote no program")]
)
def test_a_dump_in_another_form_is_told(tmp_path, checkout, written, says):
    found, problem = gpu_openpi.compiled(checkout, python_that(tmp_path, *written), "h100", 8)
    assert found is None and says in problem


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--sets openpi --openpi {0}/nowhere", "nowhere has no scripts/train.py: --openpi takes a checkout of openpi"),
        ("--sets attention --openpi {0}/openpi", "--openpi is for the set openpi: add --sets openpi"),
        ("--quick --sets openpi --openpi {0}/openpi", "--openpi is for the set openpi"),
        ("--sets openpi --peer-python python3", "--peer-python is for --openpi"),
        ("--processes 0", "--processes 0 must be at least 1"),
    ],
)
def test_flags_that_would_do_nothing_are_refused_before_anything_is_compiled(tmp_path, checkout, capsys, words, says):
    with pytest.raises(SystemExit):
        gpu_compile.parse(words.format(tmp_path).split())
    assert says in capsys.readouterr().err
