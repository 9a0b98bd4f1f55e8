"""Parts of the report from files that programs wrote with any text in them."""

import json
import re

from openpi_train.tools import report_parts
from openpi_train.tools.page import Preformatted, page
from openpi_train.tools.run_files import RunFiles
from openpi_train.training.goodput import PARTS


def test_a_completion_with_a_line_separator_in_it_is_shown_whole(tmp_path):
    text = "one\u2028two\x85three"
    done = {"text": text, "scores": {}, "finish_reason": "stop", "tokens": 3}
    line = {"place": "a.jsonl:1", "prompt": "say it", "reference": "", "completions": [done]}
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    shown = report_parts._samples(path)
    assert [block.text for block in shown if block.kind == "preformatted"] == ["say it", text]
    assert text in page("x", {"Samples": shown}, "")


def test_where_the_wall_time_of_all_starts_went_is_in_the_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/device_share": 1.0}\n')

    def shown():
        return page("x", {"Time": report_parts.time_split(RunFiles(tmp_path))}, "")

    assert "goodput" not in shown(), "a run that did not count it"
    spent = dict.fromkeys(PARTS, 0.0) | {"training": 5400.0, "lost": 1800.0}
    (tmp_path / "time.jsonl").write_text(json.dumps({"at": 0.0, "step": 1, "seconds": spent, "longest_s": {}}) + "\n")
    assert "goodput 75.0%" in shown() and "2h00m" in shown()
    (lost,) = re.findall(r"trained, and lost by a fault</td>.*?</tr>", shown(), re.DOTALL)
    assert "30m00s" in lost and "width: 25.0%" in lost


def test_the_commands_of_all_starts_are_shown_with_where_each_was_typed(tmp_path):
    def start(folder, *words):
        return {"directory": folder, "git": {"commit": "abc"}, "argv": ["/x/__main__.py", *words]}

    def shown(*starts):
        (tmp_path / "environment.json").write_text(json.dumps({"starts": starts}))
        (block,) = report_parts.command(RunFiles(tmp_path))
        assert isinstance(block, Preformatted)
        return block.text.splitlines()

    first, again = start("/a b", "debug", "--exp-name", "x"), start("/a b", "resume", "x y")
    place = "cd '/a b'  # commit abc"
    assert shown(first) == [place, "python -m openpi_train debug --exp-name x"]
    assert shown(first, again, again) == [*shown(first), "python -m openpi_train resume 'x y'"]
    assert shown(first, start("/c", "resume"), first)[2:] == [
        *("cd /c  # commit abc", "python -m openpi_train resume"),
        *shown(first),
    ]
