"""Texts from language models: choice of tokens, rows that decode together, texts. Read next: `generator.py`."""
