"""Measurements of speed, printed as tables. `python -m benchmarks --help`; recorded results:
`docs/understand/benchmarks.md`."""
