"""Training steps of the toy stack under every strategy; as a program, in one of several processes.

python strategies.py <process> <processes> <port>    process 0 prints one JSON line: {"zero3 x 4": [[loss, ...], ...]}
python strategies.py 0 1 <port> <folder>             one alone can also write the last parameters: "zero3 x 4.npz"
"""

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import jax
import numpy as np
import toy
from jax.experimental import multihost_utils
from trainers import make_trainer

from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import ParamUse
from openpi_train.parallel.strategy import CUT, Plan
from openpi_train.training.init import create_state

ROWS = 32
# The strategy, and how many of the devices share one copy of the state.
LAYOUTS = (*((strategy, 8) for strategy in CUT if strategy != "hsdp"), ("hsdp", 4))
CASES = tuple(itertools.product(LAYOUTS, (1, 4)))
# Every layout with one of both: what several processes run.
SOME = tuple(zip(LAYOUTS, itertools.cycle((1, 4)), strict=False))


def prepare(config, strategy: str, fsdp: int, accum: int, devices=None, unrolled: bool = False, sums: str = "float32"):
    """Trainer and state layout."""
    plan = Plan(mesh=make_mesh(fsdp, devices), strategy=strategy, min_shard_mib=0, reduce_dtype=sums)
    schedule = LRSchedule(warmup_steps=1, peak_lr=1e-2, decay_steps=20, decay_lr=1e-3)
    trainer, layout = make_trainer(config, plan, AdamW(), schedule, accum=accum)
    return dataclasses.replace(trainer, use=ParamUse(unrolled=unrolled)), layout


def run(config, strategy: str, fsdp: int, accum: int, devices=None, steps: int = 3, unrolled: bool = False):
    """Loss and gradient norm of each step, the final state, and the compiled step."""
    trainer, layout = prepare(config, strategy, fsdp, accum, devices, unrolled)
    plan = trainer.plan
    dims = config.action_dim
    batches = [toy.batch(ROWS, dims=dims, seed=index, vocab_size=config.vocab_size) for index in range(steps)]
    batches = jax.tree.map(np.asarray, batches)
    with jax.set_mesh(plan.real_mesh):
        state = create_state(layout, config, trainer.optimizer, config.param_rules.frozen, True, 7)
        step = trainer.compile_step(layout.shardings, state, config.rows.batch_spec(ROWS, ()))
        history = []
        for rows in batches:
            put = jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, plan.batch, x.__getitem__), rows)
            state, metrics = step(state, put)
            history.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return history, state, step


def name_of(layout: tuple[str, int], accum: int) -> str:
    """What the program calls a case."""
    return f"{layout[0]} x {accum}"


def main(process: int, processes: int, port: str, folder: str | None = None) -> None:
    """Run all cases, or with several processes some, with 8 devices over all processes."""
    jax.config.update("jax_num_cpu_devices", 8 // processes)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, cluster_detection_method="deactivate")
    found = {}
    for layout, accum in CASES if processes == 1 else SOME:
        name = name_of(layout, accum)
        found[name], state, _ = run(toy.StackedConfig(), *layout, accum)
        if folder is not None:
            np.savez(Path(folder, name), **jax.tree.map(np.asarray, dict(state.params)))
        multihost_utils.sync_global_devices("next case")
    if process == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
