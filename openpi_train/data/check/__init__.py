"""What is suspicious in a dataset, found before anyone trains on it. Read next: `fault_kinds.py`."""
