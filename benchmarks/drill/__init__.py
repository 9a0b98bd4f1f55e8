"""The fault drill: hosts, faults, verdicts. `python -m benchmarks fault_drill --help`; read first: `netns.py`."""
