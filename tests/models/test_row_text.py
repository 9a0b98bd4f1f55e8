"""What is told of the prompts of a run before it begins."""

import dataclasses
import logging
import re

from openpi_train.data.tokenizers.tokenizer import load_tokenizer
from openpi_train.models.row_text import PromptText


def test_prompts_that_are_cut_are_warned_of_with_the_flag_that_reads_them_whole(caplog):
    tokenizer, prompts = load_tokenizer("bytes"), [("pick", 7), ("pick the yellow cube and lift it", 7)]
    text = PromptText(limit=16, with_state=False)
    with caplog.at_level(logging.WARNING):
        assert text.fitted_length(tokenizer, prompts) == 16
    (found,) = re.findall(r"the model reads 16: .* --model\.max-token-len (\d+)", caplog.text)
    _, mask = tokenizer.prompt(prompts[1][0], 64)
    assert int(found) == mask.sum() > 16, "the whole text"
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert dataclasses.replace(text, limit=int(found)).fitted_length(tokenizer, prompts) == int(found)
    assert not caplog.records
