"""Makes `torch.npz` beside it with torch alone: `python make.py`, in an environment of its own.

    pip install torch==2.14.1 numpy==2.4.6

Losses of TRL's trainers for policy gradients and their gradients in the logits, in float64, on completions of other
lengths. The formulas are those of TRL's `GRPOTrainer._compute_loss`, `RLOOTrainer._compute_loss` and of the inner loop
of `PPOTrainer` (at f2cd577), written here with torch's own functions; the entropy's is that of trl 1.16.0, and the dual
clip's that of Ye et al. 2020 (equation 5), as in `compute_policy_loss_vanilla` of verl 0.9.1. Cases are named
`<trainer>/<setting>`; `<case>/loss` and `<case>/gradient`. Inputs are stored in float32.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parent
ROWS, TOKENS, VOCABULARY, LONGEST = 4, 7, 5, 6
# Where the completion of each row begins and ends.
SPANS = [(2, 7), (1, 3), (3, 4), (2, 6)]


def inputs() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    mask = np.zeros((ROWS, TOKENS - 1), bool)
    for row, (start, end) in enumerate(SPANS):
        mask[row, start - 1 : end - 1] = True
    shape = mask.shape
    logits = random.normal(size=(ROWS, TOKENS, VOCABULARY))
    given = {
        "tokens": random.integers(0, VOCABULARY, (ROWS, TOKENS)).astype(np.int32),
        "mask": mask,
        "logits": logits.astype(np.float32),
        # Those of the policy that acted are near: some ratios are clipped on either side, and some are not.
        "acting_logits": (logits + 0.3 * random.normal(size=logits.shape)).astype(np.float32),
        "reference_logits": random.normal(size=logits.shape).astype(np.float32),
        "advantages": np.array([1.2, -0.7, 0.4, -0.9], np.float32),
        "unit_advantages": random.normal(size=shape).astype(np.float32),
        "values": random.normal(size=(ROWS, TOKENS)).astype(np.float32),
        "acting_values": random.normal(size=shape).astype(np.float32),
        "returns": random.normal(size=shape).astype(np.float32),
    }
    # The sampler's differ from those of the policy that acted: it computes otherwise.
    sampling = given["acting_logits"] + 0.8 * random.normal(size=logits.shape)
    # One completion was cut, and nothing is learnt from it.
    return given | {"sampling_logits": sampling.astype(np.float32), "mask_cut": mask & (np.arange(ROWS) != 1)[:, None]}


def log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    said = (logits[:, :-1] / temperature).log_softmax(-1)
    return said.gather(-1, tokens[:, 1:, None])[..., 0]


def entropies(logits: Tensor, temperature: float = 1.0) -> Tensor:
    said = (logits[:, :-1] / temperature).log_softmax(-1)
    return -(said.exp() * said).sum(-1)


def grpo(
    given,
    logits,
    *,
    loss_type,
    level="token",
    low=0.2,
    high=0.2,
    delta=None,
    beta=0.0,
    temperature=1.0,
    mask="mask",
    dual=None,
    sampling_max=None,
    entropy_coef=0.0,
):
    mask, tokens = given[mask].double(), given["tokens"]
    lengths = mask.sum(1).clamp(min=1)
    new = log_probs(logits, tokens, temperature)
    drift = new - log_probs(given["acting_logits"], tokens, temperature)
    if level == "sequence":
        drift = ((drift * mask).sum(1) / lengths)[:, None]
    ratio, advantages = drift.exp(), given["advantages"][:, None]
    clipped = ratio.clamp(1 - low, 1 + high)
    ratio = ratio if delta is None else ratio.clamp(max=delta)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual * advantages), losses)
    if sampling_max is not None:
        old, sampled = (log_probs(given[f"{name}_logits"], tokens, temperature) for name in ("acting", "sampling"))
        losses = losses * (old - sampled).exp().clamp(max=sampling_max)
    if beta:
        d = log_probs(given["reference_logits"], tokens, temperature) - new
        losses = losses + beta * (d.exp() - d - 1)
    total = (losses * mask).sum(1)
    bonus = entropy_coef * (entropies(logits, temperature) * mask).sum() / mask.sum().clamp(min=1)
    if loss_type == "grpo":
        return (total / lengths).mean() - bonus
    return total.sum() / (mask.sum().clamp(min=1) if loss_type == "dapo" else ROWS * LONGEST) - bonus


def rloo(given, logits):
    mask, tokens = given["mask"].double(), given["tokens"]
    new, old = ((log_probs(one, tokens) * mask).sum(1) for one in (logits, given["acting_logits"]))
    ratio, advantages = (new - old).exp(), given["advantages"]
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def ppo(given, logits, values):
    """The sum of both losses, of which the second has the weight 0.1."""
    mask, tokens = given["mask"].double(), given["tokens"]

    def mean(x: Tensor) -> Tensor:
        return (x * mask).sum() / mask.sum()

    before, returns, advantages = given["acting_values"], given["returns"], given["unit_advantages"]
    said = values[:, :-1]
    near = torch.minimum(torch.maximum(said, before - 0.2), before + 0.2)
    error = torch.maximum((said - returns) ** 2, (near - returns) ** 2)
    ratio = (log_probs(logits, tokens) - log_probs(given["acting_logits"], tokens)).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return mean(policy) + 0.1 * 0.5 * mean(error)


GRPO = {
    "-".join((loss_type, level)): {"loss_type": loss_type, "level": level}
    for loss_type, level in itertools.product(("grpo", "dapo", "dr_grpo"), ("token", "sequence"))
} | {
    "higher": {"loss_type": "dapo", "high": 0.5},
    "lower": {"loss_type": "grpo", "low": 0.05},
    "two-sided": {"loss_type": "grpo", "delta": 1.3},
    "reference": {"loss_type": "grpo", "beta": 0.3},
    "reference-dapo": {"loss_type": "dapo", "beta": 0.3},
    "cooled": {"loss_type": "dapo", "temperature": 0.6, "beta": 0.1},
    "dual": {"loss_type": "dapo", "dual": 1.3},
    "sampled": {"loss_type": "grpo", "sampling_max": 1.1, "beta": 0.3},
    "sampled-freely": {"loss_type": "dapo", "sampling_max": 1e9},
    **{f"cut-{kind}": {"loss_type": kind, "mask": "mask_cut"} for kind in ("grpo", "dapo", "dr_grpo")},
    **{f"entropy-{kind}": {"loss_type": kind, "entropy_coef": 0.3} for kind in ("grpo", "dapo", "dr_grpo")},
}


def recorded() -> dict[str, np.ndarray]:
    plain = inputs()
    given = {
        name: torch.from_numpy(x).double() if x.dtype == np.float32 else torch.from_numpy(x).long()
        for name, x in plain.items()
    }
    found: dict[str, np.ndarray] = dict(plain)

    def record(case: str, loss_of, *names: str) -> None:
        leaves = [given[name].clone().requires_grad_() for name in names]
        loss = loss_of(*leaves)
        gradients = torch.autograd.grad(loss, leaves)
        found[f"{case}/loss"] = loss.detach().numpy()
        for name, gradient in zip(names, gradients, strict=True):
            found[f"{case}/gradient/{name}"] = gradient.numpy()

    for name, settings in GRPO.items():
        record(f"grpo/{name}", lambda logits, settings=settings: grpo(given, logits, **settings), "logits")
    record("rloo/product", lambda logits: rloo(given, logits), "logits")
    record("ppo/critic", lambda logits, values: ppo(given, logits, values), "logits", "values")
    found["entropy"] = entropies(given["logits"]).numpy()
    # TRL's sampling/sampling_logp_difference/mean, and importance_sampling_ratio/mean before it is bounded.
    old, sampled = (log_probs(given[f"{name}_logits"], given["tokens"]) for name in ("acting", "sampling"))
    gap = (old - sampled)[given["mask"] > 0]
    found["sampling/difference"], found["sampling/ratio"] = gap.abs().mean().numpy(), gap.exp().mean().numpy()
    found["sampling/far"] = ((gap.exp() > 2) | (gap.exp() < 0.5)).double().mean().numpy()
    return found


def main() -> None:
    np.savez_compressed(HERE / "torch.npz", **recorded())
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    (HERE / "made_with.json").write_text(json.dumps({"versions": versions}, indent=1) + "\n")


if __name__ == "__main__":
    main()
