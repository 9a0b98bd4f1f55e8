"""What parameters are, as it is said where they are made, and what a step does with them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import toy
from flax import nnx
from trainers import make_trainer

from openpi_train.nn.gemma import Gemma
from openpi_train.nn.gemma_sizes import GemmaConfig
from openpi_train.nn.lora import LoraConfig
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import Gathering, ParamKind, ParamUse, param_kinds, use_of
from openpi_train.parallel.strategy import Plan


def test_each_parameter_is_of_the_kind_that_was_given_where_it_is_made():
    sizes = GemmaConfig(width=8, depth=2, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=4)
    config = dataclasses.replace(sizes, lora=LoraConfig(attention_rank=2, mlp_rank=2))

    def gemma():
        return Gemma({"one": config}, 10, {}, dtype=jnp.float32, remat="none", rngs=nnx.Rngs(0))

    kinds = param_kinds(nnx.eval_shape(gemma))
    assert kinds.pop("token_embedding") == ParamKind(gathering=Gathering.BY_ROW)
    assert kinds.pop("final_norm/one/scale") == ParamKind()
    mlp = "layers/experts/one/mlp/"
    by_layer = ParamKind(gathering=Gathering.BY_LAYER)
    wide = dataclasses.replace(by_layer, wide=True)
    assert kinds.pop(f"{mlp}gate_up/weight") == dataclasses.replace(wide, by_entry=True)
    assert {kind for path, kind in kinds.items() if path.startswith(mlp)} == {wide}
    assert {kind for path, kind in kinds.items() if not path.startswith(mlp)} == {by_layer}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asking(FlowMatching):
    """Flow matching that notes what the step does with each parameter."""

    augment: bool = False
    uses: dict = dataclasses.field(default_factory=dict, compare=False)

    def loss(self, model, batch, norms, keys):
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            self.uses["/".join(map(str, path))] = use_of(variable)
        return super().loss(model, batch, norms, keys)


@pytest.mark.parametrize("unrolled", [False, True])
def test_a_step_says_of_every_parameter_what_it_does_with_it(unrolled):
    config, objective = toy.LinearConfig(low_rank=True), Asking()
    plan = Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated", min_shard_mib=0)
    schedule = LRSchedule(warmup_steps=2, peak_lr=1e-2, decay_steps=20, decay_lr=1e-3)
    trainer, layout = make_trainer(config, plan, AdamW(), schedule, objective=objective)
    trainer = dataclasses.replace(trainer, use=ParamUse(unrolled=unrolled))
    rows = config.rows.batch_spec(2, ())
    jax.eval_shape(lambda state, rows: trainer.accumulate(state, rows, objective.norms(rows)), layout.shapes, rows)
    frozen = {path: path != "adapter_lora" for path in ("kernel", "state_kernel", "bias", "adapter_lora")}
    assert objective.uses == {path: ParamUse(frozen=is_it, unrolled=unrolled) for path, is_it in frozen.items()}
