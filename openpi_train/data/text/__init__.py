"""Texts as training data: files of TRL's dataset types, tokens, packed rows. Read next: `text_data.py`."""
