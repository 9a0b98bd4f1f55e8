"""Trained policies, loaded and asked for actions. Read next: `loading.py`, then `policy.py`."""
