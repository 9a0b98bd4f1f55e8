"""openpi's training steps by the product's own trainer: objective, gradient, clipping, AdamW, average, norms, freezing.

What was recorded is the same batch, noise and times in every step, and no augmentation; the test gives these and
computes nothing. Read next: `golden_case.py`, which says how, and `training/step.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_case import GOLDEN, flow_cases, load_case, read_meta, read_npz
from trainers import make_trainer

from openpi_train.interop.stored_leaves import in_memory
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.training.init import create_state

pytestmark = pytest.mark.usefixtures("golden")

TRAINED = [name for name in flow_cases() if "train" in read_meta()["cases"][name]]
# `make quick` runs one. What is added up from micro-batches of one row is the same.
QUICK, MICRO_BATCHES = "pi05_f32", {"pi0_f32": 2}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in TRAINED]
)
def trained(request):
    """(case, metrics of every step, the state before the first and after the last)."""
    case = load_case(request.param)
    accum = MICRO_BATCHES.get(case.name, 1)
    config, plan = case.config, Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated")
    recorded = case.meta["train"]
    schedule, decay = LRSchedule(**recorded["lr_schedule"]), recorded["ema_decay"]
    trainer, layout = make_trainer(config, plan, AdamW(), schedule, objective=case.objective, accum=accum, ema=decay)
    weights = {path: in_memory(np.asarray(value)) for path, value in case.params.items()}
    with jax.set_mesh(plan.real_mesh):
        state = create_state(
            layout, config, trainer.optimizer, config.param_rules.frozen, decay is not None, 7, weights
        )
        batch = jax.device_put(case.batch, plan.batch)
        step = trainer.compile_step(layout.shardings, state, batch)
        first, history = jax.device_get(state), []
        for _ in range(recorded["steps"]):
            state, metrics = step(state, batch)
            history.append(jax.device_get(metrics))
    return case, history, first, jax.device_get(state)


@pytest.mark.slow
def test_every_steps_loss_and_norms_equal_openpi(trained):
    case, history, _, last = trained
    recorded = case.meta["train"]["info_per_step"]
    for ours, expected in zip(history, recorded, strict=True):
        # Float32 sums in another order: 1e-6 and, where two steps of training are between, 1e-5 were measured.
        np.testing.assert_allclose(ours["loss"], expected["loss"], rtol=2e-5)
        np.testing.assert_allclose(ours["grad_norm"], expected["grad_norm"], rtol=5e-5)
        assert ours["skipped"] == 0
    ratios = [ours["param_norm"] / expected["param_norm"] for ours, expected in zip(history, recorded, strict=True)]
    # A step changes the norm by 1e-5 or more of it, the embeddings would by 5e-2.
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-6)
    # openpi rounds a frozen leaf's sum of squares to bfloat16: by up to 2**-9, or half of that in the norm. We do not.
    np.testing.assert_allclose(ratios, 1.0, rtol=2**-10 if last.frozen else 1e-6)


def test_what_is_frozen_is_openpis_and_stays_as_it_is_in_bfloat16(trained):
    case, _, _, last = trained
    assert sorted(map(case.config.param_rules.public_name, last.frozen)) == sorted(case.meta["train"]["frozen_params"])
    for path, leaf in last.frozen.items():
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaf, case.params[path].astype(jnp.bfloat16), err_msg=path)


def test_parameters_and_their_average_equal_openpi(trained):
    case, _, first, last = trained
    paths = {case.config.param_rules.public_name(path): path for path in last.params}
    assert (last.ema is None) == (case.meta["train"]["ema_decay"] is None)
    for key, expected in read_npz(GOLDEN / case.meta["train"]["file"]).items():
        _, tree, public = key.split("/", 2)
        ours, start = getattr(last, tree)[paths[public]], first.params[paths[public]]
        # Of how far training moved it. That is 1e-3 of a parameter, of which float32's rounding is 6e-5; Adam's first
        # steps go by the gradient's sign, which rounding turns where there is next to none.
        assert np.linalg.norm(ours - expected) < 3e-4 * np.linalg.norm(expected - start), key
