"""Optimizers as their papers write them, in float64 numpy: one parameter, or one layer of it, over several steps.

Nothing here is optax's. Where optax differs from a paper, the difference is named. Read next: `test_optimizers.py`.
"""

from collections.abc import Mapping, Sequence

import numpy as np

Gradients = Sequence[np.ndarray]
Rates = Sequence[float]


def clipped(gradients: Sequence[Mapping[str, np.ndarray]], bound: float) -> list[dict[str, np.ndarray]]:
    """Every step's gradients, scaled down together to a norm of at most `bound` (Pascanu et al. 2013)."""
    found = []
    for of_step in gradients:
        exact = {path: np.asarray(gradient, np.float64) for path, gradient in of_step.items()}
        norm = np.sqrt(sum(np.square(gradient).sum() for gradient in exact.values()))
        found.append({path: gradient * min(1.0, bound / norm) for path, gradient in exact.items()})
    return found


def adam(
    param: np.ndarray,
    gradients: Gradients,
    rates: Rates,
    *,
    decay: float,
    b1: float,
    b2: float,
    eps: float = 1e-8,
    nesterov: bool = False,
) -> np.ndarray:
    """Loshchilov & Hutter 2019, algorithm 2; with `nesterov` the first moment of Dozat 2016, as optax has it."""
    first = second = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        first = b1 * first + (1 - b1) * gradient
        second = b2 * second + (1 - b2) * gradient**2
        ahead = _ahead(first, gradient, b1, step) if nesterov else first / (1 - b1**step)
        param = param - rate * (ahead / (np.sqrt(second / (1 - b2**step)) + eps) + decay * param)
    return param


def adafactor(
    param: np.ndarray,
    gradients: Gradients,
    rates: Rates,
    *,
    decay: float,
    factor_from: int,
    exponent: float = 0.8,
    relative: bool = True,
    threshold: float = 1.0,
    momentum: float = 0.0,
) -> np.ndarray:
    """Shazeer & Stern 2018, algorithms 4 and 5, with optax's momentum, which averages updates and their rates."""
    row = column = whole = update = 0.0
    *_, small, large = np.argsort((0, *param.shape), kind="stable") - 1  # the two largest dims
    factored = param.ndim > 1 and param.shape[small] >= factor_from
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        square, keep = gradient**2 + 1e-30, 1 - step**-exponent
        if factored:
            row = keep * row + (1 - keep) * square.mean(large, keepdims=True)
            column = keep * column + (1 - keep) * square.mean(small, keepdims=True)
            moment = row * column / row.mean(small, keepdims=True)
        else:
            moment = whole = keep * whole + (1 - keep) * square
        direction = gradient / np.sqrt(moment)
        direction = direction / max(1.0, _root_mean_square(direction) / threshold)
        size = max(_root_mean_square(param), 1e-3) if relative else 1.0
        update = momentum * update + (1 - momentum) * rate * size * direction
        param = param - update - rate * decay * param
    return param


def lion(param: np.ndarray, gradients: Gradients, rates: Rates, *, decay: float, b1: float, b2: float) -> np.ndarray:
    """Chen et al. 2023, algorithm 2."""
    moment = 0.0
    for gradient, rate in zip(gradients, rates, strict=True):
        param = param - rate * (np.sign(b1 * moment + (1 - b1) * gradient) + decay * param)
        moment = b2 * moment + (1 - b2) * gradient
    return param


def sgd(
    param: np.ndarray, gradients: Gradients, rates: Rates, *, decay: float, momentum: float, nesterov: bool = False
) -> np.ndarray:
    """Sutskever et al. 2013 in the form in which the rate multiplies the whole velocity; decay adds to the gradient."""
    velocity = 0.0
    for gradient, rate in zip(gradients, rates, strict=True):
        decayed = gradient + decay * param
        velocity = momentum * velocity + decayed
        param = param - rate * (decayed + momentum * velocity if nesterov else velocity)
    return param


def muon(
    param: np.ndarray,
    gradients: Gradients,
    rates: Rates,
    *,
    decay: float,
    beta: float = 0.95,
    num_iterations: int = 5,
    nesterov: bool = True,
    rms: float | None = 0.2,
) -> np.ndarray:
    """Jordan 2024 for one matrix (inputs, outputs), its momentum corrected as Adam's; sizes are Liu et al.'s (2025)."""
    inputs, outputs = param.shape
    size = np.sqrt(max(1.0, outputs / inputs)) if rms is None else rms * np.sqrt(max(inputs, outputs))
    moment = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        moment = beta * moment + (1 - beta) * gradient
        ahead = _ahead(moment, gradient, beta, step) if nesterov else moment / (1 - beta**step)
        param = param - rate * (size * _orthogonal(ahead, num_iterations) + decay * param)
    return param


def _ahead(moment: np.ndarray, gradient: np.ndarray, keep: float, step: int) -> np.ndarray:
    """Nesterov's step of a corrected average."""
    return keep * moment / (1 - keep ** (step + 1)) + (1 - keep) * gradient / (1 - keep**step)


def _orthogonal(matrix: np.ndarray, num_iterations: int) -> np.ndarray:
    """Newton-Schulz iterations with Jordan's coefficients."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(num_iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values).mean()))
