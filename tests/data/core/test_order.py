import numpy as np
import pytest

from openpi_train.data.core import order


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_every_epoch_visits_every_sample_exactly_once(size):
    epoch, index = order.sample_at(np.arange(3 * size), size, seed=4)
    assert np.array_equal(epoch, np.repeat(np.arange(3), size))
    for number in range(3):
        assert np.array_equal(np.sort(index[epoch == number]), np.arange(size))


def test_epochs_seeds_and_streams_have_different_orders():
    size = 100
    orders = [order.sample_at(np.arange(size) + epoch * size, size, seed, stream)[1].tolist()
              for epoch in (0, 1) for seed in (0, 1) for stream in (0, 1)]  # fmt: skip
    assert len({tuple(found) for found in orders}) == len(orders)


def test_a_position_alone_gives_what_the_whole_order_gives():
    _, together = order.sample_at(np.arange(500), 130, seed=9)
    alone = [int(order.sample_at(np.array(position), 130, seed=9)[1]) for position in range(500)]
    assert alone == together.tolist()


def test_the_order_is_the_same_today_as_when_it_was_first_written():
    # A change here means that no run can be resumed exactly across it.
    assert order.sample_at(np.arange(8), 1000, seed=42)[1].tolist() == [975, 225, 11, 905, 390, 62, 104, 947]


def test_places_are_spread_evenly():
    # Chi-square of (place, value) over many keys, 6 x 6 cells: 25 degrees of freedom, mean 25, 1e-4 quantile about 62.
    size, keys = 6, 6000
    values = order.permute(np.tile(np.arange(size), keys), size, np.repeat(np.arange(keys), size)).reshape(keys, size)
    cells = np.stack([np.bincount(values[:, place], minlength=size) for place in range(size)])
    assert np.sum((cells - keys / size) ** 2 / (keys / size)) < 62


def test_huge_sizes_cost_nothing():
    index = order.permute(np.arange(10), 1 << 40, key=3)
    assert len(set(index.tolist())) == 10
    assert index.max() < 1 << 40
