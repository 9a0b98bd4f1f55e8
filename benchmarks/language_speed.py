"""Language models on a CPU beside torch + transformers: an SFT step, and completions of a batch of prompts.

Both sides have the same random weights, tokens and float32, take turns, and tell their CPU and wall seconds. Of the
peer's settings (attention, cache, threads, torch.compile) each is tried, and the one with the fewest CPU seconds is
measured. Ours: `remat attention` in training, 32 tokens per call in completions, and memory kept as in a run.
Read next: `language_peer.py`, which is the peer's side; `peers.py`.
"""

import argparse
import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import peers
from benchmarks.peers import Peer
from benchmarks.report import Cell, Spread, Table
from benchmarks.steps import Trial
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.experiment import Experiment
from openpi_train.generation.generator import GenerationRequest, Generator
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.interop.openpi import parameter_names
from openpi_train.interop.stored_leaves import Stored, in_memory
from openpi_train.models.language import LanguageConfig, huggingface
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import module_params
from openpi_train.parallel.strategy import Plan
from openpi_train.runtime.heap import keep_freed_memory
from openpi_train.types import TextBatch

MODELS = {
    "SmolLM2-135M": DecoderSizes(
        vocab_size=49_152,
        width=576,
        depth=30,
        mlp_dim=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        norm_eps=1e-5,
        rope_base=1e5,
    ),
    "10M": DecoderSizes(
        vocab_size=8192,
        width=256,
        depth=10,
        mlp_dim=768,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        norm_eps=1e-5,
        rope_base=1e5,
    ),
}
# For --quick.
_TINY = DecoderSizes(vocab_size=64, width=16, depth=1, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
PACKAGES = ("torch==2.14.1", "transformers==5.23.0")
OPTIMIZER = AdamW()
RATE = 1e-4
# Tokens per call of our generator: its rows all end at the same time, so none waits for the others.
CHUNK = 32
# Losses of the first step may differ by rounding only.
_LARGEST_DIFFERENCE = 1e-4

COLUMNS = (
    "model",
    "tokens/CPU s",
    "tokens/s",
    "peer tokens/CPU s",
    "peer tokens/s",
    "peer's setting",
    "agreement",
    "tokens/s, ours / peer",
    "tokens/CPU s, ours / peer",
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is measured: prompts and completions, and the rows of a training step."""

    batch: int = 16
    prompt: int = 64
    new: int = 128
    rows: int = 4
    length: int = 256


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measurement."""

    num_tokens: int
    cpu_s: float
    wall_s: float


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks language_speed", description=__doc__
    )
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="samples of each side (default: 3)")
    parser.add_argument("--peer-python", type=Path, help="Python of an environment with torch and transformers")
    text = f"install {' and '.join(PACKAGES)} into the user's cache (0.3 GB, several with CUDA), and use these"
    parser.add_argument("--install-peer", action="store_true", help=text)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, only to check that it runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its tables."""
    flags = parse(argv)
    keep_freed_memory(os.environ)
    shape = Shape(batch=2, prompt=4, new=8, rows=2, length=16) if flags.quick else Shape()
    models = {"tiny": _TINY} if flags.quick else {name: MODELS[name] for name in flags.models}
    completed, trained, notes = [], [], []
    with start_peer(flags) as peer:
        for name, sizes in models.items():
            model = LanguageConfig(sizes=sizes, dtype="float32", context_length=shape.length, remat="attention")
            with tempfile.TemporaryDirectory(prefix="benchmark-language-") as scratch:
                folder = Path(scratch, "model")
                params = write(folder, model)
                completed.append(complete(name, model, params, folder, shape, peer, flags))
                trained.append(train(name, model, params, folder, shape, peer, flags))
            if peer is not None:
                peer.ask("forget")
        notes.append(
            "Not measured beside torch: give --peer-python or --install-peer."
            if peer is None
            else f"{', '.join(f'{name} {version}' for name, version in peer.versions.items())}."
        )
    how = f"{shape.batch} prompts of {shape.prompt} tokens, {shape.new} new tokens each, greedy, float32"
    step = f"{shape.rows} rows of {shape.length} tokens, clipping, AdamW, float32"
    return [
        Table(f"Beside torch, completions of language models: {how}", COLUMNS, completed, notes),
        Table(f"Beside torch, SFT step of language models: {step}", COLUMNS, trained, notes),
    ]


@contextlib.contextmanager
def start_peer(flags: argparse.Namespace) -> Iterator[Peer | None]:
    """The process with torch, if flags name its environment. Raises `peers.Unavailable`."""
    if flags.peer_python is None and not flags.install_peer:
        yield None
        return
    python, environ = str(flags.peer_python), peers.environment()
    if flags.peer_python is None:
        python, environ = peers.python(), peers.installed("-".join(PACKAGES), PACKAGES, timeout_s=1800)
    with peers.started(Path(__file__).with_name("language_peer.py"), python, environ) as peer:
        yield peer


def write(folder: Path, model: LanguageConfig) -> dict[str, Any]:
    """Write a model with random parameters in Hugging Face's form; returns its parameters by path."""
    params = module_params(nnx.jit(lambda: model.build(nnx.Rngs(0)))())
    names = parameter_names(model)
    leaves = {names[path]: in_memory(np.asarray(leaf)) for path, leaf in params.items()}
    huggingface.write(folder, Stored(where="memory", format="ours", params=leaves), model)
    return params


def complete(
    name: str,
    model: LanguageConfig,
    params: Mapping[str, Any],
    folder: Path,
    shape: Shape,
    peer: Peer | None,
    flags: argparse.Namespace,
) -> list[Cell]:
    """The row of completions."""
    graphdef = nnx.split(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))[0]
    plan = Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated")
    generator = Generator(
        graphdef,
        dict(params),
        Devices(plan, model.compute.dtype, graphdef),
        num_rows=shape.batch,
        max_length=shape.prompt + shape.new,
        end_ids=(),
        chunk=CHUNK,
    )
    random = np.random.default_rng(0)
    prompts = random.integers(3, model.sizes.vocab_size, (shape.batch, shape.prompt)).tolist()

    def ours(num_tokens: int = shape.new) -> tuple[list[list[int]], Sample]:
        settings = SamplingSettings(temperature=0.0, max_new_tokens=num_tokens)
        requests = [GenerationRequest(id=n, prompt=prompt, settings=settings) for n, prompt in enumerate(prompts)]
        return timed(
            lambda: [found.tokens for found in generator.complete(requests)],
            lambda found: sum(map(len, found)),
        )

    def theirs(setting: Mapping[str, Any], num_tokens: int = shape.new) -> tuple[list[list[int]], Sample]:
        assert peer is not None
        found = peer.ask("complete", folder=str(folder), prompts=prompts, num_tokens=num_tokens, **setting)
        count = sum(map(len, found["tokens"]))
        return found["tokens"], Sample(count, found["cpu_s"], found["wall_s"])

    tokens = ours()[0]
    settings = [setting | {"cache": "dynamic"} for setting in _settings()]
    settings.append(settings[0] | {"cache": "static"})
    return _row(name, ours, theirs, settings if peer else [], lambda found: _same_tokens(tokens, found), flags)


def train(
    name: str,
    model: LanguageConfig,
    params: Mapping[str, Any],
    folder: Path,
    shape: Shape,
    peer: Peer | None,
    flags: argparse.Namespace,
) -> list[Cell]:
    """The row of SFT steps."""
    experiment = Experiment(
        name="language_speed",
        exp_name="benchmark",
        model=model,
        objective=SupervisedText(),
        data=TextData(datasets=(TextDataset(path="none"),), tokenizer="none", max_length=shape.length),
        optimizer=OPTIMIZER,
        lr_schedule=LRSchedule(warmup_steps=0, peak_lr=RATE, decay_lr=RATE),
        ema_decay=None,
        batch_size=shape.rows,
    )
    trial = Trial.of(experiment)
    random = np.random.default_rng(1)
    tokens = random.integers(3, model.sizes.vocab_size, (shape.rows, shape.length)).astype(np.int32)
    # A sample has as many steps as are needed to read CPU seconds.
    num_steps = 1 if flags.quick or model.sizes.depth > 20 else 10
    with jax.set_mesh(trial.mesh):
        batch = jax.device_put(whole_texts(tokens), trial.prepared.trainer.plan.batch)
        layout = trial.prepared.layout
        step = trial.prepared.trainer.compile_step(layout.shardings, layout.abstract(), jax.eval_shape(lambda: batch))
        state = dataclasses.replace(
            trial.fresh_state(), params=jax.device_put(dict(params), layout.shardings.params, may_alias=False)
        )

        def ours() -> tuple[list[float], Sample]:
            def steps() -> list[float]:
                nonlocal state
                losses = []
                for _ in range(num_steps):
                    state, metrics = step(state, batch)
                    losses.append(metrics["loss"])
                jax.block_until_ready(state)
                return [float(loss) for loss in losses]

            return timed(steps, lambda _: num_steps * tokens.size)

        def theirs(setting: Mapping[str, Any]) -> tuple[list[float], Sample]:
            assert peer is not None
            found = peer.ask(
                "train",
                folder=str(folder),
                tokens=tokens.tolist(),
                num_steps=num_steps,
                rate=RATE,
                clip=OPTIMIZER.clip_gradient_norm,
                decays=[OPTIMIZER.b1, OPTIMIZER.b2],
                weight_decay=OPTIMIZER.weight_decay,
                **setting,
            )
            return found["losses"], Sample(tokens.size, found["cpu_s"], found["wall_s"])

        losses = ours()[0]
        return _row(name, ours, theirs, _settings() if peer else [], lambda found: same_losses(losses, found), flags)


def whole_texts(tokens: np.ndarray) -> TextBatch:
    """Rows of one text each, every token but the first a target."""
    rows, length = tokens.shape
    weights = np.ones(tokens.shape, np.float32)
    weights[:, 0] = 0
    return TextBatch(
        tokens=tokens,
        segments=np.ones_like(tokens),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape),
        weights=weights,
        row=np.arange(rows, dtype=np.int32),
    )


def timed(function: Callable[[], Any], count: Callable[[Any], int]) -> tuple[Any, Sample]:
    """What the function returns, and what it took. `count` counts the tokens of what it returns."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = function()
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
    return found, Sample(count(found), cpu_s, wall_s)


def _settings() -> list[dict[str, Any]]:
    """The peer's settings: torch with one thread spends no CPU time on waiting for others."""
    usual = {"attention": "sdpa", "threads": 1, "compiled": False}
    all_threads = len(os.sched_getaffinity(0))
    return [usual, *(usual | other for other in ({"attention": "eager"}, {"threads": all_threads}, {"compiled": True}))]


def _row(
    name: str,
    ours: Callable[[], tuple[Any, Sample]],
    theirs: Callable[[Mapping[str, Any]], tuple[Any, Sample]],
    settings: Sequence[Mapping[str, Any]],
    agreement: Callable[[Any], str],
    flags: argparse.Namespace,
) -> list[Cell]:
    tried = [theirs(setting) for setting in settings]
    # The first call of a compiled one compiles.
    seconds = [
        theirs(setting)[1].cpu_s if setting["compiled"] else sample.cpu_s
        for setting, (_, sample) in zip(settings, tried, strict=True)
    ]
    agreed = agreement(tried[0][0]) if tried else None
    best = min(range(len(seconds)), key=seconds.__getitem__, default=None)
    samples: tuple[list[Sample], list[Sample]] = [], []
    for _ in range(1 if flags.quick else flags.pairs):
        samples[0].append(ours()[1])
        if best is not None:
            samples[1].append(theirs(settings[best])[1])
    rates = [
        (_spread(side, lambda one: one.num_tokens / one.cpu_s), _spread(side, lambda one: one.num_tokens / one.wall_s))
        for side in samples
        if side
    ]
    if best is None:
        return [name, *rates[0], None, None, None, None, None, None]
    (cpu, wall), (their_cpu, their_wall) = rates
    setting = ", ".join(f"{key} {value}" for key, value in settings[best].items())
    return [name, cpu, wall, their_cpu, their_wall, setting, agreed, wall.over(their_wall), cpu.over(their_cpu)]


def _spread(samples: Sequence[Sample], rate: Callable[[Sample], float]) -> Spread:
    return Spread(tuple(map(rate, samples)))


def _same_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> str:
    same = sum(list(one) == list(other) for one, other in zip(ours, theirs, strict=True))
    return f"{same} of {len(ours)} completions equal"


def same_losses(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """How far the losses of the first step are apart. Raises RuntimeError if that is more than rounding."""
    difference = abs(ours[0] - theirs[0])
    if not difference <= _LARGEST_DIFFERENCE:
        raise RuntimeError(f"the first step's loss is {ours[0]} here and {theirs[0]} there: not the same work")
    return f"first loss {ours[0]:.4f} differs by {difference:.1e}"
