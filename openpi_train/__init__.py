"""Train robot policies on one device or many hosts, with one command. Start reading at `__main__.py`."""
