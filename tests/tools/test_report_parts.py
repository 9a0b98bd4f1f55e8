"""Parts of the report from files that programs wrote with any text in them."""

import json

from openpi_train.tools import report_parts


def test_a_completion_with_a_line_separator_in_it_is_shown_whole(tmp_path):
    text = "one\u2028two\x85three"
    done = {"text": text, "scores": {}, "finish_reason": "stop", "tokens": 3}
    line = {"place": "a.jsonl:1", "prompt": "say it", "reference": "", "completions": [done]}
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    assert text in report_parts._samples(path)
