"""Makes a script of this folder run from anywhere, installed and activated or not.

    import checkout; checkout.ready()            in a script in Python, before it imports openpi_train
    python checkout.py -m openpi_train ...       in a shell script: the same for a module

A Python that lacks the packages is replaced by that of the checkout's `.venv`, which `make` makes
(`openpi_train/launch/own_python.py`). Pythons that are too old for the project read this file, too.
"""

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def ready(arguments=None):
    """Returns where this Python can import openpi_train; else `.venv`'s goes on with the same script.

    With `arguments` it is not this script but they that a Python is started with. Exits with 2 where none has the
    packages.
    """
    sys.path.insert(0, _ROOT)
    from openpi_train.launch import own_python

    own_python.find_here()
    own_python.begin(sys.argv if arguments is None else arguments)
    if arguments is not None:
        os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    ready(sys.argv[1:])
