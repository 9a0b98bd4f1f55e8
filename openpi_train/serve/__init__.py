"""The policy server: openpi's websocket protocol over a loaded policy. Read next: `server.py`."""
