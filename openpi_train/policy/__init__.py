"""Inference with trained policies. Read next: `loading.py`, then `policy.py`."""
