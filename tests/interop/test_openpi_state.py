"""Training states under openpi's names and ours: which parameter a leaf belongs to, and which value counts."""

import numpy as np
from exchanged import TINY

from openpi_train.interop import openpi
from openpi_train.interop.openpi import our_items, published_state, state_leaves
from openpi_train.interop.stored_leaves import Stored, in_memory

# Our path -> published name. One name ends another, as a head's and that of the tower around it do.
NAMES = {"trained": "tower/head/kernel", "other": "head/kernel", "frozen": "img/kernel"}


def numbers(found):
    return {name: leaf.whole().tolist()[0] for name, leaf in found.items()}


def stored(train_state) -> Stored:
    params = {"tower/head/kernel": 1, "head/kernel": 2, "img/kernel": 3}
    return Stored(
        where="memory",
        format="openpi",
        params={name: in_memory(np.full(2, value, np.float32)) for name, value in params.items()},
        train_state={name: in_memory(np.full(2, value, np.float32)) for name, value in train_state.items()},
    )


MOMENTS = {"opt_state/1/0/mu/tower/head/kernel": 11, "opt_state/1/0/mu/head/kernel": 12}
RAW = {"params/tower/head/kernel": 21, "params/head/kernel": 22, "params/img/kernel": 23}


def test_the_longest_name_that_ends_a_moments_is_its_parameter():
    _, state = our_items(stored({"step": 5, **MOMENTS, **RAW}), NAMES)
    assert numbers(state) == {
        "step": 5,
        "opt_state/1/0/mu/trained": 11,
        "opt_state/1/0/mu/other": 12,
        "params/trained": 21,
        "params/other": 22,
    }


def test_a_frozen_parameter_is_the_one_that_was_trained_on_and_not_its_average():
    """openpi averages a frozen parameter, too, which may round it."""
    checkpoint = stored({"step": 5, **MOMENTS, **RAW})
    params, _ = our_items(checkpoint, NAMES)
    assert numbers(params) == {"tower/head/kernel": 1, "head/kernel": 2, "img/kernel": 23}
    assert numbers(state_leaves(checkpoint, NAMES)) == {
        "step": 5,
        "opt_state/1/0/mu/trained": 11,
        "opt_state/1/0/mu/other": 12,
        "ema/trained": 1,
        "params/trained": 21,
        "ema/other": 2,
        "params/other": 22,
        "params/frozen": 23,
    }


def test_our_state_is_published_with_the_frozen_parameters_beside_the_average():
    checkpoint = stored({"step": 5, **MOMENTS, **RAW})
    params, state = our_items(checkpoint, NAMES)
    assert numbers(published_state(state, params, NAMES)) == {"step": 5, **MOMENTS, **RAW}


def test_a_loss_scale_is_not_handed_to_openpis_trainer():
    checkpoint = stored({"step": 5, **MOMENTS, "scale/factor": 1024, "scale/good_steps": 3})
    assert numbers(openpi.kept(checkpoint, TINY.model).train_state) == {"step": 5, **MOMENTS}
