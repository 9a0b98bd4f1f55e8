"""Opens text data: tokenizer, cached tokens, splits, and the rows made from them.

Read next: `text_rows.py`, `core/feed.py`.
"""

import dataclasses
import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from openpi_train.data.core import findings
from openpi_train.data.core.dataset_flags import of_dataset
from openpi_train.data.core.held_out import validation_episodes
from openpi_train.data.core.hub import SCHEME
from openpi_train.data.core.interface import Feed, OpenedData, OpeningRequest
from openpi_train.data.core.text_lengths import UNIT, choose_lengths, rounded, shares_of_rows
from openpi_train.data.text import arithmetic
from openpi_train.data.text.first_records import KINDS, require_first
from openpi_train.data.text.prompt_records import PromptRecord, prompt_records, with_all_columns
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.data.text.text_encoder import TextEncoder, built_in_template, templates_of
from openpi_train.data.text.text_files import find_files, names_a_path
from openpi_train.data.text.text_prompts import TextPrompt, prompts_of
from openpi_train.data.text.text_rows import RowMember, TextCut, TextRows
from openpi_train.data.text.token_cache import UNKNOWN, TokenCache
from openpi_train.data.text.token_store import TokenStore
from openpi_train.data.tokenizers.text_tokenizer import FOLDER, TextTokenizer, load_text_tokenizer
from openpi_train.runtime.exits import DataError, ErrorCollector, reported_as

if TYPE_CHECKING:
    from jax.sharding import Sharding

logger = logging.getLogger(__name__)

# Held-out rows are the same for every run over the same data, whatever its seed.
_VALIDATION_SEED = 0
# The number of lengths from which those of batches are chosen.
_MOST_LENGTHS = 64
# Of more unknown tokens than this share a dataset is refused.
_MOST_UNKNOWN = 0.5
# If more than this share of the texts is cut, there is a warning.
_MOST_CUT = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedText(OpenedData):
    """Opened texts. `validation` is None if nothing is held out; `words` is the tokenizer.

    `held_out_files` are where the records of each of its members stand.
    """

    train: TextRows
    validation: TextRows | None
    words: TextTokenizer
    held_out_files: tuple[TextDataset, ...] = ()
    offline: bool = False

    @property
    def fingerprint(self) -> str:
        """Digest of everything that the training rows depend on."""
        return self.train.fingerprint

    @property
    def row_shapes(self) -> dict[str, list[int]]:
        return {name: list(shape) for name, (shape, _) in self.train.spec.items()}

    @property
    def is_conversational(self) -> bool:
        """Whether a dataset has conversations, so that the model knows its chat template."""
        return any(member.store.conversational for member in self.train.members)

    @property
    def has_only_prompts(self) -> bool:
        """Whether texts are prompts without completions: no token is a target."""
        return all(member.store.kind == "prompt only" for member in self.train.members)

    def feed(
        self, *, batch_size: int, sharding: "Sharding", num_workers: int | Literal["auto"], cores: int | None
    ) -> Feed:
        from openpi_train.data.core.feed import RowFeed  # jax: only the main process comes here
        from openpi_train.data.text.text_batches import batch_of

        how: Any = {"batch_size": batch_size, "sharding": sharding, "num_workers": num_workers, "cores": cores}
        return RowFeed(self.train, **how, assemble=batch_of)

    def batch_specs(self, batch_size: int) -> list[Any] | None:
        """One spec for each length that batches can have (`core/text_lengths.py`)."""
        from openpi_train.data.text.text_batches import batch_shapes

        assert self.text_length is not None
        lengths = self.train.text.lengths if self.train.text else (self.text_length,)
        return [batch_shapes(self.train.spec_of(length), batch_size) for length in lengths]

    def held_out(self, num_rows: int, batch_size: int, sharding: "Sharding") -> list[Any]:
        from openpi_train.data.core.feed import RowFeed
        from openpi_train.data.text.text_batches import batch_of, mask_texts

        if self.validation is None:
            logger.warning("no text is held out: there will be no held-out loss (--data.validation-fraction)")
            return []
        feed = RowFeed(self.validation, batch_size=batch_size, sharding=sharding, assemble=batch_of)
        batches = feed.first(num_rows, mask_texts)
        feed.close()
        return batches

    def held_out_prompts(self) -> Iterator[TextPrompt]:
        """The prompts of the held-out texts with their references, always in the same order (`text_prompts.py`)."""
        return iter(()) if self.validation is None else prompts_of(self.validation, self.words)

    def held_out_records(self, prompts: Sequence[TextPrompt]) -> list[PromptRecord]:
        """The records of held-out prompts, which are read from their files. Raises as `prompt_records`."""
        assert self.validation is not None
        found: dict[tuple[int, int], PromptRecord] = {}
        for number, (dataset, member) in enumerate(zip(self.held_out_files, self.validation.members, strict=True)):
            samples = np.array([one.sample for one in prompts if one.member == number], np.int64)
            if len(samples):
                records = prompt_records(dataset, member.store, samples, offline=self.offline)
                found |= {(number, sample): one for sample, one in zip(samples.tolist(), records, strict=True)}
        return with_all_columns([found[one.member, one.sample] for one in prompts])


@dataclasses.dataclass(frozen=True)
class _Split:
    """The samples of one dataset that are in one split."""

    dataset: TextDataset
    store: TokenStore
    samples: np.ndarray


def open_texts(config: TextData, request: OpeningRequest) -> OpenedText:
    """A run's rows and tokenizer, encoding its datasets if they are not cached. Embedded ones are written if missing.

    Needs no communication: every process may call it, with equal results.

    Raises FileNotFoundError, DataError or ValueError, saying what to do, if tokenizer or datasets cannot be used.
    """
    if problems := config.check():
        raise ValueError("; ".join(problems))
    for path in (config.tokenizer, *(dataset.path for dataset in config.datasets)):
        arithmetic.write_missing(path)
    tokenizer = load_text_tokenizer(config.tokenizer, offline=config.offline)
    _check_model(config, request.model, tokenizer)
    encoder = _encoder(config, tokenizer)
    splits = []
    for number, dataset in enumerate(config.datasets):
        with of_dataset(number):
            splits.append(_open_splits(config, number, dataset, encoder))
    for train, held_out in splits:
        for split in (train, held_out):
            _check_known(split, tokenizer)
        found = {finding.kind: finding for store in (held_out.store, train.store) for finding in store.findings}
        findings.report(train.dataset.name, found.values())
    for split in (split for both in splits for split in both):
        _check_tokens(split, request.model, tokenizer)
        if config.kind == "preferences" and not request.uses_margins:
            _refuse_margins(split)
    own_template = None
    if any(split.store.conversational for both in splits for split in both) and not _has_template(config, tokenizer):
        own_template = encoder.templates["default"].source
        logger.info(
            "data: %s has no chat template, so the built-in one is used (<|user|> ... %r, <|assistant|> ... %r); "
            "another: --data.chat-template FILE",
            *(tokenizer.name, *[tokenizer.special_tokens["eos_token"]] * 2),
        )
    cut = TextCut(config.max_length, config.truncation)
    training = [_member(config, train, cut) for train, _ in splits]
    of_held_out = [(_member(config, one, cut), one.dataset) for _, one in splits if len(one.samples)]
    of_held_out = [(member, dataset) for member, dataset in of_held_out if len(member)]
    held_out = [member for member, _ in of_held_out]
    if empty := [member.name for member in training if not len(member)]:
        raise ValueError(f"no training texts in {', '.join(empty)}: check split, --data.validation-fraction, lengths")
    length = rounded(max(int(member.lengths.max()) for member in (*training, *held_out)), config.longest_row)

    def rows(members: Sequence[RowMember], seed: int) -> TextRows:
        identity = _identity(config, members)
        how: Any = {"judged": config.judged, "references": config.reference_log_probs}
        return TextRows(members, length=length, seed=seed, identity=identity, **how)

    train = rows(training, request.seed)
    lengths = lengths_of_batches(
        [member.lengths for member in training],
        train.mixture.weights.tolist(),
        length,
        batch_size=request.batch_size,
        most=1 if config.packing else config.text_lengths,
    )
    opened = OpenedText(
        num_samples=train.num_samples,
        text_length=length,
        tokenizer=tokenizer.fingerprint,
        token_files={f"{FOLDER}/{name}": content for name, content in _files(config, tokenizer, own_template).items()},
        train=train.in_lengths(lengths) if len(lengths) > 1 else train,
        validation=rows(held_out, _VALIDATION_SEED) if held_out else None,
        words=tokenizer,
        held_out_files=tuple(_held_out_dataset(dataset) for _, dataset in of_held_out),
        offline=config.offline,
    )
    _report(opened)
    return opened


def is_ready(config: TextData) -> bool:
    """Whether `open_texts` would only read tokens that are cached, and ask no hub. Raises as it does."""
    paths = [path for dataset in config.datasets for path in (dataset.path, dataset.validation or "")]
    if any(path.startswith(SCHEME) or arithmetic.missing(path) for path in (config.tokenizer, *paths)):
        return False
    encoder = _encoder(config, load_text_tokenizer(config.tokenizer, offline=True))
    stores = []
    for dataset in config.datasets:
        stores.append(_cache(config, dataset, encoder, dataset.path, dataset.split))
        if dataset.validation is not None:
            stores.append(_cache(config, dataset, encoder, *_held_out_place(dataset, dataset.validation)))
    return all(store.is_ready() for store in stores)


def examine_texts(config: TextData, model: object) -> list[str]:
    """Raise what `open_texts` would, as far as the files' names and the tokenizer show; say what is not looked at.

    Nothing is written, and the hub is not asked. Raises DataError or UsageError, for all of them.
    """
    together, notes = ErrorCollector(), []
    for number, dataset in enumerate(config.datasets):
        with together, reported_as(DataError), of_dataset(number):
            notes.append(_examine_files(config, number, dataset))
    with together, reported_as(DataError):
        if config.tokenizer.startswith(SCHEME):
            notes.append(f"tokenizer {config.tokenizer}: it is on the hub; a start fetches it")
        elif not arithmetic.missing(config.tokenizer):
            _check_model(config, model, load_text_tokenizer(config.tokenizer))
    together.raise_all()
    return notes


def _examine_files(config: TextData, number: int, dataset: TextDataset) -> str:
    """What is not looked at of a dataset. Raises FileNotFoundError, DataError or ValueError."""
    if dataset.path.startswith(SCHEME):
        return f"{dataset.path}: it is on the hub; a start fetches it"
    if arithmetic.missing(dataset.path):
        return f"{dataset.path}: the embedded dataset is not written yet; a start does it"
    require_first(config, dataset, find_files(dataset.path, dataset.split)[0])
    if dataset.validation is not None:
        if not names_a_path(dataset.validation):
            _refuse_held_out_training(config, number, dataset)
        require_first(config, dataset, find_files(*_held_out_place(dataset, dataset.validation))[0])
    return f"{dataset.path}: its texts; a start reads them, and `data check` does so now"


def _encoder(config: TextData, tokenizer: TextTokenizer) -> TextEncoder:
    templates = templates_of(tokenizer, config.chat_template, config.today)
    if not templates and (own := built_in_template(tokenizer, config.today)) is not None:
        templates = {"default": own}
    return TextEncoder(tokenizer=tokenizer, templates=templates, targets=config.targets)


def _held_out_place(dataset: TextDataset, validation: str) -> tuple[str, str | None]:
    """The path, and the split there, of a dataset's held-out texts."""
    return (validation, None) if names_a_path(validation) else (dataset.path, validation)


def _held_out_dataset(dataset: TextDataset) -> TextDataset:
    """The dataset whose files have its held-out texts: itself, if those are a fraction of it."""
    if dataset.validation is None:
        return dataset
    path, split = _held_out_place(dataset, dataset.validation)
    return dataclasses.replace(dataset, path=path, split=split, validation=None)


def _check_model(config: TextData, model: Any, tokenizer: TextTokenizer) -> None:
    if not (hasattr(model, "context_length") and hasattr(model, "sizes")):
        raise ValueError(f"{type(model).__name__} reads no texts: choose a language model, or other data")
    known = int(model.sizes.vocab_size)
    if tokenizer.beyond(known):
        raise ValueError(
            f"the tokenizer {tokenizer.name} has {tokenizer.num_tokens} tokens, the model {known} (sizes.vocab_size): "
            "give the tokenizer that belongs to the model"
        )
    if config.max_length > model.context_length:
        raise ValueError(
            f"--data.max-length {config.max_length} is more than the {model.context_length} tokens of the model's "
            f"context (context_length): set it to at most {model.context_length}"
        )


def _check_tokens(split: _Split, model: Any, tokenizer: TextTokenizer) -> None:
    """Raise ValueError if a text has a token that the model's table lacks."""
    known, store = int(model.sizes.vocab_size), split.store
    if store.largest_token >= known:
        at = int(np.argmax(np.asarray(store.tokens) >= known))
        sample = int(np.searchsorted(store.text_ends, at, side="right")) // store.texts_per_sample
        raise ValueError(
            f"{split.dataset.name}, {store.place(sample)}: the tokenizer {tokenizer.name} gives the token "
            f"{store.tokens[at]} ({tokenizer.decode([store.tokens[at]])!r}), the model has {known} (sizes.vocab_size). "
            "Give the tokenizer that belongs to the model, or a chat template without that token"
        )


def _check_known(split: _Split, tokenizer: TextTokenizer) -> None:
    """Raise ValueError if the tokenizer does not know most of what the texts say."""
    for one in split.store.findings:
        if one.kind == UNKNOWN and one.total and one.count > _MOST_UNKNOWN * one.total:
            raise ValueError(
                f"{split.dataset.name}: {one.count / one.total:.0%} of the tokens stand for what the tokenizer "
                f"{tokenizer.name} does not know ({one.count} of {one.total}; the first: {one.where}): no model "
                "can learn these texts. Give a tokenizer that knows their characters, and its model: "
                "lm_sft, lm_dpo or lm_grpo, with --model.path FOLDER or hub:USER/NAME"
            )


def _refuse_margins(split: _Split) -> None:
    if (found := np.flatnonzero(split.store.margins[split.samples])).size:
        sample = int(split.samples[found[0]])
        raise ValueError(
            f"{split.dataset.name}, {split.store.place(sample)}: this preference has a margin "
            f"({split.store.margins[sample]:g}), and only reward models (objective RewardPairs) are trained with one. "
            "Name the columns to read without it: --data.datasets.N.columns prompt=prompt chosen=chosen "
            "rejected=rejected"
        )


def _has_template(config: TextData, tokenizer: TextTokenizer) -> bool:
    return config.chat_template is not None or bool(tokenizer.chat_templates)


def _files(config: TextData, tokenizer: TextTokenizer, own_template: str | None) -> dict[str, bytes]:
    """The tokenizer's files for checkpoints, with the template that the run uses; `own_template`: the built-in one."""
    if config.chat_template is not None:
        return {**tokenizer.files, "chat_template.jinja": Path(config.chat_template).expanduser().read_bytes()}
    return (
        tokenizer.files if own_template is None else {**tokenizer.files, "chat_template.jinja": own_template.encode()}
    )


def _open_splits(config: TextData, number: int, dataset: TextDataset, encoder: TextEncoder) -> tuple[_Split, _Split]:
    """The training and the held-out samples of a dataset, which has this number."""
    if dataset.validation is not None and not names_a_path(dataset.validation):
        _refuse_held_out_training(config, number, dataset)
    store = _open_store(config, dataset, encoder, dataset.path, dataset.split)
    everything = np.arange(len(store))
    if dataset.validation is not None:
        other = _open_store(config, dataset, encoder, *_held_out_place(dataset, dataset.validation))
        return _Split(dataset, store, everything), _Split(dataset, other, np.arange(len(other)))
    prompts, of_samples = np.unique(store.digests, return_inverse=True)
    held_out = validation_episodes([f"{prompt:016x}" for prompt in prompts.tolist()], config.validation_fraction)
    held_out = held_out[of_samples]
    return _Split(dataset, store, everything[~held_out]), _Split(dataset, store, everything[held_out])


def _refuse_held_out_training(config: TextData, number: int, dataset: TextDataset) -> None:
    """Raise ValueError if the held-out split of the dataset has files of the training split."""
    flag, name = f"--data.datasets.{number}.validation", dataset.validation
    instead = (
        f"give the path of a file with held-out texts ({flag} PATH, with a slash or an ending), or {flag} None to hold "
        "out --data.validation-fraction of the texts"
    )
    if Path(dataset.path).expanduser().is_file():
        raise ValueError(f"{flag} {name}: the single file {dataset.path} has no split {name}; {instead}")
    if dataset.split == name:  # as a user may ask to measure the loss on the texts of a run
        return
    training, held_out = (find_files(dataset.path, split, offline=config.offline) for split in (dataset.split, name))
    if both := sorted({file.name for file in training} & {file.name for file in held_out}):
        raise ValueError(
            f"{flag} {name}: {', '.join(both[:3])} of {dataset.path} would be trained on (split {dataset.split}) and "
            f"held out: name two splits (--data.datasets.{number}.split train), or {instead}"
        )


def _cache(config: TextData, dataset: TextDataset, encoder: TextEncoder, where: str, split: str | None) -> TokenCache:
    return TokenCache(
        name=dataset.name,
        where=where if where.startswith(SCHEME) else str(Path(where).expanduser().resolve()),
        files=find_files(where, split, offline=config.offline),
        encoder=encoder,
        columns=dataset.columns_by_type,
        kinds=KINDS[config.kind],
        cache_dir=config.cache_dir,
        on_bad_record=config.on_bad_record,
    )


def _open_store(
    config: TextData, dataset: TextDataset, encoder: TextEncoder, where: str, split: str | None
) -> TokenStore:
    store = _cache(config, dataset, encoder, where, split).open()
    if config.reference_log_probs:
        # A preference has both, a labelled completion one.
        given = ~np.isnan(store.references)
        missing = ~(given.all(1) if config.kind == "preferences" else given.any(1))
        if missing.any():
            raise ValueError(
                f"{dataset.name}, {store.place(int(np.argmax(missing)))}: no log-probabilities of the reference model "
                "(ref_chosen_logps and ref_rejected_logps, or reference_logps); --data.reference-log-probs needs them"
            )
    return store


def _member(config: TextData, split: _Split, cut: TextCut) -> RowMember:
    name = split.dataset.name
    samples = cut.usable(split.store, split.samples, name=name, on_no_targets=config.on_no_targets)
    return RowMember.of(split.store, samples, cut, packing=config.packing, name=name, weight=split.dataset.weight)


def lengths_of_batches(
    of_rows: Sequence[np.ndarray], weights: Sequence[float], longest: int, *, batch_size: int, most: int
) -> tuple[int, ...]:
    """At most `most` lengths for batches, up to `longest`, from the number of tokens in each row of each dataset."""
    # Few candidates, because all pairs of them are compared.
    unit = UNIT * math.ceil(longest / (UNIT * _MOST_LENGTHS))
    in_units = [np.minimum(-(-lengths // unit) * unit, longest) for lengths in of_rows]
    return choose_lengths(shares_of_rows(in_units, weights), longest, batch_size=batch_size, cost=float, most=most)


def _identity(config: TextData, members: Sequence[RowMember]) -> dict[str, Any]:
    """What the rows depend on besides the seed: content, not where it is stored."""
    datasets = [
        {
            "texts": member.store.fingerprint,
            "samples": hashlib.sha256(member.samples.astype(np.int64).tobytes()).hexdigest(),
            "weight": member.weight,
        }
        for member in members
    ]
    names = ("kind", "max_length", "truncation", "packing", "reference_log_probs")
    return {"datasets": datasets, **{name: getattr(config, name) for name in names}}


def _report(opened: OpenedText) -> None:
    for split, rows in (("training", opened.train), ("held-out", opened.validation)):
        if rows is None:
            logger.warning("data: no %s rows; evaluation has nothing to run on", split)
            continue
        for number, member in enumerate(rows.members):
            cut = member.num_cut
            share = 100 * cut / len(member.samples)
            logger.info(
                "data: %s, %d %s texts in %d rows with %.0f tokens on average, %.1f %% of rows%s",
                *(member.name, len(member.samples), split, len(member)),
                *(member.lengths.mean(), 100 * rows.mixture.weights[number]),
                f"; {cut} of the texts ({share:.2g} %) are cut to --data.max-length {member.cut.max_length}"
                if cut
                else "",
            )
            if split == "training" and cut > _MOST_CUT * len(member.samples):
                logger.warning(
                    "%s: %.0f %% of the texts are longer than --data.max-length %d and lose their %s; %d tokens hold "
                    "95 %% of them whole",
                    *(member.name, share, member.cut.max_length),
                    *("beginning" if member.cut.truncation == "keep_end" else "end", member.length_holding(0.95)),
                )
