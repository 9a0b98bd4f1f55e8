"""The embedded tabletop: its experiments write their datasets at the first run, and nothing needs to be installed."""

from openpi_train.reproduce.reproduction import Reproduction

_EVAL = "eval {run} --episodes 100 --held-out 0 --videos 0"

ENTRIES = (
    Reproduction(
        name="tabletop_act",
        what="a small ACT from images moves to the red block of the embedded tabletop",
        train="tabletop_act",
        evaluations={"tabletop": _EVAL},
    ),
    Reproduction(
        name="tabletop_dp",
        what="a diffusion policy from images moves to the red block of the embedded tabletop",
        train="tabletop_dp",
        evaluations={"tabletop": _EVAL},
    ),
    Reproduction(
        name="tabletop_pi0",
        what="a small pi0 moves to the block of the embedded tabletop that its prompt names",
        train="pi0_tabletop_reach",
        evaluations={"tabletop": _EVAL},
    ),
)
