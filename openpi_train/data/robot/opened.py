"""Opens the data of a `DataConfig`: sources, splits, norm stats, and the rows made from them.

Read next: `core/feed.py`.
"""

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from openpi_train.data.core import cache_folders
from openpi_train.data.core.dataset_flags import of_dataset
from openpi_train.data.core.interface import Feed, OpenedData, OpeningRequest, RowSpec
from openpi_train.data.core.source import Source, SourceConfig
from openpi_train.data.core.text_lengths import TextLengths, choose_lengths, rounded, shares_of_rows
from openpi_train.data.robot.chunk_tokens import chunk_tokens
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.labels import Indicator, Labels, Returns, longest_episodes
from openpi_train.data.robot.mixed_robots import of_rates
from openpi_train.data.robot.norm_stats import assets, mean_action
from openpi_train.data.robot.normalize import Form, NormStats, norm_stats_json
from openpi_train.data.robot.row_format import RowModel
from openpi_train.data.robot.rows import Rows, RowTransform
from openpi_train.data.robot.tokens import open_tokenizer, token_files, tokens_fingerprint
from openpi_train.data.robot.transforms import Normalize
from openpi_train.data.robot.windows import Windows, WindowShape
from openpi_train.data.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jax.sharding import Sharding

    from openpi_train.types import ActionBatch

logger = logging.getLogger(__name__)

# Held-out rows are the same for every run over the same data, whatever its seed.
_VALIDATION_SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedDatasets(OpenedData):
    """Opened robot demonstrations. `validation` is None if nothing is held out; `norm_stats` is keyed by asset id."""

    # Whose rows these are; None if not opened for a run.
    model: RowModel | None = None
    # What rows are labelled with (`DataConfig.label`).
    label: str | None = None
    train: Rows
    validation: Rows | None
    norm_stats: Mapping[str, Mapping[str, NormStats]]
    normalization: Form
    cameras: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Digest of everything that the training rows depend on."""
        return self.train.fingerprint

    @property
    def row_shapes(self) -> dict[str, list[int]]:
        return {name: list(shape) for name, (shape, _) in self.train.spec.items()}

    @property
    def proportions(self) -> dict[str, float]:
        """The mixture's normalised weights by dataset."""
        weights = self.train.mixture.weights.tolist()
        return {f"{number}_{name}": weights[number] for number, name in enumerate(self.train.names)}

    def feed(
        self, *, batch_size: int, sharding: "Sharding", num_workers: int | Literal["auto"], cores: int | None
    ) -> Feed:
        from openpi_train.data.core.feed import RowFeed  # jax: only the main process comes here

        return RowFeed(self.train, batch_size=batch_size, sharding=sharding, num_workers=num_workers, cores=cores)

    def batch_specs(self, batch_size: int) -> list[Any] | None:
        """One spec for each text length that batches can have (`core/text_lengths.py`)."""
        assert self.model is not None
        lengths = self.train.text.lengths if self.train.text else (self.text_length,)
        specs = [self.model.rows.batch_spec(batch_size, self.cameras, length) for length in lengths]
        return [labelled(spec, self.label) for spec in specs]

    def held_out(self, num_rows: int, batch_size: int, sharding: "Sharding") -> list[Any]:
        if self.validation is None:
            logger.warning("no episode is held out: there will be no held-out loss (--data.validation-fraction)")
            return []
        return _first_batches(self.validation, num_rows, batch_size, sharding)

    def training_rows(self, num_rows: int, batch_size: int, sharding: "Sharding") -> list[Any]:
        """The first rows of the training split, as `held_out` returns those of the held-out one."""
        return _first_batches(self.train, num_rows, batch_size, sharding)

    def mean_action(self) -> np.ndarray:
        """What a model learns that ignores its input: the mixture's mean action, normalised, float64 [a].

        Each dim's mean is over the datasets whose robots have it, by their weights; dims of no robot are 0.
        """
        rows, width = self.train, self.train.spec["actions"][0][-1]
        total, shares = np.zeros(width), np.zeros(width)
        for window, transforms, weight in zip(rows.windows, rows.transforms, rows.mixture.weights, strict=True):
            assert isinstance(transforms[0], Normalize), "as open_data has them"
            mean = transforms[0]({"actions": mean_action(window)})["actions"]
            total[: len(mean)] += weight * mean
            shares[: len(mean)] += weight
        return total / np.where(shares, shares, 1)

    def norm_stats_json(self) -> dict[str, Any]:
        return {asset: norm_stats_json(stats) for asset, stats in self.norm_stats.items()}


def _first_batches(rows: Rows, num_rows: int, batch_size: int, sharding: "Sharding") -> list[Any]:
    from openpi_train.data.core.feed import RowFeed  # jax: only the main process comes here
    from openpi_train.types import mask_rows

    feed = RowFeed(rows, batch_size=batch_size, sharding=sharding)
    batches = feed.first(num_rows, mask_rows)
    feed.close()
    return batches


def open_run_data(config: DataConfig, request: OpeningRequest) -> OpenedDatasets:
    """A run's rows, norm stats and tokenizer. Raises as `open_data`."""
    write_missing(config)  # a tokenizer may lie beside the data
    try:
        tokenizer = open_tokenizer(request.model, config.tokenizer, offline=config.offline)
    except FileNotFoundError:
        open_windows(config, request.model.rows.window)  # where the data are missing too, that is what to say
        raise
    windows = open_windows(config, request.model.rows.window)
    model: RowModel = request.model
    config.check_dims(model)
    length = model.rows.text_length(tokenizer, [*prompts(windows), *request.prompts])
    _report_blank(config, windows, reads_text=model.rows.reads_text)
    data = open_data(
        config,
        shape=model.rows.window,
        seed=request.seed,
        transforms=model.rows.transforms(tokenizer, length),
        batch_spec=functools.partial(model.rows.batch_spec, text_length=length),
        normalization=model.rows.normalization,
        assets_dir=request.assets_dir,
        windows=windows,
    )
    data = in_text_lengths(
        dataclasses.replace(data, model=model, text_length=length),
        tokenizer,
        batch_size=request.batch_size,
        most=config.text_lengths,
        draws=request.draws_per_row,
        assets_dir=request.assets_dir,
    )
    return dataclasses.replace(
        data, tokenizer=tokens_fingerprint(model, tokenizer), token_files=token_files(model, tokenizer)
    )


def open_data(
    config: DataConfig,
    *,
    shape: WindowShape,
    seed: int,
    transforms: Sequence[RowTransform],
    batch_spec: "Callable[[int, Sequence[str]], ActionBatch]",
    normalization: Form,
    assets_dir: str | Path,
    windows: Sequence[Windows] | None = None,
) -> OpenedDatasets:
    """Open every dataset of a run, computing norm stats under `assets_dir` if they are missing.

    Args: `transforms` and `batch_spec` are the model config's; `shape` is what it sees and predicts; `normalization`
    is the method it was designed for; `windows` is the result of `open_windows`, if already called. Needs no
    communication: every process may call it, with equal results.

    Raises FileNotFoundError or ValueError, saying what to do, if data, norm stats or the mixture cannot be used.
    """
    if not config.datasets:
        raise ValueError("there is no dataset to train on: give --dataset FOLDER")
    form = config.normalization or normalization
    train = open_windows(config, shape) if windows is None else list(windows)
    stats = {asset.name: asset.stats() for asset in assets(config, train, assets_dir)}
    spec = row_spec(labelled(batch_spec(1, config.cameras), config.label))

    def rows(windows: Sequence[Windows], seed: int) -> Rows | None:
        members = [(window, dataset) for window, dataset in zip(windows, config.datasets, strict=True) if len(window)]
        if not members:
            return None
        return Rows(
            [window for window, _ in members],
            [dataset.asset for _, dataset in members],
            [dataset.weight for _, dataset in members],
            [(Normalize(_needed(stats, dataset.asset, form), form), *transforms) for _, dataset in members],
            spec=spec,
            seed=seed,
            on_bad_record=config.on_bad_record,
            identity=_identity(members, stats, form),
        )

    training = rows(train, seed)
    if training is None or len(training.windows) < len(config.datasets):
        empty = [d.asset for w, d in zip(train, config.datasets, strict=True) if not len(w)]
        raise ValueError(
            f"no training samples in {', '.join(empty)}: check its split, --data.validation-fraction and "
            "--data.datasets.N.only"
        )
    validation = rows([window.in_split("validation") for window in train], _VALIDATION_SEED)
    opened = OpenedDatasets(
        num_samples=training.num_samples,
        label=config.label,
        train=training,
        validation=validation,
        norm_stats=stats,
        normalization=form,
        cameras=config.cameras,
    )
    _report(opened)
    return opened


def in_text_lengths(
    data: OpenedDatasets,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    most: int,
    draws: int = 1,
    assets_dir: str | Path = ".",
) -> OpenedDatasets:
    """The same data with training batches cut to at most `most` different text lengths, if the supports it.

    Args: `draws` is the objective's `draws_per_row`, used in the cost of a row; `assets_dir` caches the number of
    tokens in each chunk, for a model whose text includes the chunk.
    """
    rows, model, longest = data.train, data.model, data.text_length
    if model is None or longest is None or most == 1:
        return data
    tokens = []
    for window, asset, transforms in zip(rows.windows, rows.names, rows.transforms, strict=True):
        dims = len(window.robot.state_names)
        of_prompts = np.array([model.rows.prompt_tokens(tokenizer, text, dims) for text in window.prompts])
        of_samples = of_prompts[window.prompt_numbers(np.arange(len(window)))]
        if (fast := model.rows.chunk_tokenizer(tokenizer)) is not None:
            folder = Path(assets_dir) / asset
            assert isinstance(transforms[0], Normalize), "as open_data has them"
            of_samples = of_samples + chunk_tokens(window, transforms[0], fast, rows.spec["actions"][0][-1], folder)
        tokens.append(np.minimum(of_samples, longest))

    lengths = choose_lengths(
        shares_of_rows(tokens, rows.mixture.weights.tolist()),
        rounded(int(max(of_samples.max() for of_samples in tokens)), longest),
        batch_size=batch_size,
        cost=lambda length: _tokens_of_a_row(model, data.cameras, length, draws),
        most=most,
    )
    if lengths == (longest,):
        return data
    specs = {length: model.rows.batch_spec(1, data.cameras, length) for length in lengths}
    shorter = {length: row_spec(labelled(spec, data.label)) for length, spec in specs.items()}
    train = rows.in_lengths(TextLengths(lengths=lengths, tokens=tuple(tokens)), shorter)
    return dataclasses.replace(data, train=train)


def _tokens_of_a_row(model: RowModel, cameras: Sequence[str], length: int, draws: int) -> float:
    """Cost of a row for choosing text lengths: all tokens of a full row, including images and noisy actions."""
    import jax  # only the main process comes here

    row = jax.tree.map(lambda spec: np.ones(spec.shape, spec.dtype), model.rows.batch_spec(1, cameras, length))
    return float(model.num_tokens_seen(row, draws) or 1)


def write_missing(config: DataConfig) -> None:
    """Write every embedded dataset that the run reads and that does not exist yet, with a log line.

    All processes may call it at the same time: one writes, the others wait.
    """
    for dataset in config.datasets:
        if cache_folders.dataset_name(dataset.source.location) is not None:
            from openpi_train.data.make import embedded  # imports jax and the environment, which few runs need here

            embedded.write_missing(dataset.source.location)


def open_windows(config: DataConfig, shape: WindowShape) -> list[Windows]:
    """The training windows of every dataset, in order. A missing embedded dataset is written first."""
    write_missing(config)
    skip = config.on_bad_record == "skip"

    def opened(source: SourceConfig) -> Source:
        return (source.skipping_bad_records() if skip else source).open()

    sources = [opened(dataset.source) for dataset in config.datasets]
    held_out = [None if one.validation is None else opened(one.validation) for one in config.datasets]
    _check_rates(config, sources)
    labels = _labels(config, sources, held_out)
    windows = []
    for number, (dataset, source) in enumerate(zip(config.datasets, sources, strict=True)):
        with of_dataset(number):
            windows.append(
                Windows(
                    source=source,
                    robot=dataset.robot,
                    shape=shape,
                    validation_fraction=config.validation_fraction if dataset.validation is None else 0.0,
                    prompt=dataset.prompt,
                    skip_unlabeled=dataset.skip_unlabeled,
                    only=dataset.only,
                    held_out=held_out[number],
                    labels=labels[number],
                )
            )
    return windows


def _labels(config: DataConfig, sources: Sequence[Source], held_out: Sequence[Source | None]) -> list[Labels | None]:
    """What labels the rows of each dataset."""
    datasets = config.datasets
    if config.label is None:
        return [None] * len(datasets)
    if config.label == "indicator":
        return [Indicator(file=dataset.advantages) for dataset in datasets]
    prompts = [dataset.prompt for dataset in datasets]
    known = [*zip(sources, prompts, strict=True), *zip(held_out, prompts, strict=True)]
    longest = longest_episodes([(source, prompt) for source, prompt in known if source is not None])
    return [Returns(success=one.success, failure_cost=config.failure_cost, longest=longest) for one in datasets]


def _check_rates(config: DataConfig, sources: Sequence[Source]) -> None:
    """Warn of datasets with another control rate than their robots'. Raises ValueError if a mixture's differ."""
    rates = [(one, source.recorded_hz) for one, source in zip(config.datasets, sources, strict=True)]
    known = [(one.asset, one.robot.control_hz, rate_hz) for one, rate_hz in rates if rate_hz is not None]
    for name, robot_hz, rate_hz in known:
        if any(of_rates("", "", robot_hz, rate_hz)):
            logger.warning(
                "%s says %g control steps per second, and its robot %g: chunks are of the dataset's, and what runs the "
                "policy takes the robot's", name, rate_hz, robot_hz,
            )  # fmt: skip
    if "rate" not in config.may_differ:
        for name, _, rate_hz in known[1:]:
            for problem in of_rates(name, known[0][0], known[0][2], rate_hz):
                raise ValueError(problem)


def prompts(windows: Sequence[Windows]) -> list[tuple[str, int]]:
    """Every instruction of these datasets, with the number of state dims of its robot."""
    parts = [window.in_split("validation") for window in windows if window.held_out is not None]
    return [(text, len(window.robot.state_names)) for window in (*windows, *parts) for text in window.prompts]


def labelled(spec: "ActionBatch", label: str | None) -> "ActionBatch":
    """A model's batch spec, with the rows' label if there is one."""
    if label is None:
        return spec
    import jax  # only the main process comes here

    from openpi_train.types import action_batch, flatten_rows

    found = jax.ShapeDtypeStruct(spec.actions.shape[:1], np.float32)
    return action_batch({**flatten_rows(spec), "label": found})


def row_spec(spec: "ActionBatch") -> RowSpec:
    """Shape and dtype of each entry of a row, from a model's batch spec: without the leading axis."""
    from openpi_train.types import flatten_rows  # jax: only the main process comes here

    return {
        name: (tuple(leaf.shape[1:]), np.dtype(leaf.dtype).name)
        for name, leaf in flatten_rows(spec).items()
        if name != "row"
    }


def _needed(stats: Mapping[str, Mapping[str, NormStats]], asset: str, form: Form) -> Mapping[str, NormStats]:
    if form == "quantile" and any(np.isnan(entry.q01).any() for entry in stats[asset].values()):
        raise ValueError(f"norm stats of {asset} have no quantiles; set --data.normalization z_score, or give none")
    if form == "min_max" and any(entry.low is None for entry in stats[asset].values()):
        raise ValueError(f"norm stats of {asset} have no min and max; set --data.normalization z_score, or give none")
    return stats[asset]


def _identity(
    members: Sequence[tuple[Windows, Dataset]], stats: Mapping[str, Mapping[str, NormStats]], form: Form
) -> dict[str, Any]:
    """What the rows depend on. Computed stats follow from the rest, and may differ in the last bit between machines."""
    window = members[0][0]
    datasets = [
        {
            "source": window.source.fingerprint,
            "robot": repr(dataset.robot),
            "weight": dataset.weight,
            "prompt": dataset.prompt,
            # Only where it changes the rows: earlier runs had no such choice.
            **({"skip_unlabeled": True} if window.prompt_index is not window.source.prompt_index else {}),
            **({} if dataset.only is None else {"only": dataset.only}),
            **({} if window.labels is None else {"label": window.labels.identity()}),
            "norm_stats": None if dataset.norm_stats is None else _digest(stats[dataset.asset]),
        }
        for window, dataset in members
    ]
    names = ("split", "validation_fraction")
    common = {name: getattr(window, name) for name in names} | dataclasses.asdict(window.shape)
    return {"datasets": datasets, "normalization": form, **common}


def _digest(stats: Mapping[str, NormStats]) -> str:
    entries = {name: [*entry.values()] for name, entry in norm_stats_json(stats)["norm_stats"].items()}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _report_blank(config: DataConfig, windows: Sequence[Windows], *, reads_text: bool) -> None:
    """Log the episodes that are left out without an instruction, the samples that have none, and texts in vain."""
    for number, (dataset, window) in enumerate(zip(config.datasets, windows, strict=True)):
        flags = f"--data.datasets.{number}"
        if skipped := int(window.unlabeled.sum()):
            logger.info(
                "data: %s: %d of %d episodes have no instruction and are left out (%s.skip-unlabeled)",
                *(dataset.asset, skipped, window.source.num_episodes, flags),
            )
        if blank := window.num_blank:
            logger.log(
                logging.WARNING if reads_text else logging.INFO,
                "data: %s: %d of %d training samples have no instruction%s",
                *(dataset.asset, blank, len(window)),
                f"; the model learns them with an empty prompt (leave them out with {flags}.skip-unlabeled True, or "
                f"give one for all with {flags}.prompt)"
                if reads_text
                else "",
            )
    if not reads_text and (different := len({text for text, _ in prompts(windows)} - {""})) > 1:
        logger.warning(
            "data: this model reads no text: it learns the %d different instructions as one task, and cannot be told "
            "which to do; pi0, pi05 and smolvla read them",
            different,
        )


def _report(opened: OpenedDatasets) -> None:
    message = "data: %s, %d %s samples, %.1f %% of rows"
    for split, rows in (("training", opened.train), ("held-out", opened.validation)):
        if rows is None:
            logger.warning("data: no %s rows; evaluation has nothing to run on", split)
            continue
        for number, window in enumerate(rows.windows):
            logger.info(message, rows.names[number], len(window), split, 100 * rows.mixture.weights[number])
    for name, window in zip(opened.train.names, opened.train.windows, strict=True):
        if (mask := window.robot.delta_mask) is not None:
            names = [(dim, relative) for dim, relative in zip(window.robot.action_names, mask, strict=False)]
            logger.info(
                "data: %s: actions relative to the state at the chunk's start: %s; as they are: %s",
                name,
                ", ".join(dim for dim, relative in names if relative) or "none",
                ", ".join(dim for dim, relative in names if not relative) or "none",
            )
