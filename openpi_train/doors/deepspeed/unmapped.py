"""DeepSpeed config keys without an equivalent flag, grouped by reason. Read next: `flags.py`.

A key includes all keys below it. Names are DeepSpeed's (`runtime/config.py`, `runtime/zero/config.py`, its docs).
"""

from collections.abc import Mapping

_OFFLOAD = (
    "only moments and average can be offloaded, to host memory (--sharding.offload): a drive is far slower, "
    "and parameters are read in every micro-batch. zero3 over more --fsdp-devices shards the state further; "
    "--optimizer.moment-dtype bfloat16, --optimizer adafactor and a smaller --micro-batch-size need less"
)
_KEYS: Mapping[str, str] = {
    "XLA plans communication and its buffers when the step is compiled": """
        zero_optimization.allgather_partitions zero_optimization.allgather_bucket_size zero_optimization.overlap_comm
        zero_optimization.reduce_scatter zero_optimization.reduce_bucket_size
        zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.contiguous_gradients
        zero_optimization.round_robin_gradients zero_optimization.sub_group_size disable_allgather
    """,
    "gathers are planned when the step is compiled": """
        zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_max_live_parameters
        zero_optimization.stage3_max_reuse_distance zero_optimization.stage3_model_persistence_threshold
        zero_optimization.stage3_module_granularity_threshold zero_optimization.stage3_use_all_reduce_for_fetch_params
        zero_optimization.stage3_allgather_sequential zero_optimization.mics_hierarchical_params_gather
    """,
    "parameters are initialised as shards on their devices": "zero_optimization.stage3_partition_stream_chunk_size",
    "checkpoints can be read on any number of devices, and inference loads them directly": """
        zero_optimization.stage3_gather_16bit_weights_on_model_save
        zero_optimization.stage3_gather_fp16_weights_on_model_save zero_optimization.elastic_checkpoint
        zero_optimization.pipeline_loading_checkpoint checkpoint nebula datastates
    """,
    "no second copy within a host; hsdp has one: set mics_shard_size": "zero_optimization.zero_hpz_partition_size",
    _OFFLOAD: """
        zero_optimization.offload_optimizer zero_optimization.offload_param zero_optimization.cpu_offload_param
        zero_optimization.zenflow zero_optimization.save_muon_momentum_buffer_in_memory
    """,
    "host memory used for offloading is always pinned": """
        zero_optimization.offload_optimizer.pin_memory zero_optimization.cpu_offload_use_pin_memory
    """,
    f"reads and writes for offloading to NVMe; {_OFFLOAD}": "aio",
    "parameters are always kept in float32": "zero_optimization.load_from_fp32_weights",
    "a parameter that the loss does not use has a gradient of zero": "zero_optimization.ignore_unused_parameters",
    "there is one implementation": "zero_optimization.legacy_stage1",
    "collectives are neither compressed nor quantised": """
        zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_nontrainable_weights
        zero_optimization.zero_quantized_gradients zero_optimization.zeropp_loco_param optimizer.params.freeze_step
        optimizer.params.cuda_aware optimizer.params.comm_backend_name
    """,
    "specific to torch modules; there are none here": """
        zero_optimization.memory_efficient_linear zero_optimization.override_module_apply zero_optimization.leaf_module
        zero_optimization.log_trace_cache_warnings
    """,
    "every start checks collectives with a sum over all devices": "zero_optimization.enable_sanity_checks",
    "all our optimizers support sharding": "zero_allow_untested_optimizer",
    "the update is computed on the devices, also for state in host memory": "zero_force_ds_cpu_optimizer",
    "the model determines which activations are float16 (docs/understand/numerics.md)": "fp16.auto_cast",
    "patience is restored when the scale grows, as by DeepSpeed's default": "fp16.consecutive_hysteresis",
    "XLA chooses the kernel": "fp16.fused_mode optimizer.params.torch_adam optimizer.legacy_fusion",
    "parameters and gradients are float32": "fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads",
    "micro-batches are accumulated in float32 before one update": "bf16.immediate_grad_update",
    "updates that are not finite are never applied (--on-nan)": "bf16.check_grad_overflow",
    "NVIDIA Apex is for torch; --model.dtype sets the compute dtype": "amp",
    "--model.dtype sets the compute dtype": "torch_autocast",
    "gradients are accumulated in float32": "data_types",
    "there is no sequence parallelism": "seq_parallel_communication_data_type sequence_parallel_size",
    "weight decay is decoupled": "optimizer.params.adam_w_mode",
    "moments are always bias-corrected": "optimizer.params.bias_correction",
    "not part of optax's AdamW": "optimizer.params.amsgrad",
    "matrices and the rest share one learning rate (--optimizer.consistent-rms)": """
        optimizer.params.muon_lr optimizer.params.adam_lr
    """,
    "a resumed run continues at its checkpoint's step": "scheduler.params.last_batch_iteration",
    "momentum is constant": """
        scheduler.params.cycle_momentum scheduler.params.cycle_min_mom scheduler.params.cycle_max_mom
        scheduler.params.decay_mom_rate
    """,
    "rates change every step": "scheduler.params.cycle_first_stair_count scheduler.params.cycle_second_stair_count",
    "after the cycle the rate stays at its minimum": "scheduler.params.decay_step_size scheduler.params.decay_lr_rate",
    "the loss is divided by the norms of the whole batch, so gradients are never averaged": """
        prescale_gradients gradient_predivide_factor
    """,
    "gradients are dense": "sparse_gradients",
    "--model.remat sets what the backward pass recomputes": "activation_checkpointing",
    "the whole step is one compiled program": "graph_harvesting compile",
    "for generation in PPO with torch": "hybrid_engine",
    "attention is dense": "sparse_attention",
    "all layers are trained": "progressive_layer_drop",
    "for quantised training, which is not built": "eigenvalue",
    "quantised and pruned training are not built": "compression_training",
    "quantised training is not built": "quantize_training",
    "the data order is a function of seed and step": "data_efficiency curriculum_learning",
    "every batch is full: the order continues into the next epoch": "dataloader_drop_last",
    "the model determines which layers are sharded; autotp_size, over how many devices": "tensor_parallel",
    "there is no pipeline parallelism": "pipeline",
    "the models have no mixture of experts": "use_data_before_expert_parallelism",
    "runs are elastic (--elastic): the same rows on another number of devices": "elasticity",
    "--dry-run reports what fits before anything is allocated": "autotuning",
    "metrics.jsonl always has step time, data wait and MFU": "wall_clock_breakdown memory_breakdown comms_logger",
    "experiment.json and environment.json always hold it": "dump_state",
    "metrics.jsonl is always written": "csv_monitor monitor_config",
    "only TensorBoard and wandb are supported": "comet",
    "event files are in the run directory": "tensorboard.output_path",
    "event files are in the run directory, whose name is --exp-name": "tensorboard.job_name",
    "set wandb's own WANDB_ENTITY": "wandb.team",
    "set wandb's own WANDB_RUN_GROUP": "wandb.group",
    "the model determines the vocabulary size": "vocabulary_size",
}

_NO_OFFLOAD = (
    "parameters stay on the devices: more of them shard the state further (stage 3), and offload_optimizer "
    '{"device": "cpu"} moves moments and average to host memory'
)
_NOT_BUILT = "not built, and there is nothing in its place"
# Keys that ask for what is not done, and what to give instead.
NOT_DONE: Mapping[str, str] = {
    **dict.fromkeys(("zero_optimization.offload_param.device", "zero_optimization.cpu_offload_param"), _NO_OFFLOAD),
    "zero_optimization.offload_optimizer.device=nvme": '"cpu": a drive is far slower than host memory',
    **dict.fromkeys(
        (
            "zero_optimization.zero_quantized_weights",
            "zero_optimization.zero_quantized_nontrainable_weights",
            "zero_optimization.zero_quantized_gradients",
        ),
        'communication_data_type "bf16", which halves what gradients send',
    ),
    "fp16.fp16_master_weights_and_grads": "bf16.bf16_optimizer_states true makes the moments small",
    "bf16.bf16_master_weights_and_grads": "bf16.bf16_optimizer_states true makes the moments small",
    "amp.enabled": "fp16.enabled or bf16.enabled",
    "torch_autocast.enabled": "fp16.enabled or bf16.enabled",
    "sparse_attention.mode": _NOT_BUILT,
    "progressive_layer_drop.enabled": _NOT_BUILT,
    "eigenvalue.enabled": _NOT_BUILT,
    "quantize_training.enabled": _NOT_BUILT,
    "curriculum_learning.enabled": _NOT_BUILT,
    "data_efficiency.enabled": _NOT_BUILT,
    "comet.enabled": "tensorboard.enabled or wandb.enabled",
    "optimizer.params.amsgrad": _NOT_BUILT,
}

UNMAPPED: Mapping[str, str] = {key: reason for reason, keys in _KEYS.items() for key in keys.split()}
