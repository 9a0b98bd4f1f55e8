import numpy as np
import pytest

from openpi_train.data.core.mixture import Mixture


@pytest.mark.parametrize("weights", [(1.0,), (3.0, 1.0), (0.7, 0.29, 0.01), (1.0,) * 7, (1e3, 1.0, 0.001)])
def test_each_dataset_has_its_share_at_every_block_end_to_within_one_sample(weights):
    mixture = Mixture([50] * len(weights), weights, seed=0)
    shares = np.array(weights) / sum(weights)
    for block in range(1, 40):
        counts = mixture.counts(block * mixture.block)
        assert counts.sum() == block * mixture.block
        assert np.all(np.abs(counts - shares * block * mixture.block) < 1 + 1e-6)


def test_counts_are_those_of_the_located_positions():
    mixture = Mixture([30, 11, 5], [0.5, 0.3, 0.2], seed=3)
    dataset, _, _ = mixture.locate(np.arange(3000))
    for length in (1, 255, 256, 257, 1000, 3000):
        assert np.array_equal(mixture.counts(length), np.bincount(dataset[:length], minlength=3))


def test_each_dataset_of_a_mixture_passes_through_its_epochs():
    mixture = Mixture([30, 11], [0.6, 0.4], seed=1)
    dataset, epoch, index = mixture.locate(np.arange(mixture.block * 4))
    for number, size in enumerate(mixture.sizes):
        mine = dataset == number
        for whole in range(int(epoch[mine].max())):
            assert np.array_equal(np.sort(index[mine & (epoch == whole)]), np.arange(size))


def test_one_dataset_ends_its_epochs_at_multiples_of_its_size():
    _, epoch, index = Mixture([77], [2.0], seed=1).locate(np.arange(3 * 77))
    assert np.array_equal(epoch, np.repeat(np.arange(3), 77))
    assert np.array_equal(np.sort(index[:77]), np.arange(77))


@pytest.mark.slow
def test_positions_are_independent_of_how_they_are_asked_for():
    mixture = Mixture([30, 11], [0.6, 0.4], seed=1)
    together = np.stack(mixture.locate(np.arange(700)))
    alone = np.stack([np.stack(mixture.locate(np.array([position])))[:, 0] for position in range(700)], axis=1)
    assert np.array_equal(together, alone)


def test_datasets_are_shuffled_inside_a_block():
    dataset, _, _ = Mixture([1000, 1000], [1.0, 1.0], seed=1).locate(np.arange(2560))
    # 10 blocks of 128 and 128: longest runs of fair coins over 2560 throws stay below about 20.
    changes = np.flatnonzero(np.diff(dataset)) + 1
    assert np.diff(changes).max() < 25
    assert 1000 < len(changes) < 1560


def test_blocks_datasets_and_seeds_are_each_shuffled_in_their_own_way():
    mixture, other = (Mixture([200, 200], [1.0, 1.0], seed=seed) for seed in (1, 2))
    dataset, _, index = mixture.locate(np.arange(4 * mixture.block))
    blocks = dataset.reshape(4, mixture.block)
    assert len({block.tobytes() for block in [*blocks, other.locate(np.arange(mixture.block))[0]]}) == 5
    # The first block has the first 128 of each dataset's 200: two draws have 82 in common, give or take 4.3.
    first, second = (set(index[: mixture.block][dataset[: mixture.block] == number].tolist()) for number in (0, 1))
    assert len(first) == len(second) == 128
    assert len(first & second) < 108


def test_the_mixture_is_the_same_today_as_when_it_was_first_written():
    # A change here means that no run can be resumed exactly across it.
    dataset, epoch, index = Mixture([300, 110], [0.6, 0.4], seed=1).locate(np.arange(5000, 5012))
    assert dataset.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]
    assert epoch.tolist() == [10, 9, 9, 9, 9, 10, 9, 9, 9, 9, 17, 9]
    assert index.tolist() == [289, 282, 104, 248, 2, 116, 70, 298, 64, 235, 70, 133]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_is_refused(weight):
    with pytest.raises(ValueError, match="weights must be positive"):
        Mixture([10, 10], [1.0, weight], seed=0)


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="dataset 1 of the mixture has no samples"):
        Mixture([10, 0], [1.0, 1.0], seed=0)
