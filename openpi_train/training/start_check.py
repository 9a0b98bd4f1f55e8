"""What is wrong with the files, packages and devices that a start needs, before anything of a run is written.

Read next: `checkpoints/weights.py`; `settling.py`, which calls it.
"""

import dataclasses
import logging
import math
from collections.abc import Sequence

import jax

from openpi_train import registry
from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.choice import require_robots
from openpi_train.data.core import hub
from openpi_train.data.robot.config import DataConfig
from openpi_train.data.tokenizers.tokenizer import require_tokenizer
from openpi_train.experiment import Experiment
from openpi_train.interop.checkpoint_hub import is_address
from openpi_train.interop.config_json import classes_of, config_from_json
from openpi_train.models.model_config import PolicyConfig
from openpi_train.nn.attention import best_kind
from openpi_train.nn.attention_check import flash_problem
from openpi_train.objectives.objective import Objective
from openpi_train.objectives.policy_objective import distribution_of
from openpi_train.parallel.strategy import HOST_MEMORY
from openpi_train.planning.forecast import Forecast
from openpi_train.planning.memory import Memory, require_host
from openpi_train.planning.simulators import Simulators
from openpi_train.runtime import agree
from openpi_train.runtime.device_kinds import GIB, HOST_LINK_GB_S, kind_of
from openpi_train.runtime.device_limits import host_available_bytes, host_bytes_per_device
from openpi_train.runtime.exits import CheckpointError, DataError, ErrorCollector, UsageError, reported_as
from openpi_train.runtime.phases import phase
from openpi_train.sampling.denoising import DenoisingSampler
from openpi_train.sampling.flow import FlowSampler
from openpi_train.training.init import StateLayout
from openpi_train.training.metrics import require_writers
from openpi_train.training.run_length import unfit_rate
from openpi_train.training.rundir import begins

logger = logging.getLogger(__name__)

# A share of the parameters that causes a warning if it should be sharded but cannot be.
_NOTABLE = 0.02


def check_files(given: Experiment, experiment: Experiment, together: ErrorCollector) -> None:
    """Keep what is wrong with packages and start weights of `given`, as `experiment`."""
    with together:
        require_writers(tensorboard=experiment.tensorboard, wandb=experiment.wandb_enabled)
    with together:
        experiment.eval.require()
    with together:
        if experiment.rl is not None:
            experiment.rl.require()
    with together:
        if begins(given):
            check_start_weights(experiment)


def check_downloads(given: Experiment, experiment: Experiment, together: ErrorCollector) -> None:
    """Keep what of `given`, as `experiment`, has to be fetched from the hub and cannot be: the hub is asked."""
    model = experiment.model
    if not isinstance(model, PolicyConfig) or model.rows.reads_text:
        for text, kind in experiment.data.on_hub().items():
            with together:
                if isinstance(experiment.data, DataConfig) and text == f"{hub.SCHEME}{experiment.data.tokenizer}":
                    require_tokenizer(experiment.data.tokenizer)
                else:
                    hub.require(text, kind, DataError)
    loader = experiment.weight_loader
    if begins(given) and isinstance(loader, CheckpointWeightLoader):
        for text in filter(is_address, (loader.params_path, loader.adapter_path)):
            with together:
                hub.require(text, "model", CheckpointError)


def remote_weights(given: Experiment) -> list[str]:
    """A sentence for all start weights that a start of `given` fetches from elsewhere; empty if it goes on."""
    return given.weight_loader.remote() if begins(given) else []


def examine_data(experiment: Experiment, together: ErrorCollector) -> list[str]:
    """Keep what is soon found wrong with the data; returns what was not looked at."""
    with together:
        typed = registry.typed(experiment.name)
        require_robots(experiment, typed, registry.of_other_dims(typed))
    with together, reported_as(DataError):
        return experiment.data.examine(experiment.model)
    return []


def check_start_weights(experiment: Experiment) -> None:
    """Raise CheckpointError for weights that the model cannot start from, as far as it is soon known.

    Raises UsageError for a distribution that would read what the policy predicts as something else: noise as a
    velocity.
    """
    with reported_as(CheckpointError):
        experiment.weight_loader.check(experiment.model)
    if experiment.rl is None or (recorded := experiment.weight_loader.objective()) is None:
        return
    try:
        trained = config_from_json(recorded, Objective, "objective", classes_of(experiment.objective))
    except CheckpointError:  # a class of a file that this run does not name: it knows what it does
        return
    distribution = type(distribution_of(experiment.objective)).__name__
    one, other = (type(objective.action_sampler) for objective in (trained, experiment.objective))
    if {one, other} == {FlowSampler, DenoisingSampler}:
        raise UsageError(
            f"--weight-loader.params-path was trained by {type(trained).__name__}, for a {one.__name__}, and the "
            f"distribution {distribution} acts by a {other.__name__}: what the policy predicts would be read as "
            "something else. Give the objective of RL the distribution of the training: DenoisingDistribution after "
            "Diffusion, FlowDistribution after FlowMatching"
        )


def check_devices(experiment: Experiment) -> None:
    """Raise UsageError for what these devices cannot do; warn of tensor groups that span several processes."""
    sharding = experiment.sharding
    if sharding.offload != "none":
        check_host_memory(sharding.offload)
    if jax.local_device_count() % sharding.tensor_devices:
        logger.warning(
            "--sharding.tensor-devices %d: such groups span several processes of %d devices; where those are on "
            "different hosts, every layer waits for the links between them",
            *(sharding.tensor_devices, jax.local_device_count()),
        )


def check_host_memory(offload: str) -> None:
    """Raise UsageError if these devices cannot access their host's memory."""
    device = jax.local_devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise UsageError(
            f"--sharding.offload {offload} needs devices that read their host's memory ({HOST_MEMORY}); "
            f"{device.device_kind} has: {', '.join(kinds)}. Use --sharding.offload none; zero3 over more devices, "
            "--optimizer.moment-dtype bfloat16 and --optimizer adafactor need less memory, too"
        )


def check_trainable(experiment: Experiment, layout: StateLayout) -> None:
    """Raise UsageError if no parameter trains, or if `--freeze` matches nothing."""
    trainable, frozen = layout.shapes.params, layout.shapes.frozen
    if not trainable:
        raise UsageError(f"--freeze {experiment.freeze!r} leaves no parameter to train; all {len(frozen)} match it")
    if experiment.freeze is not None and not any(experiment.freezes(path) for path in frozen):
        names = ", ".join(experiment.model.param_rules.public_name(path) for path in list(trainable)[:3])
        raise UsageError(f"--freeze {experiment.freeze!r} matches no parameter as a whole; there are {names}, ...")


def tell_state(experiment: Experiment, layout: StateLayout) -> None:
    """Log how many parameters train."""
    of_state = (layout.shapes.params, layout.shapes.frozen)
    sizes = [sum(math.prod(leaf.shape) for leaf in leaves.values()) for leaves in of_state]
    logger.info("parameters: %s train, %s are kept fixed", *(f"{size:,}" for size in sizes))


def tell_rate(experiment: Experiment) -> None:
    """Log what the learning rate does, and whether that ends with the run, as far as the run's length is known."""
    schedule, steps = experiment.lr_schedule, experiment.num_train_steps
    if experiment.num_epochs is not None and schedule.follows_length:
        logger.info(
            "learning rate: at most %g; its steps follow from --num-epochs %d and the number of samples, which a start "
            "finds",
            *(schedule.peak_lr, experiment.num_epochs),
        )
        return
    of_length = experiment.num_epochs is None and not unfit_rate(experiment)  # which is warned of
    misfit = schedule.misfit(steps) if of_length else ""
    logger.info("learning rate: %s%s", schedule.in_words(steps), f"; {misfit}" if misfit else "")


def with_checked_attention(experiment: Experiment) -> Experiment:
    """The experiment, with attention by XLA if cuDNN's, which `auto` means here, is wrong on any process's device.

    Every process must call it, before anything that traces the model.
    """
    model = experiment.model
    dtype, kind = model.compute.dtype, kind_of(jax.devices()[0].device_kind)
    if best_kind(model.compute.open_heads, dtype, kind) == "xla":
        return experiment
    heads = [one.of_device(experiment.sharding.tensor_devices) for one in model.compute.open_heads]
    with phase("checking cuDNN's attention", abandonable=True):
        problems = agree.gather("cuDNN's attention", flash_problem(heads, dtype))
    for process, problem in enumerate(problems):
        if problem is not None:
            logger.warning("attention by XLA, as cuDNN's is not right on process %d: %s", process, problem)
            return dataclasses.replace(experiment, model=model.with_compute(attention="xla"))
    logger.info("attention by cuDNN: its outputs and gradients are right on these devices")
    return experiment


def tell_uncut(chosen: Forecast) -> None:
    """Warn of parameters that the strategy should shard and cannot."""
    whole, devices = chosen.layout.uncut_share, chosen.layout.fsdp_devices
    if whole < _NOTABLE:
        return
    power_of_two = devices & -devices  # models' dims are powers of two, or few times one
    logger.warning(
        "%s over %d devices leaves %.0f %% of the parameters whole on each: none of their dims divides by %d%s",
        *(chosen.layout.strategy, devices, 100 * whole, devices),
        f". Try --fsdp-devices {power_of_two}" if power_of_two < devices else "",
    )


def check_host_room(offload: str, memory: Memory, processes_on_host: int) -> None:
    """Log what is kept in host memory. Raises DoesNotFit if a host has too little. All processes call it."""
    require_host(memory, min(agree.gather("memory of a host", host_bytes_per_device(processes_on_host))), offload)
    logger.info(
        "offload %s: %.1f GiB of each device's state lie in host memory; to read and write them takes about %.2g s of "
        "a step at %d GB/s each way (PCIe 4.0 x16)",
        offload,
        memory.host / GIB,
        memory.host_link_s,
        HOST_LINK_GB_S,
    )


def tell_simulators(found: Sequence[Simulators]) -> None:
    """Warn of simulators that need more than the host's available memory."""
    needed, available = sum(one.gib or 0.0 for one in found), host_available_bytes() / GIB
    if needed > available:
        logger.warning(
            "%s; %.1f GiB are available. The host may run out of memory: give fewer",
            *("; ".join(one.words() for one in found), available),
        )
