"""Every command of five guides of other tools, as printed there and in our pages, up to the run that it would start.

A stranger's shell types them: a checkout in a folder with a space, installed and activated nowhere, from a project in
another such folder. Each process's own command line then makes its experiment.
"""

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from posttraining_project import write_project
from test_scripts import checkout, plain_pythons  # noqa: F401  # fixtures
from vla_project import write_vla_project

from openpi_train import registry, train_verbs
from openpi_train.data.core.files import write_json
from openpi_train.doors.posttraining import posttrain
from openpi_train.fields import as_json

ROOT = Path(__file__).resolve().parents[2]
SEEDS = ROOT.parent / "shared" / "seeds"
STORE = ROOT / "tests" / "data" / "formats" / "zarr" / "fixtures" / "arms_14.zarr"
SCRIPT = re.compile(r"(?<!\S)(?:\./)?(?:scripts/)?([\w]+\.(?:py|sh))(?!\S)")
STARTS = re.compile(
    r"(?:\w+=\S+ )*(?:\./scripts/|bash \w+\.sh|python \S*\w+\.py|python -m torch|torchrun|deepspeed --)"
)
# Launchers of torch and DeepSpeed, whose processes find their number in variables.
OTHER_LAUNCHER = re.compile(r"^(torchrun|python -m torch\.distributed\.launch|deepspeed)((?: --\w+[= ]\S+)*) ")
# How a line says how many processes it starts on this host.
COUNT = re.compile(
    r"--(?:gpus|nproc_per_node|world_size|processes)[ =](\d+)|--gpus-per-node (\d+)|train_multi_gpu\.sh (\d+)"
    r"|train_multi_gpu\.sh (?:\S+ ){4}(\d+)$|launch_multi_node\.sh \S+ \d+ (\d+)"
)
# Of a line that starts one process of a loop.
ONE_OF_A_LOOP = "--rank "


@dataclasses.dataclass(frozen=True)
class Guide:
    """A guide: its file, our page, how many commands each has at least, and the experiment that they train."""

    seed: str
    page: str
    num_commands: tuple[int, int]
    experiments: tuple[str, ...]


GUIDES = {
    "ript": Guide("000_*.txt", "ript_yaml.md", (5, 5), ("ript",)),
    "hosts": Guide("001_*.txt", "openpi.md", (5, 5), ("pi0_bridge_traj",)),
    "posttraining": Guide("002_*.txt", "posttraining_yaml.md", (17, 10), ("sft", "rm", "dpo", "ppo", "grpo")),
    "diffusion": Guide("003_*.txt", "diffusion_policy.md", (7, 4), ("robot_dp_10", "robot_dp_14")),
    "vla": Guide("004_*.txt", "vla_yaml.md", (12, 8), ("vla",)),
}


def printed_commands(text: str) -> Iterator[str]:
    """The commands with one of our scripts in the text's code blocks, each in one line."""
    text = re.sub(r"\\\s*\n\s*", "", re.sub(r"[ ]*\\\n[ ]*", " ", text))
    for line in text.splitlines():
        line = re.sub(r"\s+#.*|&$", "", line).strip()
        is_command = STARTS.match(line) and SCRIPT.search(line)
        if is_command and "..." not in line and "<" not in line:
            yield line.replace("$((i+4))", "5").replace("$i", "1")


def commands(name: str, source: str) -> list[str]:
    guide = GUIDES[name]
    if source == "page":
        found = (ROOT / "docs" / "from" / guide.page).read_text(encoding="utf-8")
        text = "\n".join(line for line in found.splitlines() if line.startswith("    "))
        least = guide.num_commands[1]
    else:
        if not SEEDS.is_dir():
            pytest.skip("the guides themselves are not here")
        (file,) = SEEDS.glob(guide.seed)
        text, least = file.read_text(encoding="utf-8"), guide.num_commands[0]
    own = [one for one in dict.fromkeys(printed_commands(text)) if "evaluate_libero" not in one]
    assert len(own) >= least, own
    return own


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of each tool, with what its guide takes for granted, in a folder with a space: the current one."""
    folder = tmp_path / "my project"
    write_vla_project(folder)
    write_project(folder)
    for name in ("config_distributed_example.yaml", "config_deepspeed_example.yaml", "configs/deepspeed/zero2.json"):
        (folder / name).unlink()  # as shipped
    shutil.copy(ROOT / "configs" / "config_deepspeed_example.yaml", folder / "config_deepspeed.yaml")
    policy = folder / "output" / "tabletop_few" / "quick_distributed_test"
    for file in ("experiment.json", "600/meta.json", "600/manifest.json"):
        write_json(policy / file, {"experiment": as_json(registry.load("tabletop_few"))})
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "six_tasks.zarr").symlink_to(STORE)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(posttrain, "hub_folder", lambda *_, **__: folder / "model")
    return folder


def typed(command: str, checkout: Path, project: Path, plain: Path) -> subprocess.CompletedProcess:  # noqa: F811
    """Type the command for a dry run, with the path of the checkout's scripts before the script's name."""
    at = SCRIPT.search(command)
    assert at is not None
    script = shlex.quote(str(checkout / "scripts" / at[1]))
    before, after = command[: at.start()].removeprefix("./"), command[at.end() :]
    options, dashes, arguments = after.partition(" -- ")
    line = f"{before}{script}{options} --dry-run{dashes}{arguments}"
    if "create_slurm" in line:
        line = line.replace("--dry-run", "--no-check")
    environment = {"PATH": f"{plain}:/usr/bin:/bin", "HOME": str(project), "NODE_RANK": "0"}
    how = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    return subprocess.run(["bash", "-c", line], cwd=project, env=environment, **how)


def made(words: list[str]) -> str:
    """The name of the experiment that a process's command line makes."""
    if words[:3] == ["posttrain", "--mode", "data_process"]:
        request = posttrain.PosttrainRequest(config=words[words.index("--config") + 1], mode="data_process")
        assert posttrain.algorithms_of(request) == ("sft", "rm", "dpo", "ppo", "grpo")[:3]
        return "sft"
    return train_verbs.typed(words).name


@pytest.mark.slow
@pytest.mark.parametrize("source", ["guide", "page"])
@pytest.mark.parametrize("name", GUIDES)
def test_every_command_of_a_guide_is_a_run(name, source, checkout, project, plain_pythons):  # noqa: F811
    for command in commands(name, source):
        other = OTHER_LAUNCHER.match(command)
        script = SCRIPT.search(command if other is None else "python " + command[other.end() :])
        assert script is not None, command
        match script[1]:
            case "main.py" | "train.py" | "prepare_datasets.py":
                words = shlex.split(script.string[script.end() :])
                verbs = {"main.py": ["posttrain"], "train.py": []}
                assert made([*verbs.get(script[1], ["posttrain", "--mode", "data_process"]), *words]) in (
                    GUIDES[name].experiments
                ), command
                continue
            case "merge_zarr.py":
                continue  # tests/test_scripts.py merges
        done = typed(command, checkout, project, plain_pythons)
        assert done.returncode == 0 and "Traceback" not in done.stderr, (command, done.stdout, done.stderr)
        if "create_slurm" in command:
            job = (project / "slurm_scripts" / "run_slurm.sh").read_text()
            assert "--nodes=2" in job and "pi0_bridge_traj" in job and "logs/training.log" in job
            continue
        lines = [line for line in done.stdout.splitlines() if line.startswith("RANK=")]
        said = COUNT.search(command)
        expected = 1 if ONE_OF_A_LOOP in command or said is None else int(next(filter(None, said.groups())))
        expected = 2 if "quick_distributed_test" in command else expected
        assert len(lines) == expected, (command, done.stdout)
        words = shlex.split(lines[0])
        python = words.index("-m") - 1
        assert words[python] == sys.executable  # that of the checkout's .venv
        assert made(words[python + 3 :]) in GUIDES[name].experiments, command
