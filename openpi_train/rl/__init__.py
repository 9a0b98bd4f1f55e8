"""Learning from own actions: rewards, advantages, the feed that acts. Read next: `advantages.py`."""
