"""What an iteration of RL costs: made-up numbers that can be added up by hand, and traced programs."""

import dataclasses

import jax
import pytest
from openpi_train_configs.arithmetic_rl import arithmetic_grpo, arithmetic_ppo
from planning.test_forecast import ALL, MACHINE, NONE, layout
from planning.test_generation import LANGUAGE, SIZES
from rl.wandering import wandering

from openpi_train.generation.generation_size import GenerationSize
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.parallel.mesh import planned_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.forecast import forecast
from openpi_train.planning.generation import token_flops, token_step_bytes
from openpi_train.planning.iteration import DECODING_MEMORY_SHARE, forecast_iteration
from openpi_train.planning.memory import DoesNotFit, Memory, require
from openpi_train.planning.rollout_cost import RolloutCost, TokenSteps
from openpi_train.runtime.device_kinds import GIB
from openpi_train.tools import plan, plan_text
from openpi_train.training.prepare import traced_rl, whole_layout

ROBOTS = RolloutCost(
    num_rollouts=64,
    num_steps=4,
    most_waves=1,
    acting_flops=2e12,
    acting_bytes_per_row=0.5 * GIB,
    rows_at_a_time=8,
    scoring_flops=1e12,
    experience_bytes=GIB // 4,
    is_local=True,
    control_steps=50,
)
TEXTS = dataclasses.replace(ROBOTS, acting_bytes_per_row=0.0, control_steps=0, is_local=False)
# Four H100s at half of their peak.
RATE = 4 * 989e12 * 0.5


def iteration(cost, machine=MACHINE, tensor_devices=1):
    one = dataclasses.replace(layout("zero3", 40, 3.6e9), tensor_devices=tensor_devices)
    return forecast_iteration(cost, forecast(machine, one, NONE, 32, ALL))


def test_an_iteration_acts_scores_and_learns():
    found = iteration(ROBOTS)
    assert found.acting_s == pytest.approx(64 * 2e12 / RATE) and found.scoring_s == pytest.approx(64 * 1e12 / RATE)
    step_s = 32e12 / RATE + 2 * 40 * GIB / (0.9 * 3350e9) + 3.6e9 / (0.8 * 450e9)
    assert found.learning_s == pytest.approx(4 * step_s)
    assert found.as_json()["iteration_s"] == pytest.approx(64 * 3e12 / RATE + 4 * step_s)
    assert found.as_json()["control_steps"] == 3200 and "3,200 control steps" in found.words()


def test_who_acts_keeps_what_it_saw_and_texts_are_everywhere():
    hosts = dataclasses.replace(MACHINE, num_hosts=2)
    more = dataclasses.replace(ROBOTS, most_waves=3)
    assert [iteration(one, hosts).experience_bytes_per_host // GIB for one in (ROBOTS, more, TEXTS)] == [8, 24, 16]


@pytest.mark.parametrize(("bytes_per_step", "flops", "bound"), [(3.35e9, 1e9, "reading"), (3.35e6, 1e12, "computing")])
def test_tokens_are_made_as_fast_as_parameters_are_read_or_multiplied(bytes_per_step, flops, bound):
    """64 rollouts on four devices, six at a time: three rounds, of which the last is not full."""
    tokens = TokenSteps(rows=6, steps_per_rollout=100, bytes_per_step=bytes_per_step, flops_per_row=flops)
    found = iteration(dataclasses.replace(TEXTS, tokens=tokens))
    of_step = {"reading": bytes_per_step / (3350e9 * DECODING_MEMORY_SHARE), "computing": 6 * flops / (989e12 * 0.5)}
    assert max(of_step, key=of_step.__getitem__) == bound
    assert found.acting_s == pytest.approx(64 * 2e12 / RATE + 300 * of_step[bound])


def test_a_device_holds_its_rollouts_and_acts_in_as_many_as_it_may():
    assert ROBOTS.on_device(32, 4) == {"experience": 8 * GIB // 4, "acting": 8 * GIB // 2}
    # No more than there are.
    assert ROBOTS.on_device(32, 16)["acting"] == 4 * GIB // 2


def test_an_experience_is_beside_all_else_that_a_step_needs():
    memory = Memory(params=1, frozen=0, optimizer=0, ema=0, grads=10, compute_copy=100, activations=1000)
    assert dataclasses.replace(memory, experience=10_000).total == 11_101
    # What acts is there in place of a step.
    assert dataclasses.replace(memory, acting=5000).total == 5001
    assert dataclasses.replace(memory, acting=50).total == memory.total == 1101


def test_a_token_reads_all_parameters_once_and_its_rows_cache():
    size = GenerationSize(language=LANGUAGE, rows=16, length=256, flag="")
    of_layer = SIZES.width * (3 * SIZES.mlp_dim + 2 * SIZES.num_heads * 64 + 2 * SIZES.num_kv_heads * 64)
    # Tied: the table is multiplied; norms are two vectors of each layer, and one.
    params = SIZES.depth * of_layer + SIZES.vocab_size * SIZES.width + (2 * SIZES.depth + 1) * SIZES.width
    assert token_flops(size) == 2 * params
    slot = 2 * SIZES.depth * 16 * SIZES.num_kv_heads * SIZES.head_dim * 4
    assert token_step_bytes(size, 100) == pytest.approx(4 * params + 100 * slot)
    untied = dataclasses.replace(LANGUAGE, sizes=dataclasses.replace(SIZES, tied=False))
    assert token_flops(dataclasses.replace(size, language=untied)) == 2 * params


def traced(experiment):
    whole = Plan(mesh=planned_mesh(1, 1), strategy="replicated")
    experiment = dataclasses.replace(experiment, exp_name="plan")
    found = traced_rl(experiment, whole_layout(experiment, whole))
    assert found is not None
    return found


def test_a_robot_acts_with_the_work_that_its_rollouts_are_scored_with():
    """The prefix once, the suffix at every denoising step: in a loop, or at once."""
    found = traced(wandering)
    assert found.acting_flops == pytest.approx(found.scoring_flops, rel=0.05) and found.acting_bytes_per_row > 0
    (spec,) = [wandering.batch_spec(1)]
    assert found.experience_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec))
    assert (found.num_rollouts, found.num_steps, found.control_steps, found.rows_at_a_time) == (16, 4, 5, 3)
    # What is learnt from in one step is not scored before.
    once = dataclasses.replace(wandering.rl, num_groups=2, epochs=1)
    assert traced(dataclasses.replace(wandering, rl=once)).scoring_flops == 0


def test_policy_reference_and_critic_are_scored():
    rl = dataclasses.replace(arithmetic_grpo.rl, epochs=2)
    grpo = dataclasses.replace(arithmetic_grpo, rl=rl)
    alone = traced(grpo).scoring_flops
    referenced = dataclasses.replace(
        grpo,
        model=ReferencedConfig(policy=grpo.model),
        objective=dataclasses.replace(grpo.objective, kl_weight=0.1),
    )
    assert traced(referenced).scoring_flops == pytest.approx(2 * alone)
    # A critic has a head of one number in place of the vocabulary's.
    assert 1.5 * alone < traced(arithmetic_ppo).scoring_flops < 2 * alone


def test_a_plan_counts_acting_and_experience_and_says_what_lessens_them():
    many = dataclasses.replace(
        wandering,
        exp_name="plan",
        num_train_steps=1024,
        save_interval=1024,
        model=dataclasses.replace(wandering.model, remat="none"),
        rl=dataclasses.replace(wandering.rl, num_groups=1024, episodes_per_device=4096),
    )
    report = plan.make_report(many, plan.find_machine("h100", 1, 1, None, 50.0, 0.5))
    memory, cost = report.forecasts[0].memory, report.forecasts[0].layout.rl
    assert cost is not None and memory.experience == 8 * cost.experience_bytes
    assert memory.acting == int(4096 * cost.acting_bytes_per_row) + memory.compute_copy > memory.step
    assert memory.total == memory.state + memory.acting
    text = plan_text.tables(report, ["debug"])
    assert "acts between steps: beside the state" in text and "own rollouts of a step:" in text
    assert "By this step an iteration: 4096 rollouts made in" in text and "simulators" in text
    with pytest.raises(DoesNotFit, match=r"a smaller --rl.episodes-per-device"):
        require(memory, memory.total - 1, 1, many)
