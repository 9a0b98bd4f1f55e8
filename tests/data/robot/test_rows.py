import dataclasses
import json
import pickle

import numpy as np
import pytest

from openpi_train.data.core.source import BadRecord
from openpi_train.data.core.text_lengths import TextLengths
from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.opened import open_windows, prompts
from openpi_train.data.robot.transforms import PadDims, ResizeImages, TokenizePrompt
from openpi_train.data.tokenizers.tokenizer import load_tokenizer
from openpi_train.robots.bridge import Bridge

SMALL = FakeData(num_episodes=6, episode_length=9, image_height=12, image_width=16)


def one(source=SMALL, **options):
    return DataConfig(datasets=(Dataset(source=source, robot=Bridge()),), validation_fraction=0.2, **options)


def equal(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def test_a_camera_that_one_robot_lacks_is_black_and_masked_and_one_that_none_has_is_absent(open_small, mixture_config):
    opened = open_small(mixture_config)
    assert opened.cameras == ("base_0_rgb", "left_wrist_0_rgb")
    assert {name for name in opened.train.spec if name.startswith("image/")} == {f"image/{n}" for n in opened.cameras}
    columns, _ = opened.train.batch(np.arange(64))
    dataset = opened.train.mixture.locate(np.arange(64))[0]
    assert 0 < dataset.sum() < 64
    assert np.array_equal(columns["image_mask/left_wrist_0_rgb"], dataset == 1)
    assert not columns["image/left_wrist_0_rgb"][dataset == 0].any()
    assert columns["image/left_wrist_0_rgb"][dataset == 1].any(axis=(1, 2, 3)).all()
    assert columns["image_mask/base_0_rgb"].all()


def test_rows_are_normalised_windows_passed_through_the_models_transforms(open_small, mixture_config):
    opened = open_small(mixture_config)
    rows = opened.train
    columns, _ = rows.batch(np.arange(20))
    dataset, _, index = rows.mixture.locate(np.arange(20))
    for number in range(20):
        raw = rows.windows[dataset[number]].row(int(index[number]))
        stats = opened.norm_stats[rows.names[dataset[number]]]
        actions = (raw["actions"] - stats["actions"].mean) / (stats["actions"].std + 1e-6)
        np.testing.assert_allclose(columns["actions"][number, :, :7], actions, rtol=1e-5, atol=1e-6)
        assert not columns["actions"][number, :, 7:].any()
        state = (raw["state"] - stats["state"].mean) / (stats["state"].std + 1e-6)
        np.testing.assert_allclose(columns["state"][number, :7], state, rtol=1e-5, atol=1e-6)
        assert np.array_equal(columns["action_mask"][number], raw["action_mask"])
    assert columns["dim_mask"].tolist() == [[True] * 7 + [False] * 3] * 20


def test_rows_do_not_depend_on_the_batch_they_are_asked_in_nor_on_the_process(open_small, mixture_config):
    rows = open_small(mixture_config).train
    together, _ = rows.batch(np.arange(40))
    copied = pickle.loads(pickle.dumps(rows))
    parts = [copied.batch(np.arange(start, start + 8))[0] for start in range(0, 40, 8)]
    assert equal(together, {name: np.concatenate([part[name] for part in parts]) for name in together})


def test_realised_proportions_are_the_weights(open_small, mixture_config):
    opened = open_small(mixture_config)
    assert opened.proportions == {"0_first": 0.75, "1_second": 0.25}
    assert opened.train.proportions(256 * 4) == {"0_first": 0.75, "1_second": 0.25}


def test_held_out_rows_come_from_held_out_episodes_whatever_the_seed(open_small, mixture_config):
    first, second = open_small(mixture_config, seed=1), open_small(mixture_config, seed=2)
    assert first.validation is not None
    assert second.validation is not None
    assert equal(first.validation.batch(np.arange(16))[0], second.validation.batch(np.arange(16))[0])
    assert not equal(first.train.batch(np.arange(16))[0], second.train.batch(np.arange(16))[0])
    trained = {text.split(" (epoch")[0] for text in first.train.describe(np.arange(2000))}
    held_out = {text.split(" (epoch")[0] for text in first.validation.describe(np.arange(500))}
    assert not trained & held_out
    assert open_small(dataclasses.replace(mixture_config, validation_fraction=0.0)).validation is None


def test_a_dataset_of_its_own_is_held_out_whole(open_small):
    other = dataclasses.replace(SMALL, seed=9, num_episodes=2)
    (dataset,) = one().datasets
    config = dataclasses.replace(one(), datasets=(dataclasses.replace(dataset, validation=other),))
    opened, alone = open_small(config), open_small(one(other))
    every = open_small(dataclasses.replace(one(), validation_fraction=0.0))
    assert opened.train.num_samples == every.train.num_samples  # none of its own is held out
    assert opened.validation.windows[0].source.fingerprint == other.open().fingerprint
    assert opened.validation.num_samples == alone.train.num_samples + alone.validation.num_samples
    assert opened.norm_stats.keys() == every.norm_stats.keys()
    for name, stats in opened.norm_stats[dataset.asset].items():
        assert equal(vars(stats), vars(every.norm_stats[dataset.asset][name]))
    # Instructions of both are counted.
    windows = open_windows(config, opened.train.windows[0].shape)
    assert prompts(windows)[-len(other.open().prompts) :] == prompts(open_windows(one(other), windows[0].shape))


def test_the_fingerprint_changes_with_the_data_and_only_then(open_small):
    base = open_small(one())
    assert open_small(one()).fingerprint == base.fingerprint
    assert open_small(one(on_bad_record="skip")).fingerprint == base.fingerprint
    for changed in (one(dataclasses.replace(SMALL, seed=9)), one(normalization="quantile")):
        assert open_small(changed).fingerprint != base.fingerprint
    assert open_small(one(), seed=8).fingerprint != base.fingerprint
    assert json.loads(json.dumps(base.train.identity)) == base.train.identity


def test_a_bad_record_ends_the_run_naming_file_record_episode_and_step(open_small):
    rows = open_small(one(dataclasses.replace(SMALL, bad_steps=tuple(range(60))))).train
    with pytest.raises(
        BadRecord, match=r"fake data \(seed 0\), record \d+, episode \d+, step \d+.*--data.on-bad-record"
    ):
        rows.batch(np.arange(4))


def test_skipped_bad_records_are_replaced_by_the_same_rows_everywhere_and_told(open_small):
    bad = tuple(range(0, 60, 3))
    rows = open_small(one(dataclasses.replace(SMALL, bad_steps=bad), on_bad_record="skip")).train
    whole, told = rows.batch(np.arange(48))
    assert len(told) >= 10
    assert "made unreadable on purpose" in told[0]
    parts = [rows.batch(np.arange(start, start + 4)) for start in range(0, 48, 4)]
    assert equal(whole, {name: np.concatenate([part[0][name] for part in parts]) for name in whole})
    assert [text for _, part in parts for text in part] == told
    # Good rows are the ones of the sound dataset.
    sound, _ = open_small(one()).train.batch(np.arange(48))
    steps = [rows.windows[0].starts[i] for i in rows.mixture.locate(np.arange(48))[2]]
    good = ~np.isin(steps, bad)
    assert equal({n: v[good] for n, v in whole.items()}, {n: v[good] for n, v in sound.items()})
    # Each of the others has a row of its own: a dozen and more draws of about 30 rows are mostly different.
    stand_ins = whole["state"][~good]
    assert len(stand_ins) > 10 and len({state.tobytes() for state in stand_ins}) > len(stand_ins) / 2


def stand_ins_of(rows, positions):
    """Of each of these positions whose record is bad, by its position: where the row in its place comes from.

    Images of the synthetic data are drawn from the control step, so a row says which sample it is.
    """
    rows.on_bad_record = "error"
    known = {}
    for number in range(len(rows.windows)):
        for index in range(rows.mixture.sizes[number]):
            try:
                known[rows._finished(number, index)["image/base_0_rgb"].tobytes()] = (number, index)
            except BadRecord:
                continue
    rows.on_bad_record = "skip"
    whole, told = rows.batch(positions)
    dataset, _, index = rows.mixture.locate(positions)
    found = [known[image.tobytes()] for image in whole["image/base_0_rgb"]]
    own = list(zip(dataset.tolist(), index.tolist(), strict=True))
    return {int(p): (was, now) for p, was, now in zip(positions, own, found, strict=True) if was != now}, told


def test_a_stand_in_has_no_longer_text_and_is_drawn_until_one_is_found(open_small):
    """Of 10 samples one has a short text, of 3 one is bad; a draw that is too long is followed by another."""
    starts = open_small(one()).train.windows[0].starts
    bad = tuple(int(step) for step in starts[::3])
    rows = open_small(one(dataclasses.replace(SMALL, bad_steps=bad))).train
    short = np.arange(len(starts)) % 10 == 0
    rows = rows.in_lengths(TextLengths(lengths=(8, 24), tokens=(np.where(short, 8, 24),)), {})
    found, _ = stand_ins_of(rows, np.arange(len(starts) * 8))
    replaced = {position: now for position, ((_, was), (_, now)) in found.items() if short[was]}
    assert len(replaced) == 8 * short[::3].sum() and len(set(replaced.values())) > 1
    assert short[list(replaced.values())].all()
    # Each message is of a bad record, of which a third of the draws among short ones have one: 1.5 for a position. The
    # draws that were too long have none.
    told = [line for position in replaced for line in rows.batch(np.array([position]))[1]]
    assert len(told) < 3 * len(replaced)


def test_a_stand_in_comes_from_its_own_dataset_and_depends_on_the_seed(open_small, mixture_config):
    bad = tuple(range(0, 60, 3))
    datasets = [
        dataclasses.replace(one, source=dataclasses.replace(one.source, bad_steps=bad))
        for one in mixture_config.datasets
    ]
    # The first dataset has more samples than the second.
    datasets[0] = dataclasses.replace(datasets[0], source=dataclasses.replace(datasets[0].source, num_episodes=20))
    config = dataclasses.replace(mixture_config, datasets=tuple(datasets))
    draws = []
    for seed in (1, 2):
        found, _ = stand_ins_of(open_small(config, seed=seed).train, np.arange(180))
        assert {was for (was, _), _ in found.values()} == {0, 1}
        assert all(was == now for (was, _), (now, _) in found.values())
        draws.append({position: sample for position, (_, sample) in found.items()})
    both = [one for one in draws[0].keys() & draws[1].keys() if draws[0][one][0] == draws[1][one][0]]
    assert len(both) > 5 and any(draws[0][position] != draws[1][position] for position in both)


def test_a_dataset_of_bad_records_alone_is_an_error_also_when_skipping(open_small):
    config = one(dataclasses.replace(SMALL, bad_steps=tuple(range(80))), on_bad_record="skip")
    with pytest.raises(BadRecord, match="100 rows in turn could not be read from FakeData"):
        open_small(config).train.batch(np.arange(1))


def test_a_wrong_image_size_and_a_missing_entry_are_told_with_both_shapes(open_small, tokenizer_path):
    prompt = TokenizePrompt(load_tokenizer(str(tokenizer_path)), 24)
    rows = open_small(one(), transforms=(prompt, PadDims(10))).train
    with pytest.raises(
        ValueError, match=r"image/base_0_rgb of FakeData is uint8 \[12, 16, 3\] per row; .* \[8, 8, 3\]"
    ):
        rows.batch(np.arange(1))
    rows = open_small(one(), transforms=(ResizeImages(8), PadDims(10))).train
    with pytest.raises(ValueError, match="rows of FakeData have no prompt_tokens"):
        rows.batch(np.arange(1))


def test_datasets_of_different_robots_cannot_share_norm_stats(open_small):
    datasets = tuple(Dataset(source=SMALL, robot=Bridge(num_arms=arms), asset_id="same") for arms in (1, 2))
    with pytest.raises(ValueError, match=r"share the norm stats 'same' but differ .* --data.datasets.N.asset-id"):
        open_small(DataConfig(datasets=datasets))


def test_a_run_without_datasets_is_refused(open_small):
    with pytest.raises(ValueError, match=r"no dataset to train on: give --dataset"):
        open_small(DataConfig(datasets=()))


def test_asset_names_come_from_the_path_and_skip_version_numbers():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Elsewhere(FakeData):
        path: str = "/data/bridge_dataset/1.0.0/"

    assert Dataset(source=Elsewhere(), robot=Bridge()).asset == "bridge_dataset"
    assert Dataset(source=Elsewhere(), robot=Bridge(), asset_id="widowx").asset == "widowx"
    assert Dataset(source=FakeData(), robot=Bridge()).asset == "FakeData"
