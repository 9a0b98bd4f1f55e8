"""Finding experiments: by name, in a user's file, with the closest match for a wrong name."""

import dataclasses
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from openpi_train import cli, registry
from openpi_train.experiment import Experiment

NAMES = ("pi0_bridge_traj", "pi0_bridge_traj_lora", "pi0_bridge_traj_tiny", "pi05_bridge", "pi05_bridge_lora", "debug")
NAMES += (
    "paligemma_flow",
    "paligemma_flow_lora",
    "paligemma_flow_head",
    "paligemma_flow_frozen_tower",
    "paligemma_tiny",
    "paligemma_tokens",
    "paligemma_tokens_lora",
    "paligemma_tokens_tiny",
)
NAMES += (
    "arithmetic_sft",
    "arithmetic_grpo",
    "tabletop_few_rloo",
    "tabletop_dp_rloo",
    "metaworld_rloo",
    "arithmetic_reward",
    "arithmetic_dpo_lora",
    "arithmetic_kto",
    "gsm8k_sft_qwen25_05b",
    "gsm8k_dpo_gemma3_1b",
    "gsm8k_grpo_qwen25_05b",
    "tabletop_few_weighted",
    "tabletop_few_indicator",
    "tabletop_fast_rloo",
    "pi0_tabletop_rloo",
)


def test_the_promised_experiments_are_there_and_described():
    known = registry.entries()
    assert set(NAMES) <= set(known)
    for entry in known.values():
        assert "Command: python -m openpi_train " + entry.name in entry.description, entry.name
        assert "Hardware:" in entry.description, entry.name


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_loads_and_fits_one_device(name):
    experiment = registry.load(name)
    assert isinstance(experiment, Experiment)
    assert experiment.name == name
    dataclasses.replace(experiment, exp_name="x").check(1)


def test_a_summary_is_the_whole_first_sentence_in_one_line():
    description = "Trains 0.13 M parameters: on a few\nlines of text. And more.\n\nCommand: none\n"
    entry = registry.Entry(name="one", file=Path("a.py"), description=description)
    assert entry.summary == "Trains 0.13 M parameters: on a few lines of text."


def test_a_wrong_name_is_answered_with_the_closest():
    with pytest.raises(registry.UnknownName, match="did you mean pi0_bridge_traj"):
        registry.load("pi0_bridge_trajj")


def test_what_stands_where_the_name_does_is_told_its_place(tmp_path):
    known = [*registry.entries(), *cli.VERBS]
    (tmp_path / "pi0_bridge_trajj").mkdir()
    for word, says in (
        (str(tmp_path / "pi0_bridge_trajj"), "is a folder, and needed is the name of an experiment.*to eval, serve"),
        ("--config", "--config stands where the experiment does: .* posttrain, ript and vla"),
        ("so3", r"^unknown experiment 'so3', and no folder of that name here \(all: python -m openpi_train list\)$"),
    ):
        assert re.search(says, registry.unknown(word, known, "experiment"))


def test_an_experiment_of_a_users_file_is_found_by_name(tmp_path):
    file = tmp_path / "my_runs_of_test.py"
    file.write_text(
        textwrap.dedent(
            '''
            import dataclasses
            from openpi_train import cli, registry

            try7 = dataclasses.replace(registry.load("debug"), batch_size=16)
            """The seventh try."""
            '''
        )
    )
    experiment = registry.load(f"{file}:try7")
    assert (experiment.name, experiment.batch_size) == ("try7", 16)
    assert registry.description(f"{file}:try7") == "The seventh try."
    with pytest.raises(registry.UnknownName, match="has try7"):
        registry.load(f"{file}:try8")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        registry.load(f"{tmp_path}/absent.py:try7")


def test_experiments_may_share_an_assignment_and_a_description(tmp_path):
    file = tmp_path / "pairs_of_test.py"
    file.write_text(
        "import dataclasses\n"
        "from openpi_train import registry\n"
        "small, large = (dataclasses.replace(registry.load('debug'), batch_size=size) for size in (8, 16))\n"
        "'''Two sizes.\n\nCommand: python -m openpi_train NAME --exp-name x'''\n"
    )
    assert [entry.name for entry in registry.read_entries(file)] == ["small", "large"]
    experiment = registry.load(f"{file}:large")
    assert (experiment.name, experiment.batch_size) == ("large", 16)
    assert registry.description(f"{file}:large").endswith("python -m openpi_train large --exp-name x")


def test_a_config_file_that_does_not_parse_names_file_and_line(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("a = 1\nb = (\n")
    with pytest.raises(ValueError, match=r"broken\.py line 2 does not parse"):
        registry.read_entries(file)


@pytest.mark.parametrize("verb", [["list"], ["--help"], ["launch", "--help"], ["data", "--help"], ["stats", "--help"]])
def test_verbs_answer_without_importing_jax(verb):
    program = (
        "import sys\nfrom openpi_train import cli\n"
        f"try: cli.run({verb!r})\nexcept SystemExit: pass\n"
        "heavy = {'jax', 'flax', 'orbax', 'grain', 'tensorflow_datasets', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_every_flag_explains_itself(name, capsys, monkeypatch):
    """Each flag has a text, and no two flags of one group share it (tyro hands comments on to fields without one)."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        cli.parse_experiment(name, ["--help-all"])
    options = capsys.readouterr().out.partition("[OPTIONS]")[2]  # after the process flags
    lines = [line.strip(" │") for line in options.splitlines()]
    texts: dict[str, str] = {}
    flag = ""
    for before, line in zip(["", *lines], lines, strict=False):
        if re.match(r"--\w", line):
            if re.match(r"--\w.*,$", before):
                continue  # the other form of a long flag
            flag = line.split(",")[0].split()[0]
            texts[flag] = ""
        elif flag and line.strip("╭╰╮╯─-"):
            texts[flag] += " " + line
    assert len(texts) > 60
    seen: dict[tuple[str, str], str] = {}
    for flag, described in texts.items():
        if ".cameras." in flag:  # an entry of a mapping; the mapping's text stands above the group
            continue
        text = described.partition("(default")[0].strip()
        assert text, f"{flag} has no help"
        twin = seen.setdefault((flag.rpartition(".")[0], text), flag)
        assert twin == flag, f"{flag} and {twin} have the same help: {text}"
