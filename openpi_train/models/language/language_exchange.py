"""What language models exchange with other projects: Hugging Face's folders, and PEFT's adapters."""

from openpi_train.interop.checkpoint_format import Format
from openpi_train.interop.exchange import Exchange
from openpi_train.models.language import huggingface, peft_adapter
from openpi_train.models.language.accompanied import AccompaniedConfig
from openpi_train.models.language.language import LanguageConfig
from openpi_train.models.language.reward import RewardConfig

LANGUAGE = Exchange(
    family="language",
    models=(LanguageConfig, AccompaniedConfig, RewardConfig),
    formats=(
        Format(
            name="huggingface",
            summary="a language model in Hugging Face's form: config.json, model.safetensors or several and their "
            "index",
            recognises=huggingface.recognises,
            open=huggingface.open_checkpoint,
            prepare=huggingface.prepare,
            part=huggingface.written_part,
            library="transformers",
            start_flag="--model.path",
        ),
        Format(
            name="peft",
            summary="a low-rank adapter of a language model, by PEFT: adapter_config.json, adapter_model.safetensors",
            recognises=peft_adapter.recognises,
            open=peft_adapter.open_checkpoint,
            prepare=peft_adapter.prepare,
            holds=peft_adapter.HELD,
            library="peft",
            start_flag="--weight-loader.adapter-path",
        ),
    ),
    hub_tasks={
        **dict.fromkeys(("LanguageConfig", "ReferencedConfig", "ActorCriticConfig"), "text-generation"),
        "RewardConfig": "text-classification",
    },
)
