"""Formats a plan as text: three tables, the recommendation, and the compiler's figures. Read next: `plan.py`."""

import contextlib
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from openpi_train.experiment import Experiment
from openpi_train.fields import as_json, changed_fields
from openpi_train.models.model_config import ModelConfig
from openpi_train.parallel.remat import Remat
from openpi_train.planning.forecast import Forecast
from openpi_train.runtime.device_kinds import GIB
from openpi_train.tools.compiled_memory import Compiled
from openpi_train.training.run_length import length_in_words, num_recorded
from openpi_train.training.start_check import remote_weights

if TYPE_CHECKING:
    from openpi_train.tools.plan import Report


def tables(report: "Report", words: Sequence[str]) -> str:
    """The text without the compiler's part. `words` are the experiment and its flags, as typed."""
    machine, experiment, sharding = report.machine, report.experiment, report.experiment.sharding
    hosts = f"{machine.num_hosts} host{'s' if machine.num_hosts > 1 else ''}"
    groups = f", tensor groups of {sharding.tensor_devices} devices" if sharding.tensor_devices > 1 else ""
    offload = f", {sharding.offload} in host memory" if sharding.offload != "none" else ""
    one = report.forecasts[0]
    mixture = experiment.data.mixture_in_words
    head = [
        f"{experiment.name} on {machine.num_devices} x {machine.kind.name}, {hosts}: batch {experiment.batch_size}, "
        f"{experiment.data.row_in_words}{groups}{offload}",
        *([f"datasets, with their shares of the rows: {mixture}"] if mixture else []),
        f"parameters: {report.num_params:,} train, {report.num_frozen:,} are kept fixed",
        f"model FLOPs (forward and backward): {report.model_flops_per_row / 1e12:.4g} T per sample, "
        f"{report.model_flops_per_row * one.batch_size / 1e12:.4g} T per step",
        *(
            f"generates between steps: {size.rows} texts of at most {size.length} tokens at a time on each device "
            f"({size.flag})"
            for size in experiment.generation_sizes()
        ),
    ]
    if one.memory.generation:
        head[-1] += f"; beside the state {one.memory.generation / GIB:.2f} GiB in place of all that a step needs"
    if one.memory.acting:
        head.append(
            f"acts between steps: beside the state {one.memory.acting / GIB:.2f} GiB in place of all that a step needs"
        )
    if one.memory.experience:
        head.append(f"own rollouts of a step: {one.memory.experience / GIB:.3f} GiB on each device, beside the rest")
    head += [one.words() for one in report.simulators]
    state = "State and gradients, GiB on each device; bytes sent with one micro-batch:"
    policies = "Per row, of the traced step (activations: an estimate; FLOPs: counted, recomputation included):"
    choices = f"Candidates ({machine.usable_bytes / GIB:.1f} GiB can be used on each device):"
    parts = [
        "\n".join(head),
        f"{state}\n{_layouts(report)}{_uncut(report)}",
        f"{policies}\n{_policies(report)}",
        f"{choices}\n{_candidates(report)}",
        "Assumed:\n" + "\n".join(f"  {line}" for line in report.assumptions),
        f"Recommended: {report.why}" if report.recommended else report.why[0].upper() + report.why[1:],
    ]
    if report.iteration:
        parts.append(f"By this step {report.iteration.words()}")
    if chosen := report.recommended:
        step_s = (
            chosen.step_s if report.iteration is None else report.iteration.seconds / report.iteration.cost.num_steps
        )
        if length := length_in_words(experiment, step_s, num_recorded(experiment)):
            parts.append(f"Length: {length}")
        if remote := remote_weights(experiment):
            parts.append("\n".join(f"Start weights: {line}" for line in remote))
        if chosen.grad_accum != experiment.grad_accum:
            others = [one for one in report.forecasts if one.most_rows * experiment.grad_accum >= _rows(one)]
            happens = (
                "which needs another of these candidates, slower by this forecast" if others else "and does not fit"
            )
            parts.append(
                f"A run does not choose --grad-accum {chosen.grad_accum} by itself: without the flag it takes "
                f"{experiment.grad_accum}, {happens}."
            )
        parts.append(command(words, experiment, chosen))
    return "\n\n".join(parts)


def compiled(found: Compiled, chosen: Forecast) -> str:
    """The compiler's figures next to the forecast's."""
    memory = chosen.memory
    bound, usable = found.state_bytes + found.program_bytes, chosen.machine.usable_bytes
    verdict = (
        "fits even so" if bound <= usable else "would not fit, and only a GPU's own compiler can tell (--compiler gpu)"
    )
    cut = "" if found.fsdp_devices == chosen.layout.fsdp_devices else f", the state cut over {found.fsdp_devices} only"
    return (
        f"By the compiler (for {found.num_devices} CPU devices{cut}, {found.compile_s:.0f} s): state and batch "
        f"{found.state_bytes / GIB:.2f} GiB (forecast: state {memory.state / GIB:.2f}), the program's own "
        f"{found.program_bytes / GIB:.2f} GiB (forecast: gradients, copy and activations "
        f"{found.forecast_bytes / GIB:.2f}).\n"
        "XLA for CPUs widens much of bfloat16 to float32, has no fused attention, and its layers are in a loop: a "
        f"GPU's own program needs less. Together {bound / GIB:.1f} GiB of {usable / GIB:.1f}: that {verdict}."
    )


def _rows(one: Forecast) -> int:
    """Rows of a step on each device."""
    return one.rows * one.grad_accum


def command(words: Sequence[str], experiment: Experiment, chosen: Forecast) -> str:
    """What trains as planned: the experiment and its flags as typed, and in a line of their own those of the plan."""
    is_named = any(word.partition("=")[0].replace("_", "-") == "--exp-name" for word in words)
    name = [] if is_named else ["--exp-name", "NAME"]
    typed = shlex.join(["python", "-m", "openpi_train", words[0], *name, *words[1:]])
    return f"  {typed} \\\n  {' '.join(flags(experiment, chosen))}"


def flags(experiment: Experiment, chosen: Forecast) -> list[str]:
    """The flags to add to the command line of the experiment."""
    words = ["--sharding.strategy", chosen.layout.strategy]
    if 1 < chosen.layout.fsdp_devices < chosen.machine.num_devices // chosen.layout.tensor_devices:
        words += ["--fsdp-devices", str(chosen.layout.fsdp_devices)]
    if chosen.policy.remat is not None and (flag := _remat_flag(experiment.model)):
        words += [flag, chosen.policy.remat]
    return [*words, "--grad-accum", str(chosen.grad_accum)]


def _remat_flag(model: ModelConfig) -> str | None:
    """The flag of a model's rematerialisation policy: that of a reward model or of DPO is its language model's.

    None: the model has a single policy.
    """
    for remat in get_args(Remat):
        with contextlib.suppress(ValueError):  # a policy that the model does not have
            if changed := changed_fields(as_json(model), as_json(model.with_compute(remat=remat))):
                (field,) = changed
                return f"--model.{field.replace('_', '-')}"
    return None


def _layouts(report: "Report") -> str:
    frozen = ["frozen"] if report.num_frozen else []
    columns = ["strategy", "over", "parameters", *frozen, "moments", "EMA", "gradients", "copy", "together"]
    columns += ["GB in host/device", "GB between/host"]
    offloads = report.experiment.sharding.offload != "none"
    columns += ["GiB in host memory", "to and fro s"] if offloads else []
    found = {id(one.layout): one.layout for one in report.forecasts}
    rows = []
    for layout in found.values():
        memory, flows = layout.memory(1), layout.flows(1, 0.0)
        fixed = (memory.frozen,) if report.num_frozen else ()
        copy = memory.compute_copy + memory.layer
        parts = (memory.params, *fixed, memory.optimizer, memory.ema, memory.grads, copy)
        gib = [f"{size / GIB:.2f}" for size in (*parts, memory.total)]
        sent = (sum(flow.within for flow in flows), sum(flow.between for flow in flows))
        host = [f"{memory.host / GIB:.2f}", f"{memory.host_link_s:.3g}"] if offloads else []
        rows.append([layout.strategy, str(layout.fsdp_devices), *gib, *(f"{size / 1e9:.1f}" for size in sent), *host])
    return table(columns, rows)


def _uncut(report: "Report") -> str:
    found = {one.layout.fsdp_devices: one.layout.uncut_share for one in report.forecasts if one.layout.uncut_share}
    return "".join(
        f"\n  over {devices}: {share:.0%} of the parameters stay whole on every device, "
        f"as none of their dims divides by {devices}"
        for devices, share in found.items()
        if share >= 0.01
    )


def _policies(report: "Report") -> str:
    found = {one.policy.remat: one.policy for one in report.forecasts}
    rows = [
        [
            remat or "-",
            f"{policy.activation_bytes_per_row / GIB:.3f}",
            f"{policy.flops_per_row / 1e12:.4g}",
            f"{policy.flops_per_row / report.model_flops_per_row:.2f}",
        ]
        for remat, policy in found.items()
    ]
    return table(["remat", "activations GiB", "TFLOP", "of the model's"], rows)


def _candidates(report: "Report") -> str:
    columns = ["strategy", "over", "remat", "fits", "grad_accum", "rows", "most rows", "GiB", "PFLOP/step"]
    columns += ["GB in host/device", "GB between/host", "step s", "samples/s", "overlapped"]
    rows = []
    for one in report.forecasts:
        sent = (sum(flow.within for flow in one.flows), sum(flow.between for flow in one.flows))
        mark = "yes *" if one is report.recommended else "yes" if one.fits else "no"
        numbers = [str(one.grad_accum), str(one.rows), str(one.most_rows), f"{one.memory.total / GIB:.1f}"]
        speed = [f"{one.step_s:.3g}", f"{one.batch_size / one.step_s:.3g}", f"{one.batch_size / one.overlapped_s:.3g}"]
        traffic = [f"{one.flops_per_step / 1e15:.3g}", *(f"{size / 1e9:.1f}" for size in sent)]
        which = [one.layout.strategy, str(one.layout.fsdp_devices), one.policy.remat or "-"]
        rows.append([*which, mark, *numbers, *traffic, *speed])
    return table(columns, rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with words left-aligned and numbers right-aligned."""
    lines = [columns, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    is_word = [not any(row[index][:1].isdigit() for row in rows) for index in range(len(columns))]
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_word, strict=True)
        ).rstrip()
        for line in lines
    )
