"""A project folder of the PyTorch post-training tool: configs, a tiny model, and data, as its guide has them."""

import dataclasses
import json
import shutil
from pathlib import Path

from deepspeed_files import FILES
from text_models import MODEL, write_model

CONFIGS = Path(__file__).parent / "doors" / "posttraining" / "project"
_REWARD = """def vowels(prompt, completion, reference):
    return sum(character in "aeiou" for character in completion)
"""


def write_project(folder: Path) -> Path:
    """Write the project, and return its folder."""
    shutil.copytree(CONFIGS, folder, dirs_exist_ok=True)
    small = dataclasses.replace(MODEL, sizes=dataclasses.replace(MODEL.sizes, depth=1))
    write_model(folder / "model", small)
    write_data(folder / "data")
    (folder / "rewards.py").write_text(_REWARD)
    for stage, config in FILES.items():
        file = folder / "configs" / "deepspeed" / f"zero{stage}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(config))
    return folder


def write_data(folder: Path) -> None:
    """Sums as prompts and responses, pairs of a right and a wrong answer, and prompts with the number to find."""
    sums = [(f"What is {n} plus two? ", f"It is {n + 2}.", f"It is {n}.") for n in range(48)]
    lines(folder / "sums.jsonl", [{"prompt": prompt, "response": right} for prompt, right, _ in sums])
    lines(folder / "sums_eval.jsonl", [{"prompt": prompt, "response": right} for prompt, right, _ in sums[::6]])
    pairs = [{"prompt": prompt, "chosen": right, "rejected": wrong} for prompt, right, wrong in sums]
    lines(folder / "pairs.jsonl", pairs)
    prompts = [{"prompt": prompt, "answer": f"{number + 2}"} for number, (prompt, _, _) in enumerate(sums)]
    lines(folder / "prompts.jsonl", prompts)
    lines(folder / "prompts_eval.jsonl", prompts[::6])


def lines(file: Path, records: list[dict]) -> None:
    """Write a file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
