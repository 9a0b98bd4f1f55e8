"""The verdict on a run's learning, from lines made by hand."""

import math

import pytest

from openpi_train.evaluation.learning_verdict import learning_verdict


def training(*losses):
    return [{"step": 10 * number, "loss": loss} for number, loss in enumerate(losses, 1)]


def evaluations(*losses, **more):
    return [{"step": 10 * number, "val/loss": loss, **more} for number, loss in enumerate(losses)]


def test_a_loss_that_fell_is_learning_and_one_that_did_not_is_not():
    found = learning_verdict(training(4.0, 3.0, 2.0, 1.0))
    assert found.has_learned
    assert found.words == "this run has learned: the training loss fell, from 4 (step 10) to 1 (step 40)"
    for losses in ((1.0, 1.0), (1.0, 2.0), (2.0, 1.5, 1.0, math.nan)):
        assert learning_verdict(training(*losses)).has_learned is False
    # Means over a quarter of the lines: single batches do not decide. (3 + 1) / 2 = 2, (1 + 2.5) / 2 = 1.75.
    assert learning_verdict(training(3.0, 1.0, 9.0, 9.0, 0.0, 0.0, 1.0, 2.5)).has_learned


def test_a_change_of_two_percent_says_nothing_alone():
    found = learning_verdict(evaluations(7.06, 7.027))
    assert found.has_learned is None and found.reasons == ("the held-out loss hardly changed, from 7.06 to 7.027",)
    assert found.words.startswith("it cannot be said yet whether this run has learned: the held-out loss hardly")
    reward = [{"step": step, "rl/reward": value} for step, value in ((1, -0.0997), (2, -0.0981))]
    assert "the mean reward hardly changed" in learning_verdict(reward).words
    assert learning_verdict([*evaluations(7.06, 7.027), *training(4.0, 2.0)]).has_learned
    assert learning_verdict([*evaluations(7.06, 7.027), *training(2.0, 4.0)]).has_learned is False
    for losses, has_learned in (
        ((1.0, 0.981), None),
        ((1.0, 0.979), True),
        ((1.196, 1.209), None),
        ((1.0, 1.021), False),
        ((-1.0, -1.021), True),
        ((0.0, -1e-9), True),
    ):
        assert learning_verdict(training(*losses)).has_learned is has_learned, losses


def test_a_number_that_is_not_finite_may_be_a_word():
    assert learning_verdict(training(2.0, "NaN")).has_learned is False


@pytest.mark.parametrize("lines", [[], training(1.0), evaluations(1.0), evaluations(2.0, 1.0)[1:]])
def test_too_little_is_no_verdict(lines):
    found = learning_verdict(lines)
    assert found.has_learned is None and found.words.startswith("too little was measured")


def test_the_held_out_loss_decides_against_the_training_loss():
    lines = sorted([*training(4.0, 3.0, 2.0), *evaluations(2.0, 1.0, 1.5, 2.5)], key=lambda line: line["step"])
    found = learning_verdict(lines)
    assert found.has_learned is False
    assert found.words == (
        "this run has not learned: the held-out loss is 2.5, and was 2 before the first step (lowest: 1 at step 10)"
    )
    assert learning_verdict(evaluations(2.0, 1.0)).has_learned


def test_a_held_out_loss_that_was_clearly_lower_before_is_told():
    found = learning_verdict(evaluations(6.055, 0.9597, 1.1958))
    assert found.has_learned and found.lowest_step == 10
    assert found.reasons == ("the held-out loss fell from 6.055 to 1.196 (lowest: 0.9597 at step 10)",)
    # By 2 %, of its size where losses are below 0; NaN is no lowest one, and above all.
    for losses, step in (
        ((6.0, 1.0, 1.02), None),
        ((6.0, 1.0, 1.021), 10),
        ((6.0, -1.0, -0.97), 10),
        ((6.0, -1.0, -0.99), None),
        ((6.0, math.nan, 2.0, math.nan), 20),
        ((6.0, 5.0, 4.0), None),
        ((1.0, 2.0), 0),
    ):
        assert learning_verdict(evaluations(*losses)).lowest_step == step, losses
    assert learning_verdict(training(2.0, 1.0)).lowest_step is None


def test_the_average_is_what_counts_if_there_is_one():
    found = learning_verdict(
        [*evaluations(2.0, **{"val/loss_ema": 2.0}), {"step": 9, "val/loss": 1, "val/loss_ema": 3}]
    )
    assert found.has_learned is False and "the held-out loss is 3, and was 2" in found.words


def test_actions_no_better_than_their_mean_are_not_learned():
    """FIRST_HOUR.md B22: 2.457 beside .8107, which nobody is told is worse."""
    more = {"val/action_mse": 2.457, "val/action_mse_mean_baseline": 0.8107}
    found = learning_verdict(evaluations(2.0, 1.0, **more))
    assert found.has_learned is False
    assert found.reasons == ("the action error, 2.457, is not below that of the mean of the evaluated actions, 0.8107",)
    assert learning_verdict(evaluations(2.0, 1.0, **{**more, "val/action_mse": 0.5})).has_learned


def test_actions_are_compared_with_the_mean_action_of_the_training_data_where_it_was_measured():
    more = {"val/action_mse_mean_baseline": 9.0, "val/action_mse_of_mean_action": 1.0}
    found = learning_verdict(evaluations(2.0, 1.0, **more, **{"val/action_mse": 2.5}))
    assert found.reasons == (
        "the action error on held-out data, 1.581 (root mean square), is worse than the mean action of the training "
        "data by a factor 1.58 (1)",  # the root of 2.5
    )
    assert learning_verdict(evaluations(2.0, 1.0, **more, **{"val/action_mse": 0.5})).has_learned


def test_a_run_on_own_rollouts_is_judged_by_its_reward():
    def lines(*rewards):
        return [{"step": number, "loss": number, "rl/reward": reward} for number, reward in enumerate(rewards)]

    assert learning_verdict(lines(0.1, 0.5)).has_learned
    found = learning_verdict(lines(0.5, 0.5))
    assert found.has_learned is False and "the mean reward never rose, from 0.5 (step 0) to 0.5 (step 1)" in found.words
    # A quarter of a run that went on is longer: the words say of which steps it is.
    first = learning_verdict(lines(0.5566, 0.6, 0.65, 0.7)).words
    longer = learning_verdict(lines(0.5566, 0.6442, 0.65, 0.7, 0.8, 0.8, 0.9, 0.8)).words
    assert "rose, from 0.5566 (step 0) to 0.7 (step 3)" in first
    assert "rose, from 0.6004 (steps 0-1) to 0.85 (steps 6-7)" in longer
