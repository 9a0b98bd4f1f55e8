"""The Fetch arm of gymnasium-robotics, from states: the scripted experts of `envs/gym_experts.py` imitated, and RL.

No figure is published for imitation of them: Plappert et al. 2018 learn the same tasks from rewards.
"""

from openpi_train.reproduce.reproduction import Reproduction

# ACT without pictures: the encoder reads the state alone. There is no latent: the expert acts in one way only.
_SMALL_ACT = (
    "--model.no-use-vae --model.dim-model 64 --model.n-heads 4 --model.dim-feedforward 128 --model.n-encoder-layers 2 "
    "--model.dropout 0 --model.dtype float32 --model.action-horizon 8 --ema-decay 0.99 --batch-size 64 --num-workers 0 "
    "--log-interval 100 --lr-schedule.kind cosine --lr-schedule.peak-lr 1e-3 --lr-schedule.warmup-steps 50"
)


def _imitated(task: str, what: str, episodes: int, steps: int, minutes: float | None) -> Reproduction:
    return Reproduction(
        name=f"fetch_{task}",
        what=f"a small ACT from states {what} with the Fetch arm, from {episodes} scripted demonstrations",
        data={
            "{data}.zarr": f"data collect fetch:{task} --out {{data}}.zarr --episodes-per-task {episodes}",
            "{data}": "data convert {data}.zarr {data} --to lerobot --control-hz 25",
        },
        train=f"act --dataset {{data}} {_SMALL_ACT} --num-train-steps {steps} --save-interval {steps} "
        f"--eval.interval {steps} --eval.num-rows 256",
        evaluations={
            f"fetch:{task}": f"eval {{run}} --env fetch:{task} --episodes 100 --execute 4 --held-out 0 --videos 0"
        },
        extra="fetch",
        module="gymnasium_robotics",
        minutes=minutes,
    )


_PRACTISED = Reproduction(
    name="fetch_reach_rl",
    what="a small flow policy from states reaches the goal with the Fetch arm, by 4 demonstrations and then by PPO",
    data={
        "{data}.zarr": "data collect fetch:reach --out {data}.zarr --episodes-per-task 4",
        "{data}": "data convert {data}.zarr {data} --to lerobot --control-hz 25",
    },
    start="fetch_reach_few --dataset {data} --eval.interval 0 --eval.closed-loop.interval 0 "
    "--eval.closed-loop.episodes-per-task 1",
    train="fetch_reach_ppo --dataset {data} --weight-loader.params-path {start}",
    evaluations={"fetch:reach": "eval {run} --env fetch:reach --episodes 100 --execute 4 --held-out 0 --videos 0"},
    extra="fetch",
    module="gymnasium_robotics",
    minutes=7,
)

ENTRIES = (
    _imitated("reach", "reaches the goal", 64, 1500, 5),
    _imitated("push", "pushes the block to its goal", 192, 5000, 9),
    _PRACTISED,
)
