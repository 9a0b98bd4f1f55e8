"""What the end of a run proposes to type."""

import inspect
import types
from pathlib import Path

import pytest
from openpi_train_configs.arithmetic_rl import arithmetic_grpo
from openpi_train_configs.arithmetic_runs import arithmetic_sft
from openpi_train_configs.debug import debug

from openpi_train.checkpoints.best import Best
from openpi_train.data.text.opened_texts import OpenedText
from openpi_train.evaluation.learning_verdict import LearningVerdict
from openpi_train.training import start

# Without the run-time type check: it is given no real run.
next_commands = inspect.unwrap(start._next_commands)
RUN = "/runs/e/x"


def commands(experiment, *, has_learned=True, lowest=None, best=None, conversational=()):
    data = object.__new__(OpenedText)
    members = [types.SimpleNamespace(store=types.SimpleNamespace(conversational=one)) for one in conversational]
    object.__setattr__(data, "train", types.SimpleNamespace(members=members))
    checkpoints = types.SimpleNamespace(best=best and Best(step=best, value=1.0))
    run = types.SimpleNamespace(
        experiment=experiment, directory=Path(RUN), data=data, checkpoints=checkpoints, step=experiment.num_train_steps
    )
    return next_commands(run, LearningVerdict(has_learned=has_learned, lowest_step=lowest))


def test_the_best_checkpoint_is_proposed_where_it_is_clearly_better_than_the_last():
    why = "  # step 4, of the lowest held-out loss"
    found = commands(debug, lowest=4, best=4)
    assert found[:3] == [f"report {RUN}", f"eval {RUN}/best{why}", f"serve {RUN}/best{why}"]
    assert found[3] == f"resume {RUN} --num-train-steps {2 * debug.num_train_steps}"
    # It is not clearly better; there is none; it is the last one.
    for lowest, best in ((None, 4), (4, None), (4, debug.num_train_steps)):
        assert commands(debug, lowest=lowest, best=best)[1:3] == [f"eval {RUN}", f"serve {RUN}"]


@pytest.mark.parametrize("experiment", [arithmetic_sft, arithmetic_grpo], ids=lambda one: one.name)
def test_a_model_of_conversations_is_asked_with_a_message(experiment):
    assert commands(experiment, conversational=[False])[1] == f"generate {RUN} --prompt TEXT"
    assert commands(experiment, conversational=[False, True])[1] == f"generate {RUN} --message TEXT"


def test_the_learning_rate_is_blamed_for_a_loss_and_not_for_a_reward():
    def rates(experiment, has_learned):
        return [line for line in commands(experiment, has_learned=has_learned) if "peak-lr" in line]

    peak, found = arithmetic_sft.lr_schedule.peak_lr, rates(arithmetic_sft, False)
    for line, factor, why in zip(found, (3, 1 / 3), ("if the loss hardly fell", "if the loss rose"), strict=True):
        words, _, comment = line.partition("  # ")
        assert float(words.rpartition(" ")[2]) == pytest.approx(factor * peak) and comment.endswith(why)
    assert not rates(arithmetic_sft, True) and not rates(arithmetic_grpo, False)
