"""The exit codes that launchers act on; `runtime/exits.py` explains each.

They are repeated here because launchers use only the standard library; a test compares both lists.
"""

USAGE = 2
DATA = 3
CHECKPOINT = 4
NUMBERS = 5
INDIVISIBLE = 6  # the batch may be divisible over fewer devices
PEER_LOST = 70
HARDWARE = 71  # of the host where it arose
PREEMPTED = 75  # stopped on request after a good save
INTERRUPTED = 130
