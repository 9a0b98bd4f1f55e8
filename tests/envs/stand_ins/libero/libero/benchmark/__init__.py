"""Two tasks, with three published initial states each."""

import pickle
from typing import NamedTuple

import numpy as np

PUBLISHED = np.arange(6).reshape(2, 3, 1) * 0.01 * np.ones(3)
REFUSED = False


class Task(NamedTuple):
    name: str
    language: str
    problem: str
    problem_folder: str
    bddl_file: str
    init_states_file: str


class Suite:
    def __init__(self):
        self.tasks = [
            Task(name, name.replace("_", " "), "Libero", "libero_goal", f"{name}.bddl", f"{name}.pruned_init")
            for name in ("open_the_drawer", "turn_on_the_stove")
        ]
        self.n_tasks = len(self.tasks)

    def get_task(self, number):
        return self.tasks[number]

    def get_task_init_states(self, number):
        if REFUSED:
            raise pickle.UnpicklingError("Weights only load failed")
        return PUBLISHED[number]


def get_benchmark_dict():
    return {"libero_goal": Suite}
