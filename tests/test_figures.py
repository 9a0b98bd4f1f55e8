"""Every measured figure that is written down names the command that gives it, and a commit that this repository has.

Durations, rates and the usual ways of telling a ratio, memory or success are found by their words, all else by the date
of its measuring. There is one way of citing: "commit 1234567" is ours, and OTHERS lists other projects' commits. A
passage may also point to a result, or to docs/understand/benchmarks.md, for both. Results of benchmarks
(`benchmarks/results/`) name date, commit, command and hardware on top.
"""

import functools
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [file for name in ("openpi_train", "configs", "benchmarks") for file in sorted((ROOT / name).rglob("*.py"))]

OTHERS = {
    "15a9616": "openpi",
    "5ba07ac": "diffusion_policy",
    "d309eae": "robomimic",
    "4813bbe": "octo",
    "f2cd577": "TRL",
    "4f0dd18": "LIBERO",
    "b9baaae": "RoboticsDiffusionTransformer",
}
HASH = re.compile(r"(?<![\w.])(?=[a-f]*\d)[0-9a-f]{7,40}(?![\w.])")
CITED = re.compile(r"\bcommit\s([0-9a-f]{7,40})\b")
OURS = r"benchmarks|openpi_train|pytest|tests\.mutants"
COMMAND = re.compile(rf"(`|^ +|Command: )(python -m ({OURS})|make) \w", re.MULTILINE)
DATE = re.compile(r"\b20\d\d-[01]\d-[0-3]\d\b")
NUMBER = r"(?<![\w.])\d[\d.,]*"
SPEED = re.compile(
    rf"\b(took|takes?|costs?|lasts?|ended after) (about |some )?{NUMBER} (m?s|min|minutes|seconds|hours|milliseconds)\b"
    rf"|{NUMBER} (ms|milliseconds|CPU seconds|CPU minutes|[TGP]FLOP/s|[kMGT]B/s)(?!\w)"
    rf"|{NUMBER} (\w+/s|\w+( of [\dx ]+)? (a|per) second)\b"
    rf"|{NUMBER}x (faster|slower|less|more|as|the)\b|{NUMBER} times (faster|slower)\b"
    rf"|\b(needed|used|took|peaked at) (about |some )?{NUMBER} [kMGT]i?B\b|\bran at (about )?{NUMBER} Hz\b"
    rf"|\bsuccee\w+ in {NUMBER} (%|of)|\bloss (fell|falls|was) (to )?{NUMBER}"
)
RESULT = re.compile(r"\bResult: (?!none)")
ELSEWHERE = re.compile(r"\bbenchmarks(\.md|/results/\w+\.md)|data\ssheet|not\smeasured")


def passages(text: str) -> list[str]:
    """Paragraphs, each with the indented block that it announces, without fenced ones."""
    return re.split(r"\n\s*\n(?!    )", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def written_in(code: str) -> str:
    """The docstrings and comments of a file of Python, a paragraph each."""
    strings = re.findall(r'"""(.*?)"""', code, re.DOTALL)
    comments = re.findall(r"(?:^ *#.*\n)+", code, re.MULTILINE)
    return "\n\n".join(re.sub(r"\n\s*\n", "\n", string) for string in [*strings, *comments])


def lacking(passage: str) -> list[str]:
    """What a passage with measured figures does not name."""
    plain = re.sub(r"`[^`]*`", "", passage)
    if not (DATE.search(plain) or ((SPEED.search(plain) or RESULT.search(plain)) and not ELSEWHERE.search(passage))):
        return []
    parts = {"a commit": CITED, "a command": COMMAND}
    return [name for name, pattern in parts.items() if not pattern.search(passage)]


def complaints(text: str) -> list[str]:
    """What is wrong with the figures of a text, where they are."""
    found = []
    for passage in passages(text):
        start = " ".join(passage.split())[:100]
        found += [f"{what} is missing: {start}" for what in lacking(passage)]
        cited = set(CITED.findall(passage))
        found += [
            f"{one} is not cited as a commit: {start}"
            for one in HASH.findall(passage)
            if one not in cited | set(OTHERS)
        ]
    return found


def sources_of_results() -> dict[str, dict[str, str]]:
    """What stands on top of each result of a benchmark, by file."""
    tops = {file.name: file.read_text().split("---\n")[1] for file in RESULTS}
    return {name: {key: str(value) for key, value in yaml.safe_load(top).items()} for name, top in tops.items()}


@functools.cache
def is_known(commit: str) -> bool:
    """Whether the history of this checkout has the commit."""
    return not git("merge-base", "--is-ancestor", commit, "HEAD").returncode


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)


def texts() -> dict[str, str]:
    """All that is written, by file."""
    pages = {file: file.read_text() for file in PAGES}
    sources = {file: written_in(file.read_text()) for file in SOURCES}
    return {str(file.relative_to(ROOT)): text for file, text in (pages | sources).items()}


def test_every_measured_figure_names_its_command_and_its_commit():
    found = [f"{name}: {one}" for name, text in texts().items() for one in complaints(text)]
    assert not found, "\n".join(found)


def test_every_result_names_its_source():
    assert len(RESULTS) > 30
    for name, source in sources_of_results().items():
        assert set(source) == {"date", "commit", "command", "hardware"}, name
        assert DATE.fullmatch(source["date"]) and HASH.match(source["commit"]), name
        assert re.match(r"(python -m|make) \w", source["command"]), name


def test_every_cited_commit_is_in_the_history():
    try:
        whole = git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if not whole:
        pytest.skip("this checkout has no whole git history")
    cited = {(commit, name) for name, text in texts().items() for commit in CITED.findall(text)}
    cited |= {(source["commit"].split()[0], name) for name, source in sources_of_results().items()}
    assert len(cited) > 10
    assert not [f"{name}: {commit}" for commit, name in sorted(cited) if not is_known(commit)]
    assert not is_known("0" * 12)


@pytest.mark.parametrize(
    "text",
    [
        "It decodes 278 pictures a second.",
        "A record of 23,000 chunks of 10 x 7 a second on one core.",
        "One question costs about 0.7 s.",
        "The client waited 98 ms.",
        "790 TFLOP/s were reached, and 4.3 TB/s.",
        "It succeeded in 92 % of the episodes (2026-11-22, 2 cores).",
        "Hardware: 2 CPU cores. Result: held-out loss 0.445.",
        "It is 1.7x faster than openpi.",
        "It needed 12.3 GiB of memory at its peak.",
        "It ran at 41 Hz.",
        "Training takes 12 hours on one GPU.",
        "The step lasts 240 milliseconds.",
        "It succeeds in 92 % of the episodes.",
        "Held-out loss falls to 0.0123.",
    ],
)
@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("", ["a commit", "a command"]),
        (" (commit 1234567)", ["a command"]),
        (" (`make demo`, on 1234567)", ["a commit"]),
        (" (commit 1234567, `python -m benchmarks feed`)", []),
        (" (commit 1234567):\n\n    python -m openpi_train plan debug", []),
    ],
)
def test_a_figure_without_a_source_is_found(text, source, missing):
    found = complaints(f"Before.\n\n{text.removesuffix('.')}{source}.\n\nAfter.")
    assert [one.split(" is missing")[0] for one in found if " is missing: " in one] == missing


@pytest.mark.parametrize(
    "text",
    [
        "All others end with code 70 within 60 s; the limit is `--idle-s`, 300 s.",
        "openpi (15a9616) pads; 3,238,048,528 parameters train.",
        "One port per host carries 50 GB/s, by its data sheet.",
        "About 5 CPU minutes (docs/understand/benchmarks.md).",
        "Time and result: not yet measured.",
        "`latency 0.12 ms` is a line of the log.",
    ],
)
def test_what_is_not_measured_needs_no_source(text):
    assert not complaints(text)


def test_a_bare_hash_is_found_and_so_is_one_in_code():
    assert complaints("On b07207c it was so.") == ["b07207c is not cited as a commit: On b07207c it was so."]
    code = 'rate = 3  # 1234567 is a number\n\n\ndef act():\n    """Take 4 s.\n\n    It took 12 ms.\n    """\n'
    assert [one.split(":")[0] for one in complaints(written_in(code))] == [
        "a commit is missing",
        "a command is missing",
    ]
