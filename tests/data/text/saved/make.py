"""Writes the folders beside it with `save_to_disk` of the datasets library, which is no dependency of the project.

They were made by `python make.py` with datasets 5.2.0 and pyarrow 26.0.1, on 2026-11-29.
"""

import shutil
from pathlib import Path

from datasets import Dataset, DatasetDict

HERE = Path(__file__).parent
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ROWS = [
    {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}], "n": 0},
    {
        "messages": [{"role": "user", "content": "ä"}, {"role": "assistant", "content": "ö", "tool_calls": [CALL]}],
        "n": 1,
    },
    {"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}], "n": 2},
]


def main():
    for name in ("splits", "flat"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    whole = Dataset.from_list(ROWS)
    # Rows that were chosen are written as such, in their order.
    splits = DatasetDict({"train": whole.select([2, 0]), "test": whole.select([1])})
    splits.save_to_disk(str(HERE / "splits"), num_shards={"train": 2, "test": 1})
    whole.save_to_disk(str(HERE / "flat"))
    for lock in HERE.rglob("*.lock"):
        lock.unlink()


if __name__ == "__main__":
    main()
