"""The text server of `serve`: loads a language model and compiles its programs. Read next: `text_server.py`."""

import dataclasses
import logging
import time
from collections.abc import Callable

from openpi_train.policy.text_model import load_text_model
from openpi_train.serve.limits import TextLimits, limits_of
from openpi_train.serve.openai.text_server import TextServer
from openpi_train.serve.request import ServeRequest, TextFlags
from openpi_train.serve.starting import StartProgress

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedTexts:
    """A language model that is ready to be served; `make` is called in the event loop."""

    make: Callable[[], TextServer]
    description: str
    compiled_s: float


def open_server(flags: ServeRequest, texts: TextFlags, key: str | None, progress: StartProgress) -> OpenedTexts:
    """Load the model that the flags name. Raises UsageError for flags that only robot policies have."""
    model = load_text_model(
        flags.checkpoint,
        experiment=flags.experiment,
        average=flags.average,
        dtype=flags.dtype,
        merge_lora=flags.merge_lora,
        tokenizer=flags.tokenizer,
        chat_template=texts.chat_template,
        num_rows=flags.max_batch,
        max_length=texts.max_length,
    )
    for template in model.templates.values():
        template.compiled()
    if not model.templates:
        logger.warning("%s has no chat template: only /v1/completions is served (--chat-template)", flags.checkpoint)
    started = time.monotonic()
    progress.now("compiling")
    num_programs = model.generator.warm_up()
    limits = limits_of(TextLimits, flags, max_batch=model.generator.num_rows, request_s=texts.request_s)
    name = texts.model_name or model_name(flags.checkpoint)
    return OpenedTexts(
        make=lambda: TextServer(model, name=name, limits=limits, api_key=key),
        description=f"{name} ({num_programs} programs, context of {model.generator.max_length} tokens)",
        compiled_s=time.monotonic() - started,
    )


def model_name(checkpoint: str) -> str:
    """The name of a checkpoint's model: the last part of its path that is not a step, or the hub's USER/NAME."""
    if checkpoint.startswith("hub:"):
        return checkpoint.removeprefix("hub:").partition("@")[0]
    parts = [part for part in checkpoint.split("/") if part not in ("", ".", "..")]
    while len(parts) > 1 and (parts[-1].isdecimal() or parts[-1] in ("best", "latest")):
        parts.pop()
    return parts[-1] if parts else "model"
