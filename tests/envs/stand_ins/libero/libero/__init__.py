"""Stands in for LIBERO, with its interface: files below FOLDER, a hand that moves by a hundredth of its action."""

import os


def get_libero_path(name):
    return os.path.join(os.environ["LIBERO_CONFIG_PATH"], name)
