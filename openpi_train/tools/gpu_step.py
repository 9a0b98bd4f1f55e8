"""The `compile` verb: a training step, or sampling, compiled by XLA's GPU compiler for GPUs that need not be present.

Nothing is run. `plan` starts this verb in a process of its own for the candidates that it compiles, because what the
plugin needs (`plugin.set_environment`) must be set before jax starts. Read next:
`planning/gpu/step_account.py`, `gpu_text.py`.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from openpi_train.data.config import DataConfig
from openpi_train.elastic import adapt
from openpi_train.experiment import Experiment
from openpi_train.models.model_config import PolicyConfig
from openpi_train.nn.params import module_params
from openpi_train.planning.device_limits import CLIENT_SHARE
from openpi_train.planning.forecast import Forecast, Machine
from openpi_train.planning.gpu import plugin
from openpi_train.planning.gpu.buffers import recorded_in
from openpi_train.planning.gpu.step_account import GpuAccount, account
from openpi_train.planning.gpu.targets import GpuTarget, target_of
from openpi_train.policy.sampler import Sampler
from openpi_train.runtime.exits import DONE, UsageError
from openpi_train.sharding.mesh import make_mesh, planned_mesh
from openpi_train.sharding.strategy import Plan
from openpi_train.tools import gpu_text
from openpi_train.tools.ahead import as_chosen
from openpi_train.tools.plan_text import flags
from openpi_train.tools.requests import CompileRequest
from openpi_train.training.prepare import choose, make_trainer, whole_layout


def main(experiment: Experiment, machine: Machine, request: CompileRequest) -> int:
    """Compile and print the account. Raises UsageError for conflicting flags."""
    target = target_of(machine.kind)
    if request.sampling:
        compiled, live, compile_s = compile_sampling(experiment, machine, target, request.cameras)
        chosen = None
    else:
        chosen, compiled, live, compile_s = compile_step(experiment, machine, target, request.cameras)
    if request.dump is not None:
        request.dump.write_text(compiled.as_text())
    found = account(compiled, live, machine, target, compile_s)
    if request.json:
        forecast = {} if chosen is None else {"forecast": chosen.as_json()}
        print(json.dumps({**forecast, "account": found.as_json()}))
    else:
        print(gpu_text.lines_alone(found, machine) if chosen is None else gpu_text.lines(found, chosen))
    return DONE


def compile_step(
    experiment: Experiment, machine: Machine, target: GpuTarget, cameras: Sequence[str] = ()
) -> tuple[Forecast, Any, str, float]:
    """The forecast of the step, the compiled step (a `jax.stages.Compiled`), its live ranges and the seconds it took.

    Strategy and policy are those of the flags, or else those that a run on this machine would choose. `cameras` are the
    slots that the rows fill; none: those of the data.
    """
    if experiment.sharding.offload != "none":
        raise UsageError(
            f"--sharding.offload {experiment.sharding.offload} cannot be compiled for GPUs that are not there: jax "
            "leaves everything in the device's memory then; use `plan --compiler cpu`"
        )
    experiment, _ = adapt(experiment, machine.num_devices, None)
    experiment.check(machine.num_devices)
    sharding = experiment.sharding
    model: Any = experiment.model
    if cameras and not hasattr(model, "batch_spec"):
        raise UsageError(f"--cameras {','.join(cameras)}: {experiment.name} has a model without cameras; leave it out")
    batch_spec = (lambda rows: model.batch_spec(rows, cameras)) if cameras else experiment.batch_spec
    memory_bytes = int(machine.available_bytes / CLIENT_SHARE)
    with plugin.pretended(target):
        layout = whole_layout(experiment, Plan(mesh=planned_mesh(1, 1), strategy="replicated"))
        chosen = choose(experiment, layout, machine, batch_spec)
        experiment = as_chosen(experiment, chosen)
        devices = plugin.devices(target, memory_bytes, machine.num_devices, machine.num_hosts)
        mesh = make_mesh(chosen.layout.fsdp_devices, devices, sharding.tensor_devices)
        plan = Plan(
            mesh=mesh,
            strategy=chosen.layout.strategy,
            min_shard_mib=sharding.min_shard_mib,
            offload=sharding.offload,
        )
        layout = layout.of(experiment.model)
        trainer, laid_out = make_trainer(experiment, layout, plan), layout.under(plan)
        began = time.monotonic()
        with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as folder:
            step = trainer.jitted_step(laid_out.shardings)
            lowered = step.lower(laid_out.abstract(), batch_spec(experiment.batch_size))
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
            live = recorded_in(Path(folder))
    return chosen, compiled, live, time.monotonic() - began


def compile_sampling(
    experiment: Experiment, machine: Machine, target: GpuTarget, cameras: Sequence[str] = ()
) -> tuple[Any, str, float]:
    """As `compile_step`, for what samples action chunks: float32 parameters, whole on every device, and no forecast."""
    model, data = experiment.model, experiment.data
    if not isinstance(model, PolicyConfig) or not isinstance(data, DataConfig):
        raise UsageError(f"--sampling: {experiment.name} has no policy that samples action chunks; leave it out")
    with plugin.pretended(target):
        memory_bytes = int(machine.available_bytes / CLIENT_SHARE)
        devices = plugin.devices(target, memory_bytes, machine.num_devices, machine.num_hosts)
        plan = Plan(mesh=make_mesh(1, devices), strategy="replicated")
        shapes = module_params(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))
        params: dict[str, Any] = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=plan.replicated)
            for path, leaf in shapes.items()
        }
        sampler = Sampler(
            model=model,
            objective=experiment.objective,
            params=params,
            plan=plan,
            cameras=tuple(cameras) or data.cameras,
            seed=0,
            num_steps=experiment.robot_eval.num_sample_steps,
            batch_sizes=(experiment.batch_size,),
            text_lengths=None,
        )
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            compiled = sampler.lower(sampler.sizes[0]).compile(compiler_options={"xla_dump_to": folder})
            live = recorded_in(Path(folder))
    return compiled, live, time.monotonic() - began


def compile_candidate(words: Sequence[str], chosen: Forecast, machine_flags: Sequence[str]) -> GpuAccount:
    """The account of a candidate, by the verb in a process of its own.

    `words` are the experiment and its flags, `machine_flags` those of the devices. Raises UsageError, with what the
    process said, if it fails.
    """
    command = [sys.executable, "-m", "openpi_train", "compile", *words, *flags(chosen), *machine_flags, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != DONE:
        said = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise UsageError(f"XLA's GPU compiler failed for {chosen.words()} (code {done.returncode}):\n{said}")
    return GpuAccount.from_json(json.loads(done.stdout)["account"])
