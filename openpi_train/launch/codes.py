"""The exit codes that launchers act on: `runtime/exits.py` says what each means.

They stand here once more because launching needs nothing but the standard library; a test compares them.
"""

USAGE = 2
DATA = 3
CHECKPOINT = 4
NUMBERS = 5
INDIVISIBLE = 6  # over fewer devices the batch may divide
PEER_LOST = 70
PREEMPTED = 75  # stopped on request after a good save
INTERRUPTED = 130
