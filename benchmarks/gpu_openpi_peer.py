"""openpi's own training step, compiled for GPUs by the jax that openpi names, as `gpu_openpi.py` reads it.

Runs in an environment with openpi's packages and nothing of this project: `python gpu_openpi_peer.py CHECKOUT DEVICES
ROWS < DESCRIPTION`. XLA writes the program to the folder that XLA_FLAGS name. The step and its state are those of
`scripts/train.py`; what it imports for data, logs and PyTorch is left out, as are its configs, whose defaults stand
here.
"""

import functools
import importlib
import re
import sys
import types
from typing import Any

_LEFT_OUT = (
    "openpi.models_pytorch",
    "openpi.models_pytorch.pi0_pytorch",
    "openpi.training.checkpoints",
    "openpi.training.config",
    "openpi.training.data_loader",
    "torch",
    "torch.nn",
    "torch.nn.functional",
    "tqdm_loggable",
    "tqdm_loggable.auto",
    "wandb",
)
# Fields of a description that jaxlib 0.5 does not know.
_UNKNOWN = r'\b(runtime_version \{.*?\}|feature_extension: \w+|(name|device_vendor): ".*?"|thread_dim_limit_\w: \d+)'


def main(checkout: str, num_devices: int, num_rows: int, description: str) -> None:
    """Compile one step of full pi0 over devices of this description, `fsdp_devices` being all of them."""
    sys.path[:0] = [f"{checkout}/src", f"{checkout}/scripts"]
    for name in _LEFT_OUT:
        _leave_out(name)
    torch: Any = sys.modules["torch"]
    torch.Tensor = type("Tensor", (), {})
    configs: Any = sys.modules["openpi.training.config"]
    configs.TrainConfig = type("TrainConfig", (types.SimpleNamespace,), {})

    import jax
    import numpy as np
    import train
    from flax import nnx
    from jax.experimental import topologies
    from openpi.models.pi0_config import Pi0Config
    from openpi.shared import array_typing
    from openpi.training import optimizer, sharding

    described = re.sub(_UNKNOWN, "", description)
    topology = topologies.get_topology_desc(platform="cuda", target_config=described, topology=f"1x1x{num_devices}")
    mesh = jax.sharding.Mesh(np.array(topology.devices).reshape(1, -1), (sharding.BATCH_AXIS, sharding.FSDP_AXIS))
    config = configs.TrainConfig(
        model=Pi0Config(),
        optimizer=optimizer.AdamW(),
        lr_schedule=optimizer.CosineDecaySchedule(),
        ema_decay=0.99,
        freeze_filter=nnx.Nothing,
        trainable_filter=nnx.All(nnx.Param, nnx.Not(nnx.Nothing)),
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(sharding.DATA_AXIS))
    with array_typing.disable_typechecking(), sharding.set_mesh(mesh):
        # `resume` gives shapes in place of arrays.
        state, sharded = train.init_train_state(config, key, mesh, resume=True)
        step = jax.jit(
            functools.partial(train.train_step, config),
            in_shardings=(whole, sharded, rows),
            out_shardings=(sharded, whole),
            donate_argnums=(1,),
        )
        step.lower(key, state, config.model.inputs_spec(batch_size=num_rows)).compile()


def _leave_out(name: str) -> None:
    """Let `name` be imported as an empty module."""
    empty = types.ModuleType(name)
    empty.__path__ = []
    sys.modules[name] = empty
    package, _, last = name.rpartition(".")
    if package:
        setattr(importlib.import_module(package), last, empty)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.stdin.read())
