"""Which program a batch of rows runs in: as many rows and as much text as the longest of them has."""

import dataclasses

import jax
import numpy as np
import pytest

from openpi_train.objectives.indicator_flow import IndicatorFlow
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.policy.sampler import Sampler
from openpi_train.sampling.flow import FlowSampler

LENGTHS = (48, 16, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noting(Sampler):
    """Notes its programs and what they are given; a chunk is the row's number."""

    def row_spec(self):
        return {
            "state": ((1,), "float32"),
            "prompt_tokens": ((max(LENGTHS),), "int32"),
            "prompt_mask": ((max(LENGTHS),), "bool"),
        }

    def _run(self, size, length, columns, draws, *guides):
        assert {len(column) for column in (*columns.values(), draws)} == {size}
        assert columns["prompt_tokens"].shape[1] == columns["prompt_mask"].shape[1] == length
        self._programs[size, length, bool(guides)] = columns["prompt_mask"].sum(axis=1).tolist()
        return columns["state"][:, :, None]


def row(number, tokens):
    mask = np.arange(max(LENGTHS)) < tokens
    return {"state": np.float32([number]), "prompt_tokens": mask.astype(np.int32), "prompt_mask": mask}


def sampled(*tokens):
    """The programs that rows with so many tokens ran in, and the tokens that these were given."""
    plan = Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated")
    unread = {"model": None, "objective": None, "params": {}, "cameras": (), "seed": 0, "num_steps": 1}
    sampler = Noting(plan=plan, batch_sizes=(4, 1, 2), text_lengths=LENGTHS, **unread)
    rows = [row(number, some) for number, some in enumerate(tokens)]
    assert sampler.sample(rows, range(len(rows))).ravel().tolist() == list(range(len(rows)))
    return sampler._programs


@pytest.mark.parametrize(("tokens", "length"), [(0, 16), (1, 16), (16, 16), (17, 32), (32, 32), (33, 48), (48, 48)])
def test_the_shortest_program_is_taken_that_cuts_no_token(tokens, length):
    assert sampled(tokens) == {(1, length, False): [tokens]}
    assert sampled(3, tokens) == {(2, length, False): [3, tokens]}


def test_rows_that_fill_a_batch_up_are_the_last_one_again_and_are_not_answered():
    assert sampled(5, 6, 7) == {(4, 16, False): [5, 6, 7, 7]}


def test_more_rows_than_a_program_has_run_in_several():
    assert sampled(1, 2, 3, 4, 20) == {(4, 16, False): [1, 2, 3, 4], (1, 32, False): [20]}


def test_a_given_guidance_takes_the_place_of_the_runs():
    plan = Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated")
    unread = {"model": None, "params": {}, "cameras": (), "seed": 0, "num_steps": 1, "batch_sizes": (1,)}
    sampler = Sampler(plan=plan, objective=IndicatorFlow(guidance=2.5), text_lengths=None, **unread)
    assert sampler.action_sampler == FlowSampler(guidance=2.5)
    assert dataclasses.replace(sampler, guidance=0.0).action_sampler == FlowSampler(guidance=0.0)
