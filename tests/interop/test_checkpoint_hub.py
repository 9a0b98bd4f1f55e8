"""The hub, by its own client against a hub on the loopback interface: pushed to, fetched from, and what it refuses."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from exchanged import TINY, made_up, write
from fake_hub import serving

from openpi_train.checkpoints.checkpoint_formats import model_params, open_checkpoint
from openpi_train.checkpoints.model_card import model_card
from openpi_train.interop import checkpoint_hub
from openpi_train.interop.openpi import parameter_names
from openpi_train.interop.stored_leaves import Stored
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.tools import convert_checkpoint
from openpi_train.tools.requests import ConvertRequest


@pytest.fixture(scope="module")
def client():
    return pytest.importorskip("huggingface_hub", reason="huggingface_hub (the extra `hub`) is not installed")


@pytest.fixture
def fake(client, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    with serving() as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        yield server


def fetch(address: str, server, cache, **environment: str) -> str:
    """What another process, whose client has this server for its hub, says that it fetched."""
    code = "import sys; from openpi_train.interop import checkpoint_hub; print(checkpoint_hub.fetch(sys.argv[1]))"
    around = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    settings = {"HF_ENDPOINT": server.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, address], env={**around, **settings}, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_converted_checkpoint_goes_to_the_hub_and_comes_back(fake, tmp_path, monkeypatch, capsys):
    params = made_up()
    source = write(tmp_path / "5", params)

    request = ConvertRequest(source=str(source), target=Path("hub:me/tiny"), target_format="lerobot", outputs=False)
    convert_checkpoint.main(dataclasses.replace(request, dry_run=True), TINY, lambda name: TINY)
    assert "GET /api/whoami-v2" in fake.asked and not fake.repos, "a dry run makes no repository"
    convert_checkpoint.main(request, TINY, lambda name: TINY)
    where = capsys.readouterr().out.splitlines()[-1]
    assert where.startswith(f"{fake.url}/me/tiny/commit/")
    assert fake.created[0]["name"] == "tiny" and "private" in str(fake.created[0])
    files = fake.repos["me/tiny"]
    assert {"README.md", "config.json", "model.safetensors", "parity.json", "policy_preprocessor.json"} <= files.keys()
    card = files["README.md"].decode()
    assert "library_name: lerobot" in card and "| dim | mean | std | q01 | q99 |" in card
    folder = fetch("hub:me/tiny", fake, tmp_path / "cache")
    asked = len(fake.asked)
    assert fetch("hub:me/tiny", fake, tmp_path / "cache", HF_HUB_OFFLINE="1") == folder
    assert len(fake.asked) == asked, "with HF_HUB_OFFLINE nothing is asked"
    monkeypatch.setattr(checkpoint_hub, "fetch", lambda text: folder)  # what that process fetched
    names = parameter_names(TINY.model)
    for path, leaf in model_params(open_checkpoint("hub:me/tiny", TINY.model), TINY.model).items():
        np.testing.assert_array_equal(leaf.whole(), params[names[path]])


@pytest.mark.slow
def test_what_cannot_be_fetched_says_why(fake, tmp_path):
    fake.repos["me/there"] = {"config.json": b"{}", "weights.bin": b"0"}
    for address, said in {
        "hub:me/absent": "no such repository",
        "hub:me/there@nowhere": "no such revision",
        "hub:me/there/params": "no folder params",
    }.items():
        assert said in fetch(address, fake, tmp_path)
    assert "not in the cache" in fetch("hub:me/there", fake, tmp_path, HF_HUB_OFFLINE="1")
    assert os.listdir(fetch("hub:me/there", fake, tmp_path)) == ["config.json"], "weights of other libraries stay there"


def test_a_push_that_is_refused_leaves_nothing(client, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        checkpoint_hub.check_push("hub:me/tiny")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with serving() as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_nobody")
        with pytest.raises(CheckpointError, match="could not be pushed: there is no such repository"):
            checkpoint_hub.push(tmp_path, "hub:me/never_made", "---\ntags: []\n---\n")


@pytest.mark.parametrize("text", ["hub:", "hub:name", "hub:me/a/b c@x y", "hub:me/a@"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UsageError, match="allowed: hub:USER/NAME"):
        checkpoint_hub.Address.of(text)


def test_addresses_are_read_and_said_again():
    for text in ("hub:me/a", "hub:me/a/b/c", "hub:me/a@main", "hub:me/a/b@refs/pr/1"):
        assert str(checkpoint_hub.Address.of(text)) == text


def test_without_the_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install 'openpi_train\[hub\]'"):
        open_checkpoint("hub:me/tiny")


def test_the_card_tells_of_the_run():
    experiment = {
        "name": "debug",
        "exp_name": "x",
        "batch_size": 8,
        "data": {"datasets": [{"source": {"path": "/data/bridge"}, "weight": 2.0, "robot": {"name": "bridge"}}]},
    }
    results = {
        "training_metrics": {"last": {"train/loss": 0.5}, "evaluations": [{"step": 40, "eval/loss": 0.25}]},
        "distributed_info": {"devices": 2, "device_kind": "cpu", "strategy": "zero3"},
    }
    stored = Stored(where="run/40", format="ours", params={}, norm_stats={}, experiment=experiment)
    card = model_card(stored, "openpi", "me/x", results=results, command=["python", "-m", "openpi_train", "debug"])
    assert "    python -m openpi_train debug\n" in card
    assert "| batch_size | 8 |" in card and "| /data/bridge | 2.0 | bridge |" in card
    assert "| eval/loss (step 40) | 0.25 |" in card and "| train/loss | 0.5 |" in card
    assert "--weight-loader.params-path hub:me/x" in card and "On 2 x cpu, zero3." in card


@pytest.mark.parametrize(
    ("kind", "form", "says"),
    [
        (
            "ReferencedConfig",
            "huggingface",
            ("library_name: transformers\npipeline_tag: text-generation", "--model.path"),
        ),
        (
            "RewardConfig",
            "huggingface",
            ('pipeline_tag: text-classification\ntags:\n- "text-cl', "--model.path hub:me/x"),
        ),
        ("LanguageConfig", "peft", ("library_name: peft", "--weight-loader.adapter-path hub:me/x")),
    ],
)
def test_the_card_of_a_language_model_says_how_it_is_used(kind, form, says):
    texts = {"datasets": [{"path": "hub:me/texts", "weight": 1.0}]}
    experiment = {"name": "sft", "exp_name": "x", "model": {"__class__": kind}, "data": texts}
    card = model_card(Stored(where="run/2", format="ours", params={}, experiment=experiment), form, "me/x")
    assert all(part in card for part in says) and "| hub:me/texts | 1.0 | - |" in card
