"""The flags of all verbs but `data`, `serve` and those of `doors/`. Read next: the module of each name, `data.py`.

They are separate from the implementations, which need jax, so that `--help` does not wait for it.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from openpi_train.command_line import EnvFlags, Request, one_word
from openpi_train.fields import at_least

# The experiment of a verb. Flags that the verb does not have are the experiment's fields, as in training.
ExperimentName = Annotated[str, Positional, arg(metavar="EXPERIMENT")]
# What `compile` compiles.
Program = Literal["step", "sampling", "acting", "reading", "decoding", "evaluation"]


def given_fields(request: Request, *names: str) -> dict[str, Any]:
    """The values of these fields by name, without those that are None: not given."""
    return {name: value for name in names if (value := getattr(request, name)) is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListRequest(Request):
    """List every experiment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeRequest(Request):
    """Continue a run as it was started, from its newest good checkpoint.

    All values are those of the run's experiment.json. Fields of the experiment that are given as flags replace them,
    and what differs is listed first: resume checkpoints/debug/x --num-train-steps 20000
    """

    # The run's directory, <base>/<experiment>/<name>.
    run: Annotated[Path, Positional, arg(metavar="RUN")]
    # The run's experiment, file.py:name, if it uses classes of your own and their file was moved.
    experiment: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatsRequest(Request):
    """Norm statistics of an experiment's data, per dimension, written where training finds them.

    Columns only: no image is decoded. Any field of the experiment may be set as in training:
    --data.datasets.0.source.path DIR
    """

    # A name from `list`, or file.py:name.
    experiment: ExperimentName


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorRequest(Request):
    """Check everything that a run needs; each line is ok, warn or fail, with what to do.

    The exit code is 2 if something failed. With `launch ... -- doctor` all processes of a run check together.
    Any field of the experiment may be set as in training: doctor debug --checkpoint-base-dir DIR
    """

    # A name from `list`, or file.py:name; without one only the machine is checked.
    experiment: Annotated[tuple[str, ...], Positional, arg(metavar="EXPERIMENT")] = ()
    # Also reach these hosts, or ports of them.
    hosts: Annotated[tuple[str, ...], one_word(lambda text: tuple(text.split(",")), "A,B:PORT")] = ()
    # The coordinator's port, which must be free (29500).
    port: int | None = None
    # Print the findings as JSON.
    json: bool = False

    def check(self) -> list[str]:
        """A sentence if several experiments are named."""
        # `experiment` is not `str | None`: tyro 1.0.17 turns that into "[]" if a field's flag comes first.
        return [f"name one experiment, not {', '.join(self.experiment)}"] if len(self.experiment) > 1 else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class AheadRequest(Request):
    """An experiment on devices that need not be present."""

    # A name from `list`, or file.py:name.
    experiment: ExperimentName
    # Devices of the run, over all hosts.
    devices: int = at_least(1, dataclasses.MISSING)
    # b200, gh200, h200, h100-nvl, h100-pcie, h100, a100-pcie, a100-40gb, a100, l40s, a40, rtx6000-ada, a6000, rtx5090,
    # rtx4090 or rtx3090. Of another GPU, a similar one, with its --device-gib.
    device_kind: str
    # Hosts, with equally many devices each.
    hosts: int = at_least(1, 1)
    # Memory of a device; None: the kind's.
    device_gib: float | None = None
    # GB/s out of one host. The default is one port of 400 gigabits per second, by its data sheet.
    network_gb_s: float = 50.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest(AheadRequest):
    """Forecast the memory and speed of an experiment on other devices, and list the assumptions.

    Plans every strategy and rematerialisation policy, or only the given one. Nothing is allocated.
    Exit code 2: nothing fits. Any field of the experiment may be set as in training: plan debug --devices 8
    --device-kind h100 --batch-size 64
    """

    # Share of the peak FLOP/s while computing.
    efficiency: float = 0.5
    # Also compile the recommended step and print what the compiler says.
    compile: bool = True
    # The compiler: XLA's for GPUs (needs jax's CUDA plugin, but no GPU) or for CPUs; auto: for GPUs
    # where that is installed, else none.
    compiler: Literal["auto", "cpu", "gpu"] = "auto"
    # Compile every candidate that fits, not only the recommended one (with the compiler for GPUs).
    compile_all: bool = False
    # Print the plan as JSON.
    json: bool = False

    def check(self) -> list[str]:
        """A sentence if flags contradict each other."""
        if self.compile_all and (self.compiler == "cpu" or not self.compile):
            return ["--compile-all is for --compiler gpu, and not with --no-compile"]
        if self.compiler != "auto" and not self.compile:
            return [f"--compiler {self.compiler} compiles, and --no-compile does not: leave one out"]
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileRequest(AheadRequest):
    """Compile a program of a run by XLA's GPU compiler for GPUs that need not be there: memory and kernels.

    Needs jax's CUDA plugin, but no GPU; nothing is run. Strategy and rematerialisation are chosen as in training unless
    they are given. Any field of the experiment may be set as in training: compile pi0_bridge_traj --devices 8
    --device-kind h100 --model.remat dots
    """

    # b200, h200, h100, a100, a100-40gb, l40s, rtx6000-ada or rtx4090.
    device_kind: str
    # Camera slots that the rows fill; none: those of the data.
    cameras: Annotated[tuple[str, ...], one_word(lambda text: tuple(text.split(",")), "A,B")] = ()
    # The program: the training step; sampling: of action chunks, for --batch-size observations; acting: a query of
    # RL; reading, decoding: of prompts, and of tokens, where the run completes texts; evaluation: held-out loss.
    program: Program = "step"
    # Write the compiled program (HLO) to this file.
    dump: Path | None = None
    # Print the account as JSON.
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertRequest(Request):
    """Convert a checkpoint: ours to openpi's form, others to ours.

    Every key is accounted for, the result is read back, and its outputs are compared with the source's
    (TARGET/parity.json). Fields of the experiment's model may be set as in training: --experiment debug
    --model.action-dim 8. `convert deepspeed FILE` shows a DeepSpeed config as flags. More: docs/howto/convert.md
    """

    # A checkpoint: a run's directory, a step's, one of another form; or gs://, s3://, hub:USER/NAME.
    source: Annotated[str, Positional, arg(metavar="SOURCE")]
    # Directory to create (name it by the step for openpi's trainer), or hub:USER/NAME to push to.
    target: Annotated[Path, Positional, arg(metavar="TARGET")]
    # Form of SOURCE; None: detected.
    source_format: Annotated[str | None, arg(name="from")] = None
    # Form of TARGET; None: openpi for our checkpoints, ours for others.
    target_format: Annotated[str | None, arg(name="to")] = None
    # The experiment of the model; None: as recorded in our run.
    experiment: str | None = None
    # Type of the floating-point parameters in TARGET.
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    # Merge low-rank adapters into the weights.
    merge_lora: bool = False
    # Leave the training state out.
    params_only: bool = False
    # A norm_stats.json to add, as --asset-id.
    norm_stats: str | None = None
    # Name of the norm stats in TARGET; without --norm-stats the checkpoint's own are renamed.
    asset_id: str | None = None
    # Move an existing TARGET aside.
    overwrite: bool = False
    # Compare the models' outputs.
    outputs: bool = True
    # Make the repository public that a push creates.
    public: bool = False
    # Account for every key and write nothing.
    dry_run: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateRequest(EnvFlags):
    """Evaluate a trained policy (open loop on held-out recorded episodes, closed loop in an environment), or a language
    model (held-out loss, perplexity, completions of held-out prompts).

    Tables are printed; JSON, plots, videos and completions go to eval/<step> in the run's directory. With `launch local
    --processes N -- eval ...` the work is divided over processes, with the same results. None: the run's own setting.
    """

    # A run's directory (its newest checkpoint), a step's, or another checkpoint.
    checkpoint: Annotated[str, Positional, arg(metavar="CHECKPOINT")]
    # The experiment of the checkpoint, if it is not recorded there.
    experiment: str | None = None
    # Recorded episodes, or texts, in place of the run's held-out ones: the folder of a dataset; of texts a file, a
    # folder, or hub:USER/NAME.
    data: str | None = None
    # Which dataset's robot acts: a number or asset id.
    dataset: str | None = None
    # Only steps where this boolean feature of the episodes is true, such as is_intervention.
    only: str | None = None
    # Episodes per task in the environment; 0: no closed loop.
    episodes: int | None = at_least(0, None)
    # Recorded episodes; 0: no open loop.
    held_out: int = at_least(0, 20)
    # Actions of a chunk that are executed; None: the run's own number, or the model's.
    execute: int | None = at_least(1, None)
    # Temporal ensembling with weights exp(-M i), such as 0.01.
    ensemble: Annotated[float | None, arg(metavar="M")] = None
    # Control steps until a chunk is ready; meanwhile the one before is executed.
    real_time_delay: int | None = at_least(0, None)
    # How such a chunk continues the one before: not at all, by guidance, or as trained with --objective.max-delay.
    # None: as trained, or else by guidance.
    real_time_method: Literal["none", "guided", "trained"] | None = None
    # Its largest guidance towards the chunk before; None: 5, as in the paper (LeRobot: 10).
    real_time_guidance: float | None = None
    # Control steps before an episode has failed; None: the run's number, or the environment's own.
    max_steps: int | None = at_least(1, None)
    # Number of episodes with videos.
    videos: int | None = at_least(0, None)
    # Seed of initial states and of the policy's noise, or of the sampling of texts.
    seed: int | None = None
    # Episodes, or rows and completions of a language model, at a time per process.
    batch_size: int = at_least(1, 16)
    # Denoising steps.
    num_sample_steps: int | None = at_least(1, None)
    # Guidance towards what is better than expected, of a policy that was told so (IndicatorFlow); None: as in the run's
    # evaluation.
    guidance: float | None = None
    # Use the average of the parameters (EMA) instead of the parameters.
    average: bool = True
    # Where the results go; None: eval/<step> in the run's directory.
    out: Path | None = None

    def check(self) -> list[str]:
        """A sentence if the results would lie in a file."""
        around = () if self.out is None else (self.out, *self.out.parents)
        return [f"--out {self.out}: {one} is a file; name a folder" for one in around if one.is_file()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateTextRequest(Request):
    """Flags of `eval` for language models. None: the run's own setting."""

    # Only files of --data whose path has this word; None: all files.
    split: str | None = None
    # The columns of --data to read, as TYPE=COLUMN: prompt=question completion=answer.
    columns: tuple[str, ...] = ()
    # Which tokens are predicted, so that those before them are the prompt.
    targets: Literal["auto", "completion", "assistant", "all"] | None = None
    # Held-out rows of the loss and the perplexity.
    num_rows: int | None = at_least(1, None)
    # Prompts to complete; 0: none. None: the run's own number, or 64.
    num_prompts: int | None = at_least(0, None)
    # Completions of each prompt: the largest k of pass@k.
    samples: int | None = at_least(1, None)
    # What completions are scored by: exact_match, number_match, regex:PATTERN, or file.py:function, as rewards are.
    # None: the run's scores, and what it was rewarded for by functions and patterns.
    scores: tuple[str, ...] | None = None
    # Divisor of the logits; 0 always takes the most probable token.
    temperature: float | None = at_least(0, None)
    # Only the k most probable tokens; 0: all.
    top_k: int | None = at_least(0, None)
    # Only the most probable tokens that together have this probability.
    top_p: float | None = None
    # A completion has at most this many tokens.
    max_new_tokens: int | None = at_least(1, None)
    # Texts at which a completion ends.
    stop: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateRequest(Request):
    """Complete texts with a language model: one text, a file of them, or a conversation in the terminal.

    Without --prompt, --message and --file it is a conversation: a line is a message, /new starts again, and Ctrl-D ends
    it. Settings of the sampling, such as --temperature 0, apply to all completions.
    """

    # A run's directory (its newest checkpoint), a step's, a folder in Hugging Face's form, or hub:USER/NAME.
    checkpoint: Annotated[str, Positional, arg(metavar="CHECKPOINT")]
    # A text to continue, as it is.
    prompt: str | None = None
    # A user's message to answer, by the model's chat template.
    message: str | None = None
    # JSON lines with `prompt` (a text, or a conversation's messages) or `messages`.
    file: Path | None = None
    # Where the completions of --file go, as JSON lines; those that are there already are kept.
    out: Path | None = None
    # The system's message of --message and of conversations.
    system: str | None = None
    # Completions of each prompt.
    samples: int = at_least(1, 1)
    # The experiment of the checkpoint, if it is not recorded there.
    experiment: str | None = None
    # Type of parameters and activations; None: a run's `model.dtype`, or that of the folder's tensors.
    dtype: Literal["float32", "bfloat16"] | None = None
    # Use the average of the parameters (EMA) instead of the parameters.
    average: bool = True
    # Another folder of a tokenizer.
    tokenizer: str | None = None
    # A jinja file; None: the model's own chat template.
    chat_template: str | None = None
    # Completions that are made together.
    num_rows: int = at_least(1, 16)
    # Most tokens of a prompt and its completion; None: the model's context, at most 2048.
    max_length: int | None = at_least(2, None)

    def check(self) -> list[str]:
        """A sentence for every conflict, with the flag to change."""
        problems = []
        given = [f"--{name}" for name in ("prompt", "message", "file") if getattr(self, name) is not None]
        if len(given) > 1:
            problems.append(f"{' and '.join(given)} exclude each other")
        if (self.file is None) != (self.out is None):
            problems.append("--file and --out must both be given: the prompts, and where their completions go")
        if self.file is not None and self.out is not None and self.file.absolute() == self.out.absolute():
            problems.append(f"--out {self.out} is the file with the prompts; name another one")
        if self.samples > 1 and not given:
            problems.append("--samples is for --prompt, --message and --file")
        if self.system is not None and (self.prompt is not None or self.file is not None):
            problems.append("--system is for --message and for conversations")
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportRequest(Request):
    """Write one HTML file about one or several runs.

    Curves, time, memory against the plan, norm stats, batches, evaluations with videos, environment. It needs no other
    file and no network. A run that has not ended can be reported, too.
    """

    # A run's directory, or several.
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN")]
    # The file; None: report.html in the first run's directory.
    out: Path | None = None
    # The runs' experiment, if it uses classes of your own and their file was moved.
    experiment: str | None = None
    # Show a sample batch of the data.
    batches: bool = True

    def check(self) -> list[str]:
        """A sentence if no run is named."""
        return [] if self.runs else ["RUN is missing: name the directory of a run, <base>/<experiment>/<name>"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunsRequest(Request):
    """List all runs below a folder: state, last step and loss, best held-out loss, speed, and how long ago they wrote.

    Runs that have not ended are listed, too. With --diff: the settings in which two runs differ.
    """

    # The folder; its runs may lie at any depth.
    folder: Annotated[Path, Positional, arg(metavar="FOLDER")] = Path("checkpoints")
    # Two runs, by name or path, whose settings to compare.
    diff: Annotated[tuple[str, str] | None, arg(metavar="A B")] = None
    # Print JSON.
    json: bool = False
