"""Batches of a run have text of several lengths: the same losses, on any number of processes, for less work."""

import dataclasses
import json

import fast_runs
import numpy as np
import pytest
from command import losses, places, train

from openpi_train import cli
from openpi_train.data.tokenizers.fast_tokenizer import FastTokenizer, fit_fast

EXPERIMENT = """
import dataclasses
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.make.fake import FakeData
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.robots.bridge import Bridge
from openpi_train_configs.debug import debug

SIZE = {"image_height": 32, "image_width": 32}
data = DataConfig(
    datasets=(
        Dataset(source=FakeData(**SIZE, bad_steps=tuple(range(60))), robot=Bridge(), prompt="tidy up", weight=15),
        Dataset(source=FakeData(**SIZE, seed=1), robot=Bridge(), asset_id="b", prompt="tidy up the table and floor"),
    ),
    tokenizer="bytes",
    on_bad_record="skip",
    validation_fraction=0,
)
mixed = dataclasses.replace(
    debug, objective=FlowMatching(augment=False), data=data, num_train_steps=6, save_interval=6
)
"""
BATCH_SIZE, NUM_STEPS = 8, 6


@pytest.fixture(scope="module")
def name(tmp_path_factory):
    path = tmp_path_factory.mktemp("experiments") / "texts.py"
    path.write_text(EXPERIMENT)
    return f"{path}:mixed"


def test_a_batch_is_cut_to_what_its_rows_need(tmp_path, name):
    data = cli.parse_experiment(name, [*places(tmp_path)]).open_data()
    rows = data.train
    assert rows.text.lengths == (16, 32) and data.text_length == 32
    for step in range(NUM_STEPS):
        positions = step * BATCH_SIZE + np.arange(BATCH_SIZE)
        columns, _ = rows.batch(positions)
        cut = rows.cut({name: column[:3] for name, column in columns.items()}, positions)  # one process's part
        dataset, _, _ = rows.mixture.locate(positions)
        length = 32 if (dataset == 1).any() else 16
        assert cut["prompt_tokens"].shape == cut["prompt_mask"].shape == (3, length)
        assert not columns["prompt_mask"][:, length:].any()
        assert cut["actions"].shape == (3, *columns["actions"].shape[1:])
    assert cli.parse_experiment(name, [*places(tmp_path), "--data.text-lengths", "1"]).open_data().train.text is None


def test_text_that_was_not_there_at_the_start_is_never_cut_off(tmp_path, name):
    rows = cli.parse_experiment(name, [*places(tmp_path)]).open_data().train
    positions = np.arange(BATCH_SIZE)
    assert (rows.mixture.locate(positions)[0] == 0).all()
    columns, _ = rows.batch(positions)
    columns["prompt_mask"][2, 20] = True
    with pytest.raises(ValueError, match=r"prompt_mask: a row has more text .* --data.text-lengths 1"):
        rows.cut(columns, positions)


@pytest.mark.parametrize("experiment", [fast_runs.fast, fast_runs.insulated], ids=["pi0_fast", "insulated"])
def test_rows_that_say_their_chunk_are_cut_to_what_its_tokens_need(tmp_path, monkeypatch, experiment):
    chunks = np.clip(np.random.default_rng(0).normal(scale=0.5, size=(200, 4, 7)), -1, 1)
    fast = str(fit_fast(chunks, vocab_size=300).save(tmp_path / "fast"))
    model = dataclasses.replace(experiment.model, fast_tokenizer=fast)
    experiment = dataclasses.replace(experiment, model=model, assets_base_dir=str(tmp_path), exp_name="x")
    data = experiment.open_data()
    rows, limit = data.train, data.text_length
    assert rows.text.lengths[-1] < limit
    positions = np.arange(4 * BATCH_SIZE)
    columns, _ = rows.batch(positions)
    assert columns["prompt_tokens"].shape == (len(positions), limit)
    _, _, samples = rows.mixture.locate(positions)
    spare = rows.text.tokens[0][samples] - columns["prompt_mask"].sum(axis=1)
    # "Action: " is counted twice by the byte tokenizer, and a number of the state as its longest.
    assert spare.min() >= 0 and np.ptp(spare) <= 4 * len(rows.windows[0].robot.state_names)
    cut = rows.cut(columns, positions)
    length = rows.text.of(np.zeros_like(samples), samples)
    assert {cut[name].shape[1] for name in ("prompt_tokens", "token_loss_mask", "token_ar_mask")} == {length}
    assert cut["token_loss_mask"].sum() == columns["token_loss_mask"].sum()

    monkeypatch.setattr(FastTokenizer, "encode", None)  # they are not counted again
    again = experiment.open_data().train
    assert again.text.lengths == rows.text.lengths and (again.text.tokens[0] == rows.text.tokens[0]).all()


@pytest.mark.multiprocess
@pytest.mark.slow
def test_losses_are_those_of_one_length_and_of_any_number_of_processes(tmp_path, name):
    def run(where, *flags, processes=1):
        done = train(tmp_path / where, name, *flags, processes=processes, devices=2 // processes)
        return losses(tmp_path / where, "mixed"), done

    one, done = run("one")
    two, _ = run("two", processes=2)
    whole, _ = run("whole", "--data.text-lengths", "1")
    assert "text: batches have 16 or 32 tokens" in done.stderr
    assert one == two and len(one) == NUM_STEPS
    np.testing.assert_allclose(list(one.values()), list(whole.values()), rtol=1e-5)
    programs = [
        json.loads((tmp_path / where / "runs" / "mixed" / "x" / "program.json").read_text())
        for where in ("one", "whole")
    ]
    flops = [program["model_flops"] for program in programs]
    assert flops[0] == flops[1]  # the account of the longest
    assert all(sum(program["sent_bytes"].values()) > 0 for program in programs), "two devices exchange gradients"
