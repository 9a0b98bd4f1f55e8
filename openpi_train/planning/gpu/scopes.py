"""Which part of the model, and which phase of a step, an instruction belongs to. Read next: `step_account.py`.

Both are read from the scopes in its name: jax writes those of `jax.named_scope`, and around them what it did with the
function: "jit(step)/gradient/transpose(jvp(gemma))/while/body/mlp/dot_general".
"""

import re

from openpi_train.planning.hlo_text import Computation, HloInstruction

PHASES = ("forward", "backward", "recomputation", "gather", "reduce", "update", "other")
_SENDING = {"gather": "gather", "gather_rows": "gather", "reduce": "reduce", "share_layers": "gather"}
# jax's names of control flow and of what it does with functions (0.10.2).
_OF_JAX = {"while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "shard_map", "remat", "scan"}
_OF_JAX |= {"custom_jvp_call", "custom_vjp_call", "linear_call", "pjit", "core_call", "vmap", "jvp", "transpose"}
_GRADIENT = "gradient"
# The whole model is inside the loss.
_AROUND_ALL = "loss"
_OUTSIDE = "rest"


def phase_of(op_name: str) -> str:
    """The phase of a step; `other` without a name, as most copies have none. Without a gradient all is `forward`."""
    if not op_name:
        return "other"
    scopes = _words(op_name)
    for scope, phase in _SENDING.items():
        if scope in scopes:
            return phase
    if {"optimizer", "ema"} & set(scopes) or (_GRADIENT not in scopes and op_name.startswith("jit(step)")):
        return "update"
    if "rematted_computation" in op_name:
        return "recomputation"
    return "backward" if "transpose(" in op_name else "forward"


def part_of(op_name: str) -> str:
    """The outermost and the innermost scope, such as "gemma/mlp"; "rest" outside all, "unnamed" without a name."""
    if not op_name:
        return "unnamed"
    known = {*_SENDING, _GRADIENT}
    scopes = [word for word in _words(op_name) if word not in known and not re.fullmatch(r"branch_\d+_fun", word)]
    scopes = [word for word in scopes if word != _AROUND_ALL] or scopes
    return "/".join(dict.fromkeys((scopes[0], scopes[-1]))) if scopes else _OUTSIDE


def name_of(instruction: HloInstruction, body: Computation | None) -> str:
    """An instruction's name in the traced program; that of a fusion (with this body) is the last one with a scope."""
    names = [instruction.op_name, *(one.op_name for one in reversed(list((body or {}).values())))]
    found = [name for name in names if name]
    return next((name for name in found if part_of(name) != _OUTSIDE), next(iter(found), ""))


def _words(op_name: str) -> list[str]:
    """The scopes, from the outside in. The last component is the operation's own name; "jit(f)" is a function's."""
    components = op_name.split("/")[:-1]
    words = (re.sub(r"^(?:(?:jvp|transpose|vmap)\()+|\)+$", "", one) for one in components if "jit(" not in one)
    # What is no word is the formula of an einsum, "btd,dm->btm".
    return [word for word in words if re.fullmatch(r"\w+", word) and word not in _OF_JAX]
