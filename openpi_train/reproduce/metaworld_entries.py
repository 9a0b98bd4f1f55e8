"""Meta-World (Yu et al. 2019), from states, by imitation of its scripted policies.

Its published figures are of RL on other sets of tasks, so none is compared.
"""

from openpi_train.reproduce.reproduction import Reproduction

ENTRIES = (
    Reproduction(
        name="metaworld_mt5",
        what="a diffusion policy from states does five of Meta-World's tasks, from 20 scripted demonstrations of each",
        data={
            "{data}.zarr": "data collect metaworld --tasks reach button-press drawer-close window-open push "
            "--out {data}.zarr"
        },
        train="metaworld_mt5_dp --dataset {data}.zarr --eval.closed-loop.num-videos 0",
        evaluations={"metaworld": "eval {run} --episodes 20 --held-out 0 --videos 0"},
        extra="sim",
        module="metaworld",
    ),
)
