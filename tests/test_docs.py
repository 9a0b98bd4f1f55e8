"""Every command line, path and Python block of README.md and docs/ is real: parsed, dry-run, looked up or executed."""

import collections
import dataclasses
import fnmatch
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import jax
import numpy as np
import pytest
import toy
import yaml
from flax import nnx
from posttraining_project import write_project
from vla_project import write_vla_project

from openpi_train import cli, registry, train_verbs
from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot import opened
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.windows import Windows, WindowShape
from openpi_train.doors.posttraining import posttrain
from openpi_train.keys import row_keys
from openpi_train.models.language import LanguageConfig, huggingface
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.planning.gpu import plugin
from openpi_train.reproduce import reproduce_run
from openpi_train.serve import main as serve_main
from openpi_train.tools import (
    convert_checkpoint,
    doctor,
    evaluate_policy,
    generate_text,
    gpu_step,
    list_runs,
    plan,
    report,
    resume_run,
    stats,
)
from openpi_train.tools import data as data_tool
from openpi_train.training import dry_run, start

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

import evaluate_libero

READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
DOCS = [*READMES, *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("python -m openpi_train", "openpi-train", "python scripts/", "./scripts/", "make ")
FOLDERS = ("openpi_train/", "tests/", "docs/", "configs/", "scripts/", "benchmarks/")
# What stands for every language model that the docs name.
_NAMED = LanguageConfig(
    sizes=DecoderSizes(vocab_size=16, width=8, depth=1, mlp_dim=8, num_heads=1, num_kv_heads=1, head_dim=8)
)
LAUNCHES = ("RANK=", "kind: Job", "#SBATCH ")  # what a dry run prints: command lines, a manifest, a batch script
# Scripts that are another name of a command, and its words.
SCRIPTS = {
    "scripts/main.py": ["posttrain"],
    "scripts/train.py": [],
    "scripts/prepare_datasets.py": ["posttrain", "--mode", "data_process"],
}
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "HOSTS")


@functools.cache
def commands() -> list[tuple[str, list[str], dict[str, str]]]:
    """(file name, words, variables set before the command) of every distinct command line in a code block."""
    found = {}
    for file in DOCS:
        for line in code_lines(file.read_text()):
            words = shlex.split(line, comments=True)
            variables = {}
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                name, _, variables[name] = words.pop(0).partition("=")
            found.setdefault((*words, *variables.items()), (file.name, words, variables))
    return list(found.values())


def code_lines(text: str) -> list[str]:
    """The command lines in fenced and indented blocks, with their continuation lines, and whole ones in tables."""
    fenced, lines = False, []
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            lines.append(line.strip().removeprefix("$ ").removesuffix(" &"))
        elif line.startswith("|"):
            lines += re.findall(r"`([^`]+)`", line)
    # What is refused on purpose, tests/test_tutorials.py types.
    lines = [line for line in lines if not line.endswith("|| echo refused")]
    return [line for line in lines if re.sub(r"^([A-Z_]+=\S* )+", "", line).startswith(PROGRAMS)]


def python_blocks(file: Path) -> dict[str, str]:
    """The files that a page prints, by name; a block begins with its file's."""
    files: dict[str, str] = {}
    for block, name in re.findall(r"^```python\n(# (\w+\.py).*?)^```", file.read_text(), re.DOTALL | re.MULTILINE):
        files[name] = f"{files.get(name, '')}\n\n{block}"
    return files


@pytest.fixture(scope="module")
def my_runs(tmp_path_factory) -> Iterator[ModuleType]:
    """The `my_runs.py` that docs/howto/extend.md prints, imported as the registry imports a user's file."""
    file = tmp_path_factory.mktemp("user") / "my_runs.py"
    pages = ("howto/extend.md", "howto/reinforcement_learning.md", "from/openpi.md")
    written = {name: text for page in pages for name, text in python_blocks(ROOT / "docs" / page).items()}
    for page in (ROOT / "docs" / "tutorials").glob("*.md"):  # the files that it asks to save
        written |= re.findall(r'^```\w+ title="(.+?)"\n(.*?)^```', page.read_text(), re.DOTALL | re.MULTILINE)
    for name, text in written.items():
        file.with_name(name).write_text(text)
    file.with_name("prompts.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"}\n')
    file.with_name("tests").symlink_to(ROOT / "tests")  # the docs name a dataset in there
    for name in ("my_arm", "demos", "corrections"):
        file.with_name(name).symlink_to(ROOT / "tests" / "data" / "formats" / "lerobot" / "fixtures" / "v30_image")
    stores = {"six_tasks": "arms_14", "pusht/pusht_cchi_v7_replay": "push_t"}
    for name, fixture in stores.items():
        store = file.parent / "data" / f"{name}.zarr"
        store.parent.mkdir(parents=True, exist_ok=True)
        store.symlink_to(ROOT / "tests" / "data" / "formats" / "zarr" / "fixtures" / f"{fixture}.zarr")
    file.with_name("ds.json").write_text('{"zero_optimization": {"stage": 2}, "train_batch_size": 32}')
    write_project(file.parent)  # with the configs that docs/from/posttraining_yaml.md names
    write_vla_project(file.parent)  # with the one that docs/from/vla_yaml.md names
    file.with_name("scripts").symlink_to(ROOT / "scripts")  # with the config that docs/from/ript_yaml.md names
    registry.load(f"{file}:try7")
    yield sys.modules["my_runs"]
    sys.path.remove(str(file.parent))
    for name in written:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.fixture
def only_parsing(monkeypatch, my_runs) -> list[object]:
    """Make the program stop where the work would begin; the list receives every experiment that got so far."""
    seen = []

    def work(what: object, *_: object, **__: object) -> int:
        seen.append(what)
        return 0

    def run_guarded(main: Callable[[], int]) -> NoReturn:
        sys.exit(main())

    monkeypatch.chdir(Path(my_runs.__file__).parent)
    for module in (cli, train_verbs):
        monkeypatch.setattr(module, "run_guarded", run_guarded)
    places = {start: ["main"], dry_run: ["dry_run"], stats: ["stats_table"], doctor: ["main"], plan: ["main"]}
    places |= {serve_main: ["run", "replay"], convert_checkpoint: ["main"], evaluate_policy: ["main"], report: ["main"]}
    places |= {
        reproduce_run: ["main"],
        generate_text: ["main"],
        posttrain: ["prepare_data"],
        gpu_step: ["main"],
        list_runs: ["main"],
    }
    monkeypatch.setattr(
        resume_run, "experiment_of", lambda _: dataclasses.replace(registry.load("debug"), exp_name="x")
    )
    monkeypatch.setattr(plugin, "set_environment", lambda *_: [])
    places |= {verb: ["run"] for verb in typing.get_args(data_tool.AnyDataRequest)}
    monkeypatch.setattr(huggingface, "named_model", lambda where: dataclasses.replace(_NAMED, path=where))
    for module, names in places.items():
        for name in names:
            monkeypatch.setattr(module, name, work)
    return seen


def check_program(arguments: list[str], seen: list[object]) -> None:
    """The program takes these arguments, up to where it would start to work."""
    if arguments[0] == "launch":
        output = printed([sys.executable, "-m", "openpi_train"], arguments, {})
        assert any(sign in output for sign in LAUNCHES), output
        arguments = arguments[arguments.index("--") + 1 :]
    with_help = not {"-h", "--help", "--help-all"}.isdisjoint(arguments)
    before = len(seen)
    try:
        code = cli.run(arguments)
    except SystemExit as ending:
        code = ending.code
    assert not code
    only_prints = arguments in (["list"], ["reproduce"]) or arguments[:2] == ["convert", "deepspeed"]
    assert with_help or only_prints or len(seen) == before + 1
    if seen and not with_help and hasattr(seen[-1], "exp_name"):
        assert seen[-1].exp_name, "a training command needs --exp-name"


def printed(program: list[str], arguments: list[str], variables: dict[str, str]) -> str:
    """What `program arguments` prints with --dry-run among the options."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = arguments if "--dry-run" in arguments[:end] else [*arguments[:end], "--dry-run", *arguments[end:]]
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    paths = {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "NODE_RANK": "0"}
    done = subprocess.run(
        [*program, *words], cwd=ROOT, env={**clean, **paths, **variables}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_make(words: list[str]) -> None:
    """The target is there, and so are the scripts and modules of ours that it would run."""
    done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for script in re.findall(r"\bscripts/\S+", done.stdout):
        assert (ROOT / script).is_file(), f"{script} is not there"
    for module in set(re.findall(r" -m ([\w.]+)", done.stdout)):
        folder = ROOT.joinpath(*module.split("."))
        if (ROOT / module.split(".")[0]).is_dir():
            assert (folder / "__main__.py").is_file(), f"{module} cannot be run: it has no __main__.py"


def check(words: list[str], variables: dict[str, str], seen: list[object]) -> None:
    """Raise where a command line of the docs is not real."""
    if words[0] == "make":
        if shutil.which("make"):
            check_make(words)
    elif words[:3] == ["python", "-m", "openpi_train"]:
        check_program(words[3:], seen)
    elif words[0] == "openpi-train":
        check_program(words[1:], seen)
    elif words[1:2] == ["scripts/evaluate_libero.py"]:
        evaluate_libero.flags_of(words[2:])
    elif words[1:2] and words[1] in SCRIPTS:
        assert f"{SCRIPTS[words[1]]}"[1:-1].replace("'", '"') in (ROOT / words[1]).read_text()
        check_program([*SCRIPTS[words[1]], *words[2:]], seen)
    else:
        script = words[1] if words[0] == "python" else words[0]
        assert (ROOT / script).is_file(), f"{script} is not there"
        program = [sys.executable, script] if words[0] == "python" else [script]
        output = printed(program, words[len(program) :], variables)
        assert any(sign in output for sign in LAUNCHES), output
        if "--" in words:
            check_program(words[words.index("--") + 1 :], seen)


def test_commands_are_found_in_every_page_that_has_them():
    shown = collections.Counter(name for name, _, _ in commands())
    assert min(shown[name] for name in ("README.md", "hosts.md", "data.md", "extend.md")) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("page", dict.fromkeys(name for name, _, _ in commands()))
def test_every_command_line_is_understood(only_parsing, capsys, page):
    problems = []
    for name, words, variables in commands():
        if name != page:
            continue
        capsys.readouterr()
        try:
            check(words, variables, only_parsing)
        except (Exception, SystemExit) as error:
            said = f"{type(error).__name__}: {error} {capsys.readouterr().err}"
            problems.append(f"{name}: {shlex.join(words)}\n    {said}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("file", DOCS, ids=lambda file: file.name)
def test_every_path_exists(file):
    # A path in backticks below the root, or below the package (`data/core/feed.py`), without placeholders.
    words = re.findall(r"`([\w./*-]+)`", re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL))
    paths = {word for word in words if word.startswith(FOLDERS) or re.fullmatch(r"\w+(/\w+)+\.py", word)}
    missing = [path for path in paths if not any(list(base.glob(path)) for base in (ROOT, ROOT / "openpi_train"))]
    assert not missing


def test_architecture_has_a_line_for_every_folder_and_no_other():
    block = (ROOT / "docs" / "understand" / "architecture.md").read_text().split("## The tree", 1)[1]
    told, package = [], ""
    for indent, name in re.findall(r"^    ((?:  )*)([\w.]+)/  +\S", block, re.MULTILINE):
        package = package if indent else f"{name}/"
        told.append(package + name if indent else name)
    assert told == sorted(set(told), key=told.index), "a folder is listed twice"
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    # Folders of ours hold text; what a run or a command left here holds data.
    ours = [path for path in ROOT.iterdir() if path.is_dir() and not path.is_symlink()]
    folders = {path.name for path in ours if any(file.suffix in (".py", ".sh", ".md") for file in path.iterdir())}
    top = {name for name in folders if name[0] != "." and not any(fnmatch.fnmatch(name, one) for one in ignored)}
    parts = {f"openpi_train/{file.parent.name}" for file in (ROOT / "openpi_train").glob("*/__init__.py")}
    assert set(told) == top | parts


def test_readme_is_short_and_lists_no_file_of_the_tree():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    assert not re.findall(r"^ +[\w/]+\.(?:py|sh) ", text, re.MULTILINE)


@pytest.mark.parametrize("file", DOCS, ids=lambda file: file.name)
def test_every_link_leads_to_a_file(file):
    links = re.findall(r"\]\(([\w./-]+)[)#]", file.read_text())
    assert not [link for link in links if not (file.parent / link).is_file()]
    if file.name == "README.md":
        assert {link for link in links if link.startswith("docs/")}


def test_the_chinese_readme_has_the_same_commands_links_and_figures():
    def parts(text: str) -> list[object]:
        words = [shlex.split(line, comments=True) for line in code_lines(text)]
        text = re.sub(r"\]\(docs/zh/(?=index)", "](docs/", text).replace("](docs/zh/", "](docs/tutorials/")
        links = set(re.findall(r"\]\(([\w./-]+)\)", text)) - {file.name for file in READMES}
        table = text.split("| 24 GB |", 1)[1].split("\n\n", 1)[0]
        return [words, links, re.findall(r"[\d.,]+(?= [|(])|\([\d.]+\)", table)]

    english, chinese = (parts(file.read_text()) for file in READMES)
    assert english == chinese


def code_of(page: Path) -> tuple[list[tuple[str, str, str]], set[str], int]:
    """(kind, title, text without comments) of each block; the code in sentences and tables; the number of headings."""
    fenced = re.compile(r"^```(\w*)(?: title=\"(.+?)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)
    text = page.read_text()
    rest = fenced.sub("", text)
    shown = [(kind, title, re.sub(r"(?m)(^| +)# .*$", "", block)) for kind, title, block in fenced.findall(text)]
    return shown, set(re.findall(r"`([^`]+)`", rest)), len(re.findall(r"^#+ ", rest, re.MULTILINE))


def test_every_tutorial_is_there_in_chinese_with_the_same_code():
    """So what tests/test_tutorials.py types from the English page is what the Chinese one says."""
    tutorials, chinese = ROOT / "docs" / "tutorials", ROOT / "docs" / "zh"
    names = {file.name for file in tutorials.glob("*.md")}
    assert {file.name for file in chinese.glob("*.md")} == names | {"index.md"}
    for name in names:
        (shown, named, headings), (shown_there, named_there, headings_there) = (
            code_of(folder / name) for folder in (tutorials, chinese)
        )
        assert shown == shown_there, name
        assert not named - named_there and headings == headings_there, f"{name}: {named - named_there}"
        assert (chinese / name).read_text().splitlines()[2] == f"[English](../tutorials/{name})", name


def test_every_verb_and_every_experiment_has_a_line_in_its_page():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(cli.VERBS)
    pages = "\n".join((ROOT / "docs" / name).read_text() for name in ("reference/experiments.md", "from/openpi.md"))
    rows = re.findall(r"^\| (`.*)", pages, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert not set(registry.entries()) - named


def test_documented_robot_and_source_give_rows(my_runs, tmp_path):
    robot = my_runs.Gantry()
    windows = Windows(source=FakeData(image_height=8, image_width=8).open(), robot=robot, shape=WindowShape(horizon=4))
    state, actions, real = windows.chunks(np.arange(len(windows)))
    # The gripper is absolute; relative positions come back, and the last step of an episode stays where it is.
    absolute = robot.from_model(actions, state)
    np.testing.assert_allclose(absolute[:-1, 0, :3][real[:-1, 1]], state[1:, :3][real[:-1, 1]], atol=1e-6)
    last = ~real[:, 1]
    np.testing.assert_array_equal(actions[last][:, 0, :3], 0)

    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 256, (length, 6, 8, 3), dtype=np.uint8) for length in (3, 5)]
    for number, images in enumerate(frames):
        folder = tmp_path / f"episode_{number}"
        folder.mkdir()
        np.save(folder / "images.npy", images)
        for name in ("state", "action"):
            np.save(folder / f"{name}.npy", rng.normal(size=(len(images), 7)).astype(np.float32))
        (folder / "task.txt").write_text(f"task {number}\n")
    source = my_runs.NpyFolders(path=str(tmp_path))
    dataset = Dataset(source=source, robot=my_runs.try8.data.datasets[0].robot)
    (windows,) = opened.open_windows(DataConfig(datasets=(dataset,), validation_fraction=0.0), WindowShape(horizon=2))
    assert len(windows) == 8
    row = windows.row(4)
    np.testing.assert_array_equal(row["image/base_0_rgb"], frames[1][1])
    assert row["prompt"] == "task 1"
    assert source.open().fingerprint == source.open().fingerprint
    (tmp_path / "episode_1" / "images.npy").write_bytes(b"torn")
    with pytest.raises(my_runs.BadRecord, match="episode_1, step 1"):
        windows.source.frames(np.array([4]), "images")


@pytest.mark.slow
def test_documented_objective_adds_up_over_micro_batches(my_runs):
    objective = my_runs.AbsoluteError()
    model = toy.LinearConfig().build(nnx.Rngs(0))
    batch = toy.batch(4)
    norms = objective.norms(batch)
    keys = row_keys(0, 0, batch.row)
    whole, _ = objective.loss(model, batch, norms, keys)
    halves = [jax.tree.map(lambda leaf, part=part: leaf[part], (batch, keys)) for part in (slice(0, 2), slice(2, 4))]
    shares = [objective.loss(model, half, norms, half_keys)[0] for half, half_keys in halves]
    np.testing.assert_allclose(sum(shares), whole, rtol=1e-6)
    assert objective.needs <= toy.LinearConfig.provides


def test_runs_that_a_laptop_makes_are_made_before_they_are_used():
    """By `make train`, or on the same page; a reader types the page's commands in their order."""
    made_by_make = re.search(r"-- (\S+) --exp-name (\S+)", (ROOT / "Makefile").read_text())
    assert made_by_make is not None and (tiny := made_by_make.groups())
    for page in DOCS:
        text = page.read_text()
        for used in re.finditer(r"checkpoints/(debug|pi0_bridge_traj_tiny)/([a-z]\w*)", text):
            run = used.groups()
            makes = re.search(rf"\b{run[0]}\b[^\n]* --exp-name {run[1]}\b", text[: used.start()])
            assert run == tiny or makes, f"{page.name}: {used[0]} is made by no command before it"


def test_the_citation_is_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "AGENTS.md"])
def test_what_contributors_are_told_to_type_and_read_is_there(name):
    text, made = (ROOT / name).read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"\bmake ([a-z-]+)", text))
    assert targets and all(re.search(rf"^{target}:", made, re.MULTILINE) for target in targets)
    files = set(re.findall(r"`([\w./]+(?:\.py|\.md|\.txt|/))`", text)) - {"environment.json"}
    missing = {file for file in files if not any((base / file).exists() for base in (ROOT, ROOT / "openpi_train"))}
    assert not missing - {"logs/process_0.log"}
