"""Results that one command makes again: data, training, evaluation, and a record to compare. Read next: `board.py`."""
