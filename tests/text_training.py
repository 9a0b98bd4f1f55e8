"""Tiny language models trained for two steps on ragged rows: any devices, accumulation and stage, and any processes.

    python text_training.py FOLDER PORT...

starts, at each port, the processes of one of `PROCESSES`, which train its cases together. Process N of them writes
the metrics and its shards of the parameters to FOLDER/<processes>_<case>_<N>.pickle.
"""

import dataclasses
import os
import pickle
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from trainers import make_evaluator, make_trainer

from openpi_train.models.language import LanguageConfig
from openpi_train.models.language.actor_critic import ActorCriticConfig
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.lora import AdapterConfig
from openpi_train.objectives.judged_completions import JudgedCompletions
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.objectives.preference_pairs import PreferencePairs
from openpi_train.objectives.reward_pairs import RewardPairs
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.runtime import compile_cache
from openpi_train.sampling.token_distribution import TokenDistribution
from openpi_train.training.init import create_state
from openpi_train.types import PreferenceBatch, RolloutBatch, TextBatch, TokenTraces

ROWS, LENGTH, VOCABULARY = 16, 16, 24
SIZES = DecoderSizes(
    vocab_size=VOCABULARY, width=16, depth=2, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, tied=True
)
LANGUAGE = LanguageConfig(sizes=SIZES, dtype="float32", remat="none")
COPIED = ReferencedConfig(policy=LANGUAGE)
ADAPTED = dataclasses.replace(LANGUAGE, adapter=AdapterConfig(rank=2))


def pairs(seed, rows=ROWS):
    """Rows of two texts of many lengths; every fifth row only fills, every seventh has one text."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, VOCABULARY, (rows, LENGTH)).astype(np.int32)
    segments, positions, weights = (np.zeros((rows, LENGTH), np.int32) for _ in range(3))
    for row in range(rows):
        start = 0
        for number in () if row % 5 == 4 else (1 + seed % 2,) if row % 7 == 6 else (1, 2):
            prompt, length = random.integers(1, 4), random.integers(4, 9)
            segments[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            weights[row, start + prompt : start + length] = 1
            start += length
    texts = TextBatch(
        tokens=jnp.asarray(tokens),
        segments=jnp.asarray(segments),
        positions=jnp.asarray(positions),
        weights=jnp.asarray(weights, jnp.float32),
        row=jnp.arange(rows),
    )
    return PreferenceBatch(texts=texts, margin=jnp.asarray(random.uniform(0, 1, rows), jnp.float32))


def rollouts(texts, seed):
    """The texts as own rollouts: ragged, some fresh; the units of row 3 stay out, as those of rows that only fill."""
    random = np.random.default_rng(100 + seed)
    mask = (np.asarray(texts.weights)[:, 1:] > 0) & (np.arange(len(texts.row)) != 3)[:, None]
    units = {
        name: jnp.asarray(random.normal(size=mask.shape) * scale + shift, jnp.float32)
        for name, scale, shift in (
            ("advantages", 1, 0),
            ("log_probs", 0.2, -3),
            ("sampling_log_probs", 0.2, -3),
            ("reference_log_probs", 0.2, -3),
            ("values", 1, 0),
            ("returns", 1, 0),
        )
    }
    return RolloutBatch(
        traces=TokenTraces(texts=texts, num_tokens=jnp.full(len(texts.row), VOCABULARY)),
        mask=jnp.asarray(mask),
        is_rollout=jnp.asarray(np.asarray(texts.weights).any(axis=1)),
        is_fresh=jnp.asarray(random.integers(0, 2, len(texts.row)) > 0),
        **units,
    )


def train(model, objective, strategy="replicated", fsdp=1, accum=1, devices=1, steps=2, tensor=1, *, evaluated=True):
    """Metrics of each step, the last state, and the held-out loss of other rows (None unless `evaluated`).

    Steps are large, so that the policy leaves its reference.
    """
    plan = Plan(mesh=make_mesh(fsdp, jax.devices()[:devices], tensor), strategy=strategy, min_shard_mib=0)
    schedule = LRSchedule(warmup_steps=1, peak_lr=1e-2, decay_steps=20, decay_lr=1e-3)
    # Adam divides by the gradient's size. An eps far above its rounding, or steps would be made of that.
    trainer, layout = make_trainer(model, plan, AdamW(eps=1e-2), schedule, objective=objective, accum=accum, ema=None)
    *batches, held_out = (pairs(seed) for seed in range(steps + 1))
    if isinstance(objective, SupervisedText):
        batches, held_out = [batch.texts for batch in batches], held_out.texts
    if isinstance(objective, PolicyGradient):
        *batches, held_out = (rollouts(one.texts, number) for number, one in enumerate((*batches, held_out)))
    history = []
    with jax.set_mesh(plan.real_mesh):
        state = create_state(layout, model, trainer.optimizer, model.param_rules.frozen, False, 7)
        step = trainer.compile_step(layout.shardings, state, jax.eval_shape(lambda: batches[0]))
        for batch in batches:
            state, metrics = step(state, _placed(batch, plan.batch))
            history.append({name: float(value) for name, value in metrics.items()})
        evaluator = make_evaluator(trainer, [_placed(held_out, plan.batch)], 1) if evaluated else None
        return history, state, evaluator(state)["val/loss"] if evaluator else None


def _placed(batch, sharding):
    """The batch on its devices, of which other processes have some."""

    def on_devices(leaf):
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(on_devices, batch)


OBJECTIVES = {
    "supervised": (LANGUAGE, SupervisedText(mean_over="sequences", label_smoothing=0.1, z_loss=0.01)),
    "sigmoid": (COPIED, PreferencePairs(nll_weight=0.5)),
    "aot_unpaired": (COPIED, PreferencePairs(variant="aot_unpaired", beta=0.5)),
    "aot_adapter": (ADAPTED, PreferencePairs(variant="aot", beta=0.5)),
    "judged": (COPIED, JudgedCompletions(undesirable_weight=2.0)),
    "policy": (
        ActorCriticConfig(policy=LANGUAGE, with_reference=True),
        PolicyGradient(
            distribution=TokenDistribution(temperature=0.8, top_k=12),
            average="rollouts",
            kl_weight=0.1,
            value_weight=0.5,
            entropy_weight=0.01,
        ),
    ),
    "reward": (RewardConfig(language=LANGUAGE), RewardPairs(centering=0.1)),
}

# Processes, each with its share of four devices, and what they train: an objective, a strategy, the micro-batches.
# Every kind of objective and every strategy is there, with and without micro-batches. Four processes, each with one
# device: `runs/test_rl_run.py`.
PROCESSES = {
    2: {"supervised": ("zero2", 4), "sigmoid": ("zero3", 4), "reward": ("replicated", 1), "policy": ("zero3", 1)},
}


def _train_together(folder: Path, count: int, index: int, port: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4 // count)
    compile_cache.fit_for_cpus()
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index, cluster_detection_method="deactivate")
    for name, (strategy, accum) in PROCESSES[count].items():
        fsdp = 1 if strategy == "replicated" else 4
        history, state, _ = train(*OBJECTIVES[name], strategy, fsdp, accum, devices=4, evaluated=False)
        shards = [
            (path, shard.index, np.asarray(shard.data))
            for path, leaf in state.params.items()
            for shard in leaf.addressable_shards
        ]
        (folder / f"{count}_{name}_{index}.pickle").write_bytes(pickle.dumps((history, shards)))


def main(folder: str, *ports: str) -> int:
    """Everything is imported once: the processes are forks of this one, in which jax has not started anything."""
    children = []
    for count, port in zip(PROCESSES, ports, strict=True):
        for index in range(count):
            if not (child := os.fork()):
                code = 1
                try:
                    _train_together(Path(folder), count, index, port)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)
    return max([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], key=abs)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
