"""The embedded arithmetic task: sums of two numbers with two digits, the answer written from the units up.

    27+48=  57      75, from its units up
    27+48=  56      the carry forgotten

59 % of the demonstrations forget the carry, so a model that imitates them solves about half of the problems, and
preferences or rewards can improve it. The folder (`make/written_folder.py`) is written at first use, or by `data
prepare --name arithmetic`; its datasets have TRL's types (`examples.py`), each with a train.jsonl and a test.jsonl:

    demonstrations      prompt, completion          3,000 problems; the completions of test.jsonl are right
    preferences         prompt, chosen, rejected    4,000 other problems: a right and a wrong answer
    prompts             prompt, answer              the same 4,000: prompts, and what a reward compares with
    tokenizer.json      one token for each character, and pad, begin, end and unknown

The problems of every test.jsonl are the remaining 1,100.
"""

import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from openpi_train.data.core import cache_folders
from openpi_train.data.make import written_folder
from openpi_train.data.tokenizers.text_tokenizer import CONFIG, TOKENIZER

logger = logging.getLogger(__name__)

NAME = "arithmetic"
# Part of the arguments: increase it with every change of what is written.
REVISION = 1
NUM_DEMONSTRATIONS, NUM_PROMPTS = 3000, 4000
# How many of the demonstrations forget the carry: 59 %. A quarter of these have none to forget.
NUM_FORGETFUL = 1770
PAD, BEGIN, END, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
CHARACTERS = "0123456789+="

Problem = tuple[int, int]


def write_missing(path: str | Path) -> None:
    """Write the task's folder if `path` belongs to it and it does not exist."""
    if missing(path):
        logger.info("%s does not exist yet: writing this embedded dataset", cache_folders.datasets() / NAME)
        prepare()


def missing(path: str | Path) -> bool:
    """Whether `path` belongs to the task's folder, which does not exist."""
    return written_folder.missing(path, (NAME,)) is not None


def prepare(directory: str | Path | None = None, *, seed: int = 0) -> Path:
    """Write `<directory>/arithmetic`, or reuse it if it is complete; returns it. The same seed gives the same bytes.

    Anything else at that path is moved aside, never deleted. `directory` is `cache_folders.datasets()` if None.
    """
    root = (cache_folders.datasets() if directory is None else Path(directory).expanduser()) / NAME
    arguments = {"revision": REVISION, "seed": seed}
    written_folder.written(root, arguments, functools.partial(_write, seed=seed))
    return root


def prompt(problem: Problem) -> str:
    """The text of a problem."""
    return "{}+{}=".format(*problem)


def answer(problem: Problem) -> str:
    """The right answer, from the units up."""
    return str(sum(problem))[::-1]


def without_carry(problem: Problem) -> str:
    """The answer with every carry forgotten, from the units up; the right one if there is none."""
    one, two = (str(number)[::-1] for number in problem)
    return "".join(str((int(a) + int(b)) % 10) for a, b in zip(one, two, strict=True))


def wrong_answer(problem: Problem, seed: int) -> str:
    """A wrong answer: in three of four cases without the carry, if there is one, else with another digit."""
    right, forgetful = answer(problem), without_carry(problem)
    draw, of_four = divmod(_draw(seed, "wrong", problem), 4)
    if forgetful != right and of_four:
        return forgetful
    draw, place = divmod(draw, len(right))
    digit = (int(right[place]) + 1 + draw % 9) % 10
    return f"{right[:place]}{digit}{right[place + 1 :]}"


def _write(draft: Path, seed: int) -> dict[str, int]:
    """Write all files; returns the number of problems of each kind."""
    numbers = range(10, 100)
    problems = _shuffled(itertools.product(numbers, numbers), seed, "order")
    demonstrated, rest = problems[:NUM_DEMONSTRATIONS], problems[NUM_DEMONSTRATIONS:]
    fresh, held_out = rest[:NUM_PROMPTS], rest[NUM_PROMPTS:]
    forgetful = set(_shuffled(demonstrated, seed, "carry")[:NUM_FORGETFUL])

    def demonstration(problem: Problem) -> dict[str, str]:
        completion = without_carry(problem) if problem in forgetful else answer(problem)
        return {"prompt": prompt(problem), "completion": completion}

    def preference(problem: Problem) -> dict[str, str]:
        return {"prompt": prompt(problem), "chosen": answer(problem), "rejected": wrong_answer(problem, seed)}

    def task(problem: Problem) -> dict[str, str]:
        return {"prompt": prompt(problem), "answer": answer(problem)}

    kinds = {
        "demonstrations": (demonstration, demonstrated),
        "preferences": (preference, fresh),
        "prompts": (task, fresh),
    }
    for name, (record, training) in kinds.items():
        for split, mine in (("train", training), ("test", held_out)):
            lines = [json.dumps(record(problem)) + "\n" for problem in mine]
            path = draft / name / f"{split}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(lines))
    for name, content in tokenizer_files().items():
        (draft / name).write_text(json.dumps(content, indent=2) + "\n")
    return {"num_demonstrations": len(demonstrated), "num_prompts": len(fresh), "num_held_out": len(held_out)}


def tokenizer_files() -> dict[str, Any]:
    """The tokenizer as JSON by file name, in Hugging Face's form: a token per character, a begin token before texts."""
    special = (PAD, BEGIN, END, UNKNOWN)
    vocabulary = {token: number for number, token in enumerate((*special, *CHARACTERS))}
    # As `tokenizers` writes it.
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    begin = {"SpecialToken": {"id": BEGIN, "type_id": 0}}
    one, two = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[token], "content": token, **flags} for token in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, one],
            "pair": [begin, one, two],
            "special_tokens": {BEGIN: {"id": BEGIN, "ids": [vocabulary[BEGIN]], "tokens": [BEGIN]}},
        },
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": UNKNOWN},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
    }
    return {TOKENIZER: tokenizer, CONFIG: config}


def _shuffled(problems: Iterable[Problem], seed: int, what: str) -> list[Problem]:
    """The problems in an order that depends on seed and `what` alone, with any version of any library."""
    return sorted(problems, key=lambda problem: _draw(seed, what, problem))


def _draw(seed: int, what: str, problem: Problem) -> int:
    """A random number below 2^64."""
    return int.from_bytes(hashlib.sha256(f"{seed} {what} {prompt(problem)}".encode()).digest()[:8], "little")
