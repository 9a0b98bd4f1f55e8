"""The `generate` verb: completes a prompt, the prompts of a file, or what a user types.

A file's completions are written in its order. A line that is there is a finished one: a run that was stopped goes on
after it, with the same completions, because each depends only on the settings and its place.

Read next: `policy/text_model.py`.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from openpi_train.data.text.text_files import TextFile, parsed
from openpi_train.generation.completion_text import NewText
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.generation.text_generator import TextGenerator
from openpi_train.json_object import JsonObject
from openpi_train.policy.text_model import load_text_model
from openpi_train.runtime import compile_cache, logs
from openpi_train.runtime.exits import DONE, DataError
from openpi_train.tools.requests import GenerateRequest

logger = logging.getLogger(__name__)

_NEW, _ASK = "/new", "> "
# The column that is added to each record.
_COMPLETIONS = "completions"
Say = Callable[[str], None]


def main(request: GenerateRequest, settings: SamplingSettings) -> int:
    """Generate as requested; completions go to stdout, or into a file. Returns the exit code."""
    logs.configure(0)
    compile_cache.use(jax.default_backend())
    model = load_text_model(
        request.checkpoint,
        experiment=request.experiment,
        average=request.average,
        dtype=request.dtype,
        tokenizer=request.tokenizer,
        chat_template=request.chat_template,
        num_rows=request.num_rows if request.file or request.samples > 1 else 1,
        max_length=request.max_length,
    )
    if request.file is not None and request.out is not None:
        complete_file(model, request.file, request.out, settings, request.samples)
    elif request.prompt is not None or request.message is not None:
        given = request.prompt if request.message is None else [*_system(request), _said("user", request.message)]
        assert given is not None
        if request.message is None and model.templates:
            logger.info("--prompt is continued as it is; --message asks by the model's chat template")
        _complete_one(model, model.prompt_of(given), settings, request.samples, _to_terminal)
    else:
        chat(model, _system(request), settings, sys.stdin, _to_terminal)
    return DONE


def complete_file(model: TextGenerator, source: Path, target: Path, settings: SamplingSettings, samples: int) -> None:
    """Append to `target` the completions that it lacks.

    Raises DataError for a record that cannot be completed, naming its line, and for a target of other prompts.
    """
    records = list(_records(source))
    if not records:
        raise DataError(f"{source} has no prompts: needed is one object per line, with `prompt` or `messages`")
    finished = _finished(target, records, samples)
    if finished:
        logger.info("%s has %d of %d prompts already", target, finished, len(records))
    prompts: list[Sequence[int]] = []
    for place, record in records[finished:]:
        try:
            prompts.append(model.prompt_of(_given(record)))
            if problems := model.check(prompts[-1], settings):
                raise ValueError("; ".join(problems))
        except ValueError as error:
            raise DataError(f"{place}: {error}") from error
    # A group is made before the next one begins, so that what is made is soon written.
    size = max(1, 4 * model.generator.num_rows // samples)
    with target.open("a", encoding="utf-8") as file:
        for start in range(0, len(prompts), size):
            group = prompts[start : start + size]
            rows = [(finished + start) * samples + number for number in range(len(group) * samples)]
            found = model.complete([prompt for prompt in group for _ in range(samples)], settings, rows=rows)
            for number, (_, record) in enumerate(records[finished + start : finished + start + len(group)]):
                own = found[number * samples : (number + 1) * samples]
                file.write(json.dumps({**record, _COMPLETIONS: [_told(one) for one in own]}, ensure_ascii=False) + "\n")
            file.flush()
            logger.info("%s: %d of %d prompts", target, finished + start + len(group), len(records))


def chat(
    model: TextGenerator,
    system: Sequence[JsonObject],
    settings: SamplingSettings,
    lines: Iterable[str],
    say: Say,
) -> None:
    """Answer each line of a user, with the conversation so far, until there are no more lines."""
    model.check_conversations()
    messages = list(system)
    say(_ASK)
    for line in map(str.strip, lines):
        if line == _NEW:
            messages = list(system)
        elif line:
            asked = [*messages, _said("user", line)]
            try:
                answer = _complete_one(model, model.prompt_of(asked), settings, 1, say)
                messages = [*asked, _said("assistant", answer)]
            except ValueError as error:  # too long, or refused by the template
                say(f"{error}; {_NEW} starts a new conversation\n")
        say(_ASK)
    say("\n")


def _complete_one(
    model: TextGenerator, prompt: Sequence[int], settings: SamplingSettings, samples: int, say: Say
) -> str:
    """Say the completions of one prompt, a single one as it comes. Returns the last one."""
    text = ""
    if samples == 1:
        for new in model.stream(prompt, settings):
            say(new.text)
            text += new.text
    for number, found in enumerate(model.complete([prompt] * samples, settings) if samples > 1 else ()):
        say(f"[{number + 1}] {(text := found.text)}\n")
    say("\n" if samples == 1 else "")
    return text


def _to_terminal(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _system(request: GenerateRequest) -> list[Mapping[str, Any]]:
    return [] if request.system is None else [_said("system", request.system)]


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _told(found: NewText) -> dict[str, Any]:
    tokens = found.tokens
    return {"text": found.text, "finish_reason": tokens.finish_reason, "tokens": len(tokens.tokens)}


def _records(source: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each record of a file and its place. Raises DataError, FileNotFoundError."""
    file = TextFile(source, source.name)
    if not source.is_file():
        raise DataError(f"--file {source}: there is no such file")
    for number, raw in file.records(("prompt", "messages")):
        try:
            record = parsed(raw)
            _check_writable(record)
        except ValueError as error:
            raise DataError(f"{file.place(number)}: {error}") from error
        yield file.place(number), record


def _check_writable(record: JsonObject) -> None:
    """Raise ValueError if a line of `--out` cannot hold the record and its completions."""
    if _COMPLETIONS in record:
        raise ValueError(f"it has a column `{_COMPLETIONS}`, which --out writes: rename or remove this column")
    for name, value in record.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"its column {json.dumps(name)} has half of a surrogate pair ({error}), which UTF-8 cannot write: "
                "replace or remove this text"
            ) from error


def _given(record: JsonObject) -> str | list[Mapping[str, Any]]:
    """The prompt of a record. Raises ValueError if it has none."""
    found = record.get("prompt", record.get("messages"))
    if isinstance(found, str) and found:
        return found
    if isinstance(found, list) and found and all(isinstance(message, Mapping) for message in found):
        return found
    raise ValueError("it has no prompt: needed is `prompt`, a text or messages, or `messages`")


def _finished(target: Path, records: Sequence[tuple[str, JsonObject]], samples: int) -> int:
    """How many records are in `target` already. A last line that was cut off is removed.

    Raises DataError if another line is not of these records.
    """
    if not target.exists():
        return 0
    content = target.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    lines = whole.splitlines()
    for number, raw in enumerate(lines):
        try:
            line = parsed(raw)
        except ValueError as error:
            raise DataError(
                f"--out {target}: line {number + 1} is no line of completions: {error}; name another file, or remove "
                "this one"
            ) from error
        place, record = records[number] if number < len(records) else ("no record of --file", {})
        made = line.get(_COMPLETIONS)
        if not (record and _holds(line, record) and isinstance(made, list) and len(made) == samples):
            raise DataError(
                f"--out {target}: line {number + 1} does not hold {samples} completions of {place}: it is of other "
                "prompts or --samples; name another file, or remove this one"
            )
    if len(whole) < len(content):
        with target.open("r+b") as file:
            file.truncate(len(whole))
    return len(lines)


def _holds(line: JsonObject, record: JsonObject) -> bool:
    """Whether the line has all columns of the record, compared as JSON: NaN does not equal itself."""
    own = {name: line[name] for name in record if name in line}
    return json.dumps(own) == json.dumps(dict(record))
