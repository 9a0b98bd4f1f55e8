"""A platform that is asked for without its wheels is one line with what to install."""

import subprocess
import sys

import pytest

from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.jax_wheels import check

NOTHING = {"jaxlib": "0.10.2"}


@pytest.mark.parametrize(
    ("environ", "versions", "message"),
    [
        (
            {"JAX_PLATFORM_NAME": "gpu"},
            NOTHING,
            r"JAX_PLATFORM_NAME=gpu asks for gpu.*'openpi_train\[cuda13\]'.*unset JAX",
        ),
        ({"JAX_PLATFORMS": "cuda,cpu"}, NOTHING, r"JAX_PLATFORMS=cuda,cpu asks for cuda, .*'openpi_train\[cuda12\]'"),
        ({"JAX_PLATFORMS": "tpu"}, NOTHING, r"pip install 'openpi_train\[tpu\]'"),
        (
            {"JAX_PLATFORMS": "cuda"},
            {**NOTHING, "jax-cuda12-plugin": "0.9.0"},
            r"jax-cuda12-plugin 0.9.0 is of another release than jaxlib 0.10.2.*pip install 'jax\[cuda12\]==0.10.2'",
        ),
    ],
)
def test_a_platform_without_its_wheels_is_refused_with_what_to_install(environ, versions, message):
    with pytest.raises(UsageError, match=message):
        check(environ, versions.get)


@pytest.mark.parametrize(
    ("environ", "versions"),
    [
        ({}, NOTHING),
        ({"JAX_PLATFORMS": "cpu", "JAX_PLATFORM_NAME": ""}, NOTHING),
        ({"JAX_PLATFORMS": "cuda"}, {**NOTHING, "jax-cuda13-plugin": "0.10.2"}),
        ({"JAX_PLATFORM_NAME": "gpu"}, {**NOTHING, "jax-cuda12-plugin": "0.9.0", "jax-cuda13-plugin": "0.10.2"}),
        ({"JAX_PLATFORMS": "tpu"}, {**NOTHING, "libtpu": "0.0.30"}),
    ],
)
def test_a_platform_with_its_wheels_and_none_are_left_to_jax(environ, versions):
    check(environ, versions.get)


def test_a_command_says_so_in_one_line_and_help_is_there_all_the_same():
    program = (
        "import os, sys; os.environ.update(JAX_PLATFORM_NAME='tpu', JAX_PLATFORMS='')\n"
        "from openpi_train import cli\n"
        "print(cli.run(['debug', '--exp-name', 'x']), cli.run(['list']), 'jax' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rstrip().endswith("2 0 False")
    assert done.stderr.count("\n") == 1 and "JAX_PLATFORM_NAME=tpu asks for tpu" in done.stderr
