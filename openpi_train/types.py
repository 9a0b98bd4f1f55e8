"""Array types shared by all parts: letters of shapes, `@pytree`, observations and batches.

Read next: `keys.py` (randomness per row), `models/model_config.py` (consumers of a batch).

Letters in shapes, everywhere in the project:

    b batch rows      t tokens            h action horizon (steps of a chunk)
    a action dims     s state dims        r flow draws per row
    d model width     n query heads       k key/value heads      v vocabulary
    o observation history steps           u units of a rollout (tokens, denoising steps)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, dataclass_transform

import jax
from jaxtyping import Array, Bool, Float, Int, UInt8

T = TypeVar("T")

# A JAX tree: nested tuples, dictionaries and `@pytree` nodes of arrays, or of what stands for them (shapes, shardings).
Tree = Any
# A batch of the kind that model, data and objective of a run agree on: a tree with rows on the first axis, and `row`.
Batch = Any
# A built module that can do what its caller needs: `ModelConfig.provides` says what, and is compared with that.
Network = Any

# openpi's camera slots, in the order in which they are filled.
OPENPI_SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only dataclass whose fields are JAX tree children.

    Unflattening skips `__init__`, so that trees may hold shapes, shardings or specs instead of arrays
    without failing the run-time shape checks of tests.
    """
    data_class: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    names = tuple(field.name for field in dataclasses.fields(data_class))

    def flatten_with_keys(node):
        return tuple((jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in names), None

    def flatten(node):
        return tuple(getattr(node, name) for name in names), None

    def unflatten(_, children):
        return tree_of(data_class, **dict(zip(names, children, strict=True)))

    jax.tree_util.register_pytree_with_keys(data_class, flatten_with_keys, unflatten, flatten)
    return data_class


def tree_of(cls: type[T], **fields: object) -> T:
    """A node of a `@pytree` class whose leaves need not be arrays: shapes, shardings, specs."""
    node = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(node, name, value)
    return node


@pytree
class Observation:
    """The inputs of a robot policy, for a batch of rows.

    `images` and `image_masks` are keyed by the model's camera slots (`base_0_rgb`, ...). A slot that no robot of
    the run has is absent and costs no tokens. Images are uint8 from the host, or float32 in [-1, 1].
    `state` is normalised and padded to the model's action width. A model that sees several control steps has them on
    an axis `o` after the rows', the current one last.

    A model of tokens has two more masks over the prompt. `token_ar_mask` marks causal tokens, which attend to all
    earlier ones; the others attend to each other. `token_loss_mask` marks the tokens to predict.
    """

    images: dict[str, UInt8[Array, "b *o height width 3"] | Float[Array, "b *o height width 3"]]
    image_masks: dict[str, Bool[Array, " b"]]
    state: Float[Array, "b *o s"]
    prompt_tokens: Int[Array, "b t"]
    prompt_mask: Bool[Array, "b t"]
    token_ar_mask: Bool[Array, "b t"] | None = None
    token_loss_mask: Bool[Array, "b t"] | None = None


# Entries of a row that only token models have.
TOKEN_MASKS = ("token_ar_mask", "token_loss_mask")


@pytree
class ActionBatch:
    """One batch of imitation data: observations and the action chunks that followed them.

    `action_mask` is False on steps beyond the episode's end (they repeat its last action).
    `dim_mask` is False on the action dims that only pad the robot's actions to the model's width.
    `row` is the row's position in the global batch: with seed and step it determines all of the row's randomness.
    `label` is what else an objective learns of the present control step (`data/robot/labels.py`); None: nothing.
    """

    observation: Observation
    actions: Float[Array, "b h a"]
    action_mask: Bool[Array, "b h"]
    dim_mask: Bool[Array, "b a"]
    row: Int[Array, " b"]
    label: Float[Array, " b"] | None = None


def mask_rows(batch: ActionBatch, real: Bool[Array, " b"]) -> ActionBatch:
    """The batch where only rows marked in `real` count: all steps of the others are masked."""
    return dataclasses.replace(batch, action_mask=batch.action_mask & real[:, None])


@pytree
class TextBatch:
    """One batch of token rows for a language model. A row holds one or several texts.

    `segments` numbers the texts of a row from 1; 0 is padding. A token attends to earlier tokens of its own text only.
    `positions` is a token's position in its text, from 0. `weights` is the weight of a token as a prediction target,
    given the tokens before it: 0 for prompts, padding and the first token of a text. A row without any segment only
    fills the batch. `row` is the row's position in the global batch: with seed and step it determines all of the row's
    randomness.
    """

    tokens: Int[Array, "b t"]
    segments: Int[Array, "b t"]
    positions: Int[Array, "b t"]
    weights: Float[Array, "b t"]
    row: Int[Array, " b"]


@pytree
class PreferenceBatch:
    """One batch of preferences between completions of a prompt, or of judged completions.

    A pair is one row of `texts` with two segments, prompt and chosen completion (1), prompt and rejected completion
    (2), so that no device or micro-batch splits it. An unpaired completion is a row with one segment: 1 if it is
    desirable, 2 if not. `weights` of `texts` mark the completions' tokens. `margin` is the least difference of rewards
    that a pair asks for. `reference_log_probs` are the summed log-probabilities of the completions of segments 1 and 2
    under the reference model, None if they are not precomputed.
    """

    texts: TextBatch
    margin: Float[Array, " b"]
    reference_log_probs: Float[Array, "b 2"] | None = None

    @property
    def row(self) -> Int[Array, " b"]:
        """The rows' positions in the global batch."""
        return self.texts.row

    @property
    def segments(self) -> Int[Array, "b t"]:
        """The number of each token's text in its row; 0 is padding."""
        return self.texts.segments


@pytree
class TokenTraces:
    """Completions that a policy made, each with its prompt; `weights` of `texts` mark the tokens that it chose.

    `num_tokens` are those that the tokenizer has: no other could be chosen.
    """

    texts: TextBatch
    num_tokens: Int[Array, " b"]

    @property
    def row(self) -> Int[Array, " b"]:
        """The rows' positions in the global batch."""
        return self.texts.row

    @property
    def segments(self) -> Int[Array, "b t"]:
        """The number of each token's text in its row; 0 is padding."""
        return self.texts.segments


@pytree
class ChainTraces:
    """Chunks that a policy drew, q queries of a rollout in a row: what it saw, and its chain of denoising steps.

    All leaves of `observation` have the axis of queries after the rows'. `noisy` are the actions from the noise to the
    result (`Chain.noisy` in `sampling/action_sampler.py`). `is_executed` marks the values of a chunk that the robot
    executed: its own dims, of the control steps that took place.
    """

    observation: Observation
    noisy: Float[Array, "b q _ h a"]
    is_executed: Bool[Array, "b q h a"]
    row: Int[Array, " b"]


@pytree
class TokenChunkTraces:
    """Chunks that a policy said in n tokens, q queries of a rollout in a row; `observation` as in `ChainTraces`."""

    observation: Observation
    tokens: Int[Array, "b q n"]
    row: Int[Array, " b"]


@pytree
class RolloutBatch:
    """One batch of a policy's own rollouts. A rollout is a row of `u` units: tokens, denoising steps.

    `traces` is what the policy did, in the form of its distribution (`sampling/distribution.py`). `mask` marks the
    units that count. `is_rollout` marks the rows that are more than filler, also those whose units are all masked.
    `log_probs` are those of the policy that acted, computed as those of the one that learns; of rows that `is_fresh`
    marks, both are the same policy, and they are not looked at. `sampling_log_probs` are what its sampler computed
    while it acted.
    `values` are those of the critic before it learnt from these rollouts, `returns` what it should have said. What an
    objective does not use is 0. `demonstrations` are chunks of the run's data beside the rollouts, n in every row: all
    leaves are [b, n, ...]; None: there are none.
    """

    traces: Any
    mask: Bool[Array, "b u"]
    is_rollout: Bool[Array, " b"]
    advantages: Float[Array, "b u"]
    log_probs: Float[Array, "b u"]
    sampling_log_probs: Float[Array, "b u"]
    reference_log_probs: Float[Array, "b u"]
    values: Float[Array, "b u"]
    returns: Float[Array, "b u"]
    is_fresh: Bool[Array, " b"]
    demonstrations: Any = None

    @property
    def row(self) -> Int[Array, " b"]:
        """The rows' positions in the global batch."""
        return self.traces.row

    @property
    def segments(self) -> Int[Array, "b t"]:
        """The number of each token's text in its row; 0 is padding. Of tokens only."""
        return self.traces.segments

    @property
    def observation(self) -> Observation:
        """What the policy saw. Of robots only."""
        return self.traces.observation


def flatten_rows(batch: ActionBatch) -> dict[str, Any]:
    """Name every leaf of a batch by its path, as data workers do: `image/<slot>`, `image_mask/<slot>`, `state`, ..."""
    observation = batch.observation
    return {
        **{f"image/{slot}": image for slot, image in observation.images.items()},
        **{f"image_mask/{slot}": mask for slot, mask in observation.image_masks.items()},
        "state": observation.state,
        "prompt_tokens": observation.prompt_tokens,
        "prompt_mask": observation.prompt_mask,
        **{name: mask for name in TOKEN_MASKS if (mask := getattr(observation, name)) is not None},
        "actions": batch.actions,
        "action_mask": batch.action_mask,
        "dim_mask": batch.dim_mask,
        "row": batch.row,
        **({} if batch.label is None else {"label": batch.label}),
    }


def observation(rows: Mapping[str, Tree]) -> Observation:
    """Build an `Observation` from a flat dictionary of batched columns; other columns are ignored."""

    def slots(prefix):
        return {name.removeprefix(prefix): value for name, value in sorted(rows.items()) if name.startswith(prefix)}

    return tree_of(
        Observation,
        images=slots("image/"),
        image_masks=slots("image_mask/"),
        state=rows["state"],
        prompt_tokens=rows["prompt_tokens"],
        prompt_mask=rows["prompt_mask"],
        **{name: rows[name] for name in TOKEN_MASKS if name in rows},
    )


def action_batch(rows: Mapping[str, Tree]) -> ActionBatch:
    """Build an `ActionBatch` from a flat dictionary of batched columns (inverse of `flatten_rows`)."""
    return tree_of(
        ActionBatch,
        observation=observation(rows),
        actions=rows["actions"],
        action_mask=rows["action_mask"],
        dim_mask=rows["dim_mask"],
        row=rows["row"],
        label=rows.get("label"),
    )
