"""Published language models through whole runs: started by name, resumed without their folder, written back."""

import dataclasses
import json
import shutil

import ml_dtypes
import pytest
import transformers
from runs.command import ROOT, check, losses, openpi_train, places, train
from text_models import MODEL, write_model

from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.data.core.files import write_json
from openpi_train.interop import safetensors_file
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import in_memory
from openpi_train.policy.experiment_json import experiment_from_json

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
RUNS = f"{ROOT}/tests/runs/text_runs.py"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Two runs from one published model in bfloat16: of all weights but its tables, and of an adapter."""
    base = tmp_path_factory.mktemp("texts")
    folder = write_model(base / "published", padding_side="left")
    file = folder / safetensors_file.FILE
    rounded = {
        name: leaf.cast(ml_dtypes.bfloat16) for name, leaf in safetensors_file.open_model(Place.of(folder)).items()
    }
    safetensors_file.write_file(file, {name: in_memory(leaf.whole()) for name, leaf in rounded.items()})
    (folder / "vocab.json").write_text('{"a": 0}')
    write_json(folder / "generation_config.json", {"eos_token_id": 4})
    texts = [{"prompt": f"{number} plus?", "completion": " It is four." * (1 + number % 3)} for number in range(30)]
    (base / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    flags = ["--model.path", folder, "--data.datasets.0.path", base / "texts.jsonl"]
    train(base, f"{RUNS}:sft", *flags, "--freeze", "embeddings", OPENPI_TRAIN_HOME=str(base / "home"))
    train(base, f"{RUNS}:lora", *flags, OPENPI_TRAIN_HOME=str(base / "home"))
    return base


def tensors(folder):
    return {name: leaf.whole() for name, leaf in safetensors_file.open_model(Place.of(folder)).items()}


def test_it_starts_from_the_weights_and_records_the_sizes(base):
    run = base / "runs" / "sft" / "x"
    recorded = json.loads((run / "experiment.json").read_text())["model"]
    assert recorded["sizes"]["width"] == MODEL.sizes.width and recorded["path"] == str(base / "published")
    log = (run / "logs" / "process_0.log").read_text()
    assert "start weights: " in log
    verbs = ("report", "generate", "serve", "resume")
    assert all(f"next: python -m openpi_train {verb} {run}" in log for verb in verbs)


def test_a_run_goes_on_whatever_has_become_of_the_model(base, tmp_path):
    """Its tokenizer must be there; sizes and weights are not read again."""
    shutil.copytree(base, tmp_path / "copy", symlinks=True)
    here = tmp_path / "copy"
    for file in ("model.safetensors", "config.json"):
        (base / "published" / file).rename(tmp_path / file)
    try:
        flags = ["--model.path", base / "published", "--data.datasets.0.path", base / "texts.jsonl"]
        more = ["--freeze", "embeddings", "--num-train-steps", "4", "--resume"]
        train(here, f"{RUNS}:sft", *flags, *more, OPENPI_TRAIN_HOME=str(base / "home"))
    finally:
        for file in ("model.safetensors", "config.json"):
            (tmp_path / file).rename(base / "published" / file)
    assert list(losses(here, "sft")) == [1, 2, 3, 4]


def test_it_is_written_back_with_all_that_came_with_it(base, tmp_path):
    """What did not train comes back bit for bit."""
    run = base / "runs" / "sft" / "x"
    check(openpi_train("convert", run, tmp_path / "out", "--to", "huggingface", "--dtype", "bfloat16"), 0)
    found, began = tensors(tmp_path / "out"), tensors(base / "published")
    assert found.keys() == began.keys()
    same = {name for name in found if found[name].tobytes() == began[name].tobytes()}
    assert same == {"model.embed_tokens.weight", "lm_head.weight"}
    files = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "vocab.json")
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (base / "published" / file).read_bytes(), file
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").hidden_size == MODEL.sizes.width
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words.decode(words("It is four.")["input_ids"], skip_special_tokens=True) == "It is four."


def test_an_adapter_is_written_for_peft_and_starts_a_run(base, tmp_path):
    run = base / "runs" / "lora" / "x"
    done = openpi_train("convert", run, tmp_path / "out", "--to", "peft")
    check(done, 0, "10 parameters", "left out: 10 parameters that --to peft does not hold")
    said = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (2, 4, str(base / "published"))
    assert json.loads((tmp_path / "out" / "parity.json").read_text())["parameters"]["bit_equal"] == 10
    model = experiment_from_json(json.loads((run / "experiment.json").read_text())).model
    loader = CheckpointWeightLoader(params_path=str(base / "published"), adapter_path=str(tmp_path / "out"))
    found, trained = loader.load(model), CheckpointWeightLoader(params_path=str(run)).load(model)
    assert found.keys() == trained.keys()
    for path, leaf in found.items():
        assert leaf.whole().tobytes() == trained[path].whole().tobytes(), path
    assert trained["layers/mlp/down/lora_b"].whole().any()
    # Into the weights, in Hugging Face's form.
    check(openpi_train("convert", run, tmp_path / "merged", "--to", "huggingface", "--merge-lora"), 0)
    assert tensors(tmp_path / "merged").keys() == tensors(base / "published").keys()


def test_a_tokenizer_of_another_model_is_refused(base, tmp_path):
    sizes = dataclasses.replace(MODEL.sizes, vocab_size=300)
    small = write_model(tmp_path / "small", dataclasses.replace(MODEL, sizes=sizes))
    flags = ["--model.path", small, "--data.datasets.0.path", base / "texts.jsonl"]
    done = openpi_train(f"{RUNS}:sft", *flags, *places(tmp_path), OPENPI_TRAIN_HOME=str(base / "home"))
    check(
        done,
        4,
        "tokenizer.json belongs to another model",
        "tokens",
        "the model 300 (sizes.vocab_size)",
        "the tokenizer that belongs to the model",
    )
