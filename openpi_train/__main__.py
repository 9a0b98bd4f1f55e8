"""`python -m openpi_train ...` and the console script `openpi-train`. Everything is in `cli.py`.

Kept small, because data workers are spawned processes that import this module again.
"""

import sys


def main() -> None:
    """Run the command line and exit with its code; by the Python of `.venv` where this one lacks packages."""
    from openpi_train.launch import own_python

    own_python.begin(["-m", "openpi_train", *sys.argv[1:]], launches=sys.argv[1:2] == ["launch"])
    from openpi_train.runtime import garbage

    garbage.look_rarely()
    from openpi_train.cli import run
    from openpi_train.runtime.closed_output import quietly

    sys.exit(quietly(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
