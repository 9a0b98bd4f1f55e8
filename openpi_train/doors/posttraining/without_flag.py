"""Keys of the YAML configs that have no flag, grouped by reason. Read next: `training_flags.py`.

A key includes all keys below it. Keys of `training` are named without it, as the guides of the tool name them.
"""

from collections.abc import Mapping

_TARGET_KL = "target_kl ppo.target_kl grpo.target_kl rlhf.target_kl"
_KEYS: Mapping[str, str] = {
    "XLA plans communication and its buffers when the step is compiled": """
        ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_gradient_as_bucket_view
    """,
    "a parameter that the loss does not use has a gradient of zero": """
        find_unused_parameters ddp_find_unused_parameters
    """,
    "collectives are XLA's: NCCL on GPUs, gloo on CPUs": "distributed_backend ddp_backend backend",
    "the launcher says which process this is, and how many there are": "local_rank world_size master_addr master_port",
    "how long processes wait for each other: --timeouts": "ddp_timeout",
    "the next batch is made and put on the devices during a step": """
        dataloader_pin_memory dataloader.pin_memory dataloader_prefetch_factor dataloader.prefetch_factor
        dataloader_persistent_workers dataloader.persistent_workers
    """,
    "every batch is full: the order continues into the next epoch": "dataloader_drop_last dataloader.drop_last",
    "the order of rows is a function of seed and position": """
        data.merge_config.seed data.merge_config.shuffle data.shuffle dataloader.shuffle
    """,
    "NVIDIA Apex's levels are for torch: mixed_precision sets the compute dtype, parameters are float32": """
        fp16_opt_level fp16_backend
    """,
    "evaluations compute in the dtype of training": "fp16_full_eval bf16_full_eval",
    "an evaluation's batches have the training's size; its sums do not depend on it": """
        per_device_eval_batch_size eval_accumulation_steps
    """,
    "the checkpoint with the lowest held-out loss is always linked as `best`": """
        load_best_model_at_end metric_for_best_model greater_is_better
    """,
    "checkpoints can be read on any number of devices, and `convert` writes safetensors": """
        save_safetensors save_on_each_node
    """,
    "logs of all processes are in the run directory": "logging_dir logging.level logging.log_level logging.log_dir",
    "downloads are in the hub client's cache: set HF_HOME": "model.cache_dir",
    "models are built by this package: no code comes with a checkpoint": "model.trust_remote_code",
    "XLA chooses the device; JAX_PLATFORMS=cpu for the CPU": "device model.device_map",
    "prompt and completion share max_length": "data.max_prompt_length max_prompt_length dpo.max_prompt_length",
    "datasets are mixed while they are read, and the log has their shares": "data.merge_config.save_merge_stats",
    "the length of the run limits what is read: num_epochs or max_steps": "data.merge_config.max_merged_samples",
    "texts are encoded once, by one process, into the token cache": "data.preprocessing_num_workers",
    "a pattern of parameter paths can be frozen: --freeze": "freeze_layers reward.freeze_layers",
    "no step is left out; watch approx_kl and clip_fraction": _TARGET_KL,
    "for the command `generate`": """
        generation max_new_tokens temperature top_k top_p dpo.max_new_tokens dpo.temperature dpo.top_k dpo.top_p
    """,
}

# Keys that ask for what is not done, and what to give instead.
NOT_DONE: Mapping[str, str] = {
    "ddp_timeout": "--timeouts.stuck-s SECONDS is a step's limit, --timeouts.rendezvous-s that of the start",
    "data.merge_config.max_merged_samples": "max_steps, or files with fewer records",
    **dict.fromkeys(
        ("data.max_prompt_length", "max_prompt_length", "dpo.max_prompt_length"),
        "data.max_length, which prompt and completion share",
    ),
    **dict.fromkeys(("freeze_layers", "reward.freeze_layers"), "--freeze PATTERN of parameter paths"),
    **dict.fromkeys(_TARGET_KL.split(), "kl_coef, which weighs the divergence; no step of an iteration is left out"),
}

WITHOUT_FLAG: Mapping[str, str] = {key: reason for reason, keys in _KEYS.items() for key in keys.split()}
