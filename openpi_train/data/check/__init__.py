"""What is suspicious in a dataset, found before anyone trains on it. Read next: `kinds.py`, the list of all kinds."""
