"""What users do on day one: places named in every way, conversions cut off, results for trainers that lack a part."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from bucket import bucket
from exchanged import LORA, STATS, TINY, as_stored, made_up, tiny, training_state, write

from openpi_train import cli
from openpi_train.checkpoints import checkpoint_formats
from openpi_train.checkpoints.checkpoint_formats import model_params, open_checkpoint
from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.data.robot.tokens import tokens_fingerprint
from openpi_train.data.tokenizers.fast_tokenizer import fit_fast
from openpi_train.data.tokenizers.tokenizer import BYTES, load_tokenizer, train_tokenizer
from openpi_train.interop import native_format, openpi, orbax_item, place, stored_leaves
from openpi_train.interop.checkpoint_tokenizer import check_tokenizer
from openpi_train.interop.stored_leaves import in_memory
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.tools.convert_checkpoint import plan
from openpi_train.tools.requests import ConvertRequest

PARAMS = made_up()


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """A step of a run of openpi's trainer, with its training state."""
    return write(
        tmp_path_factory.mktemp("openpi") / "20000", PARAMS, train_state=as_stored(training_state(PARAMS)).params
    )


def convert(source, target, experiment=TINY, **flags) -> Path:
    return plan(ConvertRequest(source=str(source), target=Path(target), outputs=False, **flags), experiment).run()


@pytest.mark.slow
def test_a_checkpoint_is_found_however_it_is_named(saved, tmp_path, monkeypatch):
    home = tmp_path / "home"
    link = home / ".cache/openpi/openpi-assets/checkpoints/pi0_base"
    link.parent.mkdir(parents=True)
    link.symlink_to(saved)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(saved.parent)
    cached = "~/.cache/openpi/openpi-assets/checkpoints/pi0_base"
    for name in (saved.name, f"./{saved.name}/", f"../{saved.parent.name}/{saved.name}/params", f"{cached}/params/"):
        opened = open_checkpoint(name)
        assert opened.params.keys() == PARAMS.keys() and opened.norm_stats == {"robot": STATS}
    # openpi's own copy of what lies in its bucket, which is neither asked for nor reached
    for name in ("gs://openpi-assets/checkpoints/pi0_base/params", "gs://openpi-assets/checkpoints/pi0_base"):
        loaded = CheckpointWeightLoader(params_path=name).load(TINY.model)
        assert len(loaded) == len(PARAMS)


def test_params_that_are_a_link_keep_the_norm_stats_beside_the_link(saved, tmp_path):
    shutil.copytree(saved / "params", tmp_path / "blob")
    shutil.copytree(saved / "assets", tmp_path / "step/assets")
    (tmp_path / "step/params").symlink_to(tmp_path / "blob")
    assert open_checkpoint(tmp_path / "step/params").norm_stats == {"robot": STATS}


def test_a_run_of_openpi_is_no_step_of_it(saved):
    with pytest.raises(CheckpointError, match=f"give one of its steps, such as {saved}"):
        open_checkpoint(saved.parent)


def test_the_file_of_a_folder_is_not_the_folder(saved):
    with pytest.raises(CheckpointError, match=f"it is a file; give the directory, {saved / 'params'}"):
        open_checkpoint(saved / "params/_METADATA")


def test_a_bucket_that_does_not_answer_is_told_soon(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(place, "_RETRIES", {"max_retries": 2, "initial_delay": "1ms", "max_delay": "1ms"})
    with bucket(tmp_path, monkeypatch):
        pass  # it is gone
    with pytest.raises(CheckpointError, match="Check the address, the network and the credentials"):
        open_checkpoint("gs://openpi-assets/checkpoints/pi0_base/params")


@pytest.mark.slow
def test_a_home_and_a_relative_target_are_understood(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert convert(saved / "params", "~/one/two/") == tmp_path / "one/two"
    assert convert(saved / "params", "three") == tmp_path / "three"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "three"]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("gs://bucket/out", "written to a directory, or pushed to hub:USER/NAME"),
        ("file/out", "file is a file; choose another target"),
        ("link", "is a link to nowhere, which is not there"),
    ],
)
def test_targets_that_cannot_be(saved, tmp_path, monkeypatch, target, says):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("link").symlink_to("nowhere")
    with pytest.raises((UsageError, CheckpointError), match=says):
        convert(saved / "params", target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_failure_takes_the_folders_that_it_made_with_it(saved, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("gone")

    monkeypatch.setattr(openpi, "write_norm_stats", fail)
    with pytest.raises(CheckpointError, match="Nothing was left there"):
        convert(saved / "params", tmp_path / "new/deep/out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("asset_id", ["../evil", "/tmp/evil"])
def test_norm_stats_stay_in_the_checkpoint(saved, tmp_path, asset_id):
    with pytest.raises(UsageError, match="must be a relative path without"):
        convert(saved / "params", tmp_path / "out", asset_id=asset_id)


@pytest.mark.parametrize("form", ["lerobot", "openpi_torch"])
@pytest.mark.slow
def test_a_training_state_that_a_form_cannot_hold_is_left_out_and_told(saved, tmp_path, form):
    result = convert(saved, tmp_path / "out", target_format=form)
    told = json.loads((result / "parity.json").read_text())
    assert len(told["training_state"]["left_out"]) == len(training_state(PARAMS))
    assert told["parameters"]["bit_equal"] == len(PARAMS)
    assert convert(result, tmp_path / "back").is_dir()


@pytest.mark.slow
def test_a_loss_scale_goes_to_no_other_form(saved, tmp_path):
    source = open_checkpoint(saved)
    scale = {"scale/factor": in_memory(np.float32(1024)), "scale/good_steps": in_memory(np.int32(3))}
    native_format.write(tmp_path / "ours", as_stored(PARAMS, train_state={**source.train_state, **scale}), TINY.model)
    result = open_checkpoint(convert(tmp_path / "ours", tmp_path / "6"))
    assert result.train_state.keys() == source.train_state.keys()
    told = json.loads((tmp_path / "6/parity.json").read_text())
    assert told["training_state"]["left_out"] == sorted(scale)


@pytest.mark.slow
def test_an_average_of_a_frozen_parameter_gives_way_to_what_was_trained_on(tmp_path):
    experiment = tiny(language=LORA, action_expert=LORA)
    params = made_up(experiment)
    paths = {name: path for path, name in openpi.parameter_names(experiment.model).items()}
    state = training_state(params, lambda name: not experiment.is_frozen(paths[name]))
    source = write(tmp_path / "5", params, train_state=as_stored(state).params)
    result = open_checkpoint(convert(source, tmp_path / "out", experiment), experiment.model)
    for name, leaf in result.params.items():
        frozen = experiment.is_frozen(paths[name])
        np.testing.assert_array_equal(leaf.whole(), state[f"params/{name}"] if frozen else params[name])


@pytest.mark.slow
def test_a_moment_that_reads_back_otherwise_is_found_out(saved, tmp_path, monkeypatch):
    moment = "opt_state/1/0/nu/state_proj/bias"

    def write_otherwise(opened, model):
        state = {**opened.train_state, moment: opened.train_state[moment].map(lambda value: value + 1)}
        return lambda directory: native_format.write(directory, dataclasses.replace(opened, train_state=state), model)

    forms = tuple(dataclasses.replace(one, prepare=write_otherwise) for one in checkpoint_formats.formats())
    monkeypatch.setattr(checkpoint_formats, "formats", lambda: forms)
    with pytest.raises(CheckpointError, match=f"{moment} reads back with another value"):
        convert(saved, tmp_path / "out")


@pytest.mark.parametrize("where", ["numbers", "description"])
@pytest.mark.slow
def test_a_flipped_byte_in_a_training_state_of_ours_is_found(saved, tmp_path, where):
    native_format.write(tmp_path / "5", open_checkpoint(saved), TINY.model)
    # A file of the store holds numbers of some arrays and the JSON that describes others.
    files = {path: path.read_bytes() for path in (tmp_path / "5/train_state").rglob("d/*")}
    described = {path: content for path, content in files.items() if b'"zarr_format"' in content}
    path, content = max((described if where == "description" else files).items(), key=lambda item: len(item[1]))
    place = content.find(b'"zarr_format"') if where == "description" else len(content) // 2
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(CheckpointError, match=f"{path.name} is corrupt: its crc32 is"):
        convert(tmp_path / "5", tmp_path / "6")
    assert convert(tmp_path / "5/params", tmp_path / "7").is_dir()  # which asks for nothing of it


KILLED = """
import os, signal, sys
from pathlib import Path
from exchanged import TINY
from openpi_train.interop import native_format
from openpi_train.tools.convert_checkpoint import plan
from openpi_train.tools.requests import ConvertRequest
native_format.write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # when all arrays are written
plan(ConvertRequest(source=sys.argv[1], target=Path(sys.argv[2]), outputs=False), TINY).run()
"""


@pytest.mark.slow
def test_a_conversion_that_was_killed_leaves_nothing_to_take_for_a_checkpoint(saved, tmp_path):
    target = tmp_path / "out"
    words = [sys.executable, "-c", KILLED, str(saved), str(target)]
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(Path(cli.__file__).parents[1])])}
    assert subprocess.run(words, env={**os.environ, **paths}, timeout=120, check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    assert (left / "params/_METADATA").is_file() and left.name.startswith(".out.partial-")
    for found in (left, left / "params"):
        with pytest.raises(CheckpointError, match="a conversion was interrupted, or still runs"):
            open_checkpoint(found)
    convert(saved, target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_pieces_of_a_conversion_are_small_however_large_a_leaf_is(saved, tmp_path, monkeypatch):
    """Of leaves of up to 25 kB no more than 2 kB are read or written at once, in other forms and types, too."""
    sizes, read_in_pieces, read_whole = [], stored_leaves.StoredLeaf.pieces, stored_leaves.StoredLeaf.whole

    def noting(leaf, index=None):
        for where, piece in read_in_pieces(leaf, index):
            sizes.append(piece.nbytes)
            yield where, piece

    def only_mapped(leaf):
        assert leaf.chunk is None, f"all of {leaf.shape} was decoded at once"
        return read_whole(leaf)

    for module in (stored_leaves, orbax_item):
        monkeypatch.setattr(module, "PIECE_BYTES", 2000)
    monkeypatch.setattr(stored_leaves.StoredLeaf, "pieces", noting)
    monkeypatch.setattr(stored_leaves.StoredLeaf, "whole", only_mapped)
    first = convert(saved / "params", tmp_path / "ours")
    assert convert(first, tmp_path / "torch", target_format="openpi_torch", dtype="bfloat16").is_dir()
    assert len(sizes) > 100 and max(sizes) <= 2000


@pytest.mark.slow
def test_factors_are_merged_layer_by_layer_as_at_once(tmp_path):
    experiment = tiny(language=LORA, action_expert=LORA)
    params = made_up(experiment)
    source = write(tmp_path / "5", params)
    result = open_checkpoint(convert(source, tmp_path / "6", experiment, merge_lora=True, target_format="openpi"))
    names = openpi.parameter_names(experiment.model)
    at_once = experiment.model.param_rules.merge_lora({path: jnp.asarray(params[name]) for path, name in names.items()})
    plain = experiment.model.without_lora()
    for path, leaf in model_params(result, plain).items():
        np.testing.assert_array_equal(leaf.whole(), at_once[path])


def test_weights_of_another_tokenizer_are_refused_with_both_fingerprints(tmp_path):
    mine, other = (
        load_tokenizer(BYTES).fingerprint,
        train_tokenizer(["pick up the cup"] * 3, tmp_path / "t.model", 300).fingerprint,
    )
    assert mine != other and mine == load_tokenizer(BYTES).fingerprint
    opened = as_stored(PARAMS, tokenizer=mine)
    native_format.write(tmp_path / "run/5", opened, None)
    loader = CheckpointWeightLoader(params_path=str(tmp_path / "run/5/params"))
    assert loader.tokenizer() == mine
    assert open_checkpoint(convert(tmp_path / "run/5", tmp_path / "again", target_format="ours")).tokenizer == mine
    check_tokenizer(mine, mine, where="X")
    check_tokenizer(None, other, where="X")
    with pytest.raises(CheckpointError, match=f"fingerprint {mine}, --data.tokenizer has {other}"):
        check_tokenizer(loader.tokenizer(), other, where="X")


def test_weights_of_another_fast_processor_are_refused_too(tmp_path):
    chunks, words = np.random.default_rng(0).normal(size=(20, 4, 2)), load_tokenizer(BYTES)
    for scale in (5, 10):
        fit_fast(chunks, vocab_size=300, scale=scale).save(tmp_path / str(scale))
    model = Pi0FastConfig(paligemma_variant="dummy", fast_tokenizer=str(tmp_path / "5"))
    mine, other = (
        tokens_fingerprint(dataclasses.replace(model, fast_tokenizer=str(tmp_path / name)), words)
        for name in ("5", "10")
    )
    check_tokenizer(mine, mine, where="X")
    with pytest.raises(CheckpointError, match=r"--model.fast-tokenizer has .*same actions .*model.fast_tokenizer"):
        check_tokenizer(mine, other, where="X")
    # Of a model without action tokens only the words are known.
    assert tokens_fingerprint(TINY.model, words) == words.fingerprint
    check_tokenizer(mine, words.fingerprint, where="X")
    check_tokenizer(words.fingerprint, other, where="X")
