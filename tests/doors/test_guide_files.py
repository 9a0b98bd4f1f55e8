"""The configs that other tools' guides name ship, and each is understood by its door."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed_files import FILES
from text_models import MODEL, write_model
from vla_project import write_vla_project

from openpi_train.doors import guide_files
from openpi_train.doors.deepspeed.flags import translate_file
from openpi_train.doors.door_requests import PosttrainRequest, VlaRequest
from openpi_train.doors.posttraining import posttrain
from openpi_train.doors.ript.ript_flags import translate_ript
from openpi_train.doors.vla import vla
from openpi_train.doors.yaml_file import read_yaml
from openpi_train.launch.spec import LaunchError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder without any of the files."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", guide_files._SHIPPED)
def test_a_guides_file_is_found_from_any_folder_and_told_of(path, tmp_path, capsys):
    guide_files._tell_once.cache_clear()
    shipped = CONFIGS / guide_files._SHIPPED[path]
    assert shipped.is_file() and guide_files.found(path) == guide_files.found(f"./{path}") == str(shipped)
    assert f"there is no {path} here; the one that ships with openpi_train is used" in capsys.readouterr().err
    own = tmp_path / path
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text("mine")
    assert guide_files.found(path) == path and not capsys.readouterr().err


def test_no_other_file_is_taken_for_one(tmp_path):
    for path in ("config.yaml", "config_distributed_exampel.yaml", str(tmp_path / "config_distributed_example.yaml")):
        assert guide_files.found(path) == path
        with pytest.raises(LaunchError, match="there is no config"):
            guide_files.required(path)


@pytest.mark.parametrize("stage", FILES)
def test_the_deepspeed_files_are_the_guides_for_any_number_of_devices(stage):
    shipped = json.loads((CONFIGS / "deepspeed" / f"zero{stage}.json").read_text())
    documented = {**FILES[stage], **dict.fromkeys(BATCH, "auto")}
    assert shipped == documented
    flags = dict(flag for flag in translate_file(f"configs/deepspeed/zero{stage}.json").flags if len(flag) == 2)
    assert flags["--sharding.strategy"] == f"zero{stage}"
    assert not {"--batch-size", "--micro-batch-size", "--grad-accum"} & set(flags)


@pytest.mark.parametrize("name", ["config_distributed_example.yaml", "config_deepspeed_example.yaml"])
def test_the_post_training_configs_make_an_experiment(name, tmp_path):
    write_model(tmp_path / "model", MODEL)
    text = (CONFIGS / name).read_text()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / name).write_text(text.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tmp_path / "model")))
    experiment, words = posttrain.experiment_of(PosttrainRequest(config=f"own/{name}"), [])
    flags = " ".join(words)
    assert experiment.data.datasets[0].path == str(CONFIGS / "sft_example.jsonl")  # pyright: ignore
    assert "--micro-batch-size 4" in flags and "--no-keep-effective-batch-size" in flags
    strategy = "zero2" if "deepspeed" in name else "replicated"
    assert f"--sharding.strategy {strategy}" in flags


def test_the_vla_config_is_the_documented_one_and_makes_an_experiment(tmp_path):
    documented = read_yaml(Path(__file__).parent / "vla" / "vla_config.yaml")
    assert read_yaml("configs/vla_config.yaml") == documented
    write_vla_project(tmp_path)
    shutil.copy(CONFIGS / "vla_config.yaml", tmp_path / "configs")
    experiment, words = vla.experiment_of(VlaRequest(), [])
    assert experiment.name == "vla" and "--batch-size" in words


@pytest.mark.parametrize("name", ["distributed_train_pi0", "debug_distributed_train"])
def test_the_ript_configs_start_from_what_the_quick_test_leaves(name):
    translated = translate_ript(read_yaml(f"pi0/ript/config/{name}.yaml"), {}, name=name)
    assert translated.policy == "./output/tabletop_few/quick_distributed_test" and translated.env == "tabletop"
    quick = (CONFIGS.parent / "scripts" / "quick_distributed_test.sh").read_text()
    assert "tabletop_few --exp-name quick_distributed_test\n    --checkpoint-base-dir ./output" in quick


@pytest.mark.parametrize("verb", ["posttrain", "ript", "vla"])
@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "No such file or directory in {folder}"), ("a: [", "is no YAML config"), ("", "must hold keys")],
)
def test_a_config_that_cannot_be_read_is_told_before_jax_is_imported(verb, text, message, tmp_path):
    if text is not None:
        (tmp_path / "own.yaml").write_text(text)
    words = [verb, "--config", "own.yaml"]
    program = (
        f"import sys\nfrom openpi_train import cli\ncode = cli.run({words!r})\nsys.exit(code + ('jax' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2 and message.format(folder=tmp_path) in done.stderr, done.stderr


def test_a_file_that_is_read_twice_is_told_of_once(capfd):
    program = "from openpi_train.doors import yaml_file as y\nfor _ in range(2): y.read_yaml('configs/vla_config.yaml')"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert capfd.readouterr().err.count("the one that ships with openpi_train is used") == 1
