"""The experiment of `long_run.py`: that of `launched_small.py`, with logs so short that a run of minutes fills many.

Read next: `openpi_train/runtime/logs.py`.
"""

import launched_small  # Python looks in the folder of an experiment's file

from openpi_train.runtime import logs

logs._MOST_BYTES = 1 << 17
small = launched_small.small
