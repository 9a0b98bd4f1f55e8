"""Kinds of bad exchange: each is refused with the key and what to do, and leaves nothing half-written behind."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from exchanged import LORA, STATS, TINY, as_stored, made_up, tiny, training_state, write

from openpi_train.checkpoints import checkpoint_formats
from openpi_train.checkpoints.checkpoint_formats import open_checkpoint
from openpi_train.interop import native_format, openpi
from openpi_train.interop.openpi import state_leaves
from openpi_train.interop.orbax_item import save_item
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.tools.convert_checkpoint import plan
from openpi_train.tools.requests import ConvertRequest

KEY = "action_in_proj/kernel"
WITH_LORA = tiny(language=LORA)
_SHARED = ("paligemma_variant", "language", "siglip", "image_size", "action_dim", "action_horizon", "dtype", "remat")
FAST = dataclasses.replace(
    TINY, model=Pi0FastConfig(vocab_size=32, **{name: getattr(TINY.model, name) for name in _SHARED})
)
WIDE_FAST = dataclasses.replace(FAST, model=dataclasses.replace(FAST.model, vocab_size=64))


@pytest.fixture(scope="session")
def good(tmp_path_factory) -> Path:
    """A good checkpoint, made once; what spoils it takes a copy."""
    return write(tmp_path_factory.mktemp("exchange") / "5", made_up())


@pytest.fixture
def copy(good, tmp_path) -> Path:
    """A copy of the good one to spoil."""
    return shutil.copytree(good, tmp_path / "5")


def convert(source, target, experiment=TINY, **flags) -> Path:
    return plan(ConvertRequest(source=str(source), target=target, outputs=False, **flags), experiment).run()


def refused(source, target, experiment=TINY, **flags) -> str:
    """What is said; and that there is nothing where the result would be, nor beside it."""
    folder = target.parent
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises((CheckpointError, UsageError)) as error:
        convert(source, target, experiment, **flags)
    assert sorted(path.name for path in folder.iterdir()) == before
    return str(error.value)


@pytest.mark.slow
def test_the_good_one_is_taken(good, tmp_path):
    result = convert(good, tmp_path / "out")
    assert {path.name for path in result.iterdir()} == {"params", "assets", "meta.json", "manifest.json", "parity.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def lack_a_key(params):
    del params[KEY]


def have_a_key_more(params):
    params["action_in_proj/scale"] = np.zeros(3, np.float32)


def misname_a_key(params):
    params["action_in_projection/kernel"] = params.pop(KEY)


def have_another_shape(params):
    params[KEY] = params[KEY].T


def have_whole_numbers(params):
    params[KEY] = params[KEY].astype(np.int32)


def be_factors_only(params):
    for name in [name for name in params if "lora" not in name]:
        del params[name]


def be_another_models(params):
    kept = dict(params)
    params.clear()
    params.update({f"unet/{number}": value for number, value in enumerate(kept.values()) if number < 3})


@pytest.mark.parametrize(
    ("spoil", "of", "wanted", "says"),
    [
        (lack_a_key, TINY, TINY, f"missing in the checkpoint (1):\n  {KEY}"),
        (have_a_key_more, TINY, TINY, "unknown to the model (1):\n  action_in_proj/scale"),
        (misname_a_key, TINY, TINY, f"{KEY} (closest in the checkpoint: action_in_projection/kernel)"),
        (have_another_shape, TINY, TINY, f"{KEY} is (8, 7), the model wants (7, 8)"),
        (have_whole_numbers, TINY, TINY, f"{KEY} is int32, the model wants float32"),
        (be_factors_only, WITH_LORA, WITH_LORA, "holds LoRA factors only"),
        (be_another_models, TINY, TINY, "a checkpoint of another model"),
        (None, WITH_LORA, TINY, "are LoRA factors and the model has none"),
        (None, TINY, WITH_LORA, "no LoRA factors, but the model has"),
        (None, TINY, tiny(pi05=True), "the checkpoint is pi0's and the model pi0.5"),
        (None, tiny(pi05=True), TINY, "the checkpoint is pi0.5's and the model pi0"),
        (None, TINY, FAST, "the checkpoint has an action expert, as pi0 and pi0.5 have"),
        (None, FAST, TINY, "the action expert is missing"),
        (None, FAST, WIDE_FAST, "the language expert has other sizes"),
        (
            None,
            TINY,
            tiny(language=dataclasses.replace(TINY.model.language, width=16)),
            "the language expert has other",
        ),
        (
            None,
            TINY,
            tiny(action_expert=dataclasses.replace(TINY.model.language, mlp_dim=16)),
            "the action expert or its",
        ),
        (None, TINY, tiny(vocab_size=64), "embedder/input_embedding is (32, 8), the model wants (64, 8)"),
        (
            None,
            TINY,
            tiny(siglip=dataclasses.replace(TINY.model.siglip, mlp_dim=16)),
            "the image tower has other sizes",
        ),
        (None, TINY, tiny(action_dim=32), "action_in_proj/kernel is (7, 8), the model wants (32, 8)"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_keys_that_do_not_fit(tmp_path, monkeypatch, spoil, of, wanted, says):
    params = made_up(of)
    if spoil:
        spoil(params)
    # Only names and shapes matter here, so that the checkpoint need not be written.
    monkeypatch.setattr(checkpoint_formats, "open_checkpoint", lambda *_: as_stored(params))
    assert says in refused("memory", tmp_path / "out", wanted)


def tear_a_shard(step):
    largest = max((path for path in step.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def lose_all_shards(step):
    for folder in step.rglob("d"):
        shutil.rmtree(folder)


def tear_the_index(step):
    (step / "params/manifest.ocdbt").write_bytes(b"")


def tear_the_names(step):
    path = step / "params/_METADATA"
    path.write_text(path.read_text()[:100])


def forget_the_names(step):
    (step / "params/_METADATA").write_text("{}")


def have_another_top(step):
    shutil.rmtree(step / "params")
    save_item(step / "params", {"parameters": {"kernel": np.zeros(3)}})


def tear_the_norm_stats(step):
    (step / "assets/robot/norm_stats.json").write_text("{")


def widen_the_norm_stats(step):
    wide = json.loads(json.dumps(STATS).replace("[1.0, ", f"[{'1.0, ' * 40}"))
    (step / "assets/robot/norm_stats.json").write_text(json.dumps(wide))


def be_empty(step):
    shutil.rmtree(step)
    step.mkdir()


def be_absent(step):
    shutil.rmtree(step)


def be_misspelt(step):
    shutil.copytree(step, step.with_name("30000"))
    shutil.rmtree(step)


def be_a_folder_of_runs(step):
    be_a_run_without_a_step(step)
    step.rename(step.with_name("run"))
    step.mkdir()
    step.with_name("run").rename(step / "run")


def be_a_file(step):
    shutil.rmtree(step)
    step.write_text("weights")


def be_something_else(step):
    shutil.rmtree(step)
    step.mkdir()
    (step / "notes.txt").write_text("weights")


def be_half_saved(step):
    (step / "params").rename(step / "params.orbax-checkpoint-tmp-1")


def be_half_a_step_of_ours(step):
    (step / "meta.json").write_text("{}")


def be_a_run_without_a_step(step):
    shutil.rmtree(step)
    step.mkdir()
    (step / "experiment.json").write_text('{"save_interval": 250}')


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (tear_a_shard, "truncated or damaged"),
        (lose_all_shards, "truncated or damaged"),
        (tear_the_index, "truncated or damaged"),
        (tear_the_names, "_METADATA is damaged"),
        (forget_the_names, "_METADATA is damaged"),
        (have_another_top, "it holds ['parameters'] at the top, not 'params'"),
        (tear_the_norm_stats, "norm_stats.json is not JSON"),
        (widen_the_norm_stats, "the norm stats 'robot' hold 46 dims for 'state', the model takes 7"),
        (be_empty, "the directory is empty; was its copy interrupted?"),
        (be_absent, "there is no such directory"),
        (be_misspelt, "there is no such directory; check the path ("),
        (be_misspelt, "holds 30000)"),
        (be_a_folder_of_runs, "is no run, it holds runs: give one, "),
        (be_a_file, "it is a file"),
        (be_something_else, "it holds notes.txt. Supported formats:"),
        (be_half_saved, "params.orbax-checkpoint-tmp-1 is incomplete, its save was interrupted"),
        (be_half_a_step_of_ours, "manifest.json, which is written last, is missing"),
        (be_a_run_without_a_step, "has no checkpoint yet; the first is saved at step 250 (--save-interval), or at"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_files_that_are_not_what_they_should_be(copy, tmp_path, spoil, says):
    spoil(copy)
    text = refused(copy, tmp_path / "out")
    assert says in text
    assert str(copy) in text or "'robot'" in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"source_format": "theirs"}, "unknown format 'theirs'; allowed: big_vision, ours, openpi, "),
        ({"target_format": "theirs"}, "unknown format 'theirs'"),
        ({"source_format": "ours"}, "is not in the format ours"),
        ({"merge_lora": True}, "has no LoRA factors; leave the flag out"),
        ({"norm_stats": "absent.json"}, "--norm-stats needs --asset-id"),
        ({"norm_stats": "absent.json", "asset_id": "robot"}, "--norm-stats: no norm stats at absent.json"),
    ],
    ids=str,
)
def test_flags_that_do_not_fit(good, tmp_path, flags, says):
    assert says in refused(good, tmp_path / "out", **flags)


def test_norm_stats_to_rename_must_be_one_set(copy, tmp_path):
    shutil.copytree(copy / "assets/robot", copy / "assets/other")
    assert "has ['other', 'robot']: give the file" in refused(copy, tmp_path / "out", asset_id="mine")


def test_an_address_of_an_unknown_kind(tmp_path):
    assert "addresses with ftp:// are not supported; allowed: a path, or one of gs://" in refused(
        "ftp://x/y", tmp_path / "out"
    )


def test_a_directory_that_may_not_be_read(copy, tmp_path, monkeypatch):
    def forbid(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    target = tmp_path / "out"
    monkeypatch.setattr(Path, "iterdir", forbid)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied; check its permissions"):
        convert(copy, target)


@pytest.mark.slow
def test_a_target_that_exists_stays_and_is_moved_aside_where_that_is_asked(good, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    assert "exists; give another directory, or --overwrite" in refused(good, target)
    convert(good, target, overwrite=True)
    (aside,) = tmp_path.glob("out.replaced-*/mine.txt")
    assert aside.read_text() == "mine"


def test_a_disk_without_room_is_seen_before_anything_is_written(good, small_disk, fill_disk):
    fill_disk()
    assert "not enough disk space in" in refused(good, small_disk / "out")


def test_a_disk_that_fills_up_leaves_nothing(good, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(openpi, "write_norm_stats", fail)
    assert "the disk is full; free some space. Nothing was left there" in refused(good, tmp_path / "out")


def test_a_disk_that_keeps_other_values_is_found_out(good, tmp_path, monkeypatch):
    def write_otherwise(stored, model):
        changed = {**stored.params, KEY: stored.params[KEY].map(lambda value: value + 1)}
        return lambda directory: native_format.write(directory, dataclasses.replace(stored, params=changed), model)

    forms = tuple(dataclasses.replace(form, prepare=write_otherwise) for form in checkpoint_formats.formats())
    monkeypatch.setattr(checkpoint_formats, "formats", lambda: forms)
    assert f"{KEY} reads back with another value than was written" in refused(good, tmp_path / "out")


def test_a_run_of_ours_with_another_model(tmp_path):
    stored = as_stored(made_up(), experiment={"name": "debug", "model": {"vocab_size": 32, "action_dim": 8}})
    native_format.write(tmp_path / "5", stored, None)
    assert "model.action_dim: the run has 8, given 7" in refused(tmp_path / "5", tmp_path / "out")


def test_a_flipped_byte_in_ours(tmp_path):
    native_format.write(tmp_path / "5", as_stored(made_up()), None)
    path = max((tmp_path / "5/params").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert f"{path.name} is corrupt: its crc32 is" in refused(tmp_path / "5", tmp_path / "out")


def test_training_cannot_go_on_from_what_was_published_for_inference(good):
    with pytest.raises(CheckpointError, match="has no train_state: it was published for inference"):
        state_leaves(open_checkpoint(good), openpi.parameter_names(TINY.model))


@pytest.mark.slow
def test_a_training_state_that_lacks_a_moment(tmp_path, monkeypatch):
    params = made_up()
    state = training_state(params)
    stored = as_stored(params, train_state={name: as_stored(state).params[name] for name in state})
    lost = f"opt_state/1/0/mu/{KEY}"

    def lose(stored, model):
        state = {name: leaf for name, leaf in stored.train_state.items() if name != lost}
        return lambda directory: native_format.write(directory, dataclasses.replace(stored, train_state=state), model)

    forms = tuple(dataclasses.replace(form, prepare=lose) for form in checkpoint_formats.formats())
    monkeypatch.setattr(checkpoint_formats, "formats", lambda: forms)
    monkeypatch.setattr(checkpoint_formats, "open_checkpoint", lambda *_: stored)
    assert f"missing in the checkpoint (1):\n  {lost}" in refused("memory", tmp_path / "out")
