"""How many prompt tokens the rows of a run have: as many as its longest prompt needs."""

import dataclasses
import json

import numpy as np
import pytest
from command import places, train

from openpi_train import cli
from openpi_train.runtime.world import WorldFlags, find_world
from openpi_train.training.settling import Settling, settle

# The `bytes` tokenizer: a token per letter, one that begins the prompt and one that ends it.
SHORT, LONG = "tidy up", "tidy up the table"


def opened(base, *flags):
    return cli.parse_experiment("debug", [*places(base), *flags]).open_data()


def prompts(data):
    columns, _ = data.train.batch(np.arange(4))
    return columns["prompt_tokens"], columns["prompt_mask"]


def test_rows_have_no_padding_that_no_prompt_needs(tmp_path):
    data = opened(tmp_path, "--data.datasets.0.prompt", SHORT)
    limit = data.model.rows.text_limit
    assert data.text_length == data.row_shapes["prompt_tokens"][0] == 16 < limit
    tokens, mask = prompts(data)
    assert mask.sum(axis=1).tolist() == [len(SHORT) + 2] * 4
    tokenize = data.model.rows.transforms(data.train.transforms[0][2].tokenizer)[1]
    padded = tokenize({"prompt": SHORT})
    assert len(padded["prompt_tokens"]) == limit
    assert padded["prompt_tokens"][:16].tolist() == tokens[0].tolist() and not padded["prompt_mask"][16:].any()


def test_a_longer_prompt_makes_longer_rows_and_the_limit_still_cuts(tmp_path, caplog):
    data = opened(tmp_path, "--data.datasets.0.prompt", LONG)
    assert data.text_length == 24 and prompts(data)[1].sum(axis=1).tolist() == [len(LONG) + 2] * 4
    data = opened(tmp_path, "--data.datasets.0.prompt", LONG, "--model.max-token-len", "12")
    assert data.text_length == 12 and prompts(data)[1].all()
    assert f"prompt of {len(LONG) + 2} tokens cut to 12" in caplog.text


@pytest.mark.slow
def test_memory_is_planned_for_rows_as_long_as_the_prompts_need(tmp_path):
    experiment = cli.parse_experiment("debug", [*places(tmp_path), "--data.datasets.0.prompt", SHORT])
    world = find_world(WorldFlags(), {})
    with_data, without = settle(experiment, world).prepared, Settling.here(experiment, world).prepared
    assert with_data.memory.total < without.memory.total
    as_long = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, max_token_len=16))
    assert with_data.memory == Settling.here(as_long, world).prepared.memory


@pytest.mark.slow
def test_a_run_records_the_length_of_its_rows_and_not_as_a_setting(tmp_path):
    train(tmp_path, "debug", "--num-train-steps", "2", "--data.datasets.0.prompt", SHORT)
    run = tmp_path / "runs" / "debug" / "x"
    assert json.loads((run / "2" / "meta.json").read_text())["text_length"] == 16
    (start,) = json.loads((run / "environment.json").read_text())["starts"]
    assert start["rows"]["prompt_tokens"] == [16]
