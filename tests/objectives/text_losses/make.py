"""Makes `torch.npz` beside it with torch alone: `python make.py`, in an environment of its own.

    pip install torch==2.13.0 numpy==2.4.6

Losses of language models and their gradients, written from the formulas of the papers with torch's own functions, in
float64, on a few rows of other lengths. Cases are named `<objective>/<setting>`; `<case>/loss` and `<case>/gradient`,
which is that of the logits (of `reward/...`: of the rewards). Inputs are stored in float32.
"""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).parent
ROWS, TOKENS, VOCABULARY = 4, 10, 5
# Of each row: prompt and completion of the first text, then of the second. Row 1 is shorter, row 3 only fills.
LENGTHS = [((2, 3), (2, 3)), ((1, 1), (2, 4)), ((2, 4), (1, 2)), None]


def inputs() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    segments, positions, weights = (np.zeros((ROWS, TOKENS)) for _ in range(3))
    for row, texts in enumerate(LENGTHS):
        start = 0
        for number, (prompt, completion) in enumerate(texts or (), start=1):
            end = start + prompt + completion
            segments[row, start:end] = number
            positions[row, start:end] = np.arange(end - start)
            weights[row, start + prompt : end] = 1
            start = end
    return {
        "tokens": random.integers(0, VOCABULARY, (ROWS, TOKENS)).astype(np.int32),
        "segments": segments.astype(np.int32),
        "positions": positions.astype(np.int32),
        "weights": weights.astype(np.float32),
        "logits": random.normal(size=(ROWS, TOKENS, VOCABULARY)).astype(np.float32),
        "reference_logits": random.normal(size=(ROWS, TOKENS, VOCABULARY)).astype(np.float32),
        "rewards": random.normal(size=(ROWS, 2)).astype(np.float32),
        "margin": np.array([0.5, 0.0, 1.0, 9.0], np.float32),
    }


def spans(row: int) -> list[tuple[int, int]]:
    """Begin and end of the row's completions."""
    found, start = [], 0
    for prompt, completion in LENGTHS[row] or ():
        found.append((start + prompt, start + prompt + completion))
        start += prompt + completion
    return found


def log_probs(logits: Tensor, tokens: Tensor) -> list[list[Tensor]]:
    """Of every completion of every row that has some: the log-probabilities of its tokens."""
    found = []
    for row in range(ROWS):
        by_token = functional.log_softmax(logits[row], dim=-1)
        found.append([by_token[range(a - 1, b - 1), tokens[row, a:b]] for a, b in spans(row)])
    return [texts for texts in found if texts]


def supervised(logits, tokens, *, over, smoothing=0.0, z=0.0):
    means, terms = [], []
    for row in range(ROWS):
        for a, b in spans(row):
            seen, wanted = logits[row, a - 1 : b - 1], tokens[row, a:b]
            each = functional.cross_entropy(seen, wanted, reduction="none", label_smoothing=smoothing)
            each = each + z * torch.logsumexp(seen, dim=-1) ** 2
            terms.append(each)
            means.append(each.mean())
    return torch.cat(terms).mean() if over == "tokens" else torch.stack(means).mean()


def pairwise(name, w, x, v, u, beta, smoothing):
    """The loss of a pair from the log-probabilities of chosen and rejected tokens: policy w, x; reference v, u."""
    averages = name in ("ipo", "sigmoid_norm", "simpo", "orpo")
    size_w, size_x = (len(w), len(x)) if averages else (1, 1)
    pw, pl, rw, rl = w.sum() / size_w, x.sum() / size_x, v.sum() / size_w, u.sum() / size_x
    a, b = pw - rw, pl - rl
    h, one = a - b, torch.ones((), dtype=a.dtype)
    if name in ("sigmoid", "sigmoid_norm"):
        # Cross entropy of the label, which is right with probability 1 - smoothing.
        return functional.binary_cross_entropy_with_logits(beta * h, one * (1 - smoothing))
    if name == "hinge":
        return torch.clamp(1 - beta * h, min=0)
    if name == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    if name == "robust":
        right, wrong = -functional.logsigmoid(beta * h), -functional.logsigmoid(-beta * h)
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    if name == "exo_pair":
        ours = torch.stack([torch.sigmoid(beta * h), torch.sigmoid(-beta * h)])
        labels = torch.tensor([1 - smoothing, smoothing], dtype=a.dtype)
        return (ours * (ours / labels).log()).sum()
    if name == "nca_pair":
        return (
            -functional.logsigmoid(beta * a)
            - 0.5 * functional.logsigmoid(-beta * a)
            - 0.5 * functional.logsigmoid(-beta * b)
        )
    if name == "sppo_hard":
        return (a - 1 / beta * (1 - 0.5)) ** 2 + (b - 1 / beta * (0 - 0.5)) ** 2
    if name == "apo_zero":
        return (1 - torch.sigmoid(beta * a)) + torch.sigmoid(beta * b)
    if name == "apo_down":
        return torch.sigmoid(beta * a) + (1 - torch.sigmoid(beta * h))
    if name == "discopop":
        share = torch.sigmoid(beta * h / 0.05)
        return (1 - share) * -functional.logsigmoid(beta * h) + share * torch.exp(-beta * h)
    if name == "simpo":
        return -functional.logsigmoid(beta * pw - beta * pl - 0.4)
    if name == "orpo":
        odds_w, odds_l = (p.exp() / (1 - p.exp()) for p in (pw, pl))
        return -pw - beta * functional.logsigmoid((odds_w / odds_l).log())
    raise ValueError(name)


def transport(name, policy, reference, beta, smoothing):
    """AOT: DPO on pairs of order statistics."""
    w, x, v, u = (torch.stack([texts[k].sum() for texts in side]) for side in (policy, reference) for k in (0, 1))
    ours, theirs = (w - x, v - u) if name == "aot" else (w - v, x - u)
    x = beta * (ours.sort().values - theirs.sort().values)
    return functional.binary_cross_entropy_with_logits(x, torch.full_like(x, 1 - smoothing))


def judged(policy, reference, beta, baseline, desirable, undesirable):
    terms = []
    for ours, theirs in zip(policy, reference, strict=True):
        r = [p.sum() - q.sum() for p, q in zip(ours, theirs, strict=True)]
        terms.append(desirable * (1 - torch.sigmoid(beta * (r[0] - baseline))))
        terms.append(undesirable * (1 - torch.sigmoid(beta * (baseline - r[1]))))
    return torch.stack(terms).mean()


# name -> (variant, beta, label smoothing)
PAIRS = {
    **{name: (name, 0.3, 0.0) for name in (
        "sigmoid", "sigmoid_norm", "hinge", "ipo", "nca_pair", "sppo_hard", "apo_zero", "apo_down", "discopop", "simpo",
        "orpo", "aot", "aot_unpaired")},
    **{f"{name}_smooth": (name, 0.3, 0.2) for name in ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")},
    "sigmoid_nll": ("sigmoid", 0.3, 0.0),
}  # fmt: skip


def main() -> None:
    given = inputs()
    tokens = torch.from_numpy(given["tokens"]).long()
    found = dict(given)

    def record(name, loss, leaf):
        loss.backward()
        found[f"{name}/loss"] = loss.detach().numpy()
        found[f"{name}/gradient"] = leaf.grad.numpy().astype(np.float32)

    def leaf(name):
        return torch.from_numpy(given[name]).double().requires_grad_()

    for over in ("tokens", "sequences"):
        for name, how in {"plain": {}, "smooth": {"smoothing": 0.1}, "z": {"z": 0.05}}.items():
            logits = leaf("logits")
            record(f"supervised/{over}_{name}", supervised(logits, tokens, over=over, **how), logits)
    reference = log_probs(torch.from_numpy(given["reference_logits"]).double(), tokens)
    for case, (name, beta, smoothing) in PAIRS.items():
        logits = leaf("logits")
        policy = log_probs(logits, tokens)
        if name.startswith("aot"):
            loss = transport(name, policy, reference, beta, smoothing)
        else:
            rows = zip(policy, reference, strict=True)
            loss = torch.stack([pairwise(name, *ours, *theirs, beta, smoothing) for ours, theirs in rows]).mean()
        if case.endswith("_nll"):
            loss = loss - 0.7 * torch.stack([texts[0].mean() for texts in policy]).mean()
        record(f"pairs/{case}", loss, logits)
    for case, baseline in {"zero": 0.0, "baseline": 0.8}.items():
        logits = leaf("logits")
        record(f"judged/{case}", judged(log_probs(logits, tokens), reference, 0.3, baseline, 1.0, 1.5), logits)
    for case, centering in {"plain": 0.0, "centered": 0.1}.items():
        rewards, margin = leaf("rewards"), torch.from_numpy(given["margin"]).double()
        chosen, rejected, margin = rewards[:3, 0], rewards[:3, 1], margin[:3]
        loss = -functional.logsigmoid(chosen - rejected - margin).mean() + centering * ((chosen + rejected) ** 2).mean()
        record(f"reward/{case}", loss, rewards)
    np.savez_compressed(HERE / "torch.npz", **found)
    versions = {"versions": {module.__name__: module.__version__ for module in (torch, np)}}
    (HERE / "made_with.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
