"""The keys of a DeepSpeed config that have no flag of ours, each with the reason. Read next: `flags.py`.

A key stands for all below it. Names are DeepSpeed's (`runtime/config.py`, `runtime/zero/config.py`, its documentation).
"""

from collections.abc import Mapping

_XLA = "XLA plans communication and its buffers when the step is compiled"
_GATHER = "gathers are planned when the step is compiled"
_CHECKPOINT = "checkpoints are read on any number of devices, and hold what inference loads"
_OFFLOAD = (
    "only moments and average leave the devices, for host memory (--sharding.offload): a drive is far slower, "
    "and parameters are read in every micro-batch. zero3 over more --fsdp-devices cuts the state further; "
    "--optimizer.moment-dtype bfloat16, --optimizer adafactor and a smaller --micro-batch-size need less"
)
_PINNED = "host memory that devices read by themselves is always pinned"
_COMPRESSED = "collectives are neither compressed nor quantised"
_TORCH = "a matter of torch modules; there are none here"
_MEASURED = "metrics.jsonl always has step time, data wait and MFU"
_KERNEL = "which kernel computes it is up to XLA"

UNMAPPED: Mapping[str, str] = {
    # ZeRO: communication and buffers
    "zero_optimization.allgather_partitions": _XLA,
    "zero_optimization.allgather_bucket_size": _XLA,
    "zero_optimization.overlap_comm": _XLA,
    "zero_optimization.reduce_scatter": _XLA,
    "zero_optimization.reduce_bucket_size": _XLA,
    "zero_optimization.use_multi_rank_bucket_allreduce": _XLA,
    "zero_optimization.contiguous_gradients": _XLA,
    "zero_optimization.round_robin_gradients": _XLA,
    "zero_optimization.sub_group_size": _XLA,
    # ZeRO-3: gathering
    "zero_optimization.stage3_prefetch_bucket_size": _GATHER,
    "zero_optimization.stage3_max_live_parameters": _GATHER,
    "zero_optimization.stage3_max_reuse_distance": _GATHER,
    "zero_optimization.stage3_model_persistence_threshold": _GATHER,
    "zero_optimization.stage3_module_granularity_threshold": _GATHER,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _GATHER,
    "zero_optimization.stage3_allgather_sequential": _GATHER,
    "zero_optimization.stage3_partition_stream_chunk_size": "parameters are born cut, each shard where it lives",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _CHECKPOINT,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _CHECKPOINT,
    "zero_optimization.mics_hierarchical_params_gather": _GATHER,
    "zero_optimization.zero_hpz_partition_size": "no second copy within a host; hsdp does: mics_shard_size says that",
    # ZeRO: where the state lies
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_optimizer.pin_memory": _PINNED,
    "zero_optimization.offload_param": _OFFLOAD,
    "zero_optimization.cpu_offload_param": _OFFLOAD,
    "zero_optimization.cpu_offload_use_pin_memory": _PINNED,
    "zero_optimization.zenflow": _OFFLOAD,
    "zero_optimization.save_muon_momentum_buffer_in_memory": _OFFLOAD,
    "aio": "reads and writes for offloading to NVMe; " + _OFFLOAD,
    # ZeRO: the rest
    "zero_optimization.load_from_fp32_weights": "parameters are always kept in float32",
    "zero_optimization.elastic_checkpoint": _CHECKPOINT,
    "zero_optimization.ignore_unused_parameters": "a parameter that the loss does not use has a gradient of zero",
    "zero_optimization.legacy_stage1": "there is one implementation",
    "zero_optimization.zero_quantized_weights": _COMPRESSED,
    "zero_optimization.zero_quantized_nontrainable_weights": _COMPRESSED,
    "zero_optimization.zero_quantized_gradients": _COMPRESSED,
    "zero_optimization.zeropp_loco_param": _COMPRESSED,
    "zero_optimization.memory_efficient_linear": _TORCH,
    "zero_optimization.override_module_apply": _TORCH,
    "zero_optimization.leaf_module": _TORCH,
    "zero_optimization.pipeline_loading_checkpoint": _CHECKPOINT,
    "zero_optimization.log_trace_cache_warnings": _TORCH,
    "zero_optimization.enable_sanity_checks": "every start adds up a few bytes over all devices and checks the sums",
    "zero_allow_untested_optimizer": "all our optimizers can be cut",
    "zero_force_ds_cpu_optimizer": "the update is computed on the devices, also of what lies in host memory",
    # number formats
    "fp16.auto_cast": "the model says which activations are float16 (docs/numerics.md)",
    "fp16.consecutive_hysteresis": "patience is restored when the scale grows, as by DeepSpeed's default",
    "fp16.fused_mode": _KERNEL,
    "fp16.fp16_master_weights_and_grads": "parameters and gradients are float32",
    "bf16.immediate_grad_update": "micro-batches add up in float32 before one update",
    "bf16.check_grad_overflow": "updates that are not finite are never applied (--on-nan)",
    "bf16.bf16_master_weights_and_grads": "parameters and gradients are float32",
    "amp": "NVIDIA Apex is for torch; --model.dtype says in which type is computed",
    "torch_autocast": "--model.dtype says in which type is computed",
    "data_types": "gradients add up in float32",
    "communication_data_type": "gradients travel in the type in which they are added up",
    "seq_parallel_communication_data_type": "sequences are not cut",
    # optimizers and schedulers
    "optimizer.params.adam_w_mode": "decay is decoupled",
    "optimizer.params.torch_adam": _KERNEL,
    "optimizer.params.bias_correction": "moments are always corrected for their start at zero",
    "optimizer.params.amsgrad": "not part of optax's AdamW",
    "optimizer.params.freeze_step": _COMPRESSED,
    "optimizer.params.cuda_aware": _COMPRESSED,
    "optimizer.params.comm_backend_name": _COMPRESSED,
    "optimizer.params.muon_lr": "matrices and the rest share one learning rate (--optimizer.consistent-rms)",
    "optimizer.params.adam_lr": "matrices and the rest share one learning rate (--optimizer.consistent-rms)",
    "optimizer.legacy_fusion": _KERNEL,
    "scheduler.params.last_batch_iteration": "a resumed run goes on where its checkpoint was",
    "scheduler.params.cycle_momentum": "momentum stays what it is",
    "scheduler.params.cycle_min_mom": "momentum stays what it is",
    "scheduler.params.cycle_max_mom": "momentum stays what it is",
    "scheduler.params.decay_mom_rate": "momentum stays what it is",
    "scheduler.params.cycle_first_stair_count": "rates move every step",
    "scheduler.params.cycle_second_stair_count": "rates move every step",
    "scheduler.params.decay_step_size": "after its cycle the rate stays at its least",
    "scheduler.params.decay_lr_rate": "after its cycle the rate stays at its least",
    # the rest of the step
    "prescale_gradients": "the loss is divided by the norms of the whole batch, so gradients are never averaged",
    "gradient_predivide_factor": "the loss is divided by the norms of the whole batch, so gradients are never averaged",
    "sparse_gradients": "gradients are dense",
    "activation_checkpointing": "--model.remat says what the backward pass recomputes",
    "fp32_allreduce": "gradients travel in the type in which they are added up",
    "disable_allgather": _XLA,
    "graph_harvesting": "the whole step is one compiled program",
    "compile": "the whole step is one compiled program",
    "hybrid_engine": "for generation in PPO with torch",
    "sparse_attention": "attention is dense",
    "progressive_layer_drop": "all layers are trained",
    "eigenvalue": "for quantised training, which is not built",
    "compression_training": "quantised and pruned training are not built",
    "quantize_training": "quantised training is not built",
    "data_efficiency": "the data order is a function of seed and step",
    "curriculum_learning": "the data order is a function of seed and step",
    "dataloader_drop_last": "every batch is whole: the order goes on into the next epoch",
    "tensor_parallel": "which layers are shared out is the model's matter; over how many devices, autotp_size says",
    "sequence_parallel_size": "sequences are not cut",
    "pipeline": "layers are not spread over devices in stages",
    "use_data_before_expert_parallelism": "the models have no mixture of experts",
    "elasticity": "runs are elastic as they are (--elastic): same rows on another number of devices",
    "autotuning": "--dry-run says what fits before anything is allocated",
    "checkpoint": _CHECKPOINT,
    "nebula": _CHECKPOINT,
    "datastates": _CHECKPOINT,
    # what is shown
    "wall_clock_breakdown": _MEASURED,
    "memory_breakdown": _MEASURED,
    "flops_profiler": _MEASURED,
    "comms_logger": _MEASURED,
    "dump_state": "experiment.json and environment.json always hold it",
    "csv_monitor": "metrics.jsonl is always written",
    "monitor_config": "metrics.jsonl is always written",
    "comet": "only TensorBoard and wandb are spoken to",
    "tensorboard.output_path": "event files lie in the run directory",
    "tensorboard.job_name": "event files lie in the run directory, whose name is --exp-name",
    "wandb.team": "wandb's own WANDB_ENTITY says it",
    "wandb.group": "wandb's own WANDB_RUN_GROUP says it",
    "vocabulary_size": "the model says how many tokens it knows",
}


def reason(key: str) -> str | None:
    """Why `key` has no flag; None for a key that is not in the table, nor anything above it."""
    parts = key.split(".")
    return next((UNMAPPED[name] for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in UNMAPPED), None)
