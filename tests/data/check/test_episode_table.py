"""The pass over columns: blocks, what an interrupted pass keeps, and measures against plain loops."""

import logging

import numpy as np
import pytest
from made_episodes import ACTION, STATE, InMemory, sound

from openpi_train.data.check import episode_table
from openpi_train.data.check.examined import ExaminedData
from openpi_train.data.check.fault_kinds import KINDS, examine
from openpi_train.data.check.near_copies import RowDigests, candidates, share_of_rows


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(episode_table.blocks, "__defaults__", (100,))


def test_blocks_hold_whole_episodes():
    ends = np.array([30, 90, 100, 350, 360])
    assert list(episode_table.blocks(ends, 100)) == [(0, 3), (3, 4), (4, 5)]


def test_measures_are_those_of_plain_loops(small_blocks):
    episodes = sound(6)
    episodes[2].state[3:6, 1] = np.nan
    episodes[4].state[5:9, 0] = 5.0
    table = ExaminedData(name="made", source=InMemory(episodes)).table
    for number, one in enumerate(episodes):
        np.testing.assert_array_equal(table[f"low/{STATE}"][number], np.nanmin(one.state, axis=0))
        np.testing.assert_array_equal(table[f"high/{ACTION}"][number], one.action.max(axis=0))
        np.testing.assert_array_equal(table[f"not_finite/{STATE}"][number], np.isnan(one.state).sum(axis=0))
    assert table["first_not_finite"].tolist() == [-1, -1, 30 + 31 + 3, -1, -1, -1]
    assert table[f"at_high/{STATE}"][4, 0] == 4 and table["flag/next/success"].tolist() == [1] * 6


def test_an_interrupted_pass_goes_on_and_finds_the_same(small_blocks, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    source = InMemory(sound())
    source.columns[STATE][200:203] = np.nan
    whole = examine(ExaminedData(name="made", source=source))
    measures, made = episode_table._Block.measures, []

    def interrupted(block):
        made.append(block.start)
        if len(made) == 3:
            raise KeyboardInterrupt
        return measures(block)

    monkeypatch.setattr(episode_table._Block, "measures", interrupted)
    with pytest.raises(KeyboardInterrupt):
        examine(ExaminedData(name="made", source=source, kept=tmp_path))
    assert len(list(tmp_path.glob("parts/*.npz"))) == 2
    assert examine(ExaminedData(name="made", source=source, kept=tmp_path)) == whole
    assert f"check of made: 2 of {len(set(made))} parts are those of an earlier one" in caplog.text
    assert made.count(0) == 1 and len(made) == len(set(made)) + 1  # the third block alone was begun twice
    # Parts of other data are not taken for these.
    source.fingerprint = "others"
    examine(ExaminedData(name="made", source=source, kept=tmp_path))
    assert made.count(0) == 2


def test_every_kind_says_what_it_is():
    assert all(kind.about for kind in KINDS)


def test_rows_that_differ_by_rounding_have_equal_digests_and_others_do_not():
    random = np.random.default_rng(0)
    rows = random.normal(size=(500, 6))
    digests = RowDigests.of([rows])
    assert share_of_rows(digests.rows([rows]), digests.rows([rows + 1e-6])) > 0.98
    assert share_of_rows(digests.rows([rows]), digests.rows([rows + 0.05])) < 0.02
    assert share_of_rows(digests.rows([rows[:100]]), digests.rows([rows])) == 1


def test_candidates_share_digests_and_many_copies_cost_pairs_with_the_first_and_the_one_before():
    hashes = np.array([[1, 2, 3], [7, 8, 9], [1, 2, 4], [1, 2, 5], [9, 10, 11]], np.uint64)
    assert candidates(hashes) == [(0, 2), (0, 3), (2, 3)]
