"""`--model.path`: sizes, start weights and tokenizer of a published model by one flag, on every kind of text run."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import serving
from text_models import MODEL, write_model

from openpi_train import cli
from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.data.core.files import write_json
from openpi_train.fields import as_json
from openpi_train.interop import native_format
from openpi_train.interop.openpi import parameter_names
from openpi_train.interop.stored_leaves import Stored
from openpi_train.models.language.language_part import language_of, with_language
from openpi_train.nn.lora import AdapterConfig
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.training.rundir import check_run

RUNS = Path(__file__).parent / "runs" / "text_runs.py"
FORMS = ("sft", "lora", "dpo", "reward")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("published") / "tiny")


def parsed(form, *flags):
    return cli.parse_experiment(f"{RUNS}:{form}", ["--exp-name", "x", *map(str, flags)])


@pytest.mark.parametrize("form", FORMS)
def test_sizes_weights_and_tokenizer_come_from_one_place(published, form):
    plain, found = parsed(form), parsed(form, "--model.path", published)
    language, own = language_of(found.model), language_of(plain.model)
    expected = {"sizes": MODEL.sizes, "family": "llama", "context_length": 256, "path": str(published)}
    assert language == dataclasses.replace(own, **expected)
    assert with_language(found.model, own) == plain.model
    assert found.weight_loader == CheckpointWeightLoader(params_path=str(published))
    assert found.data == dataclasses.replace(plain.data, tokenizer=str(published))
    assert dataclasses.replace(found, model=plain.model, data=plain.data, weight_loader=plain.weight_loader) == plain
    # They are the weights of this model: all of it, but for what it adds.
    leaves = found.weight_loader.load(found.model)
    assert any(path.endswith("token_embedding") for path in leaves)


@pytest.mark.parametrize("form", FORMS)
def test_start_weights_of_a_run_with_another_model_are_refused_with_the_path_of_that(published, form, tmp_path):
    trained = parsed("sft", "--model.path", published)
    leaves = trained.weight_loader.load(trained.model)
    names = parameter_names(trained.model)
    stored = Stored(
        where="a run",
        format="ours",
        params={names[path]: leaf for path, leaf in leaves.items()},
        experiment=as_json(trained),
    )
    native_format.write(tmp_path / "run" / "2", stored, None)
    flags = ["--weight-loader.params-path", tmp_path / "run" / "2"]
    without, given = parsed(form, *flags), parsed(form, *flags, "--model.path", published)
    with pytest.raises(CheckpointError, match="does not fit the model") as told:
        without.weight_loader.load(without.model)
    last = str(told.value).splitlines()[-1]
    assert last == f"  -> the run of these weights was started with --model.path {published}: give that here, too"
    assert given.weight_loader.load(given.model)


def test_flags_that_are_given_explicitly_take_precedence(published):
    flags = ["--data.tokenizer", "mine", "--weight-loader.params-path", "run/2", "--model.context-length", "64"]
    found = parsed("sft", *flags, "--model.path", published)
    assert (found.data.tokenizer, found.weight_loader.params_path) == ("mine", "run/2")
    assert found.model.context_length == 64 and found.model.sizes == MODEL.sizes
    adapted = parsed("lora", f"--model.path={published}", "--model.adapter.rank", "3")
    assert adapted.model.adapter == AdapterConfig(rank=3, alpha=4.0)


def test_it_goes_with_a_deepspeed_config(published, tmp_path):
    write_json(tmp_path / "ds.json", {"train_batch_size": 8, "zero_optimization": {"stage": 2}})
    found = parsed("sft", "--deepspeed", tmp_path / "ds.json", "--model.path", published)
    assert found.model.sizes == MODEL.sizes and found.batch_size == 8


def test_help_names_it_and_reads_nothing(capsys):
    with pytest.raises(SystemExit):
        parsed("sft", "--model.path", "hub:nobody/nothing", "--help")
    assert "--model.path {None}|STR" in capsys.readouterr().out


def test_models_without_a_language_model_are_named(published):
    with pytest.raises(UsageError, match=r"--model\.path is for language models, and debug trains a Pi0Config"):
        cli.parse_experiment("debug", ["--exp-name", "x", "--model.path", str(published)])


def test_what_is_no_published_model_says_so(published, tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no such folder; give a model's folder .* or hub:USER/NAME"):
        parsed("sft", "--model.path", tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"has no config\.json: name the folder of a language model"):
        parsed("sft", "--model.path", tmp_path)
    with pytest.raises(UsageError, match="hub:nothing is not an address on the hub"):
        parsed("sft", "--model.path", "hub:nothing")
    write_json(tmp_path / "run" / "experiment.json", {})
    with pytest.raises(CheckpointError, match=r"is a run of ours: start from its weights with --weight-loader"):
        parsed("sft", "--model.path", tmp_path / "run")
    config = json.loads((published / "config.json").read_text())
    for changed, says in {
        "model_type": ("phi3", r"models of type 'phi3' are not known; known are llama"),
        "rope_scaling": ({"rope_type": "yarn", "factor": 2.0}, r"rope type 'yarn' is not known; known are default"),
    }.values():
        key = "rope_scaling" if isinstance(changed, dict) else "model_type"
        write_json(tmp_path / "bad" / "config.json", {**config, key: changed})
        with pytest.raises(CheckpointError, match=says):
            parsed("sft", "--model.path", tmp_path / "bad")


@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_goes_on_reads_what_it_has_recorded(published, tmp_path, form):
    """And nothing else: the folder is gone, as a hub's model may have changed."""
    folder = Path(shutil.copytree(published, tmp_path / "here"))
    flags = ["--model.path", folder, "--checkpoint-base-dir", tmp_path / "runs"]
    first = parsed(form, *flags)
    write_json(first.run_dir / "experiment.json", as_json(first))
    shutil.rmtree(folder)
    again = parsed(form, *flags, "--resume")
    assert again == dataclasses.replace(first, resume=True)
    check_run(again)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        parsed(form, *flags, "--resume", "--exp-name", "y")  # which has not begun


def test_a_run_does_not_go_on_with_another_model(published, tmp_path):
    base = ["--checkpoint-base-dir", tmp_path / "runs"]
    first = parsed("sft", "--model.path", published, *base)
    write_json(first.run_dir / "experiment.json", as_json(first))
    (first.run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    other = shutil.copytree(published, tmp_path / "other")
    with pytest.raises(UsageError, match=r"model\.path: the run has '.*tiny', given '.*other'"):
        check_run(parsed("sft", "--model.path", other, *base, "--resume"))
    assert parsed("sft", *base, "--resume").model == first.model, "its own need not be named again"


def test_a_damaged_record_is_named(published, tmp_path):
    flags = ["--model.path", published, "--checkpoint-base-dir", tmp_path, "--resume"]
    file = parsed("sft", *flags).run_dir / "experiment.json"
    file.parent.mkdir(parents=True)
    file.write_text("{")
    with pytest.raises(CheckpointError, match=r"experiment\.json cannot be read \(.*\); put a copy back"):
        parsed("sft", *flags)


@pytest.mark.slow
def test_a_model_on_the_hub_is_known_by_its_config_alone(published, tmp_path):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub (the extra `hub`) is not installed")
    module = "openpi_train.models.language.huggingface"
    code = f"import sys; from {module} import named_model; print(named_model(sys.argv[1]).sizes)"
    with serving() as hub:
        hub.repos["me/tiny"] = {path.name: path.read_bytes() for path in published.iterdir()}
        around = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code, "hub:me/tiny"], env=around | settings, capture_output=True, text=True
        )
    assert done.stdout.strip() == repr(MODEL.sizes), done.stderr
    assert not any("safetensors" in asked for asked in hub.asked)
