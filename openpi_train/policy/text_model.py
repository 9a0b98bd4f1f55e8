"""`load_text_model`: loads a language model's checkpoint, of a run or of Hugging Face, as a `TextGenerator`.

Read next: `generation/text_generator.py`, `restore.py`.
"""

import collections
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from flax import nnx

from openpi_train.checkpoints import checkpoint_formats
from openpi_train.data.text.text_data import TODAY, TextData
from openpi_train.data.text.text_encoder import templates_of
from openpi_train.data.tokenizers.text_tokenizer import TextTokenizer, end_tokens, load_text_tokenizer
from openpi_train.experiment import Experiment
from openpi_train.generation.generator import Generator
from openpi_train.generation.text_generator import TextGenerator
from openpi_train.interop.checkpoint_tokenizer import on_disk
from openpi_train.interop.stored_leaves import Stored
from openpi_train.models.language import LanguageConfig, huggingface
from openpi_train.models.language.accompanied import policy_of
from openpi_train.parallel.devices import Devices
from openpi_train.policy.restore import open_run, restored
from openpi_train.runtime.device_kinds import JaxDevice
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

# The most tokens of a prompt and its completion, where a model may have more: keys and values of every row are kept
# for that many.
MAX_LENGTH = 2048


def load_text_model(
    where: str | Path,
    *,
    experiment: str | Experiment | None = None,
    average: bool = True,
    dtype: Literal["float32", "bfloat16"] | None = None,
    merge_lora: bool = True,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    num_rows: int = 16,
    max_length: int | None = None,
    devices: Sequence[JaxDevice] | None = None,
) -> TextGenerator:
    """Load a language model: `load_text_model(run).complete(...)`.

    Args:
        where: a run's directory (its newest checkpoint is used), the directory of a step in it, or its `best`; a folder
            in Hugging Face's form, or `hub:USER/NAME`. May be a bucket's address.
        experiment: the run's experiment, by name or `file.py:name`: needed if it uses classes of your own and
            their file was moved.
        average: use the averaged parameters (EMA), if the run kept an average.
        dtype: the dtype of parameters and activations; None: a run's `model.dtype`; of a folder in Hugging Face's form
            that of its tensors, float32 for other types than bfloat16.
        merge_lora: merge low-rank factors into the weights, for speed.
        tokenizer: another place of the tokenizer; None: the checkpoint's own.
        chat_template: a jinja file; None: the checkpoint's own.
        num_rows: completions that are made together.
        max_length: the most tokens of a prompt and its completion; None: the model's context, but at most `MAX_LENGTH`.
        devices: the devices to use; None: all of this process.

    Raises:
        CheckpointError: there is no complete checkpoint, or it does not fit the experiment.
        UsageError: an argument is missing or invalid, or the model gives no texts.
    """
    stored, model, run = open_language_model(where, experiment)
    of_weights = model.dtype if run is not None else stored_dtype(stored)
    model = dataclasses.replace(model, remat="none", dtype=dtype or of_weights)
    words = _tokenizer(stored, tokenizer)
    if beyond := words.beyond(model.sizes.vocab_size):
        raise CheckpointError(
            f"{words.name} has {len(beyond)} tokens that {stored.where} lacks (its vocab_size is "
            f"{model.sizes.vocab_size}), such as {beyond[0]!r}: give the tokenizer that belongs to the model"
        )
    asked = min(model.context_length, MAX_LENGTH) if max_length is None else max_length
    if asked > model.context_length:
        raise UsageError(
            f"--max-length {asked} is more than the {model.context_length} tokens that {stored.where} was trained for"
        )
    run_model, params, plan = restored(
        model, stored, str(where), average=average, dtype=model.dtype, merge_lora=merge_lora, devices=devices
    )
    graphdef = nnx.split(nnx.eval_shape(lambda: run_model.build(nnx.Rngs(0))))[0]
    generator = Generator(
        graphdef,
        params,
        Devices(plan, run_model.compute.dtype, graphdef),
        num_rows=num_rows,
        max_length=asked,
        end_ids=end_tokens(words),
        vocab_size=words.num_tokens,
    )
    logger.info("%s: %d rows of %d tokens", stored.where, generator.num_rows, asked)
    today = run.data.today if run is not None and isinstance(run.data, TextData) else TODAY
    return TextGenerator(generator, words, templates_of(words, chat_template, today))


def gives_texts(where: str | Path, experiment: str | None = None) -> bool:
    """Whether a checkpoint is for `load_text_model`: also a reward model's run, which that refuses by name.

    The others are for `load_policy`, which says what is wrong.
    """
    try:
        place = checkpoint_formats.open_place(where)
        form = checkpoint_formats.recognised(place)
        if experiment is None and form is not None and form.name == "huggingface":
            return True
        run = open_run(where, experiment)[1]
        return policy_of(run.model) is not None or isinstance(run.data, TextData)
    except (CheckpointError, UsageError):
        return False


def open_language_model(
    where: str | Path, experiment: str | Experiment | None = None
) -> tuple[Stored, LanguageConfig, Experiment | None]:
    """A checkpoint, the language model whose texts it gives, and its run, if it is one's.

    Arguments and errors are as in `load_text_model`.
    """
    place = checkpoint_formats.open_place(where)
    if experiment is None and huggingface.recognises(place):
        return checkpoint_formats.open_checkpoint(where), huggingface.read_model(place), None
    stored, run = open_run(where, experiment)
    found = policy_of(run.model)
    if found is None:
        raise UsageError(f"{stored.where} is a {type(run.model).__name__} ({run.name}), which gives no texts")
    return stored, found[0], run


def stored_dtype(stored: Stored) -> Literal["float32", "bfloat16"]:
    """The dtype to compute in that keeps what is stored: bfloat16 if most numbers are, else float32."""
    sizes = collections.Counter[str]()
    for leaf in stored.params.values():
        sizes[str(leaf.dtype)] += leaf.size_bytes // leaf.dtype.itemsize
    return "bfloat16" if sizes.most_common(1)[0][0] == "bfloat16" else "float32"


def _tokenizer(stored: Stored, given: str | None) -> TextTokenizer:
    if given is None:
        if stored.token_files is None:
            raise UsageError(f"{stored.where} has no tokenizer: give the folder of one with --tokenizer")
        given = str(on_disk(stored.token_files))
    try:
        return load_text_tokenizer(given)
    except FileNotFoundError as error:
        raise UsageError(f"{error}; or give another with --tokenizer") from error
