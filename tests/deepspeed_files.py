"""Full DeepSpeed configs, as published guides have them."""

import copy

# Three files for one device: stages 1 and 2 with buckets, stage 3 with offload.
COMMON = {
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500},
    },
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "wall_clock_breakdown": False,
}
BUCKETS = {
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
STAGE_3 = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "offload_param": {"device": "cpu", "pin_memory": True},
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
FILES = {
    1: {"zero_optimization": {"stage": 1, **BUCKETS}, **COMMON},
    2: {"zero_optimization": {"stage": 2, **BUCKETS}, **COMMON},
    3: {"zero_optimization": STAGE_3, **COMMON},
}


def with_changes(changes, stage=2):
    """A file with values changed by dotted key; None deletes."""
    config = copy.deepcopy(FILES[stage])
    for key, value in changes.items():
        *parents, name = key.split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
        if value is None:
            del node[name]
    return config
