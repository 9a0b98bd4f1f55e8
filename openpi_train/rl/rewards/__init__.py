"""Rewards of completions: what each is given for, how they are shared out and added. Read next: `text_reward.py`."""
