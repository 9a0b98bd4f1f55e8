"""The text server: OpenAI's HTTP API over a loaded language model. Read next: `text_server.py`."""
