"""Rates over several completions of each prompt: pass@k, and the vote of the majority.

Read next: `completion_scores.py`.
"""

import collections
import math
from collections.abc import Hashable, Sequence


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """The probability that at least one of `k` completions is right, from `num` of which `num_right` are.

    The unbiased estimate of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1: the share
    of the subsets of `k` that hold a right one. `k` is at most `num`.
    """
    assert 0 <= num_right <= num and 1 <= k <= num
    return 1.0 - math.comb(num - num_right, k) / math.comb(num, k)


def majority_rate(answers: Sequence[Hashable | None], is_right: Sequence[bool]) -> float:
    """The probability that the most frequent answer is right, if one of equally frequent ones is drawn.

    Completions without an answer (None) have no vote; without any vote it is 0 (maj@k, Wang et al. 2022).
    """
    votes = collections.Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    right = {answer for answer, right in zip(answers, is_right, strict=True) if right}
    chosen = [answer for answer, count in votes.items() if count == most]
    return sum(answer in right for answer in chosen) / len(chosen)
