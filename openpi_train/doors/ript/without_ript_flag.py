"""Keys of the RIPT trainers' YAML configs that have no flag, grouped by reason. Read next: `ript_flags.py`.

A key includes all keys below it. Keys of `training` are named without it.
"""

from collections.abc import Mapping

_KEYS: Mapping[str, str] = {
    "all devices of the processes that are started take part": "distributed.enabled distributed.world_size",
    "collectives are XLA's: NCCL on GPUs, gloo on CPUs": "distributed.backend",
    "acting has no time limit, so that slow episodes end nothing; what makes no progress ends all: --timeouts": """
        distributed.timeout_seconds
    """,
    "a parameter that the loss does not use has a gradient of zero": "distributed.find_unused_parameters",
    "XLA plans communication and its buffers when the step is compiled": "distributed.bucket_cap_mb",
    "outcomes of all processes are gathered in every iteration: statistics are exact at any time": """
        data_parallel.sync_every_n_steps algo.sync_every_n_steps
    """,
    "batches are the run's own episodes: nothing is loaded": """
        data_parallel.async_data_loading performance.prefetch_factor performance.num_workers performance.pin_memory
        train_dataloader.shuffle train_dataloader.num_workers train_dataloader.pin_memory train_dataloader.drop_last
        train_dataloader.persistent_workers train_dataloader.multiprocessing_context train_dataloader._target_
        train_dataloader.prefetch_factor
    """,
    "every task is drawn equally often, and every device acts in the episodes of its own rows: as many on each": """
        task_distribution.enable_task_sharding task_distribution.balance_tasks_across_gpus
        task_distribution.min_tasks_per_gpu features.enable_task_polling
    """,
    "the whole step is compiled by XLA": "performance.enable_torch_compile",
    "the memory that a run needs is compared with the device's before it starts (--dry-run); JAX takes "
    "XLA_PYTHON_CLIENT_MEM_FRACTION of it": "performance.max_memory_per_gpu_gb",
    "the newest good checkpoint is used": "fault_tolerance.resume_from_latest",
    "memory is in the log and in plan.json": "debug.log_memory_usage",
    "what became of every iteration is in the run's folder: metrics.jsonl, eval/": "debug.save_intermediate_results",
    "an iteration's acting, waves and groups are in every line of the log": """
        enhanced_sampling.debug_sampling log_interval verbose use_tqdm
    """,
    "videos of evaluations are in eval/<step>/videos": "enhanced_sampling.video_dir rollout.n_video",
    "statistics are saved with the run's position": "algo.rollout_stats_path algo.init_state_stats_file",
    "an episode's reward is its outcome, without a discount": "algo.gamma",
    "log-probabilities are summed over all dims of a chunk, and every episode counts the same": """
        algo.log_prob_mode algo.use_token_level_loss_avg
    """,
    "mini-batches are reshuffled in every epoch": "algo.use_minibatch_permutation",
    "the loss is that of the clipped ratio (--objective), without guidance": """
        algo.beta algo.cfg_alpha algo.collection_cfg_scale policy.cfg_enabled features.adaptive_cfg
        features.cfg_sweep_config
    """,
    "the baseline is the mean of a group's other episodes": "algo.rloo_over_all_rollouts",
    "waves of episodes are never cut short: results do not depend on the speed of a process": """
        algo.early_stop_percentage algo.early_stop_porcentage features.early_stop_percentage
        features.enable_file_counter
    """,
    "the length is num_train_steps, in iterations": "n_epochs",
    "devices are those that JAX finds: CUDA_VISIBLE_DEVICES, JAX_PLATFORMS": "device",
    "environments run in batches on every device, or in worker processes (ProcessEnv)": """
        features.enable_parallel_envs features.use_ript_vla_runner task.suite_name env
    """,
    "the run's folder is <output_dir>/ript/<exp_name>": "logging_folder make_unique_experiment_dir variant_name",
}

# Keys that ask for what is not done, and what to give instead.
NOT_DONE: Mapping[str, str] = {
    "distributed.timeout_seconds": "--timeouts.stuck-s SECONDS is a step's limit; acting has none",
    "performance.max_memory_per_gpu_gb": "XLA_CLIENT_MEM_FRACTION=0.3 is the share of a GPU's memory that jax takes",
}

WITHOUT_RIPT_FLAG: Mapping[str, str] = {key: reason for reason, keys in _KEYS.items() for key in keys.split()}
