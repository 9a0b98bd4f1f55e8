"""Keys of the PaliGemma VLA trainer's YAML configs that have no flag, grouped by reason. Read next: `vla_flags.py`.

A key includes all keys below it. Keys of `training` are named without it.
"""

from collections.abc import Mapping

_HEAD = "model.action_head_config"
_KEYS: Mapping[str, str] = {
    "the policy sees the newest observation alone, as there": "data.max_seq_len",
    "pictures are scaled to --model.image-size": "data.image_processor_name_or_path data.siglip_model_name",
    "actions are numbers, not bins": f"data.action_bounds {_HEAD}.num_action_bins",
    "image tower and projection are PaliGemma's own": "model.vision_encoder_config",
    "the head's last layer is one projection: --model.head sets the sizes of its layers": f"""
        {_HEAD}.mlp_hidden_dims {_HEAD}.hidden_layers_config {_HEAD}.hidden_dim {_HEAD}.state_hidden_dim
    """,
    "the flow head has no dropout, and that of the tool reads another key (dropout)": f"{_HEAD}.dropout_prob",
    "jax copies batches to the devices by itself": "data.pin_memory",
    "every row of a batch is real, whatever the number of devices": "data.drop_last",
    "epochs there; here steps: --save-interval": "save_checkpoint_interval",
}

# Keys that ask for what is not done, and what to give instead.
NOT_DONE: Mapping[str, str] = {
    "save_checkpoint_interval": "--save-interval STEPS; the best and the last are saved in any case",
    f"{_HEAD}.dropout_prob": "--optimizer.weight-decay; the flow head has no dropout",
}

WITHOUT_VLA_FLAG: Mapping[str, str] = {key: reason for reason, keys in _KEYS.items() for key in keys.split()}
