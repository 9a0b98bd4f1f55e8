"""Stands in for LIBERO, with its interface: files below FOLDER, a hand that moves by a hundredth of its action."""

import os

if not os.path.exists(os.path.join(os.environ["LIBERO_CONFIG_PATH"], "config.yaml")):
    input("Do you want to specify a custom path for the dataset folder? (Y/N): ")


def get_libero_path(name):
    return os.path.join(os.environ["LIBERO_CONFIG_PATH"], name)
